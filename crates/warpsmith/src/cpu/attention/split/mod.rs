//! f32 on tiles: queries, keys, exponentials and values are split in three, as [`crate::cpu::gemm`] splits operands.
//!
//! A band's softmax takes as long as its products, but vectors make the one and tiles the other. So three bands are under way:
//! while vectors make the exponentials of one, tiles weigh the values for the band before and make the scores of the one after.
//!
//! Where numbers are too large or too small for tiles, vectors do it: scores of a query and a key whose largest magnitudes do not
//! fit each other, and 32 elements of a value whose largest magnitude is out of range. Those are zero for the tiles, and are added
//! after a block to the rows that see the key. Both depend on the query and the key alone, and so do the bits.

mod few;
mod mend;
mod softmax;

pub(super) use few::FewPlaces;

use super::band::Band;
use super::cache::{Block, Packed};
use super::job::Compute;
use super::plan::Job;
use super::{KEYS, Space};
use crate::cpu::gemm::{
    Blocks, Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, ValueSplitter, split_block,
};
use crate::cpu::{CpuElement, Simd};
use softmax::Softmax;
use std::ops::Range;

const PANEL: usize = Blocks::PANEL;
const STEP_LEN: usize = Blocks::SPLIT;

/// What is known of the split operands of a job, and the tiles that multiply them.
pub(super) struct Split {
    tiles: SplitBlocks,
    /// The queries of each band.
    queries: Vec<Sizes>,
    /// The panels of keys of the present block.
    keys: [Sizes; KEYS / PANEL],
    left_out: LeftOut,
}

/// The values of a block that are not among the split ones: keys of each panel of keys, for each panel of columns.
type LeftOut = Vec<[u32; KEYS / PANEL]>;

/// Where the operands of a job are.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// The split queries of all bands.
    pub queries: *mut f32,
    /// A block as f32.
    pub packed: Packed,
    /// The same, split.
    pub planes: *mut f32,
    /// Two bands' scratch.
    pub scratch: *mut f32,
}

impl Places {
    fn query(&self, space: &Space, band: usize) -> *mut f32 {
        self.queries.wrapping_add(band * space.steps * STEP_LEN)
    }

    fn key(&self, space: &Space, panel: usize) -> *mut f32 {
        self.planes.wrapping_add(panel * space.steps * STEP_LEN)
    }

    /// Keys are as many steps of values as they are panels.
    fn value(&self, space: &Space, column: usize, panel: usize) -> *mut f32 {
        let panels = space.block_keys / PANEL;
        self.key(space, panels).wrapping_add((column * panels + panel) * STEP_LEN)
    }

    fn scratch(&self, number: usize) -> *mut f32 {
        self.scratch.wrapping_add(number % 2 * Band::SCRATCH)
    }
}

/// A band whose exponentials are made, and what they are to be added to.
struct Weighing {
    /// The first key of the block.
    first: usize,
    band: usize,
    panels: Range<usize>,
    scratch: *mut f32,
    resume: bool,
}

impl Split {
    /// # Safety
    /// AMX must be supported.
    pub unsafe fn new(space: &Space) -> Split {
        // SAFETY: passed on.
        let mut tiles = unsafe { SplitBlocks::new() };
        tiles.configure();
        let nothing = [Sizes::nothing(); KEYS / PANEL];
        Split {
            tiles,
            queries: Vec::with_capacity(space.bands),
            keys: nothing,
            left_out: vec![[0; KEYS / PANEL]; space.panels],
        }
    }
}

