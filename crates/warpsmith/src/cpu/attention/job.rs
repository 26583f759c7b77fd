//! Jobs: blocks of keys and values go past the rows of a job, band by band.

use super::band::{Band, State};
use super::cache::{Block, Packed};
use super::plan::{Job, keys_of};
use super::{Call, Partials, SEGMENT, Space};
use crate::cpu::gemm::{BlockProduct, Blocks, Isa, Matrix};
use crate::cpu::{CpuElement, Simd, Task};
use crate::dtype::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// Computes jobs.
pub(super) struct Compute<'a, T> {
    pub call: &'a Call<'a>,
    pub jobs: &'a [Job],
    pub partials: Partials,
    /// The space of the largest job.
    pub scratch: *mut f32,
    pub t: PhantomData<T>,
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        for job in self.jobs {
            let space = Space::new(&blocks, self.call, job);
            // SAFETY: the scratch holds the space; jobs write different rows of the outputs.
            unsafe { self.job(s, &mut blocks, &space, job, self.scratch) }
        }
    }
}

impl<T: CpuElement> Compute<'_, T> {
    /// # Safety
    /// `scratch` must hold the space, and nobody else write the rows of the job.
    #[inline(always)]
    unsafe fn job<S: Simd>(&self, s: S, blocks: &mut Blocks, space: &Space, job: &Job, scratch: *mut f32) {
        let call = self.call;
        // What is merged later is left where it is looked for then.
        let total = match job.partial {
            Some(index) => self.partials.data.wrapping_add(index * self.partials.stride),
            None => scratch,
        };
        let current = scratch.wrapping_add(space.state());
        let queries = current.wrapping_add(space.state());
        let keys = queries.wrapping_add(space.queries());
        let values = keys.wrapping_add(space.heads * space.keys());
        let gathered = values.wrapping_add(space.heads * space.values());
        let band_scratch = gathered.wrapping_add(space.gathered);
        let packed = Packed { keys, values, gathered };
        let mut bands = Vec::with_capacity(space.bands);
        for index in 0..space.bands {
            let at = index * (space.sums() + State::LEN);
            let [total, current] = [total, current].map(|data| State::at(data.wrapping_add(at), space));
            // SAFETY: the scratch holds the states of all bands.
            bands.push(unsafe { Band::new(call, space, job, index, total, current) });
        }
        // SAFETY: the space has room for the rows of all bands.
        unsafe { self.pack_queries(blocks, space, job, queries) };
        let seen = keys_of(call, &job.request, &job.queries);
        for segment in job.segments.clone() {
            for band in &mut bands {
                // SAFETY: as above.
                unsafe { band.begin() };
            }
            let end = ((segment + 1) * SEGMENT).min(seen.end);
            for first in (segment * SEGMENT..end).step_by(space.block_keys) {
                let next = (first + space.block_keys).min((segment + 1) * SEGMENT);
                let in_block = first..next.min(job.request.kv_len);
                if in_block.end <= seen.start {
                    continue;
                }
                // Many rows keep memory waiting for a whole block. For few, what is asked for should be near.
                let ahead = if space.head_bands == 1 { Blocks::TILE / 2 } else { space.block_keys };
                let block = Block { request: &job.request, kv_head: 0, keys: in_block.clone(), ahead };
                if space.in_place {
                    let kv_heads = job.kv_heads.clone();
                    // SAFETY: the block's keys are the request's; the space holds what it needs.
                    unsafe {
                        self.block_in_place(
                            s,
                            blocks,
                            space,
                            &mut bands,
                            kv_heads,
                            &block,
                            queries,
                            packed,
                            band_scratch,
                        )
                    };
                    continue;
                }
                let kv_heads = job.kv_heads.clone();
                // SAFETY: the block's keys are the request's; the space holds the panels.
                unsafe { call.cache.pack(blocks, space, call.head_dim, &block, kv_heads, packed) };
                for head in 0..job.kv_heads.len() {
                    let keys = keys.wrapping_add(head * space.keys());
                    let values = values.wrapping_add(head * space.values());
                    for index in head * space.head_bands..(head + 1) * space.head_bands {
                        let band = &mut bands[index];
                        let panels = band.panels(in_block.clone());
                        if panels.is_empty() {
                            continue;
                        }
                        let left = queries.wrapping_add(index * space.rows * Blocks::ROW);
                        let narrow = blocks.dtype() == DType::BF16;
                        // SAFETY: the panels are packed, the band's rows too, and its scratch is this thread's.
                        unsafe {
                            self.scores(blocks, space, band, &panels, left, keys, band_scratch);
                            band.softmax::<T, S>(s, self.call, narrow, first, &panels, band_scratch);
                            self.weigh(blocks, space, band, &panels, values, band_scratch);
                        }
                    }
                }
            }
            for band in &mut bands {
                // SAFETY: the states are the band's own.
                unsafe { band.end(s, call.head_dim) };
            }
        }
        if job.partial.is_none() {
            for band in &bands {
                // SAFETY: the rows are the job's.
                unsafe { band.finish::<T, S>(s, self.call, band_scratch) };
            }
        }
    }

    /// Packs the queries of a job, band by band.
    ///
    /// # Safety
    /// `queries` must hold the rows of all bands.
    unsafe fn pack_queries(&self, blocks: &Blocks, space: &Space, job: &Job, queries: *mut f32) {
        let call = self.call;
        let (batch, token) = (job.request.batch, job.request.first_query + job.queries.start);
        for (head, kv_head) in job.kv_heads.clone().enumerate() {
            let to = queries.wrapping_add(head * space.head_bands * space.rows * Blocks::ROW);
            for g in 0..call.group {
                let head = kv_head * call.group + g;
                let matrix = Matrix {
                    data: call.q.at(T::DTYPE.size(), [batch, token, head]) as *const u8,
                    dtype: T::DTYPE,
                    rows: job.queries.len(),
                    k: call.head_dim,
                    row_stride: call.q.token,
                    k_stride: call.q.dim,
                };
                let to = to.wrapping_add(g * job.queries.len() * Blocks::ROW);
                // SAFETY: the queries are those of the request; the caller's rows are as many.
                unsafe { blocks.pack_rows(&matrix, 0..job.queries.len(), to.cast()) };
            }
        }
    }

    /// The scores of a band over some panels of keys.
    ///
    /// # Safety
    /// The operands must be packed, `scratch` be a band's.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn scores(
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
                right_width: Blocks::PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
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
                right_width: Blocks::PANEL as isize,
                right_ahead: Blocks::PANEL_AHEAD,
                cols: Blocks::PANEL.min(self.call.head_dim - column * Blocks::PANEL),
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
pub(super) struct Merge<'a, T> {
    pub call: &'a Call<'a>,
    pub jobs: &'a [Job],
    /// The first partial of each job.
    pub firsts: &'a [usize],
    pub partials: Partials,
    /// The space of the largest job.
    pub scratch: *mut f32,
    pub t: PhantomData<T>,
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let call = self.call;
        let blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        for (job, &first) in self.jobs.iter().zip(self.firsts) {
            let space = Space::new(&blocks, call, job);
            let band_scratch = self.scratch.wrapping_add(space.state());
            for index in 0..space.bands {
                let at = index * (space.sums() + State::LEN);
                let state = State::at(self.scratch.wrapping_add(at), &space);
                // SAFETY: the scratch holds the states of all bands.
                let mut band = unsafe { Band::new(call, &space, job, index, state, state) };
                for part in 0..job.segments.len() {
                    let data = self.partials.data.wrapping_add((first + part) * self.partials.stride + at);
                    // SAFETY: the partial was written by the job of this segment, in the same layout.
                    unsafe { band.merge(s, State::at(data, &space), call.head_dim) };
                }
                // SAFETY: the rows are the job's alone.
                unsafe { band.finish::<T, S>(s, self.call, band_scratch) };
            }
        }
    }
}
