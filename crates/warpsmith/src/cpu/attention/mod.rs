//! Attention on the CPU, one source for all tiers and for both the ops that attend.
//!
//! The queries that share a KV head, those of all its query heads, are cut into *jobs* of some hundred rows. A job
//! walks through the keys in blocks of at most [`KEYS`]: each block is packed once for all its rows, which go through
//! it in *bands* of as many rows as one product takes. Scores, exponentials and sums of a band stay in the first cache.
//! Where keys lie, evenly or in pages, and in which type, matters for packing alone. f32 goes to tiles where the machine
//! has them, split in three (`split`); a single token then too, so that it has the bits it has in a prompt. Few rows use keys
//! and values from where they lie if they can (`in_place`, `direct`), with the same bits.
//!
//! # The order of sums
//! The context is cut at multiples of [`SEGMENT`] keys. Each segment has a softmax of its own, whose running maximum is
//! raised block by block, and the segments are merged in ascending order. So segments can be computed by one thread after
//! the other or by many at once, and a row's bits depend on its own keys alone.

mod band;
mod cache;
#[cfg(target_arch = "x86_64")]
mod direct;
mod in_place;
mod job;
mod plan;
#[cfg(target_arch = "x86_64")]
mod split;

pub(crate) use cache::{Cache, Pages};
pub(crate) use plan::Request;

use super::gemm::{Blocks, Isa, Slot, with_scratch};
use super::rows::with_float;
use super::{Tier, dispatch, num_threads, parallel_for};
use crate::dtype::DType;
use band::{Band, State};
use job::{Compute, Merge};
use plan::{JOBS_PER_THREAD, Job, SPLIT_ROWS, jobs};
use std::marker::PhantomData;
use std::ops::Range;

/// Keys of a block, unless the caller wants fewer.
pub(crate) const KEYS: usize = 128;
/// Keys of a segment.
const SEGMENT: usize = 8 * KEYS;

/// Heads of tokens in memory: the address of the first, and distances in elements.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub data: usize,
    /// From one batch to the next; of keys in pages, from one page to the next.
    pub batch: isize,
    /// From one token to the next.
    pub token: isize,
    /// From one head to the next.
    pub head: isize,
    /// From one element of a head to the next.
    pub dim: isize,
}

impl Heads {
    /// Address of a head, whose elements take `size` bytes.
    fn at(&self, size: usize, [batch, token, head]: [usize; 3]) -> usize {
        let offset = batch as isize * self.batch + token as isize * self.token + head as isize * self.head;
        self.data.wrapping_add_signed(offset * size as isize)
    }
}

/// A float for each of some heads, `step` apart; for all of them the same if that is zero.
#[derive(Clone, Copy)]
pub(crate) struct PerHead {
    pub data: usize,
    pub step: isize,
}

impl PerHead {
    /// # Safety
    /// The head's must be there.
    unsafe fn at(&self, head: usize) -> f32 {
        // SAFETY: passed on.
        unsafe { *(self.data as *const f32).offset(head as isize * self.step) }
    }
}

/// A mask or bias: address and distances in elements, zero along what all share.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub data: usize,
    pub batch: isize,
    pub head: isize,
    pub query: isize,
    pub key: isize,
}

/// One call, as the op's check found it to be right.
pub(crate) struct Call<'a> {
    pub tier: Tier,
    /// The type of queries and results.
    pub dtype: DType,
    pub num_kv_heads: usize,
    /// Query heads that share a KV head.
    pub group: usize,
    /// A multiple of the widest vectors' lanes.
    pub head_dim: usize,
    pub q: Heads,
    pub cache: Cache,
    pub out: Heads,
    /// Elements are f32, one for a head.
    pub lse: Option<Heads>,
    pub sinks: Option<PerHead>,
    /// Bytes; scores where they are zero do not count.
    pub mask: Option<Grid>,
    /// Added to scores.
    pub bias: Option<(Grid, DType)>,
    /// Zero for none.
    pub softcap: f32,
    pub scale: f32,
    /// Rows of a job, at least `group`; zero for as many as are best.
    pub block_rows: usize,
    /// Keys of a block: whole panels, at most [`KEYS`].
    pub block_keys: usize,
    /// The keys that a query of a request sees, masks aside. Both ends ascend with the query.
    pub keys: &'a (dyn Fn(usize, &Request) -> Range<usize> + Sync),
}

