//! Many rows of f32 on tiles: a block is packed and split, and all bands use it.

use super::left_out::{LeftOut, add_values, is_left_out};
use super::softmax::Softmax;
use crate::cpu::Simd;
use crate::cpu::attention::attend::Attend;
use crate::cpu::attention::band::{Band, View};
use crate::cpu::attention::cache::Block;
use crate::cpu::attention::call::KEYS;
use crate::cpu::attention::memory::{Layout, Pieces, Space, floats_of};
use crate::cpu::attention::work::Work;
use crate::cpu::gemm::{
    BlockProduct, Blocks, Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, ValueSplitter, split_block,
};

const PANEL: usize = Blocks::PANEL;
const STEP_LEN: usize = Blocks::SPLIT;

/// [`Strategy::Split`](crate::cpu::attention::memory::Strategy::Split): the tiles, and what is known of the operands.
pub(in crate::cpu::attention) struct Split<'a> {
    work: &'a Work<'a>,
    blocks: &'a mut Blocks,
    tiles: SplitBlocks,
    operands: Operands,
    /// The queries of each band.
    queries: &'a [Sizes],
    /// The panels of keys of the present block.
    keys: [Sizes; KEYS / PANEL],
    /// The values that are not among the split ones, for each panel of columns.
    left_out: &'a mut [LeftOut],
    /// Room for the rows of a band and their sums over a panel, to recompute scores.
    rows: *mut f32,
    sums: *mut f32,
}

/// Where the split keys and values of a block are.
#[derive(Clone, Copy)]
struct Operands {
    /// By panel.
    keys: Pieces,
    /// By panel of columns, then by panel of keys.
    values: Pieces,
    /// Panels of keys.
    panels: usize,
}

impl Operands {
    fn key(&self, panel: usize) -> *mut f32 {
        self.keys.at(panel)
    }

    fn value(&self, column: usize, panel: usize) -> *mut f32 {
        self.values.at(column * self.panels + panel)
    }
}

/// What a band sees of a block.
struct Part {
    /// Index of the band.
    band: usize,
    view: View,
}

impl Split<'_> {
    const ROWS: usize = PANEL * Blocks::ROW;
    const SUMS: usize = PANEL * PANEL;

    /// Floats of what is kept beside the packed block.
    pub fn staging(space: &Space) -> usize {
        // Keys are as many steps of values as they are panels.
        let operands = space.block_keys / PANEL * (space.steps + space.panels) * STEP_LEN;
        let known = floats_of::<Sizes>(space.bands) + floats_of::<LeftOut>(space.panels);
        operands + Self::ROWS + Self::SUMS + known
    }
}

impl<'a> Attend<'a> for Split<'a> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self {
        let Work { call, space, memory, .. } = work;
        let panels = space.block_keys / PANEL;
        let mut layout = Layout { next: memory.staging };
        let keys = layout.take(panels, space.steps * STEP_LEN);
        let values = layout.take(space.panels * panels, STEP_LEN);
        let (rows, sums) = (layout.take(1, Self::ROWS).at(0), layout.take(1, Self::SUMS).at(0));
        // SAFETY: the memory holds what `staging` says, and is the caller's.
        let (queries, left_out) = unsafe { (layout.slice(bands.len()), layout.slice(space.panels)) };
        left_out.fill([0; KEYS / PANEL]);
        for (index, (band, sizes)) in bands.iter().zip(&mut *queries).enumerate() {
            let to = memory.queries.at(index);
            // SAFETY: there is room for a band's rows, and for what they are split into; tiles imply the instructions.
            unsafe {
                work.pack_band(blocks, band, rows);
                let pieces = Piece::two(rows, Blocks::ROW as isize, band.rows());
                let mut rows = RowSplitter::new(pieces, call.head_dim);
                for step in 0..space.steps {
                    rows.begin(step, to.wrapping_add(step * STEP_LEN));
                    rows.finish();
                }
                *sizes = rows.sizes();
            }
        }
        // SAFETY: operands are split where there are tiles alone.
        let mut tiles = unsafe { SplitBlocks::new() };
        tiles.configure();
        Split {
            work,
            blocks,
            tiles,
            operands: Operands { keys, values, panels },
            queries,
            keys: [Sizes::nothing(); KEYS / PANEL],
            left_out,
            rows,
            sums,
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>) {
        let Work { space, memory, .. } = self.work;
        // Two bands have their scores at once, so that every other one can have the same scratch.
        let next = |bands: &[Band<'_>], from: usize, number: usize| {
            let with_panels = |index: usize| (index, bands[index].panels(&block.keys));
            let found = (from..bands.len()).map(with_panels).find(|(_, panels)| !panels.is_empty());
            found.map(|(band, panels)| {
                let scratch = memory.scratch.at(number % 2);
                Part { band, view: bands[band].view(block.keys.start, panels, scratch) }
            })
        };
        let Some(mut current) = next(bands, 0, 0) else {
            return;
        };
        // SAFETY: passed on; what the tiles multiply is split, and no two bands are the same.
        unsafe {
            self.split_block(block);
            self.scores(&bands[current.band], &current, || ());
            let mut before: Option<Part> = None;
            for number in 1.. {
                let following = next(bands, current.band + 1, number);
                let (earlier, rest) = bands.split_at_mut(current.band);
                let (band, later) = rest.split_first_mut().expect("the present band");
                let steps = before.as_ref().map_or(0, |part| part.view.panels().len() * space.panels)
                    + following.as_ref().map_or(0, |part| part.view.panels().len() * space.steps);
                let mut softmax = Softmax::new(band, current.view.clone(), SplitBlock::calls(steps));
                if let Some(before) = before {
                    self.weigh(&mut earlier[before.band], &before.view, || softmax.advance(s));
                }
                if let Some(following) = &following {
                    let band = &later[following.band - current.band - 1];
                    self.scores(band, following, || softmax.advance(s));
                }
                softmax.finish(s);
                match following {
                    Some(following) => before = Some(std::mem::replace(&mut current, following)),
                    None => break,
                }
            }
            self.weigh(&mut bands[current.band], &current.view, || ());
        }
    }
}

