//! Few rows of f32: keys and values are used from where they lie.
//!
//! Memory is the limit here, and the processor follows many pages better than one. So all heads of some tokens are used before
//! those of the next, and each product asks for what a later one needs, wherever that is: in another head, in another
//! page, among the values, in the next block.

use super::band::Band;
use super::cache::{Block, Cache, Packed};
use super::job::Compute;
use super::{Heads, Space};
use crate::cpu::gemm::{BlockProduct, Blocks, Matrix};
use crate::cpu::{CpuElement, Simd};
use std::ops::Range;

/// How many products later is needed what one asks for.
const AHEAD: usize = 2;

/// The keys of a block that are seen, by [`Blocks::TILE`] of a head, in the order in which they are used.
pub(super) struct Tiles<'a> {
    pub cache: &'a Cache,
    pub block: &'a Block<'a>,
    pub kv_heads: Range<usize>,
    pub keys: Range<usize>,
}

/// Keys or values of one head.
pub(super) struct Tile {
    /// Index of the head among those of the job.
    pub head: usize,
    /// The first key, counted from that of the block.
    pub from: usize,
    pub count: usize,
    pub address: usize,
    /// Bytes to what is to be asked for.
    pub ahead: isize,
}

impl Tiles<'_> {
    /// How many times `N` tiles of a head there are; the last of these may be empty.
    pub fn groups<const N: usize>(&self) -> usize {
        self.keys.len().div_ceil(N * Blocks::TILE) * self.kv_heads.len()
    }

    /// `N` tiles of `heads`, the keys or values. `then` come after the last, for keys from the second value on.
    ///
    /// # Safety
    /// The keys must exist.
    pub unsafe fn group<const N: usize>(
        &self,
        heads: &Heads,
        number: usize,
        (then, after): (&Heads, usize),
    ) -> [Tile; N] {
        let count = self.kv_heads.len();
        // Divisions take longer than the rest of it: once for all tiles.
        let place = |number: usize, first: usize| (first + number / count * N * Blocks::TILE, number % count);
        let next = number + AHEAD;
        let (later, (later_key, later_head)) = match next.checked_sub(self.groups::<N>()) {
            None => (heads, place(next, self.keys.start)),
            Some(over) => (then, place(over, after)),
        };
        let (key, head) = place(number, self.keys.start);
        std::array::from_fn(|i| {
            let more = i * Blocks::TILE;
            // SAFETY: passed on.
            unsafe { self.tile(heads, (key + more, head), later, (later_key + more, later_head)) }
        })
    }

    /// The tile of `heads` at a key of a head, which asks for that of `later` at another.
    ///
    /// # Safety
    /// The keys must exist.
    #[inline]
    unsafe fn tile(
        &self,
        heads: &Heads,
        (key, head): (usize, usize),
        later: &Heads,
        (later_key, later_head): (usize, usize),
    ) -> Tile {
        let find = |heads: &Heads, key: usize, head: usize| {
            // SAFETY: the keys are the request's.
            unsafe { self.cache.find(heads, self.block.request, key, self.kv_heads.start + head).0 }
        };
        let from = key - self.block.keys.start;
        if key >= self.keys.end {
            return Tile { head, from, count: 0, address: 0, ahead: 0 };
        }
        let address = find(heads, key, head);
        let ahead = match later_key < self.block.request.kv_len {
            true => find(later, later_key, later_head).wrapping_sub(address) as isize,
            false => 0,
        };
        let count = Blocks::TILE.min(self.keys.end - key);
        Tile { head, from, count, address, ahead }
    }
}

/// Tiles of a unit.
#[cfg(target_arch = "x86_64")]
const TOGETHER: usize = Blocks::PANEL / Blocks::TILE;

/// The keys of a block that are seen, by [`Blocks::PANEL`] of a head, in the order in which they are used.
#[cfg(target_arch = "x86_64")]
pub(super) struct Units<'a> {
    pub tiles: Tiles<'a>,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Units<'a> {
    pub fn new(
        cache: &'a Cache,
        block: &'a Block<'a>,
        kv_heads: Range<usize>,
        keys: Range<usize>,
    ) -> Units<'a> {
        Units { tiles: Tiles { cache, block, kv_heads, keys } }
    }

    pub fn len(&self) -> usize {
        self.tiles.groups::<TOGETHER>()
    }

    /// The head of a unit, and the panel of the block.
    pub fn place(&self, number: usize) -> (usize, usize) {
        let heads = self.tiles.kv_heads.len();
        let first = (self.tiles.keys.start - self.tiles.block.keys.start) / Blocks::PANEL;
        (number % heads, first + number / heads)
    }

    /// The tiles of a unit of `heads`, the keys or values; `then` are those that come after the last.
    ///
    /// # Safety
    /// As for [`Tiles::group`].
    pub unsafe fn at(&self, heads: &Heads, number: usize, then: (&Heads, usize)) -> [Tile; TOGETHER] {
        // SAFETY: passed on.
        unsafe { self.tiles.group(heads, number, then) }
    }
}

