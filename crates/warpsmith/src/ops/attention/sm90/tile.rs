//! Tile sizes of `attention` on Hopper: how many queries and keys a block works on at a time.

use super::CHUNK;
use super::deal::{Deal, plan};
use crate::ops::attention::problem::Problem;
use crate::tensor::DType;

/// Queries of a warpgroup, and its threads.
const ROWS: usize = 64;
const WARPGROUP: usize = 128;
/// Elements of the heads for which three consumers can share the registers of a block, with as many keys as two; and of those for
/// which they can with [`THIRD_KEYS`].
pub(super) const SHORT_HEAD: usize = 64;
pub(super) const LONG_HEAD: usize = 128;
pub(super) const THIRD_KEYS: usize = 80;
/// Keys of a block, where the caller asks for few.
pub(super) const LEAST_KEYS: usize = 64;
/// Keys of a call in f16 up to which larger blocks are better for a long head, if all its rows see all of them.
const FEW_KEYS: usize = 1024;

/// How a block works on heads of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) struct Tile {
    pub consumers: usize,
    pub keys: usize,
    pub(super) stages: usize,
    pub(super) q_stages: usize,
    pub(super) out_whole: bool,
}

impl Tile {
    /// The tile with two warpgroups: with the most keys if they are contiguous, or for pages.
    pub(super) fn of(head_dim: usize, paged: bool) -> Tile {
        let tile = Tile { consumers: 2, keys: 128, stages: 2, q_stages: 2, out_whole: true };
        match head_dim {
            // How many keys there are is not known here, and a row's bits would depend on it.
            LONG_HEAD if paged => tile.with_keys(THIRD_KEYS),
            ..=128 => tile,
            // Sizes of pages divide 64, or 64 divides them.
            ..=192 if !paged => Tile { keys: 96, q_stages: 1, out_whole: false, ..tile },
            _ => Tile { keys: 64, q_stages: 1, out_whole: false, ..tile },
        }
    }

    /// The tiles a call may choose from.
    pub(super) fn of_call(p: &Problem, units: usize) -> Tile {
        let kind = Kind::of(p);
        let wanted = |tile: &Tile| p.block_q == 0 || p.block_q == tile.rows();
        let tiles = kind.tiles(&Tile::keys_of(p)).into_iter().filter(wanted);
        match p.packed {
            None => kind.fastest(tiles, |tile| plan(&Deal::of(p, tile, units)).longest as f64),
            Some(packed) => {
                let each = |tokens: usize| tokens.div_ceil(packed.requests.max(1));
                let request =
                    Problem { batch: packed.requests, q_len: each(p.q_len), kv_len: each(p.kv_len), ..*p };
                kind.fastest(tiles, |tile| {
                    let blocks = request.kv_len.div_ceil(tile.keys).max(1);
                    Deal::of(&request, tile, units).rounds() * blocks as f64
                })
            }
        }
    }

    /// Numbers of keys a block may have. If a row's bits depend on that and it sees only part of the keys, the choice
    /// must not depend on how many there are: the row has the same bits in a call with more keys after it.
    fn keys_of(p: &Problem) -> Vec<usize> {
        let kind = Kind::of(p);
        let some = p.causal || p.window > 0;
        match p.block_kv {
            0 if kind.any_keys() => kind.keys(),
            // How long packed requests are is not known here.
            0 if p.head_dim == LONG_HEAD && (some || (p.packed.is_none() && p.kv_len > FEW_KEYS)) => {
                vec![THIRD_KEYS]
            }
            0 => vec![kind.tile().keys],
            keys => vec![keys],
        }
    }

    /// Whether there are tiles of the size that a call wants.
    pub(super) fn admits(p: &Problem) -> Result<(), String> {
        let kind = Kind::of(p);
        let keys: Vec<usize> = kind.keys().into_iter().chain([LEAST_KEYS]).collect();
        let mut rows: Vec<usize> = kind.tiles(&Tile::keys_of(p)).iter().map(Tile::rows).collect();
        rows.sort_unstable();
        rows.dedup();
        p.admits(&rows, &keys)
    }

