//! Few rows of bf16 on tiles: keys and values are used from where they lie, all heads of some before those of the next.
//!
//! Keys are the left operand of their products, so that nothing is turned round but scores. Values become units of a right
//! operand between the products of those before them: what was stored a moment ago cannot be loaded at once.

use super::band::Band;
use super::cache::Block;
use super::in_place::{Tile, Units};
use super::job::Compute;
use super::plan::Job;
use super::{Heads, Space};
use crate::cpu::gemm::{BlockProduct, Blocks, DirectProduct, Matrix, Pairs, Rows, turn_sums};
use crate::cpu::{CpuElement, Simd};
use crate::dtype::DType;

const PANEL: usize = Blocks::PANEL;
const TILE: usize = Blocks::TILE;
/// Units of keys or values that are under way.
const RING: usize = 2;

/// Where the operands of a job are.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// The queries of all heads, as right operands.
    queries: *mut f32,
    /// Floats of a head's.
    query: usize,
    /// Scores by key.
    turned: *mut f32,
    /// Values as right operands.
    pairs: *mut f32,
    /// Floats of one.
    pair: usize,
    /// The scratch of all bands.
    scratch: *mut f32,
}

impl Places {
    /// Floats of the values of a unit.
    fn pair(space: &Space) -> usize {
        TILE * space.panels * PANEL
    }

    /// Floats up to the bands' scratch.
    pub fn len(space: &Space) -> usize {
        RING * (PANEL * PANEL + Self::pair(space))
    }

    /// Lays them out: from `data` on, [`Self::len`] floats and the scratch.
    pub fn at(space: &Space, queries: *mut f32, data: *mut f32) -> Places {
        Places {
            queries,
            query: TILE * space.units,
            turned: data,
            pairs: data.wrapping_add(RING * PANEL * PANEL),
            pair: Self::pair(space),
            scratch: data.wrapping_add(Self::len(space)),
        }
    }

    fn query(&self, head: usize) -> *mut u32 {
        self.queries.wrapping_add(head * self.query).cast()
    }

    fn turned(&self, number: usize) -> *mut f32 {
        self.turned.wrapping_add(number % RING * PANEL * PANEL)
    }

    fn pairs(&self, number: usize) -> *mut u32 {
        self.pairs.wrapping_add(number % RING * self.pair).cast()
    }

    pub fn scratch(&self, head: usize) -> *mut f32 {
        self.scratch.wrapping_add(head * Band::SCRATCH)
    }
}

/// Keys or values of a tile, as rows.
fn rows(heads: &Heads, tile: Tile) -> Rows {
    let stride = heads.token * DType::BF16.size() as isize;
    Rows { data: tile.address as *const u8, stride, count: tile.count, ahead: tile.ahead }
}

