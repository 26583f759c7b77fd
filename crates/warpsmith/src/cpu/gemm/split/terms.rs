//! Numbers of f32 as sums of three bf16, in the tiles of a step.
//!
//! `x0` is the bf16 nearest to `x`, `x1` the one nearest to what is left, and `x2` the rest, which bf16 holds exactly: 8 bits
//! each. That is so for every finite number above 2^-110; of smaller ones `x2` is cut to a multiple of 2^-133, the least bf16.
//! Tiles take terms below 2^-126 for zero, so that of numbers below 2^-102 they see less: [`super::range`] says what follows.
//!
//! A *step* is 32 elements of k for 32 rows (of a left operand) or columns (of a right one): three terms of two tiles, a
//! KiB each, so that one address and its offsets reach all of them. Left tiles hold rows as they are, right ones pairs of
//! elements of a column side by side.

use crate::cpu::array;
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

/// The largest magnitudes of a first term's elements, as bits, which have the same order, with the last bit set where a number
/// has digits below it: a number below 2^-134, whose first term is zero, is not taken for zero. A NaN of the 2^15 largest has
/// no first part, but passes into the third, and so into every product.
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
const UPPER: [u16; 32] = halves(1);
/// The lower halves of two vectors of f32.
const LOWER: [u16; 32] = halves(0);

const fn halves(first: u16) -> [u16; 32] {
    let mut halves = [0; 32];
    let mut i = 0;
    while i < 32 {
        halves[i] = 2 * i as u16 + first;
        i += 1;
    }
    halves
}

/// Three f32 in each lane whose sum is `x`. The upper halves are the terms. Lower halves are zero but for those of the third
/// term of numbers below 2^-110, which have bits that no bf16 holds.
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

/// The larger of the magnitudes before and those of more numbers: `term` holds their first terms, `low` the lower halves of
/// the numbers themselves.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn larger(largest: Largest, term: __m512i, low: __m512i) -> Largest {
    /// `(a & b) | c`
    const AND_OR: i32 = 0xea;
    let digits = _mm512_min_epu16(low, _mm512_set1_epi16(1));
    let magnitude = _mm512_ternarylogic_epi32::<AND_OR>(term, _mm512_set1_epi16(i16::MAX), digits);
    _mm512_max_epu16(largest, magnitude)
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
        let lower = _mm512_loadu_si512(LOWER.as_ptr().cast());
        let low = _mm512_permutex2var_epi16(first, lower, second);
        larger(largest, split_vectors(first, second, row, dst), low)
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
        let terms: [_; 3] = array(|term| _mm512_permutex2var_epi16(a[term], upper, b[term]));
        for (term, &both) in terms.iter().enumerate() {
            _mm512_store_si512(to.add(term * TERM).cast(), both);
        }
        terms[0]
    }
}

/// Splits `len <= 32` elements of 16 columns, which lie side by side and their elements `width` apart, into the right
/// tiles of half `g` of the step at `dst`; what is past them becomes zero. Columns are the lanes of `largest`. With
/// each vector it prefetches what is `ahead` bytes from it.
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
    const ODD: __mmask32 = 0xaaaa_aaaa;
    let low = _mm512_mask_blend_epi16(ODD, even, _mm512_slli_epi32::<16>(odd));
    let (even, odd) = (split(even), split(odd));
    // Upper halves alone: the lower one of a third term need not be zero.
    let terms: [_; 3] =
        array(|term| _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32::<16>(even[term]), odd[term]));
    for (term, &both) in terms.iter().enumerate() {
        // SAFETY: the row is inside the step.
        unsafe { _mm512_store_si512(dst.add(term * TERM).cast(), both) };
    }
    larger(largest, terms[0], low)
}

#[cfg(feature = "tests")]
mod tests;
