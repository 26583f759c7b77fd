//! Few rows of f32 on tiles: all heads of some keys are split and used at once, in memory order.
//!
//! Keys are the left operand of their products, so that only scores are transposed. Splitting runs one piece ahead of
//! the products, because loading data right after it was stored stalls.

use super::left_out::{LeftOut, add_values, is_left_out};
use super::softmax::Softmax;
use super::stage::Stage;
use crate::cpu::Simd;
use crate::cpu::attention::attend::Attend;
use crate::cpu::attention::band::{Band, View};
use crate::cpu::attention::cache::Block;
use crate::cpu::attention::call::KEYS;
use crate::cpu::attention::heads::Heads;
use crate::cpu::attention::memory::{Layout, Pieces, Space, floats_of};
use crate::cpu::attention::tiles::{Tile, Tiles, Units};
use crate::cpu::attention::work::Work;
use crate::cpu::gemm::{
    Blocks, Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, Turned, ValueSplitter, split_block, turn_sums,
};

const PANEL: usize = Blocks::PANEL;
const STEP_LEN: usize = Blocks::SPLIT;
/// Steps that are split or multiplied at a time, and units of keys or values that they belong to.
const RING: usize = 2;
/// How many rows or pairs of rows of the next step are split after each sixth of the products of one.
const ROWS_AT_ONCE: usize = PANEL.div_ceil(SplitBlock::calls(1));
const PAIRS_AT_ONCE: usize = (PANEL / 2).div_ceil(SplitBlock::calls(1));

/// [`Strategy::Few`](crate::cpu::attention::memory::Strategy::Few): the tiles, and what is known of the operands.
pub(in crate::cpu::attention) struct Few<'a> {
    work: &'a Work<'a>,
    blocks: &'a Blocks,
    tiles: SplitBlocks,
    rings: Rings,
    /// The queries of each head.
    queries: &'a [Sizes],
    /// The values of the present block that are not among the split ones: of each head, for each panel of columns.
    left_out: &'a mut [LeftOut],
    /// Room for the rows of a band, to recompute scores.
    rows: *mut f32,
}

/// Where the pieces in flight are.
#[derive(Clone, Copy)]
struct Rings {
    /// Steps of split keys or values.
    steps: Pieces,
    /// Scores by key.
    turned: Pieces,
    /// Keys or values that cannot be split in place, as f32.
    staged: Pieces,
}

impl Rings {
    const TURNED: usize = PANEL * PANEL;
    const STAGED: usize = PANEL * Blocks::ROW;

    fn new(layout: &mut Layout) -> Rings {
        let steps = layout.take(RING, STEP_LEN);
        let turned = layout.take(RING, Self::TURNED);
        let staged = layout.take(RING, Self::STAGED);
        Rings { steps, turned, staged }
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
    const ROWS: usize = PANEL * Blocks::ROW;

    /// Floats of what is kept.
    pub fn staging(space: &Space) -> usize {
        let rings = RING * (STEP_LEN + Rings::TURNED + Rings::STAGED);
        let known = floats_of::<Sizes>(space.bands) + floats_of::<LeftOut>(space.bands * space.panels);
        rings + Self::ROWS + known
    }

    /// What is left out of the values of a head.
    fn left_out_of(&self, head: usize) -> &[LeftOut] {
        let panels = self.work.space.panels;
        &self.left_out[head * panels..][..panels]
    }

    /// Where the keys or values of a unit are copied to.
    fn stage(&self, number: usize) -> Stage<'_> {
        Stage { work: self.work, blocks: self.blocks, rows: self.rings.staged(number) }
    }
}

