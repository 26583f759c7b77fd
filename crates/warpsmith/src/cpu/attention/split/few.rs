//! Few rows of f32 on tiles: all heads of some keys are split and used at once, in the order in which they lie in memory.
//!
//! Keys are the left operand of their products, so that nothing is turned round but scores. Each piece is split one ahead of the
//! products: what was stored a moment ago cannot be loaded at once.

use super::mend::is_left_out;
use super::stage::Stage;
use super::{KEYS, LeftOut, PANEL, STEP_LEN, Softmax};
use crate::cpu::Simd;
use crate::cpu::attention::Heads;
use crate::cpu::attention::band::Band;
use crate::cpu::attention::cache::Block;
use crate::cpu::attention::job::{Attend, Work};
use crate::cpu::attention::memory::{Layout, Pieces};
use crate::cpu::attention::tiles::Units;
use crate::cpu::gemm::{
    Blocks, Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, Turned, ValueSplitter, split_block, turn_sums,
};

/// Steps that are split or multiplied at a time, and units of keys or values that they belong to.
const RING: usize = 2;
/// How many rows or pairs of rows of the next step are split after each sixth of the products of one.
const ROWS_AT_ONCE: usize = PANEL.div_ceil(SplitBlock::calls(1));
const PAIRS_AT_ONCE: usize = (PANEL / 2).div_ceil(SplitBlock::calls(1));

/// [`Way::Few`](crate::cpu::attention::memory::Way::Few): the tiles, and what is known of the operands.
pub(in crate::cpu::attention) struct Few<'a> {
    pub(super) work: &'a Work<'a>,
    pub(super) blocks: &'a Blocks,
    tiles: SplitBlocks,
    planes: Planes,
    /// The queries of each head.
    pub(super) queries: Vec<Sizes>,
    /// Of each head, for the present block.
    pub(super) left_out: Vec<LeftOut>,
}

/// Where what is under way is.
#[derive(Clone, Copy)]
struct Planes {
    /// Steps of split keys or values.
    steps: Pieces,
    /// Scores by key.
    turned: Pieces,
    /// Keys or values that cannot be split from where they are, as f32.
    staged: Pieces,
}

impl Planes {
    const TURNED: usize = PANEL * PANEL;
    const STAGED: usize = PANEL * Blocks::ROW;

    fn new(data: *mut f32) -> Planes {
        let mut layout = Layout { next: data };
        let steps = layout.take(RING, STEP_LEN);
        let turned = layout.take(RING, Self::TURNED);
        let staged = layout.take(RING, Self::STAGED);
        Planes { steps, turned, staged }
    }

    fn step(&self, position: usize) -> *mut f32 {
        self.steps.at(position % RING)
    }

    fn turned(&self, number: usize) -> *mut f32 {
        self.turned.at(number % RING)
    }

    fn staged(&self, number: usize) -> *mut f32 {
        self.staged.at(number % RING)
    }
}

impl Few<'_> {
    /// Floats of what is under way.
    pub const PLANES: usize = RING * (STEP_LEN + Planes::TURNED + Planes::STAGED);

    /// Where the keys or values of a unit are copied to.
    pub(super) fn stage(&self, number: usize) -> Stage<'_> {
        Stage { work: self.work, blocks: self.blocks, rows: self.planes.staged(number) }
    }
}

impl<'a> Attend<'a> for Few<'a> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self {
        let Work { call, space, memory, .. } = work;
        let planes = Planes::new(memory.planes);
        let rows = Band::exponentials(memory.scratch.at(0));
        // No keys are copied yet.
        let panel = planes.staged(0);
        // SAFETY: a band's scratch has room for its rows, and a stage for a panel of queries. Tiles, without which nothing is
        // split, imply the instructions.
        unsafe {
            let queries = bands.iter().enumerate().map(|(head, band)| {
                work.pack_band(blocks, band, rows);
                for k in 0..call.head_dim {
                    for lane in 0..PANEL {
                        *panel.add(k * PANEL + lane) =
                            if lane < band.rows() { *rows.add(lane * Blocks::ROW + k) } else { 0.0 };
                    }
                }
                split_block(panel, call.head_dim, memory.queries.at(head))
            });
            let queries: Vec<Sizes> = queries.collect();
            // What is past a head that is not whole panels long stays zero.
            std::ptr::write_bytes(panel, 0, RING * Planes::STAGED);
            let left_out = vec![vec![[0; KEYS / PANEL]; space.panels]; queries.len()];
            Few { work, blocks, tiles: SplitBlocks::new(), planes, queries, left_out }
        }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>) {
        // The same for all heads.
        let panels = bands[0].panels(&block.keys);
        if panels.is_empty() {
            return;
        }
        let (first, scratch) = (block.keys.start, self.work.memory.scratch);
        let view = |head: usize, band: &Band<'_>| band.view(first, panels.clone(), scratch.at(head));
        let units = Units::new(self.work, block, &panels);
        // SAFETY: passed on; tiles imply the instructions.
        unsafe {
            self.tiles.configure_turned(bands[0].rows());
            self.scores(bands, &units);
            for (head, band) in bands.iter_mut().enumerate() {
                let view = view(head, band);
                Softmax::new(band, view, 1).finish(s);
            }
            self.tiles.configure_few(bands[0].rows());
            self.weigh(bands, &units);
            for (head, band) in bands.iter_mut().enumerate() {
                band.note_sums();
                if is_left_out(&self.left_out[head], &panels) {
                    self.add_values(head, band, &view(head, band), &units.tiles);
                }
            }
        }
    }
}

