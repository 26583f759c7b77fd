//! Products of blocks of f32 on tiles, for kernels that feed one product into the next.
//!
//! Operands are split into *steps* ([`super::terms`]) that follow each other in memory: 32 rows of a left one, 32 columns of
//! a right one. Sums are rows of [`PANEL`] f32, and their bits do not depend on the number of rows.

use super::range::{Sizes, VALUES};
use super::steps::{CALLS, Form, begin, step, store};
use super::terms::{
    Largest, ROW, STEP, STEP_BYTES, TERM, TILE, magnitudes, split_columns, split_pair, split_row,
    split_vectors,
};
use crate::cpu::array;
use crate::cpu::gemm::amx::{Shape, Tiles};
use crate::cpu::gemm::block::Blocks;
use crate::cpu::gemm::panel::avx512::transposed;
use crate::cpu::gemm::panel::{HALF, PANEL};
use crate::cpu::prefetch::{LINE, fetch_near};
use std::arch::x86_64::*;

/// The tile registers of this thread, for products of split blocks.
pub(crate) struct SplitBlocks {
    tiles: Tiles,
}

/// One product, of `rows` rows and `cols` columns over `steps` steps.
#[derive(Copy, Clone)]
pub(crate) struct SplitBlock {
    pub left: *const f32,
    pub right: *const f32,
    pub steps: usize,
    pub rows: usize,
    pub cols: usize,
    /// Rows of [`PANEL`] sums.
    pub out: *mut f32,
    /// Whether `out` holds sums to add to.
    pub resume: bool,
}

impl SplitBlock {
    /// How often a product calls `between`.
    pub const fn calls(steps: usize) -> usize {
        steps * CALLS
    }
}

const _: () = assert!(STEP == Blocks::SPLIT_STEP && STEP_BYTES == Blocks::SPLIT * size_of::<f32>());

impl SplitBlocks {
    /// # Safety
    /// AMX must be supported.
    pub unsafe fn new() -> SplitBlocks {
        // SAFETY: passed on.
        SplitBlocks { tiles: unsafe { Tiles::new() } }
    }

    /// Prepares for [`Self::multiply`].
    pub fn configure(&mut self) {
        self.tiles.configure_whole();
    }

    /// Prepares for [`Self::multiply`] with at most 16 rows.
    pub fn configure_few(&mut self, rows: usize) {
        self.tiles.configure(Shape { rows: [rows, 0], cols: [HALF; 2] });
    }

    /// Prepares for [`Turned`] with at most 16 rows.
    pub fn configure_turned(&mut self, rows: usize) {
        self.tiles.configure(Shape { rows: [HALF; 2], cols: [rows, 0] });
    }

    /// Computes a product, and calls `between` [`SplitBlock::calls`] times: tiles multiply on while that computes with vectors.
    ///
    /// # Safety
    /// The tiles must be configured for it, the memory of `p` be as its fields say, and `between` not use tiles.
    #[inline(always)]
    pub unsafe fn multiply(&self, p: &SplitBlock, mut between: impl FnMut()) {
        let form = Form { tall: p.rows > HALF, wide: p.cols > HALF, swapped: false };
        let at = |steps: *const f32, index: usize| steps.cast::<u8>().wrapping_add(index * STEP_BYTES);
        // SAFETY: passed on.
        unsafe {
            begin(form, p.resume.then_some(p.out));
            for index in 0..p.steps {
                step(form, at(p.left, index), at(p.right, index), &mut between);
            }
            store(form, p.out);
        }
    }
}

/// The product of few rows and 32 columns, turned: columns are the left operand and rows the right one. Sums of a column are a
/// row, with the bits that [`SplitBlocks::multiply`] gives them.
pub(crate) struct Turned;

impl Turned {
    const FORM: Form = Form { tall: true, wide: false, swapped: true };

    /// Begins.
    ///
    /// # Safety
    /// The tiles must be configured for it, and not be used for anything else until it is stored.
    #[inline(always)]
    pub unsafe fn begin() -> Turned {
        // SAFETY: passed on.
        unsafe { begin(Self::FORM, None) };
        Turned
    }

    /// Adds the products of a step, and calls `between` [`SplitBlock::calls`] times.
    ///
    /// # Safety
    /// Both must be steps; `between` must not use tiles.
    #[inline(always)]
    pub unsafe fn step(&self, columns: *const f32, rows: *const f32, between: impl FnMut()) {
        // SAFETY: passed on.
        unsafe { step(Self::FORM, columns.cast(), rows.cast(), between) };
    }