impl<'a> Attend<'a> for Few<'a> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self {
        let Work { call, space, memory, .. } = work;
        let mut layout = Layout { next: memory.staging };
        let rings = Rings::new(&mut layout);
        let rows = layout.take(1, Self::ROWS).at(0);
        // No keys are copied yet.
        let panel = rings.staged(0);
        // SAFETY: the memory holds what `staging` says, and is the caller's; a stage has room for a panel of queries. Tiles,
        // without which nothing is split, imply the instructions.
        unsafe {
            let queries = layout.slice(bands.len());
            let left_out = layout.slice(bands.len() * space.panels);
            left_out.fill([0; KEYS / PANEL]);
            for (head, (band, sizes)) in bands.iter().zip(&mut *queries).enumerate() {
                work.pack_band(blocks, band, rows);
                for k in 0..call.head_dim {
                    for lane in 0..PANEL {
                        *panel.add(k * PANEL + lane) =
                            if lane < band.rows() { *rows.add(lane * Blocks::ROW + k) } else { 0.0 };
                    }
                }
                *sizes = split_block(panel, call.head_dim, memory.queries.at(head));
            }
            // The padding of a head that is not a whole number of panels stays zero.
            std::ptr::write_bytes(panel, 0, RING * Rings::STAGED);
            Few { work, blocks, tiles: SplitBlocks::new(), rings, queries, left_out, rows }
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
                if is_left_out(self.left_out_of(head), &panels) {
                    self.add_left_out(head, band, &view(head, band), &units.tiles);
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
        let (Work { call, space, memory, .. }, rings) = (self.work, self.rings);
        let (k, then) = (&units.tiles.cache.k, (&units.tiles.cache.v, units.tiles.keys.start));
        // SAFETY: passed on.
        let pieces = |number: usize| unsafe { self.pieces(units, k, number, then) };
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = RowSplitter::new(pieces(0), call.head_dim);
            let mut position = 0;
            rows.begin(0, rings.step(position));
            rows.finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let out = rings.turned(number);
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
                        rows.begin(following, rings.step(position + 1));
                    }
                    let queries = memory.queries.at(head).wrapping_add(step * STEP_LEN);
                    turned.step(rings.step(position), queries, || rows.advance(ROWS_AT_ONCE));
                    rows.finish();
                    position += 1;
                }
                turned.store(out);
                let scores = Band::scores(memory.scratch.at(head), panel);
                turn_sums(out, bands[head].rows(), scores);
                let keys = sizes.expect("a head has a step");
                if !self.queries[head].fits(&keys) {
                    self.recompute_scores(head, &bands[head], pieces(number), &keys, scores);
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
        let (Work { space, memory, .. }, rings) = (self.work, self.rings);
        let (v, then) = (&units.tiles.cache.v, (&units.tiles.cache.k, units.tiles.block.keys.end));
        let of_column = |pieces: &[Piece; 2], column: usize| {
            pieces.map(|piece| Piece { data: piece.data.wrapping_add(column * PANEL), ..piece })
        };
        let (_, first) = units.place(0);
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = self.pieces(units, v, 0, then);
            let mut position = 0;
            let mut left_out = ValueSplitter::new(rows, rings.step(position)).finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let band = &bands[head];
                for column in 0..space.panels {
                    self.left_out[head * space.panels + column][panel] = left_out;
                    let following = (column + 1) % space.panels;
                    let last = following == 0 && number + 1 == units.len();
                    if following == 0 && !last {
                        rows = self.pieces(units, v, number + 1, then);
                    }
                    let mut values =
                        ValueSplitter::new(of_column(&rows, following), rings.step(position + 1));
                    let product = SplitBlock {
                        left: Band::exponentials(memory.scratch.at(head)).wrapping_add(panel * STEP_LEN),
                        right: rings.step(position),
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

    /// Recomputes the scores of a unit of keys on vectors where the products of a query of a head and a key are out of the range of
    /// tiles.
    ///
    /// # Safety
    /// The keys must be readable, and `out` hold their scores. AVX-512 must be there.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "avx512f,fma")]
    unsafe fn recompute_scores(
        &self,
        head: usize,
        band: &Band<'_>,
        keys: [Piece; 2],
        sizes: &Sizes,
        out: *mut f32,
    ) {
        let queries = self.rows;
        // SAFETY: there is room for the rows of a band.
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
                    *out.add(i * PANEL + j) = (0..self.work.call.head_dim)
                        .fold(0f32, |sum, k| (*queries.add(i * Blocks::ROW + k)).mul_add(*key.add(k), sum));
                }
            }
        }
    }

    /// Adds the values of a head that were left out of the block.
    ///
    /// # Safety
    /// As for [`Attend::block`], with the view's exponentials made.
    #[cold]
    #[inline(never)]
    unsafe fn add_left_out(&self, head: usize, band: &Band<'_>, view: &View, tiles: &Tiles<'_>) {
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
        unsafe { add_values(band, view, self.left_out_of(head), row) };
    }
}