/// Attends.
///
/// # Safety
/// The tensors must be as the call says, and hold the requests.
pub(crate) unsafe fn run(call: &Call<'_>, requests: &[Request]) {
    let blocks = Blocks::new(Isa::of_tier(call.tier), call.dtype);
    let jobs = jobs(call, requests, &blocks);
    let segments: usize = jobs.iter().map(|job| job.segments.len()).sum();
    let split = jobs.len() < JOBS_PER_THREAD * num_threads()
        && segments > jobs.len()
        && jobs.iter().all(|job| job.queries.len() * call.group <= SPLIT_ROWS);
    let spaces = jobs.iter().map(|job| Space::new(&blocks, call, job));
    let Some(space) = spaces.max_by_key(|space| space.total()) else {
        return;
    };
    // What a thread works in is fetched out here: inside, the closure would be compiled without the tier's instructions.
    let work = |jobs: &[Job], partials: Partials| {
        parallel_for(jobs.len(), 1, |range| {
            with_scratch(Slot::Own, space.total() * size_of::<f32>(), |scratch| {
                let (jobs, scratch) = (&jobs[range], scratch.cast());
                with_float!(call.dtype, T => {
                    dispatch(call.tier, Compute::<T> { call, jobs, partials, scratch, t: PhantomData })
                });
            });
        });
    };
    if !split {
        return work(&jobs, Partials::default());
    }
    let mut parts = Vec::with_capacity(segments);
    let mut firsts = Vec::with_capacity(jobs.len());
    for job in &jobs {
        firsts.push(parts.len());
        for segment in job.segments.clone() {
            let partial = Some(parts.len());
            parts.push(Job { segments: segment..segment + 1, partial, ..job.clone() });
        }
    }
    let stride = space.state();
    with_scratch(Slot::Shared, parts.len() * stride * size_of::<f32>(), |data| {
        let partials = Partials { data: data.cast(), stride };
        work(&parts, partials);
        parallel_for(jobs.len(), 1, |range| {
            with_scratch(Slot::Own, space.total() * size_of::<f32>(), |scratch| {
                let (jobs, firsts, scratch) = (&jobs[range.clone()], &firsts[range], scratch.cast());
                with_float!(call.dtype, T => {
                    let merge = Merge::<T> { call, jobs, firsts, partials, scratch, t: PhantomData };
                    dispatch(call.tier, merge)
                });
            });
        });
    });
}

/// Memory for the results of segments that are merged later, `stride` floats each.
#[derive(Clone, Copy)]
struct Partials {
    data: *mut f32,
    stride: usize,
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

/// Sizes, in floats, of what a job works in.
struct Space {
    /// Rows of a band.
    rows: usize,
    /// KV heads whose blocks are packed together.
    heads: usize,
    /// Bands of a head, and of all heads.
    head_bands: usize,
    bands: usize,
    /// Panels of the values, and units of a row of queries.
    panels: usize,
    units: usize,
    value_units: usize,
    /// Keys of a block.
    block_keys: usize,
    /// Whether values are used where they are, and keys too.
    in_place: bool,
    keys_in_place: bool,
    /// Whether operands are split for tiles, and into how many steps a head.
    splits: bool,
    steps: usize,
    /// Whether they are split where they lie, for few rows.
    few: bool,
    /// Whether tiles use keys and values of bf16 where they are.
    direct: bool,
    /// How many bands have their scores at once.
    scored: usize,
    /// Copies of some keys and values, where they are not packed from where they are.
    gathered: usize,
}

impl Space {
    fn new(blocks: &Blocks, call: &Call<'_>, job: &Job) -> Space {
        let rows = job.queries.len() * call.group;
        let head_bands = rows.div_ceil(blocks.rows());
        let splits = blocks.splits();
        let few = splits && rows <= Blocks::TILE;
        let direct = call.cache.is_direct(blocks, call.head_dim, rows);
        let in_place = !splits && call.cache.multiplies_values_in_place(blocks, call.head_dim, head_bands);
        Space {
            rows: blocks.rows(),
            heads: match (in_place || splits, few || direct) {
                (_, true) => 0,
                (true, false) => 1,
                (false, false) => job.kv_heads.len(),
            },
            head_bands,
            bands: head_bands * job.kv_heads.len(),
            panels: call.head_dim.div_ceil(Blocks::PANEL),
            units: blocks.units(call.head_dim),
            value_units: call.block_keys / blocks.per_unit(),
            block_keys: call.block_keys,
            in_place,
            keys_in_place: in_place && call.cache.k.dim == 1 && blocks.multiplies_in_place(rows),
            splits,
            steps: call.head_dim.div_ceil(Blocks::SPLIT_STEP),
            few,
            direct,
            scored: match (in_place || few || direct, splits) {
                (true, _) => job.kv_heads.len(),
                (false, splits) => 1 + usize::from(splits),
            },
            gathered: if call.cache.is_gathered() { 2 * Blocks::TILE * call.head_dim } else { 0 },
        }
    }

    /// The sums of one band.
    fn sums(&self) -> usize {
        self.panels * self.rows * Blocks::PANEL
    }

    /// Maxima and sums of all bands: what a partial holds.
    fn state(&self) -> usize {
        self.bands * (self.sums() + State::LEN)
    }

    fn queries(&self) -> usize {
        match self.splits {
            true => self.bands * self.steps * Blocks::SPLIT,
            false => self.bands * self.rows * Blocks::ROW,
        }
    }

    /// Keys and values of a block, split, or what few rows need of them.
    fn planes(&self) -> usize {
        #[cfg(target_arch = "x86_64")]
        if self.few {
            return split::FewPlaces::LEN;
        }
        #[cfg(target_arch = "x86_64")]
        if self.direct {
            return direct::Places::len(self);
        }
        let panels = self.block_keys / Blocks::PANEL;
        if self.splits { panels * (self.steps + self.panels) * Blocks::SPLIT } else { 0 }
    }

    /// The keys of a block and head.
    fn keys(&self) -> usize {
        self.block_keys * self.units
    }

    /// Its values.
    fn values(&self) -> usize {
        self.panels * Blocks::PANEL * self.value_units
    }

    fn total(&self) -> usize {
        let panels = self.heads * (self.keys() + self.values());
        let scratch = self.scored * Band::SCRATCH;
        2 * self.state() + self.queries() + panels + self.planes() + scratch + self.gathered
    }
}