    /// Stores 32 rows of sums, [`PANEL`] apart.
    ///
    /// # Safety
    /// `out` must hold them.
    #[inline(always)]
    pub unsafe fn store(self, out: *mut f32) {
        // SAFETY: passed on.
        unsafe { store(Self::FORM, out) };
    }
}

/// At most 16 rows of f32 in memory.
#[derive(Copy, Clone)]
pub(crate) struct Piece {
    pub data: *const f32,
    /// Strides of rows.
    pub row: isize,
    pub count: usize,
    /// Bytes from a row to what is prefetched.
    pub ahead: isize,
}

impl Piece {
    /// At most 32 evenly spaced rows, as two pieces.
    pub fn two(data: *const f32, row: isize, count: usize) -> [Piece; 2] {
        [0, HALF].map(|first| {
            let data = data.wrapping_offset(first as isize * row);
            Piece { data, row, count: count.saturating_sub(first).min(HALF), ahead: 0 }
        })
    }
}

/// Rows that are being split into the steps of a left operand, one step after the other.
pub(crate) struct RowSplitter {
    pieces: [Piece; 2],
    k: usize,
    /// The present step: its first element, its place, and the next row of it.
    at: usize,
    dst: *mut f32,
    row: usize,
    largest: [Largest; PANEL],
}

impl RowSplitter {
    /// Rows of `k` elements.
    ///
    /// # Safety
    /// The rows must be readable as long as this is used. AVX-512 must be there.
    pub unsafe fn new(pieces: [Piece; 2], k: usize) -> RowSplitter {
        let largest = [no_magnitudes(); PANEL];
        RowSplitter { pieces, k, at: 0, dst: std::ptr::null_mut(), row: PANEL, largest }
    }

    /// Begins a step.
    ///
    /// # Safety
    /// `dst` must hold it, on a cache line, and the one before be finished.
    pub unsafe fn begin(&mut self, step: usize, dst: *mut f32) {
        (self.at, self.dst, self.row) = (step * STEP, dst, 0);
    }

    /// Splits the next `count` rows of the step.
    ///
    /// # Safety
    /// The step must have begun.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn advance(&mut self, count: usize) {
        let end = PANEL.min(self.row.saturating_add(count));
        let len = STEP.min(self.k - self.at);
        while self.row < end {
            let piece = &self.pieces[self.row / HALF];
            let rows = piece.count.min(HALF).min(end - self.row / HALF * HALF);
            let mut from =
                piece.data.wrapping_offset((self.row % HALF) as isize * piece.row).wrapping_add(self.at);
            for row in self.row..self.row / HALF * HALF + rows {
                let soon = from.cast::<u8>().wrapping_offset(piece.ahead);
                fetch_near(soon, 2 * LINE);
                let largest = &mut self.largest[row];
                // SAFETY: the rows are readable, and the step has its place.
                *largest = unsafe {
                    // With a constant length there are no masks.
                    match len {
                        STEP => split_row(from, STEP, row, self.dst.cast(), *largest),
                        len => split_row(from, len, row, self.dst.cast(), *largest),
                    }
                };
                from = from.wrapping_offset(piece.row);
            }
            self.row = end.min((self.row / HALF + 1) * HALF);
        }
    }

    /// Splits the rest of the step.
    ///
    /// # Safety
    /// As for [`Self::advance`].
    pub unsafe fn finish(&mut self) {
        // SAFETY: passed on.
        unsafe { self.advance(PANEL) };
    }

    /// The largest magnitudes of what has been split.
    ///
    /// # Safety
    /// AVX-512 must be there.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn sizes(&self) -> Sizes {
        let mut seen = [0; PANEL];
        for (seen, largest) in seen.chunks_mut(HALF).zip(self.largest.chunks(HALF)) {
            let columns = transposed(array(|row| magnitudes(largest[row])));
            let largest = columns.into_iter().fold(no_magnitudes(), |a, b| _mm512_max_epu32(a, b));
            // SAFETY: half the magnitudes are a vector.
            unsafe { _mm512_storeu_si512(seen.as_mut_ptr().cast(), largest) };
        }
        Sizes::of(seen)
    }
}

fn no_magnitudes() -> Largest {
    // SAFETY: plain bits.
    unsafe { std::mem::zeroed() }
}

