//! Products with AVX2: a lane has a row of the weight, and a tile is two vectors wide.

use super::{Product, ROWS, Record, Shape};
use std::arch::x86_64::*;

/// The sums of `R` rows of `x`.
///
/// # Safety
/// As [`Product::run`]; the machine must have the features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn sums<S: Shape, const R: usize>(p: &Product) {
    let low = _mm256_set1_epi8(15);
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for b in 0..p.num_tiles {
        for side in 0..2 {
            // SAFETY: tile `b` is in the panel, and its quants and scales are where `Shape` says.
            let (quants, scales) = unsafe {
                let tile = p.panel.add(b * S::BYTES);
                let mut quants = [_mm256_setzero_si256(); 8];
                for g in 0..S::QUANTS / 64 {
                    let bytes = _mm256_loadu_si256(tile.add(g * 64 + side * 32).cast());
                    if S::NIBBLES {
                        quants[g] = _mm256_and_si256(bytes, low);
                        quants[g + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
                    } else {
                        quants[g] = bytes;
                    }
                }
                let mut scales = [_mm256_setzero_ps(); 4];
                for (i, scale) in scales.iter_mut().enumerate().take(S::NUMBERS) {
                    let at = tile.add(S::QUANTS + i * S::SCALES + side * S::SCALES / 2);
                    *scale = match S::F16 {
                        true => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                        false => _mm256_loadu_ps(at.cast()),
                    };
                }
                (quants, scales)
            };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: there is a record of each row for each tile.
                let x = unsafe { &*p.x.add(b * R + r) };
                sums[side] = add_tile::<S>(&quants, &scales, x, sums[side]);
            }
        }
    }
    const { assert!(ROWS == 16) };
    for (r, sums) in sums.into_iter().enumerate() {
        for (side, sums) in sums.into_iter().enumerate() {
            // SAFETY: there is room for the sums of each row.
            unsafe { _mm256_storeu_ps(p.sums.add(r * p.pitch + side * 8), sums) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_tile<S: Shape>(quants: &[__m256i; 8], scales: &[__m256; 4], x: &Record, mut sum: __m256) -> __m256 {
    let scale = _mm256_set1_ps(x.scale);
    let offset = |i: usize| if S::MIN { 0 } else { x.offsets[i] };
    let mut dots = [_mm256_set1_epi32(offset(0)), _mm256_set1_epi32(offset(1))];
    for g in 0..8 {
        let half = if S::HALVES { g / 4 } else { 0 };
        let dot = fours::<S>(quants[g], _mm256_set1_epi32(x.quants[g]));
        dots[half] = _mm256_add_epi32(dots[half], dot);
    }
    for half in 0..S::PARTS {
        let factor = _mm256_mul_ps(scale, scales[half]);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[half]), factor, sum);
        if S::MIN {
            let total = _mm256_set1_ps(f32::from_bits(x.offsets[half] as u32));
            sum = _mm256_fmadd_ps(total, scales[S::PARTS + half], sum);
        }
    }
    sum
}

/// The dot products of four unsigned with four signed bytes, in each lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fours<S: Shape>(unsigned: __m256i, signed: __m256i) -> __m256i {
    if !S::WIDE {
        // Sums of two products of at most 63 and 127 fit 16 bits.
        return _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1));
    }
    // Bytes at even and at odd places, as 16 bits.
    let even = _mm256_and_si256(unsigned, _mm256_set1_epi16(0xff));
    let odd = _mm256_srli_epi16::<8>(unsigned);
    let signed_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed));
    let signed_odd = _mm256_srai_epi16::<8>(signed);
    _mm256_add_epi32(_mm256_madd_epi16(even, signed_even), _mm256_madd_epi16(odd, signed_odd))
}