impl<T: CpuElement> Compute<'_, T> {
    /// Lets a block of keys go past the rows of all heads of a job, each a band.
    ///
    /// # Safety
    /// With [`Space::in_place`] alone. The keys must be the request's; the queries be packed; `scratch` hold that of all bands.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn block_in_place<S: Simd>(
        &self,
        s: S,
        blocks: &mut Blocks,
        space: &Space,
        bands: &mut [Band<'_>],
        kv_heads: Range<usize>,
        block: &Block<'_>,
        queries: *const f32,
        packed: Packed,
        scratch: *mut f32,
    ) {
        let call = self.call;
        // The same for all heads.
        let panels = bands[0].panels(block.keys.clone());
        if panels.is_empty() {
            return;
        }
        let first = block.keys.start;
        let keys =
            first + panels.start * Blocks::PANEL..block.keys.end.min(first + panels.end * Blocks::PANEL);
        let tiles = Tiles { cache: &call.cache, block, kv_heads, keys };
        let scratch_of = |head: usize| scratch.wrapping_add(head * Band::SCRATCH);
        let left_of = |head: usize| queries.wrapping_add(head * space.rows * Blocks::ROW);
        // SAFETY: passed on.
        unsafe {
            if space.keys_in_place {
                self.scores_in_place(blocks, &tiles, bands[0].rows(), left_of, scratch_of);
            }
            for (head, band) in bands.iter_mut().enumerate() {
                let scratch = scratch_of(head);
                if !space.keys_in_place {
                    let kv_head = tiles.kv_heads.start + head;
                    call.cache.pack(blocks, space, call.head_dim, block, kv_head..kv_head + 1, packed);
                    self.scores(blocks, space, band, &panels, left_of(head), packed.keys, scratch);
                }
                let view = band.view(call, first, panels.clone(), scratch);
                band.softmax::<T, S>(s, call, false, &view);
            }
            self.weigh_in_place(blocks, space, &tiles, bands, scratch_of);
        }
    }

    /// The scores of all heads.
    ///
    /// # Safety
    /// As for [`Self::block_in_place`], with [`Space::keys_in_place`].
    #[inline(always)]
    unsafe fn scores_in_place(
        &self,
        blocks: &Blocks,
        tiles: &Tiles<'_>,
        rows: usize,
        left_of: impl Fn(usize) -> *const f32,
        scratch_of: impl Fn(usize) -> *mut f32,
    ) {
        let Cache { k, v, dtype, .. } = &tiles.cache;
        for index in 0..tiles.groups::<1>() {
            // SAFETY: the keys are the request's, and keys in place are rows of f32; scores past the last key are masked.
            unsafe {
                let [tile] = tiles.group(k, index, (v, tiles.keys.start));
                let matrix = Matrix {
                    data: tile.address as *const u8,
                    dtype: *dtype,
                    rows: tile.count,
                    k: self.call.head_dim,
                    row_stride: k.token,
                    k_stride: k.dim,
                };
                let scores = Band::scores(scratch_of(tile.head), tile.from / Blocks::PANEL);
                let out = scores.wrapping_add(tile.from % Blocks::PANEL);
                blocks.multiply_in_place(left_of(tile.head), rows, &matrix, tile.ahead, out);
            }
        }
    }

    /// Adds the exponentials of all heads times the values to their sums.
    ///
    /// # Safety
    /// As for [`Self::block_in_place`].
    #[inline(always)]
    unsafe fn weigh_in_place(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        tiles: &Tiles<'_>,
        bands: &mut [Band<'_>],
        scratch_of: impl Fn(usize) -> *mut f32,
    ) {
        let Cache { k, v, .. } = &tiles.cache;
        for index in 0..tiles.groups::<1>() {
            // SAFETY: the keys are the request's.
            let [tile] = unsafe { tiles.group(v, index, (k, tiles.block.keys.end)) };
            let band = &mut bands[tile.head];
            for column in 0..space.panels {
                let product = BlockProduct {
                    left: Band::exponentials(scratch_of(tile.head)).cast::<u32>().wrapping_add(tile.from),
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
                unsafe { blocks.multiply(&product) };
            }
            band.note_sums();
        }
    }
}
