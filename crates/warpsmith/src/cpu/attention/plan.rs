//! The plan: the jobs that requests are cut into.

use super::call::{Call, SEGMENT};
use super::heads::Request;
use crate::cpu::gemm::Blocks;
use crate::cpu::num_threads;
use crate::cpu::scratch::List;
use std::cmp::Reverse;
use std::ops::Range;

/// The fewest rows of a job that pay for packing the keys.
const LEAST_ROWS: usize = 256;
/// Sums of a job that fit in L2.
const JOB_SUMS: usize = 1 << 17;
/// The same beside split queries, which take half as much again.
const SPLIT_JOB_SUMS: usize = 1 << 16;
/// Heads of at most this many rows are split over segments where there are few jobs.
pub(super) const SPLIT_ROWS: usize = 64;
/// Jobs per thread, enough to balance the load.
pub(super) const JOBS_PER_THREAD: usize = 4;

/// Consecutive queries of all heads of some KV heads, and the segments to compute.
#[derive(Clone)]
pub(super) struct Job {
    pub request: Request,
    /// One, unless there are so few rows that memory is the limit: then a block of keys of all heads is read in memory
    /// order.
    pub kv_heads: Range<usize>,
    pub queries: Range<usize>,
    pub segments: Range<usize>,
    /// Where the results of the segments go, instead of the tensors, if they are merged later: an index of partials.
    pub partial: Option<usize>,
}

/// How requests are cut into jobs.
pub(super) struct Cut {
    /// Queries of a job.
    queries: usize,
    /// The most jobs of one KV head.
    pub jobs: usize,
}

impl Cut {
    pub fn new(call: &Call<'_>, requests: &[Request], blocks: &Blocks) -> Cut {
        let band = blocks.rows();
        let queries = match call.block_rows {
            0 => (rows_of_job(call, requests, blocks) / band * band / call.group).max(8),
            rows => rows / call.group,
        };
        Cut { queries, jobs: requests.iter().map(|request| request.q_len.div_ceil(queries)).sum() }
    }
}

/// Adds the jobs of all requests to `jobs`. Within a thread's share the longest come first, so that the last ones,
/// which other threads may wait for, are short. `of_head` is room for the jobs of one KV head.
pub(super) fn add_jobs(
    call: &Call<'_>,
    requests: &[Request],
    cut: &Cut,
    of_head: &mut List<'_, Job>,
    jobs: &mut List<'_, Job>,
) {
    for request in requests {
        for block in (0..request.q_len.div_ceil(cut.queries)).rev() {
            let queries = block * cut.queries..((block + 1) * cut.queries).min(request.q_len);
            let keys = keys_of(call, request, &queries);
            let first = keys.start / SEGMENT;
            let segments = first..keys.end.div_ceil(SEGMENT).max(first);
            let (request, kv_heads) = (*request, 0..call.num_kv_heads);
            of_head.push(Job { request, kv_heads, queries, segments, partial: None });
        }
    }
    let few = |job: &&Job| job.queries.len() * call.group <= SPLIT_ROWS / 4;
    let heads = heads_of_job(call, of_head.iter().filter(few));
    for first in 0..call.num_kv_heads {
        for job in of_head.iter() {
            let heads = if few(&job) { heads } else { 1 };
            if first % heads == 0 {
                let kv_heads = first..(first + heads).min(call.num_kv_heads);
                jobs.push(Job { kv_heads, ..job.clone() });
            }
        }
    }
    if !jobs.iter().any(|job| few(&job)) {
        let own = jobs.len().div_ceil(num_threads()).max(1);
        let pairs = |job: &Job| keys_of(call, &job.request, &job.queries).len() * job.queries.len();
        jobs.chunks_mut(own).for_each(|own| own.sort_unstable_by_key(|job| Reverse(pairs(job))));
    }
}

/// How many rows go into one job: many, as long as all threads have something to do.
fn rows_of_job(call: &Call<'_>, requests: &[Request], blocks: &Blocks) -> usize {
    let sums = if blocks.splits() { SPLIT_JOB_SUMS } else { JOB_SUMS };
    let mut rows = (sums / call.head_dim).max(LEAST_ROWS);
    let jobs = |rows: usize| -> usize {
        let of_heads = requests.iter().map(|request| (request.q_len * call.group).div_ceil(rows));
        of_heads.sum::<usize>() * call.num_kv_heads
    };
    while rows > LEAST_ROWS && jobs(rows) < JOBS_PER_THREAD * num_threads() {
        rows = (rows / 2).max(LEAST_ROWS);
    }
    rows
}

/// How many KV heads go into one job of few rows.
fn heads_of_job<'a>(call: &Call<'_>, jobs: impl Iterator<Item = &'a Job>) -> usize {
    if [call.cache.k, call.cache.v].iter().any(|heads| heads.head > heads.token) {
        return 1;
    }
    let segments: usize = jobs.map(|job| job.segments.len().max(1)).sum();
    let mut heads = call.num_kv_heads;
    while heads > 1 && segments * call.num_kv_heads.div_ceil(heads) < JOBS_PER_THREAD * num_threads() {
        heads = heads.div_ceil(2);
    }
    heads
}

/// All keys that some of the queries see.
pub(super) fn keys_of(call: &Call<'_>, request: &Request, queries: &Range<usize>) -> Range<usize> {
    let keys = |i: usize| (call.keys)(i, request);
    // Both ends of what is seen ascend with the query.
    keys(queries.start).start..keys(queries.end - 1).end
}