impl<T: CpuElement> Compute<'_, T> {
    /// Splits the queries of a job, band by band.
    ///
    /// # Safety
    /// The space must hold them.
    pub(super) unsafe fn split_queries(
        &self,
        blocks: &Blocks,
        space: &Space,
        job: &Job,
        bands: &[Band<'_>],
        places: Places,
        split: &mut Split,
    ) {
        let rows = Band::exponentials(places.scratch);
        for (index, band) in bands.iter().enumerate() {
            // SAFETY: a band's scratch has room for its rows; tiles imply the instructions.
            split.queries.push(unsafe {
                self.pack_band(blocks, job, band, rows);
                let to = places.query(space, index);
                let pieces = Piece::two(rows, Blocks::ROW as isize, band.rows());
                let mut rows = RowSplitter::new(pieces, self.call.head_dim);
                for step in 0..space.steps {
                    rows.begin(step, to.wrapping_add(step * STEP_LEN));
                    rows.finish();
                }
                rows.sizes()
            });
        }
    }

    /// Lets a block of keys go past the rows of all bands of a job.
    ///
    /// # Safety
    /// The keys must be the request's, the queries be split, and the places hold what the space says.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn block_split<S: Simd>(
        &self,
        s: S,
        blocks: &mut Blocks,
        space: &Space,
        bands: &mut [Band<'_>],
        job: &Job,
        block: &Block<'_>,
        places: Places,
        split: &mut Split,
    ) {
        // Jobs of many rows have one head.
        let kv_head = job.kv_heads.start;
        let next = |bands: &[Band<'_>], from: usize| {
            let with_panels = |index: usize| (index, bands[index].panels(block.keys.clone()));
            (from..bands.len()).map(with_panels).find(|(_, panels)| !panels.is_empty())
        };
        let Some(mut current) = next(bands, 0) else {
            return;
        };
        // SAFETY: passed on; what the tiles multiply is split, and no two bands are the same.
        unsafe {
            self.split_block(blocks, space, &Block { kv_head, ..block.clone() }, places, split);
            let first = &bands[current.0];
            self.scores_split(blocks, space, job, first, &current, places, 0, split, || ());
            let mut before: Option<Weighing> = None;
            for number in 0.. {
                let following = next(bands, current.0 + 1);
                let (earlier, rest) = bands.split_at_mut(current.0);
                let (band, later) = rest.split_first_mut().expect("the present band");
                let scratch = places.scratch(number);
                let view = band.view(self.call, block.keys.start, current.1.clone(), scratch);
                let steps = before.as_ref().map_or(0, |before| before.panels.len() * space.panels)
                    + following.as_ref().map_or(0, |following| following.1.len() * space.steps);
                let weighing = Weighing {
                    first: block.keys.start,
                    band: current.0,
                    panels: current.1.clone(),
                    scratch,
                    resume: band.has_sums(),
                };
                let mut softmax = Softmax::<T>::new(self.call, band, view, SplitBlock::calls(steps));
                if let Some(before) = before {
                    let band = &earlier[before.band];
                    self.weigh_split(space, band, before, places, split, || softmax.advance(s));
                }
                if let Some(following) = &following {
                    let band = &later[following.0 - current.0 - 1];
                    let between = || softmax.advance(s);
                    self.scores_split(
                        blocks,
                        space,
                        job,
                        band,
                        following,
                        places,
                        number + 1,
                        split,
                        between,
                    );
                }
                softmax.finish(s);
                band.note_sums();
                before = Some(weighing);
                match following {
                    Some(following) => current = following,
                    None => break,
                }
            }
            if let Some(before) = before {
                let band = &bands[before.band];
                self.weigh_split(space, band, before, places, split, || ());
            }
        }
    }

    /// Packs a block of a head and splits it.
    ///
    /// # Safety
    /// As for [`Self::block_split`].
    unsafe fn split_block(
        &self,
        blocks: &Blocks,
        space: &Space,
        block: &Block<'_>,
        places: Places,
        split: &mut Split,
    ) {
        let (call, packed) = (self.call, places.packed);
        let (kv_head, count) = (block.kv_head, block.keys.len());
        // SAFETY: the places hold a block; tiles imply the instructions.
        unsafe {
            call.cache.pack(blocks, space, call.head_dim, block, kv_head..kv_head + 1, packed);
            for panel in 0..count.div_ceil(PANEL) {
                let keys = packed.keys.wrapping_add(panel * PANEL * space.units);
                split.keys[panel] = split_block(keys, call.head_dim, places.key(space, panel));
                for column in 0..space.panels {
                    let at = (column * space.value_units + panel * PANEL) * PANEL;
                    let count = PANEL.min(count - panel * PANEL);
                    let pieces = Piece::two(packed.values.wrapping_add(at), PANEL as isize, count);
                    let values = ValueSplitter::new(pieces, places.value(space, column, panel));
                    split.left_out[column][panel] = values.finish();
                }
            }
        }
    }

    /// The scores of a band over some panels of keys.
    ///
    /// # Safety
    /// As for [`Self::block_split`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn scores_split(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        job: &Job,
        band: &Band<'_>,
        (index, panels): &(usize, Range<usize>),
        places: Places,
        number: usize,
        split: &Split,
        mut between: impl FnMut(),
    ) {
        let queries = &split.queries[*index];
        for panel in panels.clone() {
            let product = SplitBlock {
                left: places.query(space, *index),
                right: places.key(space, panel),
                steps: space.steps,
                rows: band.rows(),
                cols: PANEL,
                out: Band::scores(places.scratch(number), panel),
                resume: false,
            };
            // SAFETY: passed on.
            unsafe {
                split.tiles.multiply(&product, &mut between);
                if !queries.fits(&split.keys[panel]) {
                    let keys = places.packed.keys.wrapping_add(panel * PANEL * space.units);
                    let seen = (queries, &split.keys[panel]);
                    self.mend_scores(blocks, space, job, band, keys, seen, product.out);
                }
            }
        }
    }

    /// Adds a band's exponentials times the values of some panels of keys to its sums.
    ///
    /// # Safety
    /// As for [`Self::block_split`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn weigh_split(
        &self,
        space: &Space,
        band: &Band<'_>,
        weighing: Weighing,
        places: Places,
        split: &Split,
        mut between: impl FnMut(),
    ) {
        let Weighing { first, panels, scratch, resume, .. } = weighing;
        let exponentials = Band::exponentials(scratch);
        for column in 0..space.panels {
            let product = SplitBlock {
                left: exponentials.wrapping_add(panels.start * STEP_LEN),
                right: places.value(space, column, panels.start),
                steps: panels.len(),
                rows: band.rows(),
                cols: PANEL.min(self.call.head_dim - column * PANEL),
                out: band.sums(column),
                resume,
            };
            // SAFETY: passed on.
            unsafe { split.tiles.multiply(&product, &mut between) };
        }
        if is_left_out(&split.left_out, &panels) {
            let row = |key: usize, column: usize| {
                places.packed.values.wrapping_add((column * space.value_units + key) * PANEL).cast_const()
            };
            // SAFETY: passed on; tiles imply the instructions.
            unsafe { self.add_values(band, first, &panels, &split.left_out, row, exponentials) };
        }
    }
}

/// Whether some of the keys of these panels were left out.
fn is_left_out(left_out: &LeftOut, panels: &Range<usize>) -> bool {
    left_out.iter().any(|of_column| of_column[panels.clone()].iter().any(|&keys| keys != 0))
}
