//! Few rows of f32 on tiles: all heads of some keys are split and used at once, in the order in which they lie in memory.
//!
//! Keys are the left operand of their products, so that nothing is turned round but scores. Each piece is split one ahead of the
//! products: what was stored a moment ago cannot be loaded at once.

use super::{KEYS, LeftOut, PANEL, STEP_LEN, Softmax, is_left_out};
use crate::cpu::attention::band::Band;
use crate::cpu::attention::cache::{Block, Run};
use crate::cpu::attention::in_place::{Tile, Tiles, Units};
use crate::cpu::attention::job::Compute;
use crate::cpu::attention::plan::Job;
use crate::cpu::attention::{Heads, Space};
use crate::cpu::gemm::{
    Blocks, Matrix, Piece, RowSplitter, Sizes, SplitBlock, SplitBlocks, Turned, ValueSplitter, split_block,
    turn_sums,
};
use crate::cpu::prefetch::fetch_near;
use crate::cpu::{CpuElement, Simd};
use crate::dtype::DType;

/// Steps that are split or multiplied at a time, and units of keys or values that they belong to.
const RING: usize = 2;
/// How many rows or pairs of rows of the next step are split after each sixth of the products of one.
const ROWS_AT_ONCE: usize = PANEL.div_ceil(SplitBlock::calls(1));
const PAIRS_AT_ONCE: usize = (PANEL / 2).div_ceil(SplitBlock::calls(1));

/// What is known of the operands of a job, and the tiles that multiply them.
pub(in crate::cpu::attention) struct Few {
    tiles: SplitBlocks,
    /// The queries of each head.
    queries: Vec<Sizes>,
    /// Of each head, for the present block.
    left_out: Vec<LeftOut>,
}

/// Where the operands of a job are.
#[derive(Clone, Copy)]
pub(in crate::cpu::attention) struct FewPlaces {
    /// The split queries of all heads, as right operands.
    queries: *mut f32,
    /// Steps of split keys or values.
    steps: *mut f32,
    /// Scores by key.
    turned: *mut f32,
    /// Keys or values that cannot be split from where they are, as f32.
    stage: *mut f32,
    gathered: *mut f32,
    /// The scratch of all bands.
    scratch: *mut f32,
}

/// Where keys or values are copied to.
#[derive(Clone, Copy)]
pub(in crate::cpu::attention) struct Stage {
    rows: *mut f32,
    gathered: *mut f32,
}

impl FewPlaces {
    /// Floats from keys to the bands' scratch.
    pub const LEN: usize = RING * (STEP_LEN + PANEL * PANEL + PANEL * Blocks::ROW);

    /// Lays them out: from `data` on, [`Self::LEN`] floats and the scratch.
    pub fn at(queries: *mut f32, gathered: *mut f32, data: *mut f32) -> FewPlaces {
        let turned = data.wrapping_add(RING * STEP_LEN);
        let stage = turned.wrapping_add(RING * PANEL * PANEL);
        let scratch = data.wrapping_add(Self::LEN);
        FewPlaces { queries, steps: data, turned, stage, gathered, scratch }
    }

    fn query(&self, space: &Space, head: usize) -> *mut f32 {
        self.queries.wrapping_add(head * space.steps * STEP_LEN)
    }

    fn step(&self, position: usize) -> *mut f32 {
        self.steps.wrapping_add(position % RING * STEP_LEN)
    }

    /// Where a unit is copied to, and what else copies need.
    pub fn stage(&self, number: usize) -> Stage {
        let rows = self.stage.wrapping_add(number % RING * PANEL * Blocks::ROW);
        Stage { rows, gathered: self.gathered }
    }

    fn turned(&self, number: usize) -> *mut f32 {
        self.turned.wrapping_add(number % RING * PANEL * PANEL)
    }

    pub fn scratch(&self, head: usize) -> *mut f32 {
        self.scratch.wrapping_add(head * Band::SCRATCH)
    }
}