    /// With blocks of so many keys, and one more stage in shared memory if they are small.
    pub(super) fn with_keys(self, keys: usize) -> Tile {
        Tile { keys, stages: if keys < self.keys { 3 } else { self.stages }, ..self }
    }

    /// With three warpgroups.
    pub(super) fn wide(self) -> Tile {
        Tile { consumers: 3, stages: 2, ..self }
    }

    /// Queries of a tile.
    pub fn rows(&self) -> usize {
        ROWS * self.consumers
    }

    pub fn threads(&self) -> usize {
        (1 + self.consumers) * WARPGROUP
    }

    /// Shared memory of a block without pages.
    pub fn shared_bytes(&self, head_dim: usize) -> usize {
        let chunks = head_dim.div_ceil(CHUNK);
        let operands = (self.q_stages * self.rows() + 2 * self.stages * self.keys) * chunks * 128;
        let results = self.rows() * 128 * if self.out_whole { chunks } else { 1 };
        let barriers = 16 * (self.q_stages + 2 * self.stages) + 32;
        let raised = 4 * self.rows();
        operands + results + barriers + 32 * self.q_stages + raised
    }

    /// A number of keys that divides both blocks and pages: the copy engine moves that many at once.
    pub fn page_rows(&self, page_size: usize) -> usize {
        page_size.min(1 << self.keys.trailing_zeros())
    }

    /// Extra registers for page numbers that do not exist.
    pub fn paged_bytes(&self) -> usize {
        4 * self.stages
    }
}

/// What decides which tiles a call may have.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Kind {
    pub dtype: DType,
    pub head_dim: usize,
    pub softcap: bool,
    pub paged: bool,
}

impl Kind {
    fn of(p: &Problem) -> Kind {
        Kind { dtype: p.dtype, head_dim: p.head_dim, softcap: p.softcap_bits != 0, paged: false }
    }

    fn tile(&self) -> Tile {
        Tile::of(self.head_dim, self.paged)
    }

    /// Whether the bits of a row do not depend on the keys of a block.
    fn any_keys(&self) -> bool {
        self.dtype == DType::BF16 && self.head_dim == LONG_HEAD && !self.paged
    }

    /// The default number of keys of a block.
    fn keys(&self) -> Vec<usize> {
        let third = (self.head_dim == LONG_HEAD).then_some(THIRD_KEYS);
        [self.tile().keys].into_iter().chain(third).collect()
    }

    /// Whether three warpgroups can share the registers of a block: a softcap needs those of the third, and so do pages
    /// that may not exist.
    fn can_be_wide(&self, keys: usize) -> bool {
        match self.head_dim {
            SHORT_HEAD => !self.softcap,
            LONG_HEAD => keys <= THIRD_KEYS && !(self.softcap && self.paged),
            _ => false,
        }
    }

    /// The tiles with one of these numbers of keys.
    fn tiles(&self, keys: &[usize]) -> Vec<Tile> {
        let narrow = keys.iter().map(|&keys| self.tile().with_keys(keys));
        narrow
            .flat_map(|tile| [Some(tile), self.can_be_wide(tile.keys).then(|| tile.wide())])
            .flatten()
            .collect()
    }

    /// The time that a tile takes for a block of keys, in terms of what two warpgroups take for one of 128. Three take longer than
    /// two, but hide more of the exponentials, and load keys for more queries; smaller blocks hide less.
    fn time(&self, tile: &Tile) -> f64 {
        let wide = if self.head_dim == SHORT_HEAD { 1.27 } else { 1.33 };
        let small = if tile.keys < 128 { 1.12 } else { 1.0 };
        tile.keys as f64 / 128.0 * small * if tile.consumers == 3 { wide } else { 1.0 }
    }

    /// The tile that minimises the time of the block with the most `work`, in blocks of keys.
    fn fastest(&self, tiles: impl Iterator<Item = Tile>, work: impl Fn(&Tile) -> f64) -> Tile {
        let times = tiles.map(|tile| (work(&tile) * self.time(&tile), tile));
        times.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(self.tile(), |(_, tile)| tile)
    }

    /// The tile of a call over pages.
    pub fn over_pages(&self, work: impl Fn(&Tile) -> f64) -> Tile {
        self.fastest(self.tiles(&[self.tile().keys]).into_iter(), work)
    }
}
