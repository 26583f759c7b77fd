//! What tiles cannot multiply, by vectors.

use super::few::Few;
use super::{LeftOut, PANEL, Part, STEP_LEN, Split};
use crate::cpu::attention::band::{Band, View};
use crate::cpu::attention::tiles::{Tile, Tiles};
use crate::cpu::gemm::{BlockProduct, Blocks, Piece, Sizes, Slot, left_element, with_scratch};
use std::ops::Range;

impl Split<'_> {
    /// Makes the scores of a panel of keys again where a query and a key do not fit each other.
    ///
    /// # Safety
    /// The band must be the part's, the panel packed, and its scores there.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn mend_scores(&mut self, band: &Band<'_>, part: &Part, panel: usize) {
        let (rows, sums) = (PANEL * Blocks::ROW, PANEL * PANEL);
        let out = part.view.scores(panel);
        with_scratch(Slot::Own, (rows + sums) * size_of::<f32>(), |scratch| {
            let queries = scratch.cast::<f32>();
            let sums = queries.wrapping_add(rows);
            let product = BlockProduct {
                left: queries.cast(),
                rows: band.rows(),
                right: self.packed_keys(panel).cast(),
                right_width: PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
                cols: PANEL,
                units: self.work.space.units,
                out: sums,
                resume: false,
            };
            // SAFETY: the scratch has room for the rows of a band and their sums.
            unsafe {
                self.work.pack_band(self.blocks, band, queries);
                self.blocks.multiply(&product);
                let (queries, keys) = (&self.queries[part.band], &self.keys[panel]);
                for i in 0..band.rows() {
                    for j in (0..PANEL).filter(|&j| !queries.fits_at(i, keys, j)) {
                        *out.add(i * PANEL + j) = *sums.add(i * PANEL + j);
                    }
                }
            }
        });
    }
}

impl Few<'_> {
    /// Makes the scores of a unit of keys again where a query of a head and a key do not fit each other.
    ///
    /// # Safety
    /// The keys must be readable, and `out` hold their scores. AVX-512 must be there.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,fma")]
    pub(super) unsafe fn mend_scores(
        &self,
        head: usize,
        band: &Band<'_>,
        keys: [Piece; 2],
        sizes: &Sizes,
        out: *mut f32,
    ) {
        with_scratch(Slot::Own, PANEL * Blocks::ROW * size_of::<f32>(), |scratch| {
            let queries = scratch.cast::<f32>();
            // SAFETY: the scratch has room for the rows of a band.
            unsafe {
                self.work.pack_band(self.blocks, band, queries);
                for i in 0..band.rows() {
                    for j in (0..PANEL).filter(|&j| !self.queries[head].fits_at(i, sizes, j)) {
                        let piece = &keys[j / Blocks::TILE];
                        if j % Blocks::TILE >= piece.count {
                            continue;
                        }
                        let key = piece.data.wrapping_offset((j % Blocks::TILE) as isize * piece.row);
                        // In the order of vectors.
                        *out.add(i * PANEL + j) = (0..self.work.call.head_dim).fold(0f32, |sum, k| {
                            (*queries.add(i * Blocks::ROW + k)).mul_add(*key.add(k), sum)
                        });
                    }
                }
            }
        });
    }

    /// Adds the values of a head that were left out of the block.
    ///
    /// # Safety
    /// As for [`Attend::block`], with the view's exponentials made.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn add_values(&self, head: usize, band: &Band<'_>, view: &View, tiles: &Tiles<'_>) {
        let v = &tiles.cache.v;
        let stage = self.stage(0);
        let row = |key: usize, column: usize| {
            // SAFETY: the key is the request's.
            unsafe {
                let kv_head = tiles.kv_heads.start + head;
                let address = tiles.cache.find(v, tiles.block.request, view.first() + key, kv_head).0;
                let tile = Tile { head, from: key, count: 1, address, ahead: 0 };
                stage.piece(v, tiles, &tile).data.wrapping_add(column * PANEL)
            }
        };
        // SAFETY: passed on; tiles imply the instructions.
        unsafe { add_values(band, view, &self.left_out[head], row) };
    }
}

/// Whether some of the keys of these panels were left out.
pub(super) fn is_left_out(left_out: &LeftOut, panels: &Range<usize>) -> bool {
    left_out.iter().any(|of_column| of_column[panels.clone()].iter().any(|&keys| keys != 0))
}

/// Adds the values that were left out, one after the other, to the sums of the rows that see them.
///
/// # Safety
/// `row` must give 32 values of a key of the block from some panel of columns on, and the view's exponentials be split. AVX-512
/// must be there.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,fma")]
pub(super) unsafe fn add_values(
    band: &Band<'_>,
    view: &View,
    left_out: &LeftOut,
    row: impl Fn(usize, usize) -> *const f32,
) {
    let panels = view.panels();
    for (column, left_out) in left_out.iter().enumerate() {
        let keys = panels.start * PANEL..panels.end * PANEL;
        for key in keys.filter(|key| left_out[key / PANEL] >> (key % PANEL) & 1 != 0) {
            let step = view.exponentials().wrapping_add(key / PANEL * STEP_LEN);
            let values = row(key, column);
            for r in (0..band.rows()).filter(|&r| band.sees(r, view.first() + key)) {
                let sums = band.sums(column).wrapping_add(r * PANEL);
                // SAFETY: the exponentials of the panel are there, and rows of sums are whole panels.
                unsafe {
                    let e = left_element(step, r, key % PANEL);
                    for i in 0..PANEL {
                        *sums.add(i) = e.mul_add(*values.add(i), *sums.add(i));
                    }
                }
            }
        }
    }
}
