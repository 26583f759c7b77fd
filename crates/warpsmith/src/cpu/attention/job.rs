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
#[cfg(target_arch = "x86_64")]
use {
    super::direct,
    super::split::{FewPlaces, Places, Split},
    crate::cpu::Tier,
};

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
        #[cfg(target_arch = "x86_64")]
        if S::TIER == Tier::Avx512 && space.splits {
            // SAFETY: operands are split on tiles alone; the space has room for all of them, and for the bands.
            unsafe { self.split_job(s, blocks, space, job, &mut bands, queries, packed, band_scratch) };
            return;
        }
        #[cfg(target_arch = "x86_64")]
        if S::TIER == Tier::Avx512 && T::DTYPE == DType::BF16 && space.direct {
            let places = direct::Places::at(space, queries, band_scratch);
            // SAFETY: the space has room for all of this, and for the bands.
            unsafe {
                self.pack_columns(blocks, space, job, &bands, places);
                self.walk(
                    s,
                    space,
                    job,
                    &mut bands,
                    places.scratch(0),
                    #[inline(always)]
                    |bands, block| self.block_direct(s, blocks, space, bands, job, block, places),
                );
            }
            return;
        }
        // SAFETY: the space has room for the rows of all bands, and holds what blocks of keys need.
        unsafe {
            self.pack_queries(blocks, space, job, queries);
            self.walk(
                s,
                space,
                job,
                &mut bands,
                band_scratch,
                #[inline(always)]
                |bands, block| match space.in_place {
                    true => {
                        let kv_heads = job.kv_heads.clone();
                        self.block_in_place(
                            s,
                            blocks,
                            space,
                            bands,
                            kv_heads,
                            block,
                            queries,
                            packed,
                            band_scratch,
                        );
                    }
                    false => self.block(s, blocks, space, bands, job, block, queries, packed, band_scratch),
                },
            );
        }
    }

    /// A job whose operands are split; `planes` are past all else in the space.
    ///
    /// # Safety
    /// As for [`Self::job`], on tiles.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn split_job<'b, S: Simd>(
        &self,
        s: S,
        blocks: &mut Blocks,
        space: &Space,
        job: &'b Job,
        bands: &mut [Band<'b>],
        queries: *mut f32,
        packed: Packed,
        planes: *mut f32,
    ) {
        // SAFETY: passed on.
        unsafe {
            if space.few {
                let places = FewPlaces::at(queries, packed.gathered, planes);
                let mut few = self.split_few_queries(blocks, space, job, bands, places);
                return self.walk(
                    s,
                    space,
                    job,
                    bands,
                    places.scratch(0),
                    #[inline(always)]
                    |bands, block| self.block_few(s, blocks, space, bands, job, block, places, &mut few),
                );
            }
            let places = Places { queries, packed, planes, scratch: planes.wrapping_add(space.planes()) };
            let mut split = Split::new(space);
            self.split_queries(blocks, space, job, bands, places, &mut split);
            self.walk(
                s,
                space,
                job,
                bands,
                places.scratch,
                #[inline(always)]
                |bands, block| self.block_split(s, blocks, space, bands, job, block, places, &mut split),
            );
        }
    }

    /// Lets the keys of a job go past its bands, block by block, and writes the results; `scratch` is a band's.
    ///
    /// # Safety
    /// The bands must be the job's, and `each` add what they see of a block to their sums.
    #[inline(always)]
    unsafe fn walk<'b, S: Simd>(
        &self,
        s: S,
        space: &Space,
        job: &'b Job,
        bands: &mut [Band<'b>],
        scratch: *mut f32,
        mut each: impl FnMut(&mut [Band<'b>], &Block<'_>),
    ) {
        let call = self.call;
        let seen = keys_of(call, &job.request, &job.queries);
        for segment in job.segments.clone() {
            for band in bands.iter_mut() {
                // SAFETY: passed on.
                unsafe { band.begin() };
            }
            let end = ((segment + 1) * SEGMENT).min(seen.end);
            for first in (segment * SEGMENT..end).step_by(space.block_keys) {
                let next = (first + space.block_keys).min((segment + 1) * SEGMENT);
                let keys = first..next.min(job.request.kv_len);
                if keys.end <= seen.start {
                    continue;
                }
                // Many rows keep memory waiting for a whole block. For few, what is asked for should be near.
                let ahead = if space.head_bands == 1 { Blocks::TILE / 2 } else { space.block_keys };
                each(bands, &Block { request: &job.request, kv_head: 0, keys, ahead });
            }
            for band in bands.iter_mut() {
                // SAFETY: the states are the band's own.
                unsafe { band.end(s, call.head_dim) };
            }
        }
        if job.partial.is_none() {
            for band in bands.iter() {
                // SAFETY: the rows are the job's.
                unsafe { band.finish::<T, S>(s, call, scratch) };
            }
        }
    }

    /// Lets a block of keys go past the rows of all bands of a job.
    ///
    /// # Safety
    /// The keys must be the request's; the queries be packed; the space hold the panels, `scratch` be a band's.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn block<S: Simd>(
        &self,
        s: S,
        blocks: &mut Blocks,
        space: &Space,
        bands: &mut [Band<'_>],
        job: &Job,
        block: &Block<'_>,
        queries: *const f32,
        packed: Packed,
        scratch: *mut f32,
    ) {
        let call = self.call;
        let narrow = blocks.dtype() == DType::BF16;
        // SAFETY: passed on.
        unsafe { call.cache.pack(blocks, space, call.head_dim, block, job.kv_heads.clone(), packed) };
        for (index, band) in bands.iter_mut().enumerate() {
            let head = index / space.head_bands;
            let panels = band.panels(block.keys.clone());
            if panels.is_empty() {
                continue;
            }
            let left = queries.wrapping_add(index * space.rows * Blocks::ROW);
            let keys = packed.keys.wrapping_add(head * space.keys());
            let values = packed.values.wrapping_add(head * space.values());
            // SAFETY: the panels are packed, the band's rows too, and its scratch is this thread's.
            unsafe {
                self.scores(blocks, space, band, &panels, left, keys, scratch);
                let view = band.view(call, block.keys.start, panels.clone(), scratch);
                band.softmax::<T, S>(s, call, narrow, &view);
                self.weigh(blocks, space, band, &panels, values, scratch);
            }
        }
    }

    /// Packs the rows of one band.
    ///
    /// # Safety
    /// `to` must hold its rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) unsafe fn pack_band(&self, blocks: &Blocks, job: &Job, band: &Band<'_>, to: *mut f32) {
        let mut r = 0;
        while r < band.rows() {
            let (head, query, rows) = band.run(r);
            let matrix = self.queries(job, head, query, rows);
            // SAFETY: the queries are those of the request; the caller's rows are as many.
            unsafe { blocks.pack_rows(&matrix, 0..rows, to.wrapping_add(r * Blocks::ROW).cast()) };
            r += rows;
        }
    }

    /// Consecutive queries of a head.
    fn queries(&self, job: &Job, head: usize, query: usize, rows: usize) -> Matrix {
        let q = &self.call.q;
        let place = [job.request.batch, job.request.first_query + query, head];
        Matrix {
            data: q.at(T::DTYPE.size(), place) as *const u8,
            dtype: T::DTYPE,
            rows,
            k: self.call.head_dim,
            row_stride: q.token,
            k_stride: q.dim,
        }
    }

    /// Packs the queries of a job, band by band.
    ///
    /// # Safety
    /// `queries` must hold the rows of all bands.
    unsafe fn pack_queries(&self, blocks: &Blocks, space: &Space, job: &Job, queries: *mut f32) {
        let call = self.call;
        for (head, kv_head) in job.kv_heads.clone().enumerate() {
            let to = queries.wrapping_add(head * space.head_bands * space.rows * Blocks::ROW);
            for g in 0..call.group {
                let matrix =
                    self.queries(job, kv_head * call.group + g, job.queries.start, job.queries.len());
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
