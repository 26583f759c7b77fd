//! What tiles cannot multiply, by vectors.

use super::few::FewPlaces;
use super::{LeftOut, PANEL, STEP_LEN};
use crate::cpu::CpuElement;
use crate::cpu::attention::Space;
use crate::cpu::attention::band::Band;
use crate::cpu::attention::in_place::{Tile, Tiles};
use crate::cpu::attention::job::Compute;
use crate::cpu::attention::plan::Job;
use crate::cpu::gemm::{BlockProduct, Blocks, Piece, Sizes, Slot, left_element, with_scratch};
use std::ops::Range;

impl<T: CpuElement> Compute<'_, T> {
    /// Makes the scores of a panel of keys again where a query and a key do not fit each other.
    ///
    /// # Safety
    /// `keys` must be the panel as f32, and `out` hold its scores.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn mend_scores(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        job: &Job,
        band: &Band<'_>,
        keys: *const f32,
        (queries_sizes, keys_sizes): (&Sizes, &Sizes),
        out: *mut f32,
    ) {
        let (rows, sums) = (PANEL * Blocks::ROW, PANEL * PANEL);
        with_scratch(Slot::Own, (rows + sums) * size_of::<f32>(), |scratch| {
            let queries = scratch.cast::<f32>();
            let sums = queries.wrapping_add(rows);
            let product = BlockProduct {
                left: queries.cast(),
                rows: band.rows(),
                right: keys.cast(),
                right_width: PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
                cols: PANEL,
                units: space.units,
                out: sums,
                resume: false,
            };
            // SAFETY: the scratch has room for the rows of a band and their sums.
            unsafe {
                self.pack_band(blocks, job, band, queries);
                blocks.multiply(&product);
                for i in 0..band.rows() {
                    for j in (0..PANEL).filter(|&j| !queries_sizes.fits_at(i, keys_sizes, j)) {
                        *out.add(i * PANEL + j) = *sums.add(i * PANEL + j);
                    }
                }
            }
        });
    }

    /// Adds the values that were left out, one after the other, to the sums of the rows that see them.
    ///
    /// # Safety
    /// `row` must give 32 values of a key from some column on, and the band's exponentials over the block at `first` be split.
    /// AVX-512 must be there.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,fma")]
    pub(super) unsafe fn add_values(
        &self,
        band: &Band<'_>,
        first: usize,
        panels: &Range<usize>,
        left_out: &LeftOut,
        row: impl Fn(usize, usize) -> *const f32,
        exponentials: *const f32,
    ) {
        for (column, left_out) in left_out.iter().enumerate() {
            let keys = panels.start * PANEL..panels.end * PANEL;
            for key in keys.filter(|key| left_out[key / PANEL] >> (key % PANEL) & 1 != 0) {
                let step = exponentials.wrapping_add(key / PANEL * STEP_LEN);
                let values = row(key, column);
                for r in (0..band.rows()).filter(|&r| band.sees(r, first + key)) {
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

    /// [`Self::mend_scores`] for few rows, and keys where they lie.
    ///
    /// # Safety
    /// The keys must be readable, and `out` hold their scores. AVX-512 must be there.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,fma")]
    pub(super) unsafe fn mend_few_scores(
        &self,
        blocks: &Blocks,
        job: &Job,
        band: &Band<'_>,
        keys: [Piece; 2],
        (queries_sizes, keys_sizes): (&Sizes, &Sizes),
        out: *mut f32,
    ) {
        with_scratch(Slot::Own, PANEL * Blocks::ROW * size_of::<f32>(), |scratch| {
            let queries = scratch.cast::<f32>();
            // SAFETY: the scratch has room for the rows of a band.
            unsafe {
                self.pack_band(blocks, job, band, queries);
                for i in 0..band.rows() {
                    for j in (0..PANEL).filter(|&j| !queries_sizes.fits_at(i, keys_sizes, j)) {
                        let piece = &keys[j / Blocks::TILE];
                        if j % Blocks::TILE >= piece.count {
                            continue;
                        }
                        let key = piece.data.wrapping_offset((j % Blocks::TILE) as isize * piece.row);
                        // In the order of vectors.
                        *out.add(i * PANEL + j) = (0..self.call.head_dim).fold(0f32, |sum, k| {
                            (*queries.add(i * Blocks::ROW + k)).mul_add(*key.add(k), sum)
                        });
                    }
                }
            }
        });
    }

    /// [`Self::add_values`] for few rows of a head.
    ///
    /// # Safety
    /// As for [`Self::block_few`].
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn add_few_values(
        &self,
        blocks: &Blocks,
        band: &Band<'_>,
        tiles: &Tiles<'_>,
        head: usize,
        panels: &Range<usize>,
        places: FewPlaces,
        left_out: &LeftOut,
    ) {
        let first = tiles.block.keys.start;
        let v = &tiles.cache.v;
        let row = |key: usize, column: usize| {
            // SAFETY: the key is the request's.
            unsafe {
                let kv_head = tiles.kv_heads.start + head;
                let address = tiles.cache.find(v, tiles.block.request, first + key, kv_head).0;
                let tile = Tile { head, from: key, count: 1, address, ahead: 0 };
                self.piece(blocks, v, tiles, &tile, places.stage(0)).data.wrapping_add(column * PANEL)
            }
        };
        let exponentials = Band::exponentials(places.scratch(head));
        // SAFETY: passed on; tiles imply the instructions.
        unsafe { self.add_values(band, first, panels, left_out, row, exponentials) };
    }
}