impl<T: CpuElement> Compute<'_, T> {
    /// Splits the queries of a job, head by head.
    ///
    /// # Safety
    /// AMX must be supported, and the places hold what the space says.
    pub(in crate::cpu::attention) unsafe fn split_few_queries(
        &self,
        blocks: &Blocks,
        space: &Space,
        job: &Job,
        bands: &[Band<'_>],
        places: FewPlaces,
    ) -> Few {
        let (rows, head_dim) = (Band::exponentials(places.scratch), self.call.head_dim);
        // No keys are copied yet.
        let panel = places.stage;
        // SAFETY: a band's scratch has room for its rows, and a stage for a panel of queries. Tiles imply the instructions.
        unsafe {
            let queries = bands.iter().enumerate().map(|(head, band)| {
                self.pack_band(blocks, job, band, rows);
                for k in 0..head_dim {
                    for lane in 0..PANEL {
                        *panel.add(k * PANEL + lane) =
                            if lane < band.rows() { *rows.add(lane * Blocks::ROW + k) } else { 0.0 };
                    }
                }
                split_block(panel, head_dim, places.query(space, head))
            });
            let queries: Vec<Sizes> = queries.collect();
            // What is past a head that is not whole panels long stays zero.
            std::ptr::write_bytes(places.stage, 0, RING * PANEL * Blocks::ROW);
            let left_out = vec![vec![[0; KEYS / PANEL]; space.panels]; queries.len()];
            Few { tiles: SplitBlocks::new(), queries, left_out }
        }
    }

    /// Lets a block of keys go past the rows of all heads of a job, each a band.
    ///
    /// # Safety
    /// The keys must be the request's, the queries be split, and the places hold what the space says.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(in crate::cpu::attention) unsafe fn block_few<S: Simd>(
        &self,
        s: S,
        blocks: &Blocks,
        space: &Space,
        bands: &mut [Band<'_>],
        job: &Job,
        block: &Block<'_>,
        places: FewPlaces,
        few: &mut Few,
    ) {
        // The same for all heads.
        let panels = bands[0].panels(block.keys.clone());
        if panels.is_empty() {
            return;
        }
        let first = block.keys.start;
        let keys = first + panels.start * PANEL..block.keys.end.min(first + panels.end * PANEL);
        let kv_heads = job.kv_heads.clone();
        let units = Units::new(&self.call.cache, block, kv_heads, keys);
        // SAFETY: passed on; tiles imply the instructions.
        unsafe {
            few.tiles.configure_turned(bands[0].rows());
            self.scores_few(blocks, space, job, bands, &units, places, few);
            for (head, band) in bands.iter_mut().enumerate() {
                let view = band.view(self.call, first, panels.clone(), places.scratch(head));
                Softmax::<T>::new(self.call, band, view, 1).finish(s);
            }
            few.tiles.configure_few(bands[0].rows());
            self.weigh_few(blocks, space, bands, &units, places, few);
            for (head, band) in bands.iter_mut().enumerate() {
                band.note_sums();
                if is_left_out(&few.left_out[head], &panels) {
                    let (tiles, left_out) = (&units.tiles, &few.left_out[head]);
                    self.add_few_values(blocks, band, tiles, head, &panels, places, left_out);
                }
            }
        }
    }

    /// The scores of all heads.
    ///
    /// # Safety
    /// As for [`Self::block_few`].
    #[target_feature(enable = "avx512f,avx512bw")]
    #[allow(clippy::too_many_arguments)]
    unsafe fn scores_few(
        &self,
        blocks: &Blocks,
        space: &Space,
        job: &Job,
        bands: &[Band<'_>],
        units: &Units<'_>,
        places: FewPlaces,
        few: &Few,
    ) {
        let (k, then) = (&units.tiles.cache.k, (&units.tiles.cache.v, units.tiles.keys.start));
        // SAFETY: passed on.
        let pieces = |number: usize| unsafe {
            units.at(k, number, then).map(|t| self.piece(blocks, k, &units.tiles, &t, places.stage(number)))
        };
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = RowSplitter::new(pieces(0), self.call.head_dim);
            let mut position = 0;
            rows.begin(0, places.step(position));
            rows.finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let out = places.turned(number);
                let mut sizes = None;
                let turned = Turned::begin();
                for step in 0..space.steps {
                    let following = (step + 1) % space.steps;
                    if following == 0 {
                        sizes = Some(rows.sizes());
                        if number + 1 < units.len() {
                            rows = RowSplitter::new(pieces(number + 1), self.call.head_dim);
                        }
                    }
                    if following != 0 || number + 1 < units.len() {
                        rows.begin(following, places.step(position + 1));
                    }
                    let queries = places.query(space, head).wrapping_add(step * STEP_LEN);
                    turned.step(places.step(position), queries, || rows.advance(ROWS_AT_ONCE));
                    rows.finish();
                    position += 1;
                }
                turned.store(out);
                let scores = Band::scores(places.scratch(head), panel);
                turn_sums(out, bands[head].rows(), scores);
                let (queries, keys) = (&few.queries[head], &sizes.expect("a head has a step"));
                if !queries.fits(keys) {
                    let pieces = pieces(number);
                    self.mend_few_scores(blocks, job, &bands[head], pieces, (queries, keys), scores);
                }
            }
        }
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Self::block_few`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn weigh_few(
        &self,
        blocks: &Blocks,
        space: &Space,
        bands: &[Band<'_>],
        units: &Units<'_>,
        places: FewPlaces,
        few: &mut Few,
    ) {
        let (v, then) = (&units.tiles.cache.v, (&units.tiles.cache.k, units.tiles.block.keys.end));
        // SAFETY: passed on.
        let pieces = |number: usize| unsafe {
            units.at(v, number, then).map(|t| self.piece(blocks, v, &units.tiles, &t, places.stage(number)))
        };
        let of_column = |pieces: &[Piece; 2], column: usize| {
            pieces.map(|piece| Piece { data: piece.data.wrapping_add(column * PANEL), ..piece })
        };
        let (_, first) = units.place(0);
        // SAFETY: passed on; the ring has room for a step that is multiplied and the next, which is split.
        unsafe {
            let mut rows = pieces(0);
            let mut position = 0;
            let mut left_out = ValueSplitter::new(rows, places.step(position)).finish();
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let band = &bands[head];
                for column in 0..space.panels {
                    few.left_out[head][column][panel] = left_out;
                    let following = (column + 1) % space.panels;
                    let last = following == 0 && number + 1 == units.len();
                    if following == 0 && !last {
                        rows = pieces(number + 1);
                    }
                    let mut values =
                        ValueSplitter::new(of_column(&rows, following), places.step(position + 1));
                    let product = SplitBlock {
                        left: Band::exponentials(places.scratch(head)).wrapping_add(panel * STEP_LEN),
                        right: places.step(position),
                        steps: 1,
                        rows: band.rows(),
                        cols: PANEL,
                        out: band.sums(column),
                        resume: band.has_sums() || panel > first,
                    };
                    if last {
                        few.tiles.multiply(&product, || ());
                        break;
                    }
                    few.tiles.multiply(&product, || values.advance(PAIRS_AT_ONCE));
                    left_out = values.finish();
                    position += 1;
                }
            }
        }
    }

    /// The keys or values of a tile, in f32 and whole panels; copied where they are not.
    ///
    /// # Safety
    /// The tile must be one of these.
    #[inline(always)]
    pub(super) unsafe fn piece(
        &self,
        blocks: &Blocks,
        heads: &Heads,
        tiles: &Tiles<'_>,
        tile: &Tile,
        stage: Stage,
    ) -> Piece {
        let (cache, head_dim) = (tiles.cache, self.call.head_dim);
        let direct = cache.dtype == DType::F32 && head_dim.is_multiple_of(PANEL) && heads.dim == 1;
        if direct && !cache.is_gathered() {
            let Tile { address, count, ahead, .. } = *tile;
            return Piece { data: address as *const f32, row: heads.token, count, ahead };
        }
        // SAFETY: passed on.
        unsafe { self.staged(blocks, heads, tiles, tile, stage) }
    }

    /// # Safety
    /// As for [`Self::piece`].
    #[inline(never)]
    unsafe fn staged(
        &self,
        blocks: &Blocks,
        heads: &Heads,
        tiles: &Tiles<'_>,
        tile: &Tile,
        stage: Stage,
    ) -> Piece {
        let (cache, head_dim) = (tiles.cache, self.call.head_dim);
        let rows = stage.rows.wrapping_add(tile.from % PANEL * Blocks::ROW);
        let piece = Piece { data: rows, row: Blocks::ROW as isize, count: tile.count, ahead: 0 };
        if tile.count == 0 {
            return piece;
        }
        // SAFETY: the keys are the request's, and the stage has room for a tile.
        unsafe {
            let run = if cache.is_gathered() {
                let block = Block { kv_head: tiles.kv_heads.start + tile.head, ..tiles.block.clone() };
                cache.gather(heads, head_dim, &block, block.keys.start + tile.from, stage.gathered.cast())
            } else {
                let (data, at) = (tile.address as *const u8, 0..tile.count);
                Run { data, token: heads.token, dim: heads.dim, at, ahead: tile.ahead }
            };
            let matrix = Matrix {
                data: run.data,
                dtype: cache.dtype,
                rows: tile.count,
                k: head_dim,
                row_stride: run.token,
                k_stride: run.dim,
            };
            if run.dim == 1 {
                let size = cache.dtype.size();
                for row in 0..tile.count as isize {
                    let row = run.data.wrapping_offset(row * run.token * size as isize);
                    fetch_near(row.wrapping_offset(run.ahead), head_dim * size);
                }
            }
            blocks.pack_rows(&matrix, 0..tile.count, rows.cast());
        }
        piece
    }
}
