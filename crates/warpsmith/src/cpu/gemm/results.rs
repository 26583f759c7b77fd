//! From tiles of sums to the epilogue: which rows and columns a tile holds, and how much of it is finished.

use super::epilogue::{self, Epilogue, Tile};
use super::isa::Isa;
use super::panel::{PANEL, Side, transpose_sums};
use std::ops::Range;

/// The results of a product of a left operand with a right one, on AMX.
pub(super) struct Results<'a, E> {
    pub left: &'a Side,
    /// Outputs along the right operand, and in each of its panels.
    pub len: usize,
    pub panel_len: usize,
    /// Whether the left operand is the weights.
    pub swapped: bool,
    pub epilogue: &'a E,
}

/// A tile of which `done` rows are finished.
pub(super) struct Unfinished {
    tile: Tile,
    done: usize,
}

impl Default for Unfinished {
    /// Nothing is left to do.
    fn default() -> Self {
        let tile = Tile { sums: std::ptr::null(), row: 0, col: 0, rows: 0, cols: 0 };
        Unfinished { tile, done: 0 }
    }
}

impl<E: Epilogue> Results<'_, E> {
    /// The first output of a panel, and how many it has.
    pub fn columns(&self, panel: usize) -> (usize, usize) {
        let first = panel * self.panel_len;
        (first, (self.len - first).min(self.panel_len))
    }

    /// Rows and columns of the left and right operand that a tile is made of.
    fn extent(&self, block: usize, panel: usize) -> [Range<usize>; 2] {
        let row = block * self.left.panel_len();
        let rows = self.left.panel_len().min(self.left.len() - row);
        let (col, cols) = self.columns(panel);
        [row..row + rows, col..col + cols]
    }

    /// Tells the epilogue which tile comes next.
    pub fn expect(&self, block: usize, panel: usize) {
        let [left, right] = self.extent(block, panel);
        if self.swapped { self.epilogue.expect(right, left) } else { self.epilogue.expect(left, right) }
    }

    /// A tile of sums on its way to the epilogue; `turned` has room for its transpose.
    ///
    /// # Safety
    /// `sums` must hold the tile.
    pub unsafe fn unfinished(
        &self,
        block: usize,
        panel: usize,
        sums: *const f32,
        turned: *mut f32,
    ) -> Unfinished {
        let [left, right] = self.extent(block, panel);
        if !self.swapped {
            let (row, rows) = (left.start, left.len());
            return Unfinished {
                tile: Tile { sums, row, col: right.start, rows, cols: right.len() },
                done: 0,
            };
        }
        // SAFETY: passed on.
        unsafe { transpose_sums(Isa::Amx.tier(), sums, right.len(), turned) };
        let (row, rows) = (right.start, right.len());
        Unfinished { tile: Tile { sums: turned, row, col: left.start, rows, cols: left.len() }, done: 0 }
    }

    /// Hands as many rows to the epilogue as make `part` parts of `whole`.
    ///
    /// # Safety
    /// The tile must hold its sums.
    #[inline(always)]
    pub unsafe fn finish(&self, pending: &mut Unfinished, part: usize, whole: usize) {
        let Unfinished { tile, done } = pending;
        let rows = (tile.rows * part).div_ceil(whole);
        if *done < rows {
            let sums = tile.sums.wrapping_add(*done * PANEL);
            let rows = Tile { sums, row: tile.row + *done, rows: rows - *done, ..*tile };
            *done += rows.rows;
            // SAFETY: the tile's memory is the caller's promise; each row is finished once.
            unsafe { epilogue::finish(Isa::Amx, rows, self.epilogue) };
        }
    }
}
