//! Attention on the CPU: one source for all tiers and for both attention ops.
//!
//! The queries that share a KV head, those of all its query heads, are cut into *jobs* of some hundred rows. A job
//! walks through the keys in blocks of at most [`KEYS`]. Each block is packed once and then used by all rows of the
//! job, in *bands* of as many rows as one product takes. Scores, exponentials and sums of a band stay in L1. Whether
//! keys are evenly spaced or in pages, and their type, matters only to packing (`packed`). f32 goes to tiles where the
//! machine has them, split in three (`split`); a single token then too, so that it has the bits it has in a prompt. Few
//! rows use keys and values in place where possible (`in_place`, `direct`), with the same bits. A job has one of these
//! strategies, and its memory is laid out for that (`memory`). In 16 bits the scores of rows that see one key are
//! computed again (`single`).
//!
//! # The order of sums
//! The context is cut at multiples of [`SEGMENT`] keys. Each segment has a softmax of its own with a running maximum,
//! and segments are merged in ascending order. One thread can therefore compute the segments in turn, or several
//! threads in parallel, and a row's bits depend on its own keys alone.

mod attend;
mod band;
mod cache;
mod call;
#[cfg(target_arch = "x86_64")]
mod direct;
mod dropout;
mod heads;
mod in_place;
mod job;
mod memory;
mod merge;
mod pack;
mod packed;
mod plan;
mod single;
#[cfg(target_arch = "x86_64")]
mod split;
mod state;
mod tiles;
mod work;

pub(crate) use cache::{Cache, Pages};
pub(crate) use call::{Call, KEYS};
pub(crate) use dropout::Dropout;
pub(crate) use heads::{Grid, Heads, PerHead, Request};

use super::gemm::{Blocks, Isa};
use super::rows::with_float;
use super::scratch::{self, Need};
use super::{dispatch, num_threads, parallel_for_with_scratch, with_threads};
use job::{Compute, Extent};
use memory::Partials;
use merge::Merge;
use plan::{Cut, JOBS_PER_THREAD, Job, SPLIT_ROWS, add_jobs};
use std::marker::PhantomData;

/// Computes attention.
///
/// # Safety
/// The tensors must be as the call says, and hold the requests.
pub(crate) unsafe fn run(call: &Call<'_>, requests: &[Request]) {
    // SAFETY: passed on.
    let attend = || unsafe { attend(call, requests) };
    if is_small(call, requests) { with_threads(1, attend) } else { attend() }
}

/// Whether the work is too small to wake another thread for: up to about ten microseconds.
fn is_small(call: &Call<'_>, requests: &[Request]) -> bool {
    const MOST: usize = 1 << 18;
    let of_pair = 2 * call.num_kv_heads * call.group * call.head_dim;
    let mut left = MOST / of_pair.max(1);
    requests.iter().all(|request| {
        let rest = left.checked_sub(request.q_len.saturating_mul(request.kv_len));
        left = rest.unwrap_or(0);
        rest.is_some()
    })
}

/// [`run`] on the threads that it is to use.
///
/// # Safety
/// As for [`run`].
unsafe fn attend(call: &Call<'_>, requests: &[Request]) {
    let blocks = Blocks::new(Isa::of_tier(call.tier), call.dtype);
    let cut = Cut::new(call, requests, &blocks);
    let most = cut.jobs * call.num_kv_heads;
    scratch::with(Need::of::<Job>(cut.jobs).and::<Job>(most), |mut region| {
        let (mut of_head, mut jobs) = (region.list(cut.jobs), region.list(most));
        add_jobs(call, requests, &cut, &mut of_head, &mut jobs);
        let extent = Extent::of(call, &blocks, &jobs);
        let segments: usize = jobs.iter().map(|job| job.segments.len()).sum();
        let split = jobs.len() < JOBS_PER_THREAD * num_threads()
            && segments > jobs.len()
            && jobs.iter().all(|job| job.queries.len() * call.group <= SPLIT_ROWS);
        if split {
            run_segments(call, &jobs, extent, segments);
        } else {
            compute(call, &jobs, extent, Partials::default());
        }
    });
}

/// Computes jobs on all threads.
fn compute(call: &Call<'_>, jobs: &[Job], extent: Extent, partials: Partials) {
    // A separate function: as an inner closure it would be compiled without the tier's instructions.
    parallel_for_with_scratch(jobs.len(), 1, extent.need(), |range, region| {
        let jobs = &jobs[range];
        with_float!(call.dtype, T => {
            dispatch(call.tier, Compute::<T> { call, jobs, partials, extent, region, t: PhantomData })
        });
    });
}

/// Computes the segments of jobs, `segments` in all, on all threads, and merges them.
fn run_segments(call: &Call<'_>, jobs: &[Job], extent: Extent, segments: usize) {
    let states = Need::of::<f32>(segments * extent.states);
    scratch::with(Need::of::<Job>(segments).and::<usize>(jobs.len()).plus(states), |mut region| {
        let (mut parts, mut firsts) = (region.list(segments), region.list(jobs.len()));
        for job in jobs {
            firsts.push(parts.len());
            for segment in job.segments.clone() {
                let partial = Some(parts.len());
                parts.push(Job { segments: segment..segment + 1, partial, ..job.clone() });
            }
        }
        let data = region.slice(segments * extent.states).as_mut_ptr();
        let partials = Partials { data, stride: extent.states };
        compute(call, &parts, extent, partials);
        let firsts = &firsts[..];
        parallel_for_with_scratch(jobs.len(), 1, extent.need(), |range, region| {
            let (jobs, firsts) = (&jobs[range.clone()], &firsts[range]);
            with_float!(call.dtype, T => {
                let merge = Merge::<T> { call, jobs, firsts, partials, extent, region, t: PhantomData };
                dispatch(call.tier, merge)
            });
        });
    });
}
