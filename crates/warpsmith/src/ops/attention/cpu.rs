//! `attention` on the CPU, one source for all tiers.
//!
//! The queries that share a KV head, those of all its query heads, are cut into *jobs* of some [`JOB_ROWS`] rows. A job
//! walks through the keys in blocks of [`KEYS`]: each block is packed once for all its rows, which go through it in *bands*
//! of as many rows as one product takes. Scores, exponentials and sums of a band stay in the first cache.
//!
//! # The order of sums
//! The context is cut at multiples of [`SEGMENT`] keys. Each segment has a softmax of its own, whose running maximum is
//! raised block by block, and the segments are merged in ascending order. So segments can be computed by one thread after
//! the other or by many at once, and a row's bits depend on its own keys alone.

mod band;

use super::problem::{Heads, Problem};
use super::{K, KV_STARTS, OUT, Q, Q_STARTS, V};
use crate::cpu::gemm::{BlockProduct, Blocks, Isa, Matrix, Slot, with_scratch};
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, Simd, Task, dispatch, num_threads, parallel_for};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::registry::Launch;
use band::{Band, State};
use std::marker::PhantomData;
use std::ops::Range;

/// Keys of a block.
const KEYS: usize = 128;
/// Keys of a segment.
const SEGMENT: usize = 8 * KEYS;
/// Rows of a job: their sums fit the second cache, and pay for packing the keys.
const JOB_ROWS: usize = 256;
/// Jobs of at most this many rows are split over segments where there are few of them.
const SPLIT_ROWS: usize = 64;

/// Where the tokens of a request are.
#[derive(Clone, Copy)]
struct Request {
    /// Index of the batch; zero for packed requests.
    batch: usize,
    first_query: usize,
    q_len: usize,
    first_key: usize,
    kv_len: usize,
}

/// Consecutive queries of all heads of a KV head, and the segments to compute.
#[derive(Clone)]
struct Job {
    request: Request,
    kv_head: usize,
    queries: Range<usize>,
    segments: Range<usize>,
    /// Where the results of the segments go, instead of the tensors, if they are merged later: an index of partials.
    partial: Option<usize>,
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let requests = requests(launch)?;
    let jobs = jobs(p, &requests);
    let segments: usize = jobs.iter().map(|job| job.segments.len()).sum();
    let split = jobs.len() < 4 * num_threads()
        && segments > jobs.len()
        && jobs.iter().all(|job| job.queries.len() * p.group() <= SPLIT_ROWS);
    let work = |jobs: &[Job], partials: Partials| {
        parallel_for(jobs.len(), 1, |range| {
            with_float!(p.dtype, T => {
                dispatch(launch.tier, Compute::<T> { launch, jobs: &jobs[range], partials, t: PhantomData })
            });
        });
    };
    if !split {
        work(&jobs, Partials::default());
        return Ok(());
    }
    let mut parts = Vec::with_capacity(segments);
    for job in &jobs {
        for segment in job.segments.clone() {
            let partial = Some(parts.len());
            parts.push(Job { segments: segment..segment + 1, partial, ..job.clone() });
        }
    }
    let stride = Space::new(&Blocks::new(Isa::of_tier(launch.tier), p.dtype), p, SPLIT_ROWS).state();
    with_scratch(Slot::Shared, parts.len() * stride * size_of::<f32>(), |data| {
        let partials = Partials { data: data.cast(), stride };
        work(&parts, partials);
        let firsts: Vec<usize> = jobs
            .iter()
            .scan(0, |next, job| Some(std::mem::replace(next, *next + job.segments.len())))
            .collect();
        parallel_for(jobs.len(), 1, |range| {
            with_float!(p.dtype, T => {
                let (jobs, firsts) = (&jobs[range.clone()], &firsts[range]);
                dispatch(launch.tier, Merge::<T> { launch, jobs, firsts, partials, t: PhantomData })
            });
        });
    });
    Ok(())
}

