//! Numbers of f32 as sums of three bf16, in the tiles of a step.
//!
//! `x0` is the bf16 nearest to `x`, `x1` the one nearest to what is left, and `x2` the rest, which bf16 holds exactly: 8 bits
//! each. That is so for every finite number above 2^-102; of smaller ones the last bits are lost in `x2`.
//!
//! A *step* is 32 elements of k for 32 rows (of a left operand) or columns (of a right one): three terms of two tiles, a
//! KiB each, so that one address and its offsets reach all of them. Left tiles hold rows as they are, right ones pairs of
//! elements of a column side by side.

use crate::cpu::gemm::panel::{HALF, PANEL};
use crate::cpu::prefetch::{LINE, fetch_near};
use std::arch::x86_64::*;

/// Elements of k in a step.
pub(in crate::cpu::gemm) const STEP: usize = 32;
/// Bytes of a row of a tile.
pub(in crate::cpu::gemm) const ROW: usize = 64;
/// Bytes of a tile.
pub(in crate::cpu::gemm) const TILE: usize = HALF * ROW;
/// Bytes of a term of a step: two tiles.
pub(in crate::cpu::gemm) const TERM: usize = 2 * TILE;
/// Bytes of a step.
pub(in crate::cpu::gemm) const STEP_BYTES: usize = 3 * TERM;

/// The largest magnitudes of a first term's elements, as bits, which have the same order. A NaN of the 2^15 largest has no
/// first part, but passes into the third, and so into every product.
pub(in crate::cpu::gemm) type Largest = __m512i;

/// The largest magnitude of all elements, as bits of f32.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) fn magnitude(largest: Largest) -> u32 {
    _mm512_reduce_max_epu32(magnitudes(largest))
}

/// The larger magnitude of both elements of each lane.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) fn magnitudes(largest: Largest) -> __m512i {
    let odd = _mm512_and_si512(largest, _mm512_set1_epi32(!0xffff));
    _mm512_max_epu32(_mm512_slli_epi32::<16>(largest), odd)
}

/// Which halves of two vectors of f32 make one of bf16: the upper ones.
const UPPER: [u16; 32] = {
    let mut halves = [0; 32];
    let mut i = 0;
    while i < 32 {
        halves[i] = 2 * i as u16 + 1;
        i += 1;
    }
    halves
};

/// Three f32 in each lane whose sum is that of `x`, with zeros in the lower halves.
#[target_feature(enable = "avx512f")]
#[inline]
fn split(x: __m512i) -> [__m512i; 3] {
    let (half, mask) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(!0xffff));
    let rounded = |v| _mm512_and_si512(_mm512_add_epi32(v, half), mask);
    let minus = |a, b| _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
    let x0 = rounded(x);
    let rest = minus(x, x0);
    let x1 = rounded(rest);
    [x0, x1, minus(rest, x1)]
}

#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn larger(largest: Largest, term: __m512i) -> Largest {
    _mm512_max_epu16(largest, _mm512_and_si512(term, _mm512_set1_epi16(i16::MAX)))
}

/// Splits `len <= 32` elements of row `row < 32` into the left tiles of the step at `dst`; what is past them becomes zero.
///
/// # Safety
/// The elements must be readable and `dst` hold a step, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) unsafe fn split_row(
    src: *const f32,
    len: usize,
    row: usize,
    dst: *mut u8,
    largest: Largest,
) -> Largest {
    debug_assert!(len <= STEP && row < PANEL);
    let mask = if len >= STEP { u32::MAX } else { !(u32::MAX << len) };
    // SAFETY: the masks hold the elements that there are; the row is inside the step.
    unsafe {
        let first = _mm512_maskz_loadu_epi32(mask as u16, src.cast());
        let second = _mm512_maskz_loadu_epi32((mask >> HALF) as u16, src.wrapping_add(HALF).cast());
        larger(largest, split_vectors(first, second, row, dst))
    }
}

/// Splits 32 elements of row `row < 32` into the left tiles of the step at `dst`, and returns those of the first term.
///
/// # Safety
/// `dst` must hold a step, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) unsafe fn split_vectors(
    first: __m512i,
    second: __m512i,
    row: usize,
    dst: *mut u8,
) -> __m512i {
    // SAFETY: the table is a vector; the row is inside the step.
    unsafe {
        let to = dst.add((row / HALF).wrapping_mul(TILE).wrapping_add(row % HALF * ROW));
        let upper = _mm512_loadu_si512(UPPER.as_ptr().cast());
        let (a, b) = (split(first), split(second));
        let terms: [_; 3] = std::array::from_fn(|term| _mm512_permutex2var_epi16(a[term], upper, b[term]));
        for (term, &both) in terms.iter().enumerate() {
            _mm512_store_si512(to.add(term * TERM).cast(), both);
        }
        terms[0]
    }
}