impl<T: CpuElement> Compute<'_, T> {
    /// Packs the queries of a job as right operands, head by head.
    ///
    /// # Safety
    /// With [`Space::direct`] alone. The places must hold what the space says.
    pub(super) unsafe fn pack_columns(
        &self,
        blocks: &Blocks,
        space: &Space,
        job: &Job,
        bands: &[Band<'_>],
        places: Places,
    ) {
        debug_assert!(TILE * space.units <= space.rows * Blocks::ROW);
        let rows = Band::exponentials(places.scratch(0));
        for (head, band) in bands.iter().enumerate() {
            let matrix = Matrix {
                data: rows.cast(),
                dtype: DType::BF16,
                rows: band.rows(),
                k: self.call.head_dim,
                row_stride: (Blocks::ROW * blocks.per_unit()) as isize,
                k_stride: 1,
            };
            // SAFETY: a band's scratch has room for its rows; the caller promised the rest.
            unsafe {
                self.pack_band(blocks, job, band, rows);
                blocks.pack_columns(&matrix, places.query(head));
            }
        }
    }

    /// Lets a block of keys go past the rows of all heads of a job, each a band.
    ///
    /// # Safety
    /// The keys must be the request's, the queries be packed, and the places hold what the space says.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn block_direct<S: Simd>(
        &self,
        s: S,
        blocks: &mut Blocks,
        space: &Space,
        bands: &mut [Band<'_>],
        job: &Job,
        block: &Block<'_>,
        places: Places,
    ) {
        // The same for all heads.
        let panels = bands[0].panels(block.keys.clone());
        if panels.is_empty() {
            return;
        }
        let first = block.keys.start;
        let keys = first + panels.start * PANEL..block.keys.end.min(first + panels.end * PANEL);
        let units = Units::new(&self.call.cache, block, job.kv_heads.clone(), keys);
        // SAFETY: passed on; tiles imply the instructions.
        unsafe {
            self.direct_scores(blocks, space, bands, &units, places);
            for (head, band) in bands.iter_mut().enumerate() {
                let view = band.view(self.call, first, panels.clone(), places.scratch(head));
                band.softmax::<T, S>(s, self.call, true, &view);
            }
            self.direct_weigh(blocks, space, bands, &units, places);
            bands.iter_mut().for_each(Band::note_sums);
        }
    }

    /// The scores of all heads. Those past the last key are masked later.
    ///
    /// # Safety
    /// As for [`Self::block_direct`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn direct_scores(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        bands: &[Band<'_>],
        units: &Units<'_>,
        places: Places,
    ) {
        let (k, then) = (&units.tiles.cache.k, (&units.tiles.cache.v, units.tiles.keys.start));
        let turn = |number: usize| {
            let (head, panel) = units.place(number);
            let scores = Band::scores(places.scratch(head), panel);
            // SAFETY: the unit was multiplied.
            unsafe { turn_sums(places.turned(number), bands[head].rows(), scores) };
        };
        for number in 0..units.len() {
            let (head, _) = units.place(number);
            // SAFETY: passed on.
            unsafe {
                let product = DirectProduct {
                    left: units.at(k, number, then).map(|tile| rows(k, tile)),
                    right: places.query(head),
                    cols: bands[head].rows(),
                    steps: space.units / Blocks::STEP,
                    out: places.turned(number),
                };
                blocks.multiply_direct(&product);
            }
            if number > 0 {
                turn(number - 1);
            }
        }
        turn(units.len() - 1);
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Self::block_direct`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn direct_weigh(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        bands: &[Band<'_>],
        units: &Units<'_>,
        places: Places,
    ) {
        let (v, then) = (&units.tiles.cache.v, (&units.tiles.cache.k, units.tiles.block.keys.end));
        let columns = self.call.head_dim;
        let pairs_of = |number: usize| {
            // SAFETY: the keys are the request's.
            let tiles = unsafe { units.at(v, number, then) };
            Pairs::new(tiles.map(|tile| rows(v, tile)), columns, places.pairs(number))
        };
        let at_once = TILE.div_ceil(space.panels);
        let (_, first) = units.place(0);
        // SAFETY: passed on; the ring has room for a unit that is multiplied and the next.
        unsafe {
            pairs_of(0).advance(TILE);
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let band = &bands[head];
                let mut next = (number + 1 < units.len()).then(|| pairs_of(number + 1));
                let left = Band::exponentials(places.scratch(head)).cast::<u32>();
                for column in 0..space.panels {
                    let product = BlockProduct {
                        left: left.wrapping_add(panel * TILE),
                        rows: band.rows(),
                        right: places.pairs(number).wrapping_add(column * PANEL),
                        right_width: columns as isize,
                        right_ahead: 0,
                        cols: PANEL,
                        units: TILE,
                        out: band.sums(column),
                        resume: band.has_sums() || panel > first,
                    };
                    blocks.multiply(&product);
                    if let Some(next) = &mut next {
                        next.advance(at_once);
                    }
                }
            }
        }
    }
}