/// The requests, in bounds.
fn requests(launch: &Launch<'_, Problem>) -> Result<Vec<Request>> {
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
fn jobs(p: &Problem, requests: &[Request]) -> Vec<Job> {
    let mut jobs = Vec::new();
    let queries = (JOB_ROWS / p.group()).max(8);
    for request in requests {
        for kv_head in 0..p.num_kv_heads {
            for block in (0..request.q_len.div_ceil(queries)).rev() {
                let queries = block * queries..((block + 1) * queries).min(request.q_len);
                let keys = keys_of(p, request, &queries);
                let segments = keys.start / SEGMENT..keys.end.div_ceil(SEGMENT).max(keys.start / SEGMENT);
                jobs.push(Job { request: *request, kv_head, queries, segments, partial: None });
            }
        }
    }
    jobs
}

/// All keys that some of the queries see.
fn keys_of(p: &Problem, request: &Request, queries: &Range<usize>) -> Range<usize> {
    let keys = |i: usize| p.keys(i, request.q_len, request.kv_len);
    // Both ends of what is seen ascend with the query.
    keys(queries.start).start..keys(queries.end - 1).end
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
    rows: usize,
    bands: usize,
    /// Panels of the values, and units of a row of queries.
    panels: usize,
    units: usize,
    value_units: usize,
}

impl Space {
    fn new(blocks: &Blocks, p: &Problem, rows: usize) -> Space {
        Space {
            rows: blocks.rows(),
            bands: rows.div_ceil(blocks.rows()),
            panels: p.head_dim.div_ceil(Blocks::PANEL),
            units: blocks.units(p.head_dim),
            value_units: KEYS / blocks.per_unit(),
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
        self.bands * self.rows * Blocks::ROW
    }

    fn keys(&self) -> usize {
        KEYS * self.units
    }

    fn values(&self) -> usize {
        self.panels * Blocks::PANEL * self.value_units
    }

    fn total(&self) -> usize {
        2 * self.state() + self.queries() + self.keys() + self.values() + Band::SCRATCH
    }
}

/// Computes jobs.
struct Compute<'a, T> {
    launch: &'a Launch<'a, Problem>,
    jobs: &'a [Job],
    partials: Partials,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut blocks = Blocks::new(Isa::of_tier(self.launch.tier), T::DTYPE);
        for job in self.jobs {
            let rows = job.queries.len() * self.launch.problem.group();
            let space = Space::new(&blocks, self.launch.problem, rows);
            with_scratch(Slot::Own, space.total() * size_of::<f32>(), |scratch| {
                // SAFETY: the scratch holds the space; jobs write different rows of the outputs.
                unsafe { self.job(s, &mut blocks, &space, job, scratch.cast()) }
            });
        }
    }
}

/// Tensor `index` from the first token of a request on, as rows of heads.
fn head_of(
    launch: &Launch<'_, Problem>,
    index: usize,
    heads: &Heads,
    token: [usize; 2],
    head: usize,
) -> usize {
    let [batch, token] = token;
    let offset = batch as isize * heads.batch + token as isize * heads.token + head as isize * heads.head;
    launch.args.address(index).wrapping_add_signed(offset * launch.problem.dtype.size() as isize)
}

