//! Keys and values used in place, in the order in which few rows use them.
//!
//! Memory is the limit there, and the hardware prefetcher follows many pages better than one. So all heads of some
//! tokens are used before those of the next, and each product prefetches what a later one needs, wherever that is: in
//! another head, in another page, among the values, in the next block.

use super::cache::{Block, Cache};
use super::heads::Heads;
use super::work::Work;
use crate::cpu::array;
use crate::cpu::gemm::Blocks;
use std::ops::Range;

/// How many products ahead each product prefetches.
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
    /// Distance in bytes to what is prefetched.
    pub ahead: isize,
}

impl<'a> Tiles<'a> {
    /// The keys of some panels of a block, of all heads of a job.
    pub fn new(work: &Work<'a>, block: &'a Block<'a>, panels: &Range<usize>) -> Tiles<'a> {
        let first = block.keys.start;
        let end = block.keys.end.min(first + panels.end * Blocks::PANEL);
        let (cache, kv_heads) = (&work.call.cache, work.job.kv_heads.clone());
        Tiles { cache, block, kv_heads, keys: first + panels.start * Blocks::PANEL..end }
    }

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
        array(|i| {
            let more = i * Blocks::TILE;
            // SAFETY: passed on.
            unsafe { self.tile(heads, (key + more, head), later, (later_key + more, later_head)) }
        })
    }

    /// The tile of `heads` at a key of a head, which prefetches that of `later` at another.
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
    /// As [`Tiles::new`].
    pub fn new(work: &Work<'a>, block: &'a Block<'a>, panels: &Range<usize>) -> Units<'a> {
        Units { tiles: Tiles::new(work, block, panels) }
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
