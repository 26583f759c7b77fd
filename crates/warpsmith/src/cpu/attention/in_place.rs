//! Few rows of f32: values are used in place, and keys too where vectors allow it.

use super::attend::Attend;
use super::band::Band;
use super::cache::{Block, Cache};
use super::memory::Strategy;
use super::tiles::Tiles;
use super::work::Work;
use crate::cpu::Simd;
use crate::cpu::gemm::{BlockProduct, Blocks, Matrix};

/// [`Strategy::InPlace`].
pub(super) struct InPlace<'a> {
    work: &'a Work<'a>,
    blocks: &'a mut Blocks,
    keys_too: bool,
}

impl<'a> Attend<'a> for InPlace<'a> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, _: &[Band<'_>]) -> Self {
        // SAFETY: passed on.
        unsafe { work.pack_queries(blocks) };
        InPlace { work, blocks, keys_too: matches!(work.space.strategy, Strategy::InPlace { keys: true }) }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>) {
        // The same for all heads.
        let panels = bands[0].panels(&block.keys);
        if panels.is_empty() {
            return;
        }
        let (work, memory) = (self.work, &self.work.memory);
        let tiles = Tiles::new(work, block, &panels);
        // SAFETY: passed on.
        unsafe {
            if self.keys_too {
                self.scores(&tiles, bands[0].rows());
            }
            for (head, band) in bands.iter_mut().enumerate() {
                let view = band.view(block.keys.start, panels.clone(), memory.scratch.at(head));
                if !self.keys_too {
                    let kv_head = tiles.kv_heads.start + head;
                    work.pack_block(self.blocks, block, kv_head..kv_head + 1);
                    work.scores(self.blocks, band, &view, memory.queries.at(head), memory.keys.at(0));
                }
                band.softmax::<f32, S>(s, false, &view);
            }
            self.weigh(&tiles, bands);
        }
    }
}

impl InPlace<'_> {
    /// The scores of all heads, each of so many rows.
    ///
    /// # Safety
    /// As for [`Attend::block`], where keys are used in place too.
    #[inline(always)]
    unsafe fn scores(&self, tiles: &Tiles<'_>, rows: usize) {
        let Work { call, memory, .. } = self.work;
        let Cache { k, v, dtype, .. } = &tiles.cache;
        for index in 0..tiles.groups::<1>() {
            // SAFETY: the keys are the request's, and keys in place are rows of f32; scores past the last key are masked.
            unsafe {
                let [tile] = tiles.group(k, index, (v, tiles.keys.start));
                let matrix = Matrix {
                    data: tile.address as *const u8,
                    dtype: *dtype,
                    rows: tile.count,
                    k: call.head_dim,
                    row_stride: k.token,
                    k_stride: k.dim,
                };
                let queries = memory.queries.at(tile.head);
                let scores = Band::scores(memory.scratch.at(tile.head), tile.from / Blocks::PANEL);
                let out = scores.wrapping_add(tile.from % Blocks::PANEL);
                self.blocks.multiply_in_place(queries, rows, &matrix, tile.ahead, out);
            }
        }
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    #[inline(always)]
    unsafe fn weigh(&mut self, tiles: &Tiles<'_>, bands: &mut [Band<'_>]) {
        let Work { space, memory, .. } = self.work;
        let Cache { k, v, .. } = &tiles.cache;
        for index in 0..tiles.groups::<1>() {
            // SAFETY: the keys are the request's.
            let [tile] = unsafe { tiles.group(v, index, (k, tiles.block.keys.end)) };
            let band = &mut bands[tile.head];
            let exponentials = Band::exponentials(memory.scratch.at(tile.head)).cast::<u32>();
            let product = |column: usize| BlockProduct {
                left: exponentials.wrapping_add(tile.from),
                rows: band.rows(),
                right: (tile.address as *const u32).wrapping_add(column * Blocks::PANEL),
                right_width: v.token,
                right_ahead: tile.ahead / size_of::<f32>() as isize,
                cols: Blocks::PANEL,
                units: tile.count,
                out: band.sums(column),
                resume: band.has_sums(),
            };
            // SAFETY: passed on; heads are whole panels of f32.
            unsafe {
                if self.blocks.multiplies_across(band.rows()) {
                    let apart = band.sums(1) as usize - band.sums(0) as usize;
                    self.blocks.multiply_across(&product(0), space.panels, apart / size_of::<f32>());
                } else {
                    (0..space.panels).for_each(|column| self.blocks.multiply(&product(column)));
                }
            }
            band.note_sums();
        }
    }
}