impl<T: CpuElement> Compute<'_, T> {
    /// # Safety
    /// `scratch` must hold the space, and nobody else write the rows of the job.
    #[inline(always)]
    unsafe fn job<S: Simd>(&self, s: S, blocks: &mut Blocks, space: &Space, job: &Job, scratch: *mut f32) {
        let p = self.launch.problem;
        let Request { batch, first_query, first_key, kv_len, .. } = job.request;
        let rows = job.queries.len() * p.group();
        let total = scratch;
        let current = total.wrapping_add(space.state());
        let queries = current.wrapping_add(space.state());
        let keys = queries.wrapping_add(space.queries());
        let values = keys.wrapping_add(space.keys());
        let band_scratch = values.wrapping_add(space.values());
        for g in 0..p.group() {
            let token = [batch, first_query + job.queries.start];
            let matrix = Matrix {
                data: head_of(self.launch, Q, &p.q, token, job.kv_head * p.group() + g) as *const u8,
                dtype: T::DTYPE,
                rows: job.queries.len(),
                k: p.head_dim,
                row_stride: p.q.token,
                k_stride: p.q.dim,
            };
            let to = queries.wrapping_add(g * job.queries.len() * Blocks::ROW);
            // SAFETY: the queries are those of the request; the space has their rows.
            unsafe { blocks.pack_rows(&matrix, 0..job.queries.len(), to.cast()) };
        }
        let mut bands: Vec<Band> = (0..space.bands)
            .map(|band| {
                let first = band * space.rows;
                let at = band * (space.sums() + State::LEN);
                let [total, current] = [total, current].map(|data| State::at(data.wrapping_add(at), space));
                // SAFETY: the scratch holds the states of all bands.
                unsafe { Band::new(p, first..(first + space.rows).min(rows), job, total, current) }
            })
            .collect();
        let seen = keys_of(p, &job.request, &job.queries);
        let head =
            |index: usize, heads: &Heads| head_of(self.launch, index, heads, [batch, first_key], job.kv_head);
        let (k, v) = (head(K, &p.k), head(V, &p.v));
        let address = |base: usize, heads: &Heads, key: usize| {
            base.wrapping_add_signed(key as isize * heads.token * size_of::<T>() as isize) as *const u8
        };
        for segment in job.segments.clone() {
            for band in &mut bands {
                // SAFETY: as above.
                unsafe { band.begin() };
            }
            let end = ((segment + 1) * SEGMENT).min(seen.end);
            for first in (segment * SEGMENT..end).step_by(KEYS) {
                let count = KEYS.min(kv_len - first);
                if first + count <= seen.start {
                    continue;
                }
                let k_block = Matrix {
                    data: address(k, &p.k, first),
                    dtype: T::DTYPE,
                    rows: count,
                    k: p.head_dim,
                    row_stride: p.k.token,
                    k_stride: p.k.dim,
                };
                let v_block = Matrix {
                    data: address(v, &p.v, first),
                    dtype: T::DTYPE,
                    rows: p.head_dim,
                    k: count,
                    row_stride: p.v.dim,
                    k_stride: p.v.token,
                };
                // SAFETY: the block's keys are the request's; the space holds the panels.
                unsafe {
                    for panel in 0..count.div_ceil(Blocks::PANEL) {
                        let to = keys.wrapping_add(panel * Blocks::PANEL * space.units);
                        blocks.pack_panel(&k_block, panel, space.units, to.cast());
                    }
                    for panel in 0..space.panels {
                        let to = values.wrapping_add(panel * Blocks::PANEL * space.value_units);
                        blocks.pack_panel(&v_block, panel, space.value_units, to.cast());
                    }
                }
                for band in &mut bands {
                    let panels = band.panels(first..first + count);
                    if panels.is_empty() {
                        continue;
                    }
                    let left = queries.wrapping_add(band.first_row() * Blocks::ROW);
                    // SAFETY: the panels are packed, the band's rows too, and its scratch is this thread's.
                    unsafe {
                        self.scores(blocks, space, band, &panels, left, keys, band_scratch);
                        band.softmax::<T, S>(
                            s,
                            self.launch,
                            blocks.dtype() == DType::BF16,
                            first,
                            &panels,
                            band_scratch,
                        );
                        self.weigh(blocks, space, band, &panels, values, band_scratch);
                    }
                }
            }
            for band in &mut bands {
                // SAFETY: the states are the band's own.
                unsafe { band.end(s, p.head_dim) };
            }
        }
        // SAFETY: the rows are the job's; a partial has room for the state.
        unsafe {
            match job.partial {
                Some(index) => {
                    let to = self.partials.data.wrapping_add(index * self.partials.stride);
                    std::ptr::copy_nonoverlapping(total, to, space.state());
                }
                None => {
                    for band in &bands {
                        band.finish::<T, S>(s, self.launch, band_scratch);
                    }
                }
            }
        }
    }

    /// The scores of a band over some panels of keys.
    ///
    /// # Safety
    /// The operands must be packed, `scratch` be a band's.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn scores(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        band: &Band,
        panels: &Range<usize>,
        left: *const f32,
        keys: *const f32,
        scratch: *mut f32,
    ) {
        for panel in panels.clone() {
            let product = BlockProduct {
                left: left.cast(),
                rows: band.rows(),
                right: keys.wrapping_add(panel * Blocks::PANEL * space.units).cast(),
                cols: Blocks::PANEL,
                units: space.units,
                out: Band::scores(scratch, panel),
                resume: false,
            };
            // SAFETY: passed on.
            unsafe { blocks.multiply(&product) };
        }
    }

    /// Adds the band's exponentials times the values of some panels of keys to its sums.
    ///
    /// # Safety
    /// As for [`Self::scores`].
    #[inline(always)]
    unsafe fn weigh(
        &self,
        blocks: &mut Blocks,
        space: &Space,
        band: &mut Band,
        panels: &Range<usize>,
        values: *const f32,
        scratch: *mut f32,
    ) {
        let per_panel = Blocks::PANEL / blocks.per_unit();
        let from = panels.start * per_panel;
        for column in 0..space.panels {
            let right = values.wrapping_add((column * space.value_units + from) * Blocks::PANEL);
            let product = BlockProduct {
                left: Band::exponentials(scratch).cast::<u32>().wrapping_add(from),
                rows: band.rows(),
                right: right.cast(),
                cols: Blocks::PANEL.min(self.launch.problem.head_dim - column * Blocks::PANEL),
                units: panels.len() * per_panel,
                out: band.sums(column),
                resume: band.has_sums(),
            };
            // SAFETY: passed on.
            unsafe { blocks.multiply(&product) };
        }
        band.note_sums();
    }
}

