//! Very few rows of f32 on AVX-512: the weights are transposed in registers and multiplied there.
//!
//! Packing into L1 alternates between loading and multiplying, and memory idles half of the time. Here each block of 16
//! x 16 weights is loaded, transposed and used at once, so that loads are always in flight.

use super::matrix::Matrix;
use super::panel::avx512::transposed;
use super::panel::{HALF, PANEL, Side};
use super::partition::block_len;
use crate::cpu::array;
use std::arch::x86_64::*;

/// The most rows that are worth it: more would be faster with weights that are transposed once for all. With more at once the
/// compiler runs out of registers.
pub(super) const MOST_ROWS: usize = 4;
/// How many bytes ahead in its row a weight is prefetched.
const AHEAD: usize = 1024;

/// Rows of f32, `stride` elements apart.
#[derive(Copy, Clone)]
pub(super) struct Rows {
    pub data: *const f32,
    pub stride: usize,
    pub count: usize,
}

// SAFETY: written before the loop that shares it, only read in it.
unsafe impl Sync for Rows {}

/// Multiplies rows with one panel of weights in f32: rows of [`PANEL`] sums at `out`. The sums have the bits that
/// [`super::vector`] gives them.
///
/// # Safety
/// AVX-512 F and BW must be there, the rows hold as many elements as the weights, and those be readable; at most
/// [`MOST_ROWS`] rows.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn multiply(x: Rows, w: &Side, panel: usize, out: *mut f32) {
    for g in 0..2 {
        let (matrix, first, rows) = w.half(panel, g);
        if rows == 0 {
            continue;
        }
        // Lanes past the last row are not stored.
        let weights = array(|i| matrix.at(first + i.min(rows - 1), 0));
        let bytes = 4 * matrix.k;
        let next = HALF as isize * matrix.row_bytes() + AHEAD as isize - bytes as isize;
        let half = Half { weights, bytes, ahead: [AHEAD as isize, next] };
        // SAFETY: passed on.
        unsafe { half.multiply_rows(x, out.wrapping_add(g * HALF)) };
    }
}

/// Multiplies rows with at most [`HALF`] others of as many elements, in place: rows of [`HALF`] sums at `out`,
/// [`PANEL`] apart. They have the bits of [`multiply`]; those past the last of the others mean nothing. Prefetches what
/// is `ahead` bytes from the others.
///
/// # Safety
/// AVX-512 F and BW must be there, both operands readable, and `out` hold the sums.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn multiply_in_place(mut x: Rows, others: &Matrix, ahead: isize, mut out: *mut f32) {
    let weights = array(|i| others.at(i.min(others.rows - 1), 0));
    let half = Half { weights, bytes: 4 * others.k, ahead: [ahead; 2] };
    while x.count > 0 {
        let count = x.count.min(MOST_ROWS);
        // SAFETY: passed on.
        unsafe { half.multiply_rows(Rows { count, ..x }, out) };
        x = Rows { data: x.data.wrapping_add(count * x.stride), count: x.count - count, ..x };
        out = out.wrapping_add(count * PANEL);
    }
}

/// Sixteen rows of weights.
struct Half {
    weights: [*const u8; HALF],
    bytes: usize,
    /// Bytes from a weight to the one prefetched with it: as long as more than [`AHEAD`] are left of its row, and then.
    ahead: [isize; 2],
}

impl Half {
    /// # Safety
    /// As for [`multiply`].
    #[inline(always)]
    unsafe fn multiply_rows(&self, x: Rows, out: *mut f32) {
        // SAFETY: passed on.
        unsafe {
            match x.count {
                1 => self.multiply::<1>(x, out),
                2 => self.multiply::<2>(x, out),
                3 => self.multiply::<3>(x, out),
                _ => self.multiply::<MOST_ROWS>(x, out),
            }
        }
    }

