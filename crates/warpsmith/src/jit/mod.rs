//! Run-time compilation of kernels: from CUDA C++ to a cubin, without a GPU, a driver or a CUDA toolkit.
//!
//! [`get`] looks in memory, then in kernel packs ([`pack`], compiled ahead of time), then in the disk cache
//! ([`cache`]), and compiles with NVRTC ([`nvrtc`]) only if none has the kernel. A kernel is compiled once, no matter
//! how many threads and processes ask for it at the same time.
//!
//! A pack also serves devices of the same major and a higher minor version than it was built for: an `sm_80` pack
//! works on 8.6 and 8.9 (see [`Arch::loadable`]). It needs neither NVRTC nor the disk cache.

mod arch;
pub mod cache;
mod elf;
pub mod headers;
pub mod inspect;
mod kernel;
pub mod nvrtc;
mod observe;
pub mod pack;
mod params;
mod request;
pub(crate) mod search;
mod service;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

pub use arch::Arch;
pub use kernel::{CudaKernel, Defines};
pub use observe::{CompileEvent, observe_compilation};
pub use params::{AddressKind, Bits64, CType, Member, declare_struct};
pub use request::{Key, Profile, Request, Source, source_hash};
pub use service::{Jit, Toolchain};

use crate::Result;

/// Turns a request into code: NVRTC, or a fake in tests.
pub trait Compiler: Send + Sync {
    /// Major and minor version. Code of one version is never used for another.
    fn version(&self) -> (i32, i32);

    /// Compiles to a cubin.
    fn compile(&self, request: &Request) -> Result<Output>;
}

/// The result of a [`Compiler`].
#[derive(Clone, Debug)]
pub struct Output {
    /// The code.
    pub cubin: Vec<u8>,
    /// Warnings, and the registers and spills of each function.
    pub log: String,
}

/// A compiled kernel source.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The code: an ELF file for one architecture.
    pub cubin: Arc<[u8]>,
    /// Identity of the request it answers.
    pub key: Key,
    /// Where it came from.
    pub origin: Origin,
    /// The compiler's log; empty if it came from a pack.
    pub log: String,
}

/// Where a compiled kernel came from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Origin {
    /// From this file of a kernel pack.
    Pack(PathBuf),
    /// From this file of the disk cache.
    Disk(PathBuf),
    /// Compiled here.
    Built {
        /// Time the compiler took, in milliseconds.
        ms: u64,
    },
}

static PROFILE: AtomicU8 = AtomicU8::new(0);

/// The profile kernels are compiled with in this process: [`Profile::Release`] unless changed.
pub fn profile() -> Profile {
    match PROFILE.load(Ordering::Relaxed) {
        1 => Profile::LineInfo,
        2 => Profile::Debug,
        _ => Profile::Release,
    }
}

/// Changes the profile of kernels compiled from now on. Loaded kernels are not affected.
pub fn set_profile(profile: Profile) {
    PROFILE.store(profile as u8, Ordering::Relaxed);
}

static FAST_MATH: AtomicBool = AtomicBool::new(false);

/// Whether all kernels are compiled with fast math in this process: approximate division, square root and transcendental
/// functions, subnormals flushed. Off unless changed. No promise about errors holds with it.
pub fn fast_math() -> bool {
    FAST_MATH.load(Ordering::Relaxed)
}

/// Changes that for kernels compiled from now on. Loaded kernels are not affected.
pub fn set_fast_math(fast: bool) {
    FAST_MATH.store(fast, Ordering::Relaxed);
}

/// The compiled form of a request, by the process-wide [`Jit`].
///
/// Each call hashes the request, which takes microseconds. Callers that launch often should keep the result.
pub fn get(request: &Request) -> Result<Arc<Compiled>> {
    Jit::global().get(request)
}

/// The PTX of a request, for reading; always compiled.
pub fn to_ptx(request: &Request) -> Result<String> {
    nvrtc::find_for(&[request.arch])?.ptx_with(request)
}

/// Why the disk cache could not be used in this process, if so.
pub fn warnings() -> Vec<String> {
    Jit::global().cache().warning().into_iter().collect()
}