/// Splits a panel of 32 columns of `k` elements into the steps of a right operand.
///
/// # Safety
/// The panel must be readable; `dst` must hold its steps, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn split_block(src: *const f32, k: usize, dst: *mut f32) -> Sizes {
    let mut seen = [0; PANEL];
    let mut largest = [_mm512_setzero_si512(); 2];
    for (index, at) in (0..k).step_by(STEP).enumerate() {
        let to = dst.cast::<u8>().wrapping_add(index * STEP_BYTES);
        for (g, largest) in largest.iter_mut().enumerate() {
            let from = src.wrapping_add(at * PANEL + g * HALF);
            // SAFETY: passed on.
            *largest = unsafe { split_columns(from, (PANEL, 0), STEP.min(k - at), g, to, *largest) };
        }
    }
    for (seen, &largest) in seen.chunks_mut(HALF).zip(&largest) {
        // SAFETY: half the magnitudes are a vector.
        unsafe { _mm512_storeu_si512(seen.as_mut_ptr().cast(), magnitudes(largest)) };
    }
    Sizes::of(seen)
}

/// Splits two vectors of row `row` of a left operand into the step at `dst`.
///
/// # Safety
/// `dst` must hold a step, on a cache line.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
pub(crate) unsafe fn split_left(a: __m512i, b: __m512i, row: usize, dst: *mut f32) {
    // SAFETY: passed on.
    unsafe { split_vectors(a, b, row, dst.cast()) };
}

/// 32 columns of rows that are being split into a step of a right operand: the rows are consecutive elements of its k.
///
/// Rows that tiles cannot multiply with numbers up to one, or of which they would lose bits, become zero instead.
pub(crate) struct ValueSplitter {
    pieces: [Piece; 2],
    dst: *mut f32,
    /// The next pair of rows.
    pair: usize,
    /// The largest magnitudes of all, and whether those of some row, or any number, may be too small.
    largest: Largest,
    small: bool,
}

impl ValueSplitter {
    /// Begins to split the rows, from their first columns on, to `dst`.
    ///
    /// # Safety
    /// The rows must be readable as long as this is used; `dst` must hold a step, on a cache line. AVX-512 must be there.
    pub unsafe fn new(pieces: [Piece; 2], dst: *mut f32) -> ValueSplitter {
        ValueSplitter { pieces, dst, pair: 0, largest: no_magnitudes(), small: false }
    }

    /// Splits the next `count` pairs of rows.
    ///
    /// # Safety
    /// The caller of [`Self::new`] promised all that it needs.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn advance(&mut self, count: usize) {
        let end = HALF.min(self.pair.saturating_add(count));
        let (mut largest, mut small) = (self.largest, self.small);
        for pair in self.pair..end {
            let piece = &self.pieces[2 * pair / HALF];
            let first = 2 * pair % HALF;
            let even = piece.data.wrapping_offset((first as isize).wrapping_mul(piece.row));
            let mut of_pair = _mm512_setzero_si512();
            for g in 0..2 {
                let load = |i: usize| {
                    let from =
                        even.wrapping_offset(if i == 0 { 0 } else { piece.row }).wrapping_add(g * HALF);
                    fetch_near(from.cast::<u8>().wrapping_offset(piece.ahead), LINE);
                    match first.wrapping_add(i) < piece.count {
                        // SAFETY: the caller's promise.
                        true => unsafe { _mm512_loadu_si512(from.cast()) },
                        false => _mm512_setzero_si512(),
                    }
                };
                let (even, odd) = (load(0), load(1));
                small |= tiny(even) | tiny(odd) != 0;
                let to = self.dst.cast::<u8>().wrapping_add(g * TILE + pair * ROW);
                // SAFETY: the caller's promise.
                of_pair = unsafe { split_pair(even, odd, to, of_pair) };
            }
            let fair = _mm512_cmpge_epu16_mask(of_pair, _mm512_set1_epi16(LEAST as i16));
            small |= fair & EVEN == 0 || fair & !EVEN == 0;
            largest = _mm512_max_epu16(largest, of_pair);
        }
        (self.pair, self.largest, self.small) = (end, largest, small);
    }

    /// Splits the rest, and returns which rows became zero.
    ///
    /// # Safety
    /// As for [`Self::advance`].
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn finish(mut self) -> u32 {
        // SAFETY: passed on; all rows have been split.
        unsafe {
            self.advance(HALF);
            let great = _mm512_cmpge_epu16_mask(self.largest, _mm512_set1_epi16(MOST as i16));
            if self.small || great != 0 { leave_out(&self.pieces, self.dst) } else { 0 }
        }
    }
}

/// The lower halves of all lanes, which are the even row of a pair.
const EVEN: __mmask32 = 0x5555_5555;
/// The range of the upper half of a row's largest number that tiles multiply: the least, and the first that is too
/// large.
const LEAST: u32 = *VALUES.start() << 7;
const MOST: u32 = (*VALUES.end() + 1) << 7;

/// Numbers below this are not split without loss, or make products that tiles take for zero.
const TINY: u32 = (127 - 100) << 23;

