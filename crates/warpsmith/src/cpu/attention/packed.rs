//! Any rows of any type: a block is packed once, and all bands use it.

use super::attend::Attend;
use super::band::{Band, View};
use super::cache::Block;
use super::work::Work;
use crate::cpu::gemm::{BlockProduct, Blocks};
use crate::cpu::{CpuElement, Simd};
use std::marker::PhantomData;

/// [`Strategy::Packed`](super::memory::Strategy::Packed).
pub(super) struct Packed<'a, T> {
    work: &'a Work<'a>,
    blocks: &'a mut Blocks,
    t: PhantomData<T>,
}

impl<'a, T: CpuElement> Attend<'a> for Packed<'a, T> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, _: &[Band<'_>]) -> Self {
        // SAFETY: passed on.
        unsafe { work.pack_queries(blocks) };
        Packed { work, blocks, t: PhantomData }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>) {
        let Work { job, space, memory, .. } = self.work;
        let narrow = self.blocks.per_unit() == 2;
        // SAFETY: passed on.
        unsafe { self.work.pack_block(self.blocks, block, job.kv_heads.clone()) };
        for (index, band) in bands.iter_mut().enumerate() {
            let panels = band.panels(&block.keys);
            if panels.is_empty() {
                continue;
            }
            let head = index / space.head_bands;
            let view = band.view(block.keys.start, panels, memory.scratch.at(0));
            // SAFETY: the panels are packed, the band's rows too, and its scratch is this thread's.
            unsafe {
                let queries = memory.queries.at(index);
                self.work.scores(self.blocks, band, &view, queries, memory.keys.at(head));
                if narrow {
                    self.work.refine_single_scores(self.blocks, band, &view);
                }
                band.softmax::<T, S>(s, narrow, &view);
                self.weigh(band, &view, memory.values.at(head));
            }
        }
    }
}

impl<T: CpuElement> Packed<'_, T> {
    /// Adds the band's exponentials times the values of the view's panels of keys to its sums.
    ///
    /// # Safety
    /// The exponentials must be there, and the values be packed.
    #[inline(always)]
    unsafe fn weigh(&mut self, band: &mut Band<'_>, view: &View, values: *const f32) {
        let (Work { call, space, .. }, panels) = (self.work, view.panels());
        let per_panel = Blocks::PANEL / self.blocks.per_unit();
        let from = panels.start * per_panel;
        for column in 0..space.panels {
            let right = values.wrapping_add((column * space.value_units + from) * Blocks::PANEL);
            let product = BlockProduct {
                left: view.exponentials().cast::<u32>().wrapping_add(from),
                rows: band.rows(),
                right: right.cast(),
                right_width: Blocks::PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
                cols: Blocks::PANEL.min(call.head_dim - column * Blocks::PANEL),
                units: panels.len() * per_panel,
                out: band.sums(column),
                resume: band.has_sums(),
            };
            // SAFETY: passed on.
            unsafe { self.blocks.multiply(&product) };
        }
        band.note_sums();
    }
}

impl Work<'_> {
    /// The scores of a band over the view's panels of packed keys.
    ///
    /// # Safety
    /// The operands must be packed, and the view's scratch be the caller's.
    #[inline(always)]
    pub(super) unsafe fn scores(
        &self,
        blocks: &mut Blocks,
        band: &Band<'_>,
        view: &View,
        queries: *const f32,
        keys: *const f32,
    ) {
        let units = self.space.units;
        for panel in view.panels() {
            let product = BlockProduct {
                left: queries.cast(),
                rows: band.rows(),
                right: keys.wrapping_add(panel * Blocks::PANEL * units).cast(),
                right_width: Blocks::PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
                cols: Blocks::PANEL,
                units,
                out: view.scores(panel),
                resume: false,
            };
            // SAFETY: passed on.
            unsafe { blocks.multiply(&product) };
        }
    }
}