/// Splits `len <= 32` elements of 16 columns, which lie side by side and their elements `width` apart, into the right tiles of
/// half `g` of the step at `dst`; what is past them becomes zero. Columns are the lanes of `largest`. With each vector it asks for
/// what lies `ahead` bytes from it.
///
/// # Safety
/// The elements must be readable and `dst` hold a step, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) unsafe fn split_columns(
    src: *const f32,
    (width, ahead): (usize, isize),
    len: usize,
    g: usize,
    dst: *mut u8,
    mut largest: Largest,
) -> Largest {
    debug_assert!(len <= STEP && g < 2);
    for pair in 0..HALF {
        let load = |k: usize| {
            if k >= len {
                return _mm512_setzero_si512();
            }
            let p = src.wrapping_add(k * width);
            fetch_near(p.wrapping_byte_offset(ahead).cast(), LINE);
            // SAFETY: the caller's elements.
            unsafe { _mm512_loadu_si512(p.cast()) }
        };
        let (even, odd) = (load(2 * pair), load(2 * pair + 1));
        // SAFETY: the pair is inside the step.
        largest = unsafe { split_pair(even, odd, dst.add(g * TILE + pair * ROW), largest) };
    }
    largest
}

/// Splits two neighbouring elements of 16 columns into the row of a right tile at `dst`, and of its other terms.
///
/// # Safety
/// `dst` must be such a row of a step.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(in crate::cpu::gemm) unsafe fn split_pair(
    even: __m512i,
    odd: __m512i,
    dst: *mut u8,
    largest: Largest,
) -> Largest {
    let (even, odd) = (split(even), split(odd));
    let terms: [_; 3] =
        std::array::from_fn(|term| _mm512_or_si512(_mm512_srli_epi32::<16>(even[term]), odd[term]));
    for (term, &both) in terms.iter().enumerate() {
        // SAFETY: the row is inside the step.
        unsafe { _mm512_store_si512(dst.add(term * TERM).cast(), both) };
    }
    larger(largest, terms[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::isa::Isa;

    #[repr(align(64))]
    struct Step([u16; STEP_BYTES / 2]);

    impl Step {
        /// The terms of element `k` of row or column `lane`.
        fn terms(&self, left: bool, lane: usize, k: usize) -> [f32; 3] {
            let at = if left { lane % HALF * 32 + k } else { k / 2 * 32 + lane % HALF * 2 + k % 2 };
            std::array::from_fn(|p| {
                let bits = self.0[p * TERM / 2 + lane / HALF * TILE / 2 + at];
                f32::from_bits(u32::from(bits) << 16)
            })
        }
    }

    fn expected_magnitude(numbers: &[f32]) -> u32 {
        let largest = numbers.iter().fold(0f32, |a, b| a.max(b.abs()));
        (largest.to_bits() + 0x8000) & !0xffff
    }

    fn numbers() -> Vec<f32> {
        let mut state = 12345u32;
        let mut numbers: Vec<f32> = (0..STEP * PANEL)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Exponents from 2^-97 to 2^99.
                f32::from_bits(state & 0x807f_ffff | (30 + (state >> 9) % 197) << 23)
            })
            .collect();
        let special = [0.0, -0.0, 1.0, f32::from_bits(0x3f80_8000), f32::from_bits(0xbf7f_ffff), 2.5e-20];
        numbers[..6].copy_from_slice(&special);
        numbers
    }

    #[test]
    fn three_terms_hold_every_bit() {
        if Isa::supported() < Isa::Amx {
            return;
        }
        let numbers = numbers();
        for len in [STEP, 31, 17, 16, 15, 1, 0] {
            let (mut left, mut right) = (Step([7; STEP_BYTES / 2]), Step([7; STEP_BYTES / 2]));
            for lane in 0..PANEL {
                let row = &numbers[lane * STEP..][..STEP];
                // SAFETY: the instructions are there, and the memory is the test's.
                let largest = unsafe {
                    let largest = split_row(
                        row.as_ptr(),
                        len,
                        lane,
                        left.0.as_mut_ptr().cast(),
                        _mm512_setzero_si512(),
                    );
                    magnitude(largest)
                };
                assert_eq!(largest, expected_magnitude(&row[..len]));
            }
            for g in 0..2 {
                let columns: Vec<f32> =
                    (0..STEP * HALF).map(|i| numbers[(g * HALF + i % HALF) * STEP + i / HALF]).collect();
                // SAFETY: as above.
                unsafe {
                    let zero = _mm512_setzero_si512();
                    let largest =
                        split_columns(columns.as_ptr(), (HALF, 0), len, g, right.0.as_mut_ptr().cast(), zero);
                    let largest = std::mem::transmute::<__m512i, [u32; 16]>(magnitudes(largest));
                    for (lane, largest) in largest.into_iter().enumerate() {
                        let row = &numbers[(g * HALF + lane) * STEP..][..len];
                        assert_eq!(largest, expected_magnitude(row));
                    }
                }
            }
            for lane in 0..PANEL {
                for k in 0..STEP {
                    let expected = if k < len { numbers[lane * STEP + k] } else { 0.0 };
                    for terms in [left.terms(true, lane, k), right.terms(false, lane, k)] {
                        let [x0, x1, x2] = terms;
                        assert_eq!(x0 + (x1 + x2), expected, "{terms:?}");
                        assert!(x1.abs() <= x0.abs() / 256.0 && x2.abs() <= x0.abs() / 65536.0, "{terms:?}");
                    }
                }
            }
        }
    }
}
