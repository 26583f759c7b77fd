//! Packs queries into rows, and a block of keys and values into panels.

#[cfg(target_arch = "x86_64")]
use super::band::Band;
use super::cache::{Block, Run};
use super::memory::Strategy;
use super::work::Work;
use crate::cpu::gemm::{Blocks, Matrix, Place};
use std::ops::Range;

impl Work<'_> {
    /// Consecutive queries of a head.
    pub(super) fn queries(&self, head: usize, query: usize, rows: usize) -> Matrix {
        let (call, request) = (self.call, &self.job.request);
        let place = [request.batch, request.first_query + query, head];
        Matrix {
            data: call.q.at(call.dtype.size(), place) as *const u8,
            dtype: call.dtype,
            rows,
            k: call.head_dim,
            row_stride: call.q.token,
            k_stride: call.q.dim,
        }
    }

    /// Packs the queries of the job, band by band.
    ///
    /// # Safety
    /// The memory must hold the rows of all bands.
    pub(super) unsafe fn pack_queries(&self, blocks: &Blocks) {
        let (group, queries) = (self.call.group, &self.job.queries);
        for (head, kv_head) in self.job.kv_heads.clone().enumerate() {
            let to = self.memory.queries.at(head * self.space.head_bands);
            for g in 0..group {
                let matrix = self.queries(kv_head * group + g, queries.start, queries.len());
                let to = to.wrapping_add(g * queries.len() * Blocks::ROW);
                // SAFETY: the queries are those of the request; the rows of a head's bands follow each other.
                unsafe { blocks.pack_rows(&matrix, 0..queries.len(), to.cast()) };
            }
        }
    }

    /// Packs the rows of one band.
    ///
    /// # Safety
    /// `to` must hold its rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) unsafe fn pack_band(&self, blocks: &Blocks, band: &Band<'_>, to: *mut f32) {
        let mut r = 0;
        while r < band.rows() {
            let (head, query, rows) = band.run(r);
            let matrix = self.queries(head, query, rows);
            // SAFETY: the queries are those of the request; the caller's rows are as many.
            unsafe { blocks.pack_rows(&matrix, 0..rows, to.wrapping_add(r * Blocks::ROW).cast()) };
            r += rows;
        }
    }

    /// Packs a block of some heads, and prefetches what comes after it. Where rows are few, memory is the limit: all
    /// heads of some tokens are packed before those of the next, as they lie in memory.
    ///
    /// # Safety
    /// The keys must be the request's, and the memory hold panels of as many heads.
    pub(super) unsafe fn pack_block(&self, blocks: &Blocks, block: &Block<'_>, heads: Range<usize>) {
        let Work { call, space, memory, .. } = self;
        let (cache, head_dim) = (&call.cache, call.head_dim);
        let packing = Packing { work: self, blocks, count: block.keys.len() };
        let most = if space.head_bands == 1 { Blocks::TILE } else { usize::MAX };
        let values_too = !matches!(space.strategy, Strategy::InPlace { .. });
        let mut key = block.keys.start;
        while key < block.keys.end {
            let mut packed = 0;
            for (index, kv_head) in heads.clone().enumerate() {
                let of = block.of_head(kv_head);
                // SAFETY: passed on.
                unsafe {
                    let [keys, values] = if cache.is_gathered() {
                        let copies = memory.gathered.wrapping_add(Blocks::TILE * head_dim);
                        let keys = cache.gather(&cache.k, head_dim, &of, key, memory.gathered.cast());
                        [keys, cache.gather(&cache.v, head_dim, &of, key, copies.cast())]
                    } else {
                        [&cache.k, &cache.v].map(|heads| cache.run(heads, &of, key, most))
                    };
                    packed = keys.at.len();
                    packing.keys(&keys, memory.keys.at(index));
                    if values_too {
                        packing.values(&values, memory.values.at(index));
                    }
                }
            }
            key += packed;
        }
    }
}

/// What is the same for all runs of a block.
struct Packing<'a> {
    work: &'a Work<'a>,
    blocks: &'a Blocks,
    /// Keys of the block.
    count: usize,
}

impl Packing<'_> {
    /// Keys are columns, elements of a head units.
    ///
    /// # Safety
    /// The run must be readable, and `to` hold a block's keys.
    unsafe fn keys(&self, run: &Run, to: *mut f32) {
        let call = self.work.call;
        let matrix = Matrix {
            data: run.data,
            dtype: call.cache.dtype,
            rows: run.at.len(),
            k: call.head_dim,
            row_stride: run.token,
            k_stride: run.dim,
        };
        let last = run.at.end == self.count;
        let end = if last { run.at.end.next_multiple_of(Blocks::PANEL) } else { run.at.end };
        let units = self.work.space.units;
        let place = Place { columns: run.at.start..end, units: 0..units, panel: units };
        // SAFETY: passed on.
        unsafe { self.blocks.pack_panels(&matrix, run.ahead, &place, to.cast()) };
    }

    /// Elements of a head are columns, keys units.
    ///
    /// # Safety
    /// The run must be readable, and `to` hold a block's values.
    unsafe fn values(&self, run: &Run, to: *mut f32) {
        let Work { call, space, .. } = self.work;
        let matrix = Matrix {
            data: run.data,
            dtype: call.cache.dtype,
            rows: call.head_dim,
            k: run.at.len(),
            row_stride: run.dim,
            k_stride: run.token,
        };
        let end = if run.at.end == self.count { space.block_keys } else { run.at.end };
        let per_unit = self.blocks.per_unit();
        let units = run.at.start / per_unit..end / per_unit;
        let columns = 0..space.panels * Blocks::PANEL;
        let place = Place { columns, units, panel: space.value_units };
        // SAFETY: passed on.
        unsafe { self.blocks.pack_panels(&matrix, run.ahead, &place, to.cast()) };
    }
}
