//! One vector vocabulary for all tiers.
//!
//! [`Simd`] is implemented by small tokens. A token exists only where its instructions do: [`dispatch`] makes
//! it after the check, inside a function compiled for that tier. So methods on values are safe; those on pointers
//! are `unsafe` for the memory alone.
//!
//! Every elementwise method gives the same bits on every tier (the portable one emulates fused multiply-add
//! exactly where the target lacks it). Reductions depend on the number of lanes, hence on the tier, and on nothing
//! else.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_fp8;
pub(in crate::cpu) mod fp8;
mod pair;
mod portable;
mod vector;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use pair::Pair;
pub use portable::Portable;
pub use vector::Simd;

use super::tier::Tier;
use std::mem::MaybeUninit;

/// Lanes of the widest vectors: a pair of pairs of AVX-512's.
pub const MAX_LANES: usize = 64;

/// Entries of a table that vectors are looked up in.
pub const TABLE: usize = 32;

/// Pairs of pairs, where there are any.
pub type Four<S> = <<S as Simd>::Pair as Simd>::Pair;

/// An array of `f(i)` for each index `i`. The standard library's `from_fn` is not inlined into large functions, and
/// then compiled without the tier's instructions.
#[inline(always)]
pub(crate) fn array<T, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    const { assert!(!std::mem::needs_drop::<T>(), "what was made so far is not dropped if `f` panics") };
    let mut all = [const { MaybeUninit::uninit() }; N];
    let mut i = 0;
    while i < N {
        all[i].write(f(i));
        i += 1;
    }
    // SAFETY: every place has been written.
    unsafe { std::mem::transmute_copy(&all) }
}

/// A kernel body, generic over the tier.
pub trait Task {
    /// What the body returns.
    type Out;

    /// The body. Implementations must be `#[inline(always)]`, and so must every helper and closure they call with
    /// vectors: code left out of line is compiled without the tier's instructions and crawls.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Runs `task` on `tier`, or on the best tier below it that the machine has.
#[inline]
pub fn dispatch<T: Task>(tier: Tier, task: T) -> T::Out {
    match tier.min(Tier::supported()) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `supported` found every feature `avx512::run` is compiled for.
        Tier::Avx512 => unsafe { avx512::run(task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `supported` found every feature `avx2::run` is compiled for.
        Tier::Avx2 => unsafe { avx2::run(task) },
        _ => task.run(Portable::new()),
    }
}

#[cfg(feature = "tests")]
mod tests;
