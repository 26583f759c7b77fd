//! What happened when: calls of ops, loops of the CPU's threads, memory, and spans that programs name.
//!
//! Nothing is recorded unless a [`Session`] lives or a tool listens ([`listen_to_tools`]). Until then each place that
//! could record reads one flag, relaxed, and evaluates nothing. While a session lives, a place reads the clock twice and
//! appends to a list of its own thread; names, shapes and costs are made from what was kept when the session ends.
//!
//! This is not the crate `tracing`: its events carry values that are formatted or visited when they happen, where a call
//! here only shares its plan, and parts of loops are recorded from kernels, which use nothing but the standard library.
//!
//! ```
//! use warpsmith::{DType, Device, Tensor, ops::RmsNorm, profile};
//! let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
//! let session = profile::Session::start()?;
//! {
//!     let _span = profile::span(profile::Kind::User, || "norms".into());
//!     RmsNorm::new(&x).run()?;
//! }
//! let records = session.stop();
//! assert_eq!(records.calls[0].form.op, "rms_norm");
//! assert_eq!(records.spans[0].name, "norms");
//! # Ok::<(), warpsmith::Error>(())
//! ```

mod graph;
mod nvtx;
mod recorder;
mod records;

#[cfg(feature = "cuda")]
pub(crate) use graph::GraphCalls;
pub(crate) use recorder::{Called, Loop, begin_call, end_call, memory, next_call, part};
#[cfg(feature = "cuda")]
pub(crate) use recorder::{DeviceSource, Measured, device_work, graph_launch, register_device};
pub use recorder::{Session, Span, emit, prepare, span};
pub use records::{
    Call, CallForm, Clock, DeviceWork, Kind, LoopPart, LoopRecord, MemoryEvent, Recorded, Records, SpanRecord,
};

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether anybody listens: a session, or a tool.
static ON: AtomicBool = AtomicBool::new(false);
/// Whether a tool listens to NVTX.
static RANGES: AtomicBool = AtomicBool::new(false);

/// Whether anybody listens now: one relaxed load.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Names spans and calls for a tool from now on, if [`env::NVTX`](crate::env::NVTX) asks for it and the process was started
/// by one. The first use of a GPU does so, too.
pub fn listen_to_tools() {
    if nvtx::start() {
        RANGES.store(true, Ordering::Relaxed);
        ON.store(true, Ordering::Relaxed);
    }
}

/// A range for a tool, until it is dropped.
pub(crate) struct Range(());

impl Range {
    /// Begins one, if a tool listens.
    #[cold]
    pub fn begin(name: &str) -> Option<Range> {
        RANGES.load(Ordering::Relaxed).then(|| {
            nvtx::push(name);
            Range(())
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        nvtx::pop();
    }
}

/// Nanoseconds of the clock that never goes back: the one that all records, and a GPU's, are in.
#[inline]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system writes one value. This clock exists on every system that the library builds on.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