impl Split<'_> {
    /// Packs a block and splits it. Jobs of many rows have one head.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    unsafe fn split_block(&mut self, block: &Block<'_>) {
        let (Work { call, job, space, .. }, operands) = (self.work, self.operands);
        let count = block.keys.len();
        // SAFETY: the memory holds a block, packed and split; tiles imply the instructions.
        unsafe {
            self.work.pack_block(self.blocks, block, job.kv_heads.clone());
            for panel in 0..count.div_ceil(PANEL) {
                self.keys[panel] = split_block(self.packed_keys(panel), call.head_dim, operands.key(panel));
                for column in 0..space.panels {
                    let count = PANEL.min(count - panel * PANEL);
                    let values = self.packed_values(column, panel * PANEL);
                    let pieces = Piece::two(values, PANEL as isize, count);
                    let values = ValueSplitter::new(pieces, operands.value(column, panel));
                    self.left_out[column][panel] = values.finish();
                }
            }
        }
    }

    /// A panel of the present block's keys as f32.
    fn packed_keys(&self, panel: usize) -> *const f32 {
        let Work { space, memory, .. } = self.work;
        memory.keys.at(0).wrapping_add(panel * PANEL * space.units)
    }

    /// The values of the present block as f32, from some key on, a panel of columns.
    fn packed_values(&self, column: usize, key: usize) -> *const f32 {
        let Work { space, memory, .. } = self.work;
        memory.values.at(0).wrapping_add((column * space.value_units + key) * PANEL)
    }

    /// The scores of a band.
    ///
    /// # Safety
    /// As for [`Attend::block`], with the block split.
    #[inline(always)]
    unsafe fn scores(&mut self, band: &Band<'_>, part: &Part, mut between: impl FnMut()) {
        let Work { space, memory, .. } = self.work;
        for panel in part.view.panels() {
            let product = SplitBlock {
                left: memory.queries.at(part.band),
                right: self.operands.key(panel),
                steps: space.steps,
                rows: band.rows(),
                cols: PANEL,
                out: part.view.scores(panel),
                resume: false,
            };
            // SAFETY: passed on.
            unsafe {
                self.tiles.multiply(&product, &mut between);
                if !self.queries[part.band].fits(&self.keys[panel]) {
                    self.recompute_scores(band, part, panel);
                }
            }
        }
    }

    /// Recomputes the scores of a panel of keys on vectors where the products of a query and a key are out of the range of tiles.
    ///
    /// # Safety
    /// The band must be the part's, the panel packed, and its scores there.
    #[cold]
    #[inline(never)]
    unsafe fn recompute_scores(&mut self, band: &Band<'_>, part: &Part, panel: usize) {
        let (rows, sums, out) = (self.rows, self.sums, part.view.scores(panel));
        let product = BlockProduct {
            left: rows.cast(),
            rows: band.rows(),
            right: self.packed_keys(panel).cast(),
            right_width: PANEL as isize,
            right_ahead: Blocks::PANEL_AHEAD,
            cols: PANEL,
            units: self.work.space.units,
            out: sums,
            resume: false,
        };
        // SAFETY: there is room for the rows of a band and their sums.
        unsafe {
            self.work.pack_band(self.blocks, band, rows);
            self.blocks.multiply(&product);
            let (queries, keys) = (&self.queries[part.band], &self.keys[panel]);
            for i in 0..band.rows() {
                for j in (0..PANEL).filter(|&j| !queries.fits_at(i, keys, j)) {
                    *out.add(i * PANEL + j) = *sums.add(i * PANEL + j);
                }
            }
        }
    }

    /// Adds a band's exponentials times the values to its sums.
    ///
    /// # Safety
    /// As for [`Attend::block`], with the block split and the exponentials made.
    #[inline(always)]
    unsafe fn weigh(&self, band: &mut Band<'_>, view: &View, mut between: impl FnMut()) {
        let (Work { call, space, .. }, panels) = (self.work, view.panels());
        for column in 0..space.panels {
            let product = SplitBlock {
                left: view.exponentials().wrapping_add(panels.start * STEP_LEN),
                right: self.operands.value(column, panels.start),
                steps: panels.len(),
                rows: band.rows(),
                cols: PANEL.min(call.head_dim - column * PANEL),
                out: band.sums(column),
                resume: band.has_sums(),
            };
            // SAFETY: passed on.
            unsafe { self.tiles.multiply(&product, &mut between) };
        }
        band.note_sums();
        if is_left_out(self.left_out, &panels) {
            let row = |key: usize, column: usize| self.packed_values(column, key);
            // SAFETY: passed on; tiles imply the instructions.
            unsafe { add_values(band, view, self.left_out, row) };
        }
    }
}