/// Merges the segments of jobs that were computed apart.
struct Merge<'a, T> {
    launch: &'a Launch<'a, Problem>,
    jobs: &'a [Job],
    /// The first partial of each job.
    firsts: &'a [usize],
    partials: Partials,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let blocks = Blocks::new(Isa::of_tier(self.launch.tier), T::DTYPE);
        for (job, &first) in self.jobs.iter().zip(self.firsts) {
            let rows = job.queries.len() * p.group();
            let space = Space::new(&blocks, p, rows);
            with_scratch(Slot::Own, (space.state() + Band::SCRATCH) * size_of::<f32>(), |scratch| {
                let total = scratch.cast::<f32>();
                let band_scratch = total.wrapping_add(space.state());
                for index in 0..space.bands {
                    let at = index * (space.sums() + State::LEN);
                    let range = index * space.rows..((index + 1) * space.rows).min(rows);
                    let state = State::at(total.wrapping_add(at), &space);
                    // SAFETY: the scratch holds the states of all bands.
                    let mut band = unsafe { Band::new(p, range, job, state, state) };
                    for part in 0..job.segments.len() {
                        let data =
                            self.partials.data.wrapping_add((first + part) * self.partials.stride + at);
                        // SAFETY: the partial was written by the job of this segment, in the same layout.
                        unsafe { band.merge(s, State::at(data, &space), p.head_dim) };
                    }
                    // SAFETY: the rows are the job's alone.
                    unsafe { band.finish::<T, S>(s, self.launch, band_scratch) };
                }
            });
        }
    }
}

/// Where query `i` of a request's query head has its result.
fn result_of(launch: &Launch<'_, Problem>, job: &Job, head: usize, i: usize) -> usize {
    let token = [job.request.batch, job.request.first_query + i];
    head_of(launch, OUT, &launch.problem.out, token, head)
}
