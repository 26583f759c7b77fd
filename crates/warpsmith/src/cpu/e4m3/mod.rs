//! bf16 to e4m3 in bulk, where that is faster than through vectors of f32.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod scaled;

pub use scaled::Scaled;

use super::runs::Runs;
use super::simd::Simd;
use super::tier::Tier;

/// Converts the leading elements of each run of bf16 to e4m3, as many as the fast path takes, and returns their number.
/// `scaled` has the scaling of each run. With `stream`, stores bypass the caches: call [`Simd::fence`] before others
/// read them.
///
/// # Safety
/// Sources must be readable and results writable for all runs, and apart.
#[inline]
pub unsafe fn bf16_to_e4m3<S: Simd>(
    _: S,
    runs: &Runs<'_, u16, u8>,
    scaled: &[Scaled],
    stream: bool,
) -> usize {
    match S::TIER {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on; the token proves the tier.
        Tier::Avx512 => unsafe { avx512::convert(runs, scaled, stream) },
        _ => 0,
    }
}
