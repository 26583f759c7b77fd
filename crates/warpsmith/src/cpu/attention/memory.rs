//! What a job works in: how it takes its blocks, how much memory that needs, and where everything lies in it.

use super::Call;
use super::band::{Band, State};
use super::plan::Job;
#[cfg(target_arch = "x86_64")]
use super::{direct::Direct, split::Few, split::Split};
use crate::cpu::gemm::Blocks;

/// How a job takes blocks of keys and values. What the types and the layout of a call allow decides, and how many rows there are
/// to share the work of packing.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// A block is packed, and all bands go through it.
    Packed,
    /// Values of f32 are used where they are, and keys too if so said. Each head is one band, as in all ways for few rows.
    InPlace { keys: bool },
    /// Few rows of bf16 on tiles, which use keys and values where they are.
    Direct,
    /// f32 on tiles: a block is split, and all bands go through it.
    Split,
    /// Few rows of f32 on tiles: keys and values are split where they are.
    Few,
}

impl Way {
    /// The way of a job with so many rows of a KV head.
    fn of(call: &Call<'_>, blocks: &Blocks, rows: usize) -> Way {
        let Call { cache, head_dim, .. } = call;
        if blocks.splits() {
            return if rows <= Blocks::TILE { Way::Few } else { Way::Split };
        }
        if cache.is_direct(blocks, *head_dim, rows) {
            return Way::Direct;
        }
        if cache.multiplies_values_in_place(blocks, *head_dim, rows.div_ceil(blocks.rows())) {
            return Way::InPlace { keys: cache.k.dim == 1 && blocks.multiplies_in_place(rows) };
        }
        Way::Packed
    }
}

/// Sizes of a job, and of what it works in, in floats.
pub(super) struct Space {
    pub way: Way,
    /// Rows of a band.
    pub rows: usize,
    /// KV heads whose blocks are packed together.
    heads: usize,
    /// Bands of a head, and of all heads.
    pub head_bands: usize,
    pub bands: usize,
    /// Panels of the values, and units of a row of queries.
    pub panels: usize,
    pub units: usize,
    pub value_units: usize,
    /// Keys of a block.
    pub block_keys: usize,
    /// Steps of a head that is split.
    pub steps: usize,
    /// How many bands have their scores at once.
    scored: usize,
    /// Copies of some keys and values, where they are not packed from where they are.
    gathered: usize,
}

impl Space {
    pub fn new(call: &Call<'_>, blocks: &Blocks, job: &Job) -> Space {
        let rows = job.queries.len() * call.group;
        let head_bands = rows.div_ceil(blocks.rows());
        let kv_heads = job.kv_heads.len();
        let way = Way::of(call, blocks, rows);
        let (heads, scored) = match way {
            Way::Packed => (kv_heads, 1),
            Way::InPlace { .. } => (1, kv_heads),
            Way::Split => (1, 2),
            Way::Direct | Way::Few => (0, kv_heads),
        };
        Space {
            way,
            rows: blocks.rows(),
            heads,
            head_bands,
            bands: head_bands * kv_heads,
            panels: call.head_dim.div_ceil(Blocks::PANEL),
            units: blocks.units(call.head_dim),
            value_units: call.block_keys / blocks.per_unit(),
            block_keys: call.block_keys,
            steps: call.head_dim.div_ceil(Blocks::SPLIT_STEP),
            scored,
            gathered: if call.cache.is_gathered() { 2 * Blocks::TILE * call.head_dim } else { 0 },
        }
    }

    /// Maxima and sums of one band.
    fn state(&self) -> usize {
        State::LEN + self.panels * self.rows * Blocks::PANEL
    }

    /// Those of all bands: what a partial holds.
    pub fn states(&self) -> usize {
        self.bands * self.state()
    }

    /// The queries of one band.
    fn queries(&self) -> usize {
        match self.way {
            Way::Packed | Way::InPlace { .. } => self.rows * Blocks::ROW,
            Way::Direct => Blocks::TILE * self.units,
            Way::Split | Way::Few => self.steps * Blocks::SPLIT,
        }
    }

    /// The keys of a block and head.
    fn keys(&self) -> usize {
        self.block_keys * self.units
    }

    /// Its values.
    fn values(&self) -> usize {
        self.panels * Blocks::PANEL * self.value_units
    }

    /// Keys and values as tiles need them.
    fn planes(&self) -> usize {
        match self.way {
            #[cfg(target_arch = "x86_64")]
            Way::Direct => Direct::planes(self),
            #[cfg(target_arch = "x86_64")]
            Way::Split => Split::planes(self),
            #[cfg(target_arch = "x86_64")]
            Way::Few => Few::PLANES,
            _ => 0,
        }
    }

    /// All of it.
    pub fn total(&self) -> usize {
        let packed = self.heads * (self.keys() + self.values());
        let operands = self.bands * self.queries() + packed + self.gathered + self.planes();
        2 * self.states() + operands + self.scored * Band::SCRATCH
    }
}

/// Memory that is handed out from its beginning on.
pub(super) struct Layout {
    pub next: *mut f32,
}

impl Layout {
    /// The next `count` pieces of `len` floats. Only an address: whoever uses them must know that the memory has room.
    pub fn take(&mut self, count: usize, len: usize) -> Pieces {
        let first = self.next;
        self.next = first.wrapping_add(count * len);
        Pieces { first, len }
    }
}

/// Pieces of memory, all as long, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    first: *mut f32,
    len: usize,
}

impl Pieces {
    pub fn at(&self, index: usize) -> *mut f32 {
        self.first.wrapping_add(index * self.len)
    }

    /// Pieces as long that begin elsewhere.
    pub fn elsewhere(&self, first: *mut f32) -> Pieces {
        Pieces { first, len: self.len }
    }
}

/// Where everything is that a job works in. How much room each has, [`Space`] says.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    /// The states of bands: of all segments so far, and of the present one.
    pub total: Pieces,
    pub current: Pieces,
    /// Queries as operands, by band.
    pub queries: Pieces,
    /// A block as panels, by head.
    pub keys: Pieces,
    pub values: Pieces,
    /// Copies of some keys and values.
    pub gathered: *mut f32,
    /// What a way keeps there of keys and values.
    #[cfg(target_arch = "x86_64")]
    pub planes: *mut f32,
    /// What bands work in: for as many as have their scores at once.
    pub scratch: Pieces,
}

impl Memory {
    /// Lays it out from `data` on, where [`Space::total`] floats have room. States that are merged later are left in `partial`,
    /// where they are looked for then.
    pub fn new(space: &Space, data: *mut f32, partial: Option<*mut f32>) -> Memory {
        let mut layout = Layout { next: data };
        let total = layout.take(space.bands, space.state());
        let current = layout.take(space.bands, space.state());
        let queries = layout.take(space.bands, space.queries());
        let keys = layout.take(space.heads, space.keys());
        let values = layout.take(space.heads, space.values());
        let gathered = layout.take(1, space.gathered);
        #[cfg(target_arch = "x86_64")]
        let planes = layout.take(1, space.planes());
        let scratch = layout.take(space.scored, Band::SCRATCH);
        debug_assert_eq!(layout.next, data.wrapping_add(space.total()));
        Memory {
            total: partial.map_or(total, |partial| total.elsewhere(partial)),
            current,
            queries,
            keys,
            values,
            gathered: gathered.first,
            #[cfg(target_arch = "x86_64")]
            planes: planes.first,
            scratch,
        }
    }
}
