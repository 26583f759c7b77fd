//! `attention` on the CPU, one source for all tiers.
//!
//! The queries that share a KV head, those of all its query heads, are cut into *jobs* of some [`JOB_ROWS`] rows. A job
//! walks through the keys in blocks of at most [`KEYS`]: each block is packed once for all its rows, which go through it in *bands*
//! of as many rows as one product takes. Scores, exponentials and sums of a band stay in the first cache.
//!
//! # The order of sums
//! The context is cut at multiples of [`SEGMENT`] keys. Each segment has a softmax of its own, whose running maximum is
//! raised block by block, and the segments are merged in ascending order. So segments can be computed by one thread after
//! the other or by many at once, and a row's bits depend on its own keys alone.

mod band;
mod plan;

use super::problem::{BLOCKS_Q, Heads, Problem};
use super::{K, OUT, Q, V};
use crate::cpu::gemm::{BlockProduct, Blocks, Isa, Matrix, Slot, with_scratch};
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, Simd, Task, dispatch, num_threads, parallel_for};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::Result;
use crate::registry::Launch;
use band::{Band, State};
use plan::{JOBS_PER_THREAD, Job, SPLIT_ROWS, jobs, keys_of, requests};
use std::marker::PhantomData;
use std::ops::Range;

/// Keys of a block, unless the caller wants fewer, and the numbers it may want: whole panels.
const KEYS: usize = 128;
const BLOCKS_KV: [usize; 4] = [32, 64, 96, KEYS];
/// Keys of a segment.
const SEGMENT: usize = 8 * KEYS;

pub(super) fn supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    p.admits(&BLOCKS_Q, &BLOCKS_KV)?;
    if p.block_q != 0 && p.num_heads > 0 && p.group() > p.block_q {
        return Err(format!("a query of {} heads to a KV head is more than {} rows", p.group(), p.block_q));
    }
    Ok(())
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let requests = requests(launch)?;
    let jobs = jobs(p, &requests);
    let segments: usize = jobs.iter().map(|job| job.segments.len()).sum();
    let split = jobs.len() < JOBS_PER_THREAD * num_threads()
        && segments > jobs.len()
        && jobs.iter().all(|job| job.queries.len() * p.group() <= SPLIT_ROWS);
    let isa = Isa::of_tier(launch.tier);
    let blocks = Blocks::new(isa, p.dtype);
    let spaces = jobs.iter().map(|job| Space::new(&blocks, p, job));
    let Some(space) = spaces.max_by_key(|space| space.total()) else { return Ok(()) };
    // What a thread works in is fetched out here: inside, the closure would be compiled without the tier's instructions.
    let work = |jobs: &[Job], partials: Partials| {
        parallel_for(jobs.len(), 1, |range| {
            with_scratch(Slot::Own, space.total() * size_of::<f32>(), |scratch| {
                let (jobs, scratch) = (&jobs[range], scratch.cast());
                with_float!(p.dtype, T => {
                    dispatch(launch.tier, Compute::<T> { launch, jobs, partials, scratch, t: PhantomData })
                });
            });
        });
    };
    if !split {
        work(&jobs, Partials::default());
        return Ok(());
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
                with_float!(p.dtype, T => {
                    let merge = Merge::<T> { launch, jobs, firsts, partials, scratch, t: PhantomData };
                    dispatch(launch.tier, merge)
                });
            });
        });
    });
    Ok(())
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
    /// Bands of a head, and of all heads.
    head_bands: usize,
    bands: usize,
    /// Panels of the values, and units of a row of queries.
    panels: usize,
    units: usize,
    value_units: usize,
    /// Keys of a block.
    keys: usize,
}

