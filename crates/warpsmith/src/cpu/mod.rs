//! What the CPU kernels share: SIMD tiers, vector math, element conversion, threads and the machine's limits.
//!
//! A kernel is written once, generically, as a [`Task`], and compiled for every [`Tier`]:
//!
//! ```
//! use warpsmith::cpu::{self, CpuElement, Simd, Task, Tier, map, math};
//!
//! struct Gelu<'a, T> { x: &'a [T], y: &'a mut [T] }
//!
//! impl<T: CpuElement> Task for Gelu<'_, T> {
//!     type Out = ();
//!     #[inline(always)]
//!     fn run<S: Simd>(self, s: S) {
//!         assert_eq!(self.x.len(), self.y.len());
//!         // SAFETY: both slices hold `len` elements and the borrow checker keeps them apart.
//!         unsafe {
//!             map(s, self.x.as_ptr(), self.y.as_mut_ptr(), self.x.len(), false, #[inline(always)] |v| math::gelu(s, v))
//!         }
//!     }
//! }
//!
//! let mut y = [0.0f32; 3];
//! cpu::dispatch(Tier::best(), Gelu { x: &[-1.0, 0.0, 1.0], y: &mut y });
//! assert!((y[2] - 0.841_344_7).abs() < 1e-6);
//! ```
//!
//! Split work over threads *outside* and dispatch *inside* each part: code that runs on another thread's stack is
//! not inlined into the tier's entry function and would call every intrinsic out of line (correct, but slow).

pub(crate) mod attention;
mod bandwidth;
mod copy;
pub mod e4m3;
mod element;
pub mod gemm;
pub mod math;
pub mod math16;
pub mod piecewise;
pub mod prefetch;
pub(crate) mod random;
pub mod rows;
mod runs;
pub mod scratch;
mod settings;
pub mod simd;
mod threads;
mod tier;

pub use bandwidth::{cpu_name, l2_bytes, should_stream};
pub use copy::copy_bytes;
pub use element::{CpuElement, map};
pub use runs::Runs;
pub use scratch::{Need, Region};
pub(crate) use settings::check_settings;
pub(crate) use simd::array;
pub use simd::{Simd, Task, dispatch};
pub use threads::{configured_threads, num_threads, parallel_for, parallel_for_with_scratch, with_threads};
pub use tier::Tier;
