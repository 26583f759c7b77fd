//! Products with AVX-512 VNNI: a lane has a row of the weight.

use super::{AHEAD, Product, ROWS, Shape};
use std::arch::x86_64::*;

/// The sums of `R` rows of `x`.
///
/// # Safety
/// As [`Product::run`]; the machine must have the features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn sums<S: Shape, const R: usize>(p: &Product) {
    let low = _mm512_set1_epi8(15);
    let mut sums = [_mm512_setzero_ps(); R];
    for b in 0..p.num_tiles {
        // SAFETY: tile `b` is in the panel, and its quants and scales are where `Shape` says; prefetches touch nothing.
        let (quants, scales) = unsafe {
            let tile = p.panel.add(b * S::BYTES);
            if R == 1 {
                for line in 0..S::BYTES.div_ceil(64) {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(AHEAD + line * 64).cast());
                }
            }
            let mut quants = [_mm512_setzero_si512(); 8];
            for g in 0..S::QUANTS / 64 {
                let bytes = _mm512_loadu_si512(tile.add(g * 64).cast());
                if S::NIBBLES {
                    quants[g] = _mm512_and_si512(bytes, low);
                    quants[g + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low);
                } else {
                    quants[g] = bytes;
                }
            }
            let mut scales = [_mm512_setzero_ps(); 4];
            for (i, scale) in scales.iter_mut().enumerate().take(S::NUMBERS) {
                let at = tile.add(S::QUANTS + i * S::SCALES);
                *scale = match S::F16 {
                    true => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
                    false => _mm512_loadu_ps(at.cast()),
                };
            }
            (quants, scales)
        };
        for (r, sum) in sums.iter_mut().enumerate() {
            // SAFETY: there is a record of each row for each tile.
            let x = unsafe { &*p.x.add(b * R + r) };
            let scale = _mm512_set1_ps(x.scale);
            let offset = |i: usize| if S::MIN { 0 } else { x.offsets[i] };
            let mut dots = [_mm512_set1_epi32(offset(0)), _mm512_set1_epi32(offset(1))];
            for g in 0..8 {
                let half = if S::HALVES { g / 4 } else { 0 };
                dots[half] = _mm512_dpbusd_epi32(dots[half], quants[g], _mm512_set1_epi32(x.quants[g]));
            }
            for half in 0..S::PARTS {
                let factor = _mm512_mul_ps(scale, scales[half]);
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[half]), factor, *sum);
                if S::MIN {
                    let total = _mm512_set1_ps(f32::from_bits(x.offsets[half] as u32));
                    *sum = _mm512_fmadd_ps(total, scales[S::PARTS + half], *sum);
                }
            }
        }
    }
    const { assert!(ROWS == 16) };
    for (r, sum) in sums.into_iter().enumerate() {
        // SAFETY: there is room for the sums of each row.
        unsafe { _mm512_storeu_ps(p.sums.add(r * p.pitch), sum) };
    }
}