    /// # Safety
    /// As for [`multiply`], with `R` rows.
    #[inline(always)]
    unsafe fn multiply<const R: usize>(&self, x: Rows, out: *mut f32) {
        // SAFETY: loads stay in the rows; prefetches are hints, and never a fault.
        unsafe {
            let block_bytes = 4 * block_len(self.bytes / 4);
            let mut sums = [_mm512_setzero_ps(); R];
            let (mut at, mut block_end) = (0, block_bytes);
            while at < self.bytes {
                if at == block_end {
                    add_block(&mut sums, out, at > block_bytes);
                    block_end += block_bytes;
                }
                let left = self.bytes - at;
                let ahead = self.ahead[usize::from(left <= AHEAD)];
                let mask = if left >= 64 { !0 } else { !(!0 << (left / 4)) };
                let block = array(
                    #[inline(always)]
                    |i| {
                        let p = self.weights[i].wrapping_add(at);
                        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_offset(ahead).cast());
                        _mm512_maskz_loadu_epi32(mask, p.cast())
                    },
                );
                let x_at = x.data.wrapping_byte_add(at);
                for (j, w) in transposed(block).into_iter().enumerate().take(left / 4) {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        let x = _mm512_set1_ps(*x_at.wrapping_add(r * x.stride + j));
                        *sum = _mm512_fmadd_ps(x, _mm512_castsi512_ps(w), *sum);
                    }
                }
                at += 64;
            }
            add_block(&mut sums, out, self.bytes > block_bytes);
        }
    }
}

/// Stores the sums of a block of k, added to those of the blocks before if there are any, and begins anew.
///
/// # Safety
/// AVX-512 must be there, and `out` hold rows of sums.
#[inline(always)]
unsafe fn add_block<const R: usize>(sums: &mut [__m512; R], out: *mut f32, add: bool) {
    for (r, sum) in sums.iter_mut().enumerate() {
        let out = out.wrapping_add(r * PANEL);
        // SAFETY: passed on.
        unsafe {
            let all = if add { _mm512_add_ps(_mm512_loadu_ps(out), *sum) } else { *sum };
            _mm512_storeu_ps(out, all);
            *sum = _mm512_setzero_ps();
        }
    }
}

/// One row times lines of several panels side by side.
#[derive(Copy, Clone)]
pub(super) struct Across {
    pub row: *const f32,
    pub lines: *const f32,
    /// Floats from one line to the next, and from a line to what is prefetched with it.
    pub width: isize,
    pub ahead: isize,
    /// Elements of the row: lines.
    pub count: usize,
    /// The sums of a panel, and floats from those to the next panel's.
    pub out: *mut f32,
    pub apart: usize,
    /// Whether sums are there already.
    pub resume: bool,
}

/// Multiplies one row with `panels` panels. The sums have the bits that [`super::vector`] gives them.
///
/// # Safety
/// AVX-512 must be there, row and lines be readable, and `out` hold the sums.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn multiply_across(mut across: Across, mut panels: usize) {
    // As many at once as there are registers for sums, beside those for loads.
    const MOST: usize = 4;
    while panels > 0 {
        let now = panels.min(MOST);
        // SAFETY: passed on.
        unsafe {
            match now {
                1 => across.multiply::<2>(),
                2 => across.multiply::<4>(),
                3 => across.multiply::<6>(),
                _ => across.multiply::<8>(),
            }
        }
        panels -= now;
        across.lines = across.lines.wrapping_add(now * PANEL);
        across.out = across.out.wrapping_add(now * across.apart);
    }
}

impl Across {
    /// The sums of `V` vectors, two of each panel.
    ///
    /// # Safety
    /// As for [`multiply_across`].
    #[inline(always)]
    unsafe fn multiply<const V: usize>(&self) {
        let at = |v: usize| self.out.wrapping_add(v / 2 * self.apart + v % 2 * HALF);
        // SAFETY: passed on; prefetches are hints, and never a fault.
        unsafe {
            let mut sums: [_; V] = array(
                #[inline(always)]
                |v| if self.resume { _mm512_loadu_ps(at(v)) } else { _mm512_setzero_ps() },
            );
            for i in 0..self.count {
                let x = _mm512_set1_ps(*self.row.add(i));
                let line = self.lines.wrapping_offset(i as isize * self.width);
                for (v, sum) in sums.iter_mut().enumerate() {
                    let p = line.wrapping_add(v * HALF);
                    _mm_prefetch::<_MM_HINT_T0>(p.wrapping_offset(self.ahead).cast());
                    *sum = _mm512_fmadd_ps(x, _mm512_loadu_ps(p), *sum);
                }
            }
            for (v, sum) in sums.into_iter().enumerate() {
                _mm512_storeu_ps(at(v), sum);
            }
        }
    }
}