impl Space {
    fn new(blocks: &Blocks, p: &Problem, job: &Job) -> Space {
        let keys = if p.block_kv == 0 { KEYS } else { p.block_kv };
        let head_bands = (job.queries.len() * p.group()).div_ceil(blocks.rows());
        Space {
            rows: blocks.rows(),
            head_bands,
            bands: head_bands * job.kv_heads.len(),
            panels: p.head_dim.div_ceil(Blocks::PANEL),
            units: blocks.units(p.head_dim),
            value_units: keys / blocks.per_unit(),
            keys,
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
        self.keys * self.units
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
    /// The space of the largest job.
    scratch: *mut f32,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut blocks = Blocks::new(Isa::of_tier(self.launch.tier), T::DTYPE);
        for job in self.jobs {
            let space = Space::new(&blocks, self.launch.problem, job);
            // SAFETY: the scratch holds the space; jobs write different rows of the outputs.
            unsafe { self.job(s, &mut blocks, &space, job, self.scratch) }
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
        let kv_len = job.request.kv_len;
        // What is merged later is left where it is looked for then.
        let total = match job.partial {
            Some(index) => self.partials.data.wrapping_add(index * self.partials.stride),
            None => scratch,
        };
        let current = scratch.wrapping_add(space.state());
        let queries = current.wrapping_add(space.state());
        let keys = queries.wrapping_add(space.queries());
        let values = keys.wrapping_add(space.keys());
        let band_scratch = values.wrapping_add(space.values());
        let mut bands = Vec::with_capacity(space.bands);
        for index in 0..space.bands {
            let at = index * (space.sums() + State::LEN);
            let [total, current] = [total, current].map(|data| State::at(data.wrapping_add(at), space));
            // SAFETY: the scratch holds the states of all bands.
            bands.push(unsafe { Band::new(p, space, job, index, total, current) });
        }
        // SAFETY: the space has room for the rows of all bands.
        unsafe { self.pack_queries(blocks, space, job, queries) };
        let seen = keys_of(p, &job.request, &job.queries);
        for segment in job.segments.clone() {
            for band in &mut bands {
                // SAFETY: as above.
                unsafe { band.begin() };
            }
            let end = ((segment + 1) * SEGMENT).min(seen.end);
            for first in (segment * SEGMENT..end).step_by(space.keys) {
                let block = first..(first + space.keys).min((segment + 1) * SEGMENT).min(kv_len);
                if block.end <= seen.start {
                    continue;
                }
                for (head, kv_head) in job.kv_heads.clone().enumerate() {
                    // SAFETY: the block's keys are the request's; the space holds the panels.
                    unsafe { self.pack_block(blocks, space, job, kv_head, &block, [keys, values]) };
                    for index in head * space.head_bands..(head + 1) * space.head_bands {
                        let band = &mut bands[index];
                        let panels = band.panels(block.clone());
                        if panels.is_empty() {
                            continue;
                        }
                        let left = queries.wrapping_add(index * space.rows * Blocks::ROW);
                        let narrow = blocks.dtype() == DType::BF16;
                        // SAFETY: the panels are packed, the band's rows too, and its scratch is this thread's.
                        unsafe {
                            self.scores(blocks, space, band, &panels, left, keys, band_scratch);
                            band.softmax::<T, S>(s, self.launch, narrow, first, &panels, band_scratch);
                            self.weigh(blocks, space, band, &panels, values, band_scratch);
                        }
                    }
                }
            }
            for band in &mut bands {
                // SAFETY: the states are the band's own.
                unsafe { band.end(s, p.head_dim) };
            }
        }
        if job.partial.is_none() {
            for band in &bands {
                // SAFETY: the rows are the job's.
                unsafe { band.finish::<T, S>(s, self.launch, band_scratch) };
            }
        }
    }

    /// Packs the queries of a job, band by band.
    ///
    /// # Safety
    /// `queries` must hold the rows of all bands.
    unsafe fn pack_queries(&self, blocks: &Blocks, space: &Space, job: &Job, queries: *mut f32) {
        let p = self.launch.problem;
        let token = [job.request.batch, job.request.first_query + job.queries.start];
        for (head, kv_head) in job.kv_heads.clone().enumerate() {
            let to = queries.wrapping_add(head * space.head_bands * space.rows * Blocks::ROW);
            for g in 0..p.group() {
                let matrix = Matrix {
                    data: head_of(self.launch, Q, &p.q, token, kv_head * p.group() + g) as *const u8,
                    dtype: T::DTYPE,
                    rows: job.queries.len(),
                    k: p.head_dim,
                    row_stride: p.q.token,
                    k_stride: p.q.dim,
                };
                let to = to.wrapping_add(g * job.queries.len() * Blocks::ROW);
                // SAFETY: the queries are those of the request; the caller's rows are as many.
                unsafe { blocks.pack_rows(&matrix, 0..job.queries.len(), to.cast()) };
            }
        }
    }

    /// Packs a block of keys and values of a KV head.
    ///
    /// # Safety
    /// The block must be the request's, and the targets have the space.
    unsafe fn pack_block(
        &self,
        blocks: &Blocks,
        space: &Space,
        job: &Job,
        kv_head: usize,
        block: &Range<usize>,
        [keys, values]: [*mut f32; 2],
    ) {
        let p = self.launch.problem;
        // The next head of the block is needed next, or the first of the next block.
        let ahead = |heads: &Heads| match job.kv_heads.end - kv_head {
            1 => space.keys as isize * heads.token - (job.kv_heads.len() - 1) as isize * heads.head,
            _ => heads.head,
        };
        let size = size_of::<T>() as isize;
        let token = [job.request.batch, job.request.first_key + block.start];
        let k = Matrix {
            data: head_of(self.launch, K, &p.k, token, kv_head) as *const u8,
            dtype: T::DTYPE,
            rows: block.len(),
            k: p.head_dim,
            row_stride: p.k.token,
            k_stride: p.k.dim,
        };
        // Columns are what is multiplied: for the values, elements of a head.
        let v = Matrix {
            data: head_of(self.launch, V, &p.v, token, kv_head) as *const u8,
            dtype: T::DTYPE,
            rows: p.head_dim,
            k: block.len(),
            row_stride: p.v.dim,
            k_stride: p.v.token,
        };
        // SAFETY: passed on.
        unsafe {
            blocks.pack_panels(&k, ahead(&p.k) * size, space.units, keys.cast());
            blocks.pack_panels(&v, ahead(&p.v) * size, space.value_units, values.cast());
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
    /// The space of the largest job.
    scratch: *mut f32,
    t: PhantomData<T>,
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let blocks = Blocks::new(Isa::of_tier(self.launch.tier), T::DTYPE);
        for (job, &first) in self.jobs.iter().zip(self.firsts) {
            let space = Space::new(&blocks, p, job);
            let band_scratch = self.scratch.wrapping_add(space.state());
            for index in 0..space.bands {
                let at = index * (space.sums() + State::LEN);
                let state = State::at(self.scratch.wrapping_add(at), &space);
                // SAFETY: the scratch holds the states of all bands.
                let mut band = unsafe { Band::new(p, &space, job, index, state, state) };
                for part in 0..job.segments.len() {
                    let data = self.partials.data.wrapping_add((first + part) * self.partials.stride + at);
                    // SAFETY: the partial was written by the job of this segment, in the same layout.
                    unsafe { band.merge(s, State::at(data, &space), p.head_dim) };
                }
                // SAFETY: the rows are the job's alone.
                unsafe { band.finish::<T, S>(s, self.launch, band_scratch) };
            }
        }
    }
}

/// Where query `i` of a request's query head has its result.
fn result_of(launch: &Launch<'_, Problem>, job: &Job, head: usize, i: usize) -> usize {
    let token = [job.request.batch, job.request.first_query + i];
    head_of(launch, OUT, &launch.problem.out, token, head)
}
