//! The shapes of blocks: their warps, their rings and their shared memory.

use super::SEGMENT;
use crate::tensor::DType;

/// Keys or values of a warp's unit.
pub(in super::super) const UNIT_KEYS: usize = 16;
/// Rows of a tile of a warp, and rows that half a tile has.
pub(in super::super) const TILE_ROWS: usize = 16;
pub(super) const EIGHT: usize = 8;
/// Warps of a block that share the keys of few rows.
pub(super) const WARPS: usize = 4;
/// Further shared memory of every block: page addresses and piece numbers.
pub(super) const STATIC_SHARED: usize = 6 << 10;

/// What blocks are designed for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) enum Load {
    /// Few rows: four warps share the keys.
    Few,
    /// At most eight rows, the same.
    Eight,
    /// At most eight rows, and a block for each multiprocessor: eight warps share the keys.
    EightAlone,
    /// Few rows, and few keys of many requests: one warp a block, and many blocks.
    FewAndShort,
    /// Many rows: warps have different ones.
    Many,
}

impl Load {
    pub const ALL: [Load; 5] = [Load::Few, Load::Eight, Load::EightAlone, Load::FewAndShort, Load::Many];
}

/// The composition of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) struct Shape {
    /// Rows of a warp.
    pub warp_rows: usize,
    /// Warps with different rows.
    pub row_warps: usize,
    /// Groups of warps with different keys.
    pub key_warps: usize,
    /// Units in a group's ring.
    pub ring: usize,
    /// Keys of a step.
    pub step: usize,
    /// Blocks a multiprocessor should hold.
    pub blocks: usize,
}

impl Shape {
    /// For blocks with at most so many bytes of shared memory.
    pub fn new(head_dim: usize, cache: DType, load: Load, shared: usize) -> Shape {
        let long = head_dim > 128;
        let blocks = if long { 1 } else { 2 };
        // Enough in flight to keep memory busy.
        let narrow = cache.size() == 1;
        let rings: &[usize] = match (load, head_dim * cache.size()) {
            (Load::Many, _) => &[4, 2],
            (_, ..=128) if narrow => &[5],
            (_, ..=128) => &[8],
            (Load::FewAndShort, ..=256) => &[6],
            (_, ..=256) => &[if narrow && head_dim > 160 { 6 } else { 5 }, 4],
            _ => &[4, 3],
        };
        // Long heads leave few registers for scores.
        let step = match head_dim {
            161.. => 16,
            128 => 32,
            _ => 64,
        };
        let shape = |ring| {
            let few = Shape { warp_rows: TILE_ROWS, row_warps: 1, key_warps: WARPS, ring, step, blocks };
            match load {
                Load::Few => few,
                Load::Eight => Shape { warp_rows: EIGHT, ..few },
                Load::EightAlone => Shape { warp_rows: EIGHT, key_warps: 8, blocks: 1, ..few },
                Load::FewAndShort => Shape { key_warps: 1, blocks: 3 * blocks, ..few },
                Load::Many => Shape { row_warps: if long { 2 } else { 4 }, key_warps: 1, ..few },
            }
        };
        let fits = |ring: &&usize| shape(**ring).shared(head_dim, cache, 2) + STATIC_SHARED <= shared;
        shape(*rings.iter().find(fits).unwrap_or(&rings[rings.len() - 1]))
    }

    /// The same for rows that have two segments of keys at most: a warp for each, and only what so many keys need. No bit
    /// depends on it.
    pub fn of_few_keys(self, keys: usize) -> Shape {
        let step = self.step.min(keys.next_power_of_two().max(UNIT_KEYS));
        let units = 2 * keys.div_ceil(UNIT_KEYS).max(1);
        let (key_warps, blocks) = if keys <= SEGMENT { (1, 3 * self.blocks) } else { (2, 2 * self.blocks) };
        Shape { key_warps, ring: self.ring.min(units + 1), step, blocks, ..self }
    }

    pub(super) fn rows(&self) -> usize {
        self.warp_rows * self.row_warps
    }

    pub fn threads(&self) -> usize {
        32 * self.row_warps * self.key_warps
    }

    /// Bytes of shared memory, with room for the sums of some levels.
    pub(super) fn shared(&self, head_dim: usize, cache: DType, levels: usize) -> usize {
        let row = |bytes: usize| 16 * if bytes.is_multiple_of(128) { bytes / 16 } else { (bytes / 16) | 1 };
        let rows = TILE_ROWS * self.row_warps;
        let keys = if cache.size() == 1 { rows.max(32) } else { rows };
        let unit = keys.min(self.step) * row(head_dim * cache.size());
        let queries = if head_dim > 128 { rows * row(2 * head_dim) } else { 0 };
        // The sums of all rows, and of each, in four threads, the largest score and the sum of weights.
        let level = self.rows() * (head_dim + 8) * size_of::<f32>();
        queries + self.key_warps * self.ring * unit + levels * level
    }
}
