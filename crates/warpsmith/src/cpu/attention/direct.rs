//! Few rows of bf16 or f16 on tiles: keys and values are used in place, all heads of some keys before those of the
//! next.
//!
//! Keys are the left operand of their products, so that only scores are transposed. Values are repacked into units of a
//! right operand while earlier ones are multiplied, because a tile load stalls on data that was stored just before it.

use super::attend::Attend;
use super::band::Band;
use super::cache::Block;
use super::heads::Heads;
use super::memory::{Layout, Pieces, Space};
use super::tiles::{Tile, Units};
use super::work::Work;
use crate::cpu::gemm::{BlockProduct, Blocks, DirectProduct, Matrix, Pairs, Rows, turn_sums};
use crate::cpu::{CpuElement, Simd};
use std::marker::PhantomData;

const PANEL: usize = Blocks::PANEL;
const TILE: usize = Blocks::TILE;
/// Units of keys or values in flight.
const RING: usize = 2;

/// [`Strategy::Direct`](super::memory::Strategy::Direct).
pub(super) struct Direct<'a, T> {
    work: &'a Work<'a>,
    blocks: &'a mut Blocks,
    /// Scores by key.
    turned: Pieces,
    /// Values as right operands.
    pairs: Pieces,
    t: PhantomData<T>,
}

/// Floats of the values of a unit.
fn pair(space: &Space) -> usize {
    TILE * space.panels * PANEL
}

/// Floats of what is in flight.
pub(super) fn staging(space: &Space) -> usize {
    RING * (PANEL * PANEL + pair(space))
}

impl<T> Direct<'_, T> {
    fn turned(&self, number: usize) -> *mut f32 {
        self.turned.at(number % RING)
    }

    fn pairs(&self, number: usize) -> *mut u32 {
        self.pairs.at(number % RING).cast()
    }
}

impl<'a, T: CpuElement> Attend<'a> for Direct<'a, T> {
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self {
        let Work { call, space, memory, .. } = work;
        let rows = Band::exponentials(memory.scratch.at(0));
        for (head, band) in bands.iter().enumerate() {
            let matrix = Matrix {
                data: rows.cast(),
                dtype: T::DTYPE,
                rows: band.rows(),
                k: call.head_dim,
                row_stride: (Blocks::ROW * blocks.per_unit()) as isize,
                k_stride: 1,
            };
            // SAFETY: a band's scratch has room for its rows; the caller promised the rest.
            unsafe {
                work.pack_band(blocks, band, rows);
                blocks.pack_columns(&matrix, memory.queries.at(head).cast());
            }
        }
        let mut layout = Layout { next: memory.staging };
        let turned = layout.take(RING, PANEL * PANEL);
        let pairs = layout.take(RING, pair(space));
        Direct { work, blocks, turned, pairs, t: PhantomData }
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>) {
        // The same for all heads.
        let panels = bands[0].panels(&block.keys);
        if panels.is_empty() {
            return;
        }
        let (first, scratch) = (block.keys.start, self.work.memory.scratch);
        let units = Units::new(self.work, block, &panels);
        // SAFETY: passed on; tiles imply the instructions.
        unsafe {
            self.scores(bands, &units);
            for (head, band) in bands.iter_mut().enumerate() {
                let view = band.view(first, panels.clone(), scratch.at(head));
                self.work.refine_single_scores(self.blocks, band, &view);
                band.softmax::<T, S>(s, true, &view);
            }
            self.weigh(bands, &units);
            bands.iter_mut().for_each(Band::note_sums);
        }
    }
}

impl<T: CpuElement> Direct<'_, T> {
    /// The scores of all heads. Those past the last key are masked later.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scores(&mut self, bands: &[Band<'_>], units: &Units<'_>) {
        let Work { space, memory, .. } = self.work;
        let (k, then) = (&units.tiles.cache.k, (&units.tiles.cache.v, units.tiles.keys.start));
        for number in 0..units.len() {
            let (head, _) = units.place(number);
            // SAFETY: passed on.
            unsafe {
                let product = DirectProduct {
                    left: units.at(k, number, then).map(|tile| rows::<T>(k, tile)),
                    right: memory.queries.at(head).cast(),
                    cols: bands[head].rows(),
                    steps: space.units / Blocks::STEP,
                    out: self.turned(number),
                };
                self.blocks.multiply_direct(&product);
                if number > 0 {
                    self.turn(bands, units, number - 1);
                }
            }
        }
        // SAFETY: the last unit was multiplied.
        unsafe { self.turn(bands, units, units.len() - 1) };
    }

    /// Transposes the scores of a unit into place.
    ///
    /// # Safety
    /// The unit must have been multiplied, and its slot not reused since.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn turn(&self, bands: &[Band<'_>], units: &Units<'_>, number: usize) {
        let (head, panel) = units.place(number);
        let scores = Band::scores(self.work.memory.scratch.at(head), panel);
        // SAFETY: passed on.
        unsafe { turn_sums(self.turned(number), bands[head].rows(), scores) };
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Attend::block`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn weigh(&mut self, bands: &[Band<'_>], units: &Units<'_>) {
        let Work { call, space, memory, .. } = self.work;
        let columns = call.head_dim;
        let at_once = TILE.div_ceil(space.panels);
        let (_, first) = units.place(0);
        // SAFETY: passed on; the ring has room for a unit that is multiplied and the next.
        unsafe {
            self.values(units, 0).advance(TILE);
            for number in 0..units.len() {
                let (head, panel) = units.place(number);
                let band = &bands[head];
                let mut next = (number + 1 < units.len()).then(|| self.values(units, number + 1));
                let left = Band::exponentials(memory.scratch.at(head)).cast::<u32>();
                for column in 0..space.panels {
                    let product = BlockProduct {
                        left: left.wrapping_add(panel * TILE),
                        rows: band.rows(),
                        right: self.pairs(number).wrapping_add(column * PANEL),
                        right_width: columns as isize,
                        right_ahead: 0,
                        cols: PANEL,
                        units: TILE,
                        out: band.sums(column),
                        resume: band.has_sums() || panel > first,
                    };
                    self.blocks.multiply(&product);
                    if let Some(next) = &mut next {
                        next.advance(at_once);
                    }
                }
            }
        }
    }

    /// The values of a unit, to become a right operand.
    ///
    /// # Safety
    /// The keys must be the request's.
    unsafe fn values(&self, units: &Units<'_>, number: usize) -> Pairs {
        let (v, then) = (&units.tiles.cache.v, (&units.tiles.cache.k, units.tiles.block.keys.end));
        // SAFETY: passed on.
        let tiles = unsafe { units.at(v, number, then) };
        Pairs::new(tiles.map(|tile| rows::<T>(v, tile)), self.work.call.head_dim, self.pairs(number))
    }
}

/// Keys or values of a tile, as rows.
fn rows<T>(heads: &Heads, tile: Tile) -> Rows {
    let stride = heads.token * size_of::<T>() as isize;
    Rows { data: tile.address as *const u8, stride, count: tile.count, ahead: tile.ahead }
}
