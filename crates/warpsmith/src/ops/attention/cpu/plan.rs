//! What there is to do: requests, and the jobs they are cut into.

use super::SEGMENT;
use crate::cpu::num_threads;
use crate::error::{Error, Result};
use crate::ops::attention::problem::Problem;
use crate::ops::attention::{KV_STARTS, Q_STARTS};
use crate::registry::Launch;
use std::ops::Range;

/// Rows of a job, unless the caller wants another number: their sums fit the second cache, and pay for packing the keys.
const JOB_ROWS: usize = 256;
/// Heads of at most this many rows are split over segments where there are few jobs.
pub(super) const SPLIT_ROWS: usize = 64;
/// Jobs for each thread that even out what the threads do.
pub(super) const JOBS_PER_THREAD: usize = 4;

/// Where the tokens of a request are.
#[derive(Clone, Copy)]
pub(super) struct Request {
    /// Index of the batch; zero for packed requests.
    pub batch: usize,
    pub first_query: usize,
    pub q_len: usize,
    pub first_key: usize,
    pub kv_len: usize,
}

/// Consecutive queries of all heads of some KV heads, and the segments to compute.
#[derive(Clone)]
pub(super) struct Job {
    pub request: Request,
    /// One, unless there are so few rows that memory is the limit: a block of keys of all heads is then read in the order
    /// in which it lies there.
    pub kv_heads: Range<usize>,
    pub queries: Range<usize>,
    pub segments: Range<usize>,
    /// Where the results of the segments go, instead of the tensors, if they are merged later: an index of partials.
    pub partial: Option<usize>,
}

/// The requests, in bounds.
pub(super) fn requests(launch: &Launch<'_, Problem>) -> Result<Vec<Request>> {
    let p = launch.problem;
    let Some(packed) = p.packed else {
        return Ok((0..p.batch)
            .map(|batch| Request { batch, first_query: 0, q_len: p.q_len, first_key: 0, kv_len: p.kv_len })
            .collect());
    };
    let starts = |index: usize, step: isize, len: usize| -> Result<Vec<usize>> {
        let mut all = Vec::with_capacity(packed.requests + 1);
        for r in 0..=packed.requests {
            // SAFETY: `check` bound the tensor to one more start than there are requests, this far apart.
            let start = unsafe { *(launch.args.address(index) as *const i32).offset(r as isize * step) };
            let least = all.last().copied().unwrap_or(0);
            let found = usize::try_from(start).ok().filter(|start| (least..=len).contains(start));
            let Some(start) = found else {
                let expected = format!("starts that ascend from 0 to {len} at most");
                let spec = launch.args.spec();
                let got = format!("{start} at index {r}");
                return Err(Error::argument(spec.name, spec.args[index].name, expected, got));
            };
            all.push(start);
        }
        Ok(all)
    };
    let queries = starts(Q_STARTS, packed.q_step, p.q_len)?;
    let keys = starts(KV_STARTS, packed.kv_step, p.kv_len)?;
    let both = queries.windows(2).zip(keys.windows(2));
    Ok(both
        .map(|(q, k)| Request {
            batch: 0,
            first_query: q[0],
            q_len: q[1] - q[0],
            first_key: k[0],
            kv_len: k[1] - k[0],
        })
        .collect())
}

/// The jobs of all requests, those that see the most keys first.
pub(super) fn jobs(p: &Problem, requests: &[Request]) -> Vec<Job> {
    let mut jobs = Vec::new();
    let queries = match p.block_q {
        0 => (JOB_ROWS / p.group()).max(8),
        rows => rows / p.group(),
    };
    for request in requests {
        for block in (0..request.q_len.div_ceil(queries)).rev() {
            let queries = block * queries..((block + 1) * queries).min(request.q_len);
            let keys = keys_of(p, request, &queries);
            let first = keys.start / SEGMENT;
            let segments = first..keys.end.div_ceil(SEGMENT).max(first);
            jobs.push(Job {
                request: *request,
                kv_heads: 0..p.num_kv_heads,
                queries,
                segments,
                partial: None,
            });
        }
    }
    let heads = heads_of_job(p, &jobs);
    let starts = (0..p.num_kv_heads).step_by(heads);
    let parts = starts.flat_map(|first| {
        let kv_heads = first..(first + heads).min(p.num_kv_heads);
        jobs.iter().map(move |job| Job { kv_heads: kv_heads.clone(), ..job.clone() })
    });
    parts.collect()
}

/// How many KV heads go into one job.
fn heads_of_job(p: &Problem, jobs: &[Job]) -> usize {
    let few_rows = jobs.iter().all(|job| job.queries.len() * p.group() <= SPLIT_ROWS / 4);
    if !few_rows || p.k.head > p.k.token || p.v.head > p.v.token {
        return 1;
    }
    let segments: usize = jobs.iter().map(|job| job.segments.len().max(1)).sum();
    let mut heads = p.num_kv_heads;
    while heads > 1 && segments * p.num_kv_heads.div_ceil(heads) < JOBS_PER_THREAD * num_threads() {
        heads = heads.div_ceil(2);
    }
    heads
}

/// All keys that some of the queries see.
pub(super) fn keys_of(p: &Problem, request: &Request, queries: &Range<usize>) -> Range<usize> {
    let keys = |i: usize| p.keys(i, request.q_len, request.kv_len);
    // Both ends of what is seen ascend with the query.
    keys(queries.start).start..keys(queries.end - 1).end
}
