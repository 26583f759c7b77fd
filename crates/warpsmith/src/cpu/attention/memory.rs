//! The working memory of a job: the strategy it uses, how much memory that needs, and where everything is in it.

use super::call::Call;
use super::plan::Job;
use super::state::{BAND_SCRATCH, State};
use crate::cpu::gemm::Blocks;
#[cfg(target_arch = "x86_64")]
use crate::cpu::scratch::{LINE, Plain};

/// How a job processes blocks of keys and values. The choice depends on what types and layout allow, and on how many
/// rows share the cost of packing.
#[derive(Clone, Copy)]
pub(super) enum Strategy {
    /// A block is packed, and all bands use it.
    Packed,
    /// f32 values are used in place, and keys too if the field says so. Each head is one band, as in all strategies for
    /// few rows.
    InPlace { keys: bool },
    /// Few rows of bf16 or f16 on tiles, which use keys and values where they are.
    Direct,
    /// f32 on tiles: a block is split, and all bands use it.
    Split,
    /// Few rows of f32 on tiles: keys and values are split where they are.
    Few,
}

impl Strategy {
    /// The strategy for a job with so many rows of a KV head.
    fn of(call: &Call<'_>, blocks: &Blocks, rows: usize) -> Strategy {
        let Call { cache, head_dim, .. } = call;
        if blocks.splits() {
            return if rows <= Blocks::TILE { Strategy::Few } else { Strategy::Split };
        }
        if cache.is_direct(blocks, *head_dim, rows) {
            return Strategy::Direct;
        }
        if cache.multiplies_values_in_place(blocks, *head_dim, rows.div_ceil(blocks.rows())) {
            return Strategy::InPlace { keys: cache.k.dim == 1 && blocks.multiplies_in_place(rows) };
        }
        Strategy::Packed
    }
}

/// Sizes of a job, and of what it works in, in floats.
pub(super) struct Space {
    pub strategy: Strategy,
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
    /// Copies of some keys and values, where they are not packed in place.
    gathered: usize,
    /// What the strategy keeps of keys and values.
    pub staging: usize,
}

impl Space {
    /// All but [`Space::staging`], which the strategy knows.
    pub fn new(call: &Call<'_>, blocks: &Blocks, job: &Job) -> Space {
        let rows = job.queries.len() * call.group;
        let head_bands = rows.div_ceil(blocks.rows());
        let kv_heads = job.kv_heads.len();
        let strategy = Strategy::of(call, blocks, rows);
        let (heads, scored) = match strategy {
            Strategy::Packed => (kv_heads, 1),
            Strategy::InPlace { .. } => (1, kv_heads),
            Strategy::Split => (1, 2),
            Strategy::Direct | Strategy::Few => (0, kv_heads),
        };
        Space {
            strategy,
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
            staging: 0,
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
        match self.strategy {
            Strategy::Packed | Strategy::InPlace { .. } => self.rows * Blocks::ROW,
            Strategy::Direct => Blocks::TILE * self.units,
            Strategy::Split | Strategy::Few => self.steps * Blocks::SPLIT,
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

    /// All of it.
    pub fn total(&self) -> usize {
        let packed = self.heads * (self.keys() + self.values());
        let operands = self.bands * self.queries() + packed + self.gathered + self.staging;
        2 * self.states() + operands + self.scored * BAND_SCRATCH
    }
}

/// Memory handed out front to back.
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

    /// The next `len` elements of another type, on cache lines of their own: [`floats_of`] floats.
    ///
    /// # Safety
    /// The memory must be large enough, initialised, and not used by anything else during `'a`.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn slice<'a, T: Plain>(&mut self, len: usize) -> &'a mut [T] {
        let Pieces { first, .. } = self.take(1, floats_of::<T>(len));
        // SAFETY: passed on; any bits are elements.
        unsafe { std::slice::from_raw_parts_mut(first.cast(), len) }
    }
}

/// Floats that `len` elements take, on cache lines of their own.
#[cfg(target_arch = "x86_64")]
pub(super) const fn floats_of<T>(len: usize) -> usize {
    (len * size_of::<T>()).next_multiple_of(LINE) / size_of::<f32>()
}

/// Pieces of memory of equal length, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    first: *mut f32,
    len: usize,
}

impl Pieces {
    pub fn at(&self, index: usize) -> *mut f32 {
        self.first.wrapping_add(index * self.len)
    }

    /// Pieces of the same length that start elsewhere.
    pub fn elsewhere(&self, first: *mut f32) -> Pieces {
        Pieces { first, len: self.len }
    }
}

/// Where each part of a job's working memory is. [`Space`] has the sizes.
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
    /// What the strategy keeps of keys and values.
    #[cfg(target_arch = "x86_64")]
    pub staging: *mut f32,
    /// What bands work in: for as many as have their scores at once.
    pub scratch: Pieces,
}

impl Memory {
    /// Lays it out from `data` on, which has room for [`Space::total`] floats. States that are merged later stay in
    /// `partial`.
    pub fn new(space: &Space, data: *mut f32, partial: Option<*mut f32>) -> Memory {
        let mut layout = Layout { next: data };
        let total = layout.take(space.bands, space.state());
        let current = layout.take(space.bands, space.state());
        let queries = layout.take(space.bands, space.queries());
        let keys = layout.take(space.heads, space.keys());
        let values = layout.take(space.heads, space.values());
        let gathered = layout.take(1, space.gathered);
        #[cfg(target_arch = "x86_64")]
        let staging = layout.take(1, space.staging);
        let scratch = layout.take(space.scored, BAND_SCRATCH);
        debug_assert_eq!(layout.next, data.wrapping_add(space.total()));
        Memory {
            total: partial.map_or(total, |partial| total.elsewhere(partial)),
            current,
            queries,
            keys,
            values,
            gathered: gathered.first,
            #[cfg(target_arch = "x86_64")]
            staging: staging.first,
            scratch,
        }
    }
}

/// Memory for the results of segments that are merged later, `stride` floats each.
#[derive(Clone, Copy)]
pub(super) struct Partials {
    pub data: *mut f32,
    pub stride: usize,
}

impl Partials {
    pub fn at(&self, index: usize) -> *mut f32 {
        self.data.wrapping_add(index * self.stride)
    }
}

impl Default for Partials {
    fn default() -> Self {
        Partials { data: std::ptr::null_mut(), stride: 0 }
    }
}

// SAFETY: each partial is written by one job and read after the loop that wrote it.
unsafe impl Sync for Partials {}
// SAFETY: as above.
unsafe impl Send for Partials {}