/// The lanes with a number below [`TINY`] that is not zero.
#[target_feature(enable = "avx512f")]
#[inline]
fn tiny(x: __m512i) -> __mmask16 {
    // Without the sign, and with zero as the largest.
    let order = _mm512_sub_epi32(_mm512_add_epi32(x, x), _mm512_set1_epi32(2));
    _mm512_cmplt_epu32_mask(order, _mm512_set1_epi32((2 * TINY - 2) as i32))
}

/// Makes those rows zero that tiles cannot multiply; returns which.
///
/// # Safety
/// `dst` must hold the step of a right operand that was split from the pieces.
#[cold]
unsafe fn leave_out(pieces: &[Piece; 2], dst: *mut f32) -> u32 {
    let mut left_out = 0;
    for row in 0..PANEL {
        // Where the row's numbers are, of each term of both tiles.
        let number = |term: usize, column: usize| {
            let at = term * TERM + column / HALF * TILE + row / 2 * ROW + (2 * (column % HALF) + row % 2) * 2;
            dst.cast::<u8>().wrapping_add(at).cast::<u16>()
        };
        let piece = &pieces[row / HALF];
        let from = piece.data.wrapping_offset(((row % HALF) as isize).wrapping_mul(piece.row));
        // SAFETY: passed on.
        unsafe {
            let largest = (0..PANEL).fold(0, |largest, column| (*number(0, column) & 0x7fff).max(largest));
            let has_tiny = row % HALF < piece.count
                && (0..PANEL).any(|i| (1..TINY).contains(&(*from.add(i)).abs().to_bits()));
            if has_tiny || largest != 0 && !VALUES.contains(&(u32::from(largest) >> 7)) {
                left_out |= 1 << row;
                for at in 0..3 * PANEL {
                    *number(at / PANEL, at % PANEL) = 0;
                }
            }
        }
    }
    left_out
}

/// Turns 32 rows of at most 16 sums, [`PANEL`] apart, into `rows` rows of 32.
///
/// # Safety
/// `sums` must hold them, and `out` so many rows of [`PANEL`].
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) unsafe fn turn_sums(sums: *const f32, rows: usize, out: *mut f32) {
    for first in [0, HALF] {
        // SAFETY: passed on.
        unsafe {
            let sums = array(|row| _mm512_loadu_si512(sums.add((first + row) * PANEL).cast()));
            for (row, sums) in transposed(sums).into_iter().enumerate().take(rows) {
                _mm512_storeu_si512(out.add(row * PANEL + first).cast(), sums);
            }
        }
    }
}

/// An element of a row of a left operand, put together again.
///
/// # Safety
/// The row must be split into the step at `src`.
pub(crate) unsafe fn left_element(src: *const f32, row: usize, k: usize) -> f32 {
    let at =
        src.cast::<u8>().wrapping_add(row / HALF * TILE + row % HALF * ROW).cast::<u16>().wrapping_add(k);
    let part = |term: usize| {
        // SAFETY: passed on.
        let bits = unsafe { *at.byte_add(term * TERM) };
        f32::from_bits(u32::from(bits) << 16)
    };
    part(0) + part(1) + part(2)
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::Tier;

    #[repr(align(64))]
    struct Step([f32; STEP_BYTES / 4]);

    #[test]
    fn values_are_left_out_that_tiles_would_lose_bits_of() {
        if Tier::supported() < Tier::Avx512 {
            return;
        }
        for count in [PANEL, 7] {
            let mut rows = [1.5f32; PANEL * PANEL];
            let mut expected = 0u32;
            let odd = [0.0, f32::from_bits(1), -1e-40, 1e-32, 1e-28, -1e31, f32::INFINITY, -0.0];
            for (row, value) in odd.into_iter().enumerate() {
                rows[3 * row * PANEL + 9 + row] = value;
                let lost = value != 0.0 && (value.abs() < 2f32.powi(-100) || value.abs() >= 2f32.powi(101));
                expected |= u32::from(lost && 3 * row < count) << (3 * row);
            }
            // A row of tiny numbers, and one of zeros.
            rows[PANEL..2 * PANEL].fill(1e-42);
            rows[2 * PANEL..3 * PANEL].fill(0.0);
            expected |= 1 << 1;
            let mut step = Step([f32::NAN; STEP_BYTES / 4]);
            // SAFETY: the instructions are there, and the memory is the test's.
            let left_out = unsafe {
                let pieces = Piece::two(rows.as_ptr(), PANEL as isize, count);
                ValueSplitter::new(pieces, step.0.as_mut_ptr()).finish()
            };
            assert_eq!(left_out, expected, "{left_out:b} {expected:b}");
        }
    }
}
