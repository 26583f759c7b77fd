//! What is kept of the softmax of a band's rows.

use super::call::KEYS;
use crate::cpu::gemm::Blocks;

/// The most rows of a band.
pub(super) const ROWS: usize = Blocks::PANEL;
/// Lanes of the widest vectors that are summed in.
pub(super) const LANES: usize = 16;
const PANEL: usize = Blocks::PANEL;
/// Floats of the longest head.
const LONGEST: usize = 256;
/// Floats a band works in: scores, exponentials, and a row.
pub(super) const BAND_SCRATCH: usize = KEYS / PANEL * ROWS * PANEL + ROWS * Blocks::ROW + LONGEST;

/// Where the rows of a band stand in one softmax: the largest score so far, the sum of `exp(score - largest)`, and the
/// sums of the values with these weights.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) most: *mut f32,
    pub(super) sum: *mut f32,
    /// Sums of exponentials by lane, which make `sum` in the end.
    pub(super) lanes: *mut f32,
    /// Panels of `stride` floats.
    values: *mut f32,
    stride: usize,
}

impl State {
    /// Floats before the values.
    pub const LEN: usize = 2 * ROWS + ROWS * LANES;

    /// The state at `data` of a band, of at most `rows` rows.
    pub fn at(data: *mut f32, rows: usize) -> State {
        let sum = data.wrapping_add(ROWS);
        let lanes = sum.wrapping_add(ROWS);
        State { most: data, sum, lanes, values: data.wrapping_add(Self::LEN), stride: rows * PANEL }
    }

    /// Forgets everything.
    ///
    /// # Safety
    /// The memory must be the caller's.
    pub(super) unsafe fn clear(&self) {
        // SAFETY: passed on.
        unsafe {
            std::slice::from_raw_parts_mut(self.most, ROWS).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(self.sum, ROWS + ROWS * LANES).fill(0.0);
        }
    }

    /// Where the sums of a row are from a column on.
    pub(super) fn row(&self, r: usize, column: usize) -> *mut f32 {
        self.values.wrapping_add(column / PANEL * self.stride + r * PANEL + column % PANEL)
    }
}

/// What is subtracted from scores: the largest, or zero if there is none, because minus infinity minus itself is NaN.
#[inline(always)]
pub(super) fn base(most: f32) -> f32 {
    if most == f32::NEG_INFINITY { 0.0 } else { most }
}
