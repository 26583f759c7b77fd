//! Attention on the CPU, one source for all tiers and for both the ops that attend.
//!
//! The queries that share a KV head, those of all its query heads, are cut into *jobs* of some hundred rows. A job
//! walks through the keys in blocks of at most [`KEYS`]: each block is packed once for all its rows, which go through
//! it in *bands* of as many rows as one product takes. Scores, exponentials and sums of a band stay in the first cache.
//! Where keys lie, evenly or in pages, and in which type, matters for packing alone (`packed`). f32 goes to tiles where the
//! machine has them, split in three (`split`); a single token then too, so that it has the bits it has in a prompt. Few rows
//! use keys and values from where they lie if they can (`in_place`, `direct`), with the same bits. A job has one of these ways,
//! and its memory is laid out for that (`memory`).
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
mod memory;
mod merge;
mod pack;
mod packed;
mod plan;
#[cfg(target_arch = "x86_64")]
mod split;
mod tiles;

pub(crate) use cache::{Cache, Pages};
pub(crate) use plan::Request;

use super::gemm::{Blocks, Isa, Slot, with_scratch};
use super::rows::with_float;
use super::{Tier, dispatch, num_threads, parallel_for};
use crate::tensor::DType;
use job::Compute;
use memory::Space;
use merge::Merge;
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
    let spaces = jobs.iter().map(|job| Space::new(call, &blocks, job));
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
    let stride = space.states();
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

impl Partials {
    fn at(&self, index: usize) -> *mut f32 {
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