impl Few<'_> {
    /// The scores of all heads.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scores(&self, bands: &[Band<'_>], units: &Units<'_>) {
        let (Work { call, space, memory, .. }, planes) = (self.work, self.planes);
        let (k, then) = (&units.tiles.cache.k, (&units.tiles.cache.v, units.tiles.keys.start));
        // SAFETY: passed on.
        let pieces = |number: usize| unsafe { self.pieces(units, k, number, then) };
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = RowSplitter::new(pieces(0), call.head_dim);
            let mut position = 0;
            rows.begin(0, planes.step(position));
            rows.finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let out = planes.turned(number);
                let mut sizes = None;
                let turned = Turned::begin();
                for step in 0..space.steps {
                    let following = (step + 1) % space.steps;
                    if following == 0 {
                        sizes = Some(rows.sizes());
                        if number + 1 < units.len() {
                            rows = RowSplitter::new(pieces(number + 1), call.head_dim);
                        }
                    }
                    if following != 0 || number + 1 < units.len() {
                        rows.begin(following, planes.step(position + 1));
                    }
                    let queries = memory.queries.at(head).wrapping_add(step * STEP_LEN);
                    turned.step(planes.step(position), queries, || rows.advance(ROWS_AT_ONCE));
                    rows.finish();
                    position += 1;
                }
                turned.store(out);
                let scores = Band::scores(memory.scratch.at(head), panel);
                turn_sums(out, bands[head].rows(), scores);
                let keys = sizes.expect("a head has a step");
                if !self.queries[head].fits(&keys) {
                    self.mend_scores(head, &bands[head], pieces(number), &keys, scores);
                }
            }
        }
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn weigh(&mut self, bands: &[Band<'_>], units: &Units<'_>) {
        let (Work { space, memory, .. }, planes) = (self.work, self.planes);
        let (v, then) = (&units.tiles.cache.v, (&units.tiles.cache.k, units.tiles.block.keys.end));
        let of_column = |pieces: &[Piece; 2], column: usize| {
            pieces.map(|piece| Piece { data: piece.data.wrapping_add(column * PANEL), ..piece })
        };
        let (_, first) = units.place(0);
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = self.pieces(units, v, 0, then);
            let mut position = 0;
            let mut left_out = ValueSplitter::new(rows, planes.step(position)).finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let band = &bands[head];
                for column in 0..space.panels {
                    self.left_out[head][column][panel] = left_out;
                    let following = (column + 1) % space.panels;
                    let last = following == 0 && number + 1 == units.len();
                    if following == 0 && !last {
                        rows = self.pieces(units, v, number + 1, then);
                    }
                    let mut values =
                        ValueSplitter::new(of_column(&rows, following), planes.step(position + 1));
                    let product = SplitBlock {
                        left: Band::exponentials(memory.scratch.at(head)).wrapping_add(panel * STEP_LEN),
                        right: planes.step(position),
                        steps: 1,
                        rows: band.rows(),
                        cols: PANEL,
                        out: band.sums(column),
                        resume: band.has_sums() || panel > first,
                    };
                    if last {
                        self.tiles.multiply(&product, || ());
                        break;
                    }
                    self.tiles.multiply(&product, || values.advance(PAIRS_AT_ONCE));
                    left_out = values.finish();
                    position += 1;
                }
            }
        }
    }

    /// A unit of `heads`, the keys or values, in f32; `then` are those that come after the last.
    ///
    /// # Safety
    /// As for [`Units::at`]; the memory must hold what the space says.
    #[inline(always)]
    unsafe fn pieces(
        &self,
        units: &Units<'_>,
        heads: &Heads,
        number: usize,
        then: (&Heads, usize),
    ) -> [Piece; 2] {
        let stage = self.stage(number);
        // SAFETY: passed on.
        unsafe { units.at(heads, number, then).map(|tile| stage.piece(heads, &units.tiles, &tile)) }
    }
}
