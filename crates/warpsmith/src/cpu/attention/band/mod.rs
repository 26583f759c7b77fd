//! A band: the rows that one matrix product computes together, and their softmax.

mod results;
mod softmax;

// Only tiles have the softmax done in pieces.
#[cfg(target_arch = "x86_64")]
pub(super) use softmax::Growth;
pub(super) use softmax::View;

use super::call::{Call, KEYS};
use super::dropout::HeadDropout;
use super::plan::Job;
use super::state::{ROWS, State};
use super::work::Work;
use crate::cpu::gemm::Blocks;
use std::ops::Range;

const PANEL: usize = Blocks::PANEL;

/// Rows of a job.
pub(super) struct Band<'a> {
    call: &'a Call<'a>,
    job: &'a Job,
    kv_head: usize,
    /// The first row of its head.
    first: usize,
    rows: usize,
    /// Factor of the scores.
    scale: f32,
    /// Factor of the values.
    value_scale: f32,
    /// The keys each row sees, before masking.
    seen: [(usize, usize); ROWS],
    /// The keys that some row sees.
    keys: Range<usize>,
    /// All segments so far.
    total: State,
    /// The present segment.
    current: State,
    has_sums: bool,
}

impl<'a> Band<'a> {
    /// Band `index` of a job, with nothing accumulated yet.
    ///
    /// # Safety
    /// The memory must be the caller's, and hold what the space says.
    pub unsafe fn new(work: &Work<'a>, index: usize) -> Band<'a> {
        let Work { call, job, ref space, ref memory } = *work;
        let [total, current] =
            [memory.total, memory.current].map(|states| State::at(states.at(index), space.rows));
        let first = index % space.head_bands * space.rows;
        let rows = first..(first + space.rows).min(job.queries.len() * call.group);
        let mut seen = [(0, 0); ROWS];
        let (mut start, mut end) = (usize::MAX, 0);
        for (slot, row) in seen.iter_mut().zip(rows.clone()) {
            let query = job.queries.start + row % job.queries.len();
            let range = (call.keys)(query, &job.request);
            if !range.is_empty() {
                (start, end) = (start.min(range.start), end.max(range.end));
            }
            *slot = (range.start, range.end);
        }
        let kv_head = job.kv_heads.start + index / space.head_bands;
        // SAFETY: the memory has room for the states; the scales of the KV head are there.
        let [k_scale, v_scale] = unsafe {
            total.clear();
            [call.cache.k_scale, call.cache.v_scale].map(|scale| scale.map_or(1.0, |scale| scale.at(kv_head)))
        };
        Band {
            call,
            job,
            kv_head,
            first,
            rows: rows.len(),
            scale: call.scale * k_scale,
            value_scale: v_scale * call.dropout.map_or(1.0, |dropout| dropout.factor()),
            seen,
            keys: start.min(end)..end,
            total,
            current,
            has_sums: false,
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Whether a row sees a key, before masking.
    #[cfg(target_arch = "x86_64")]
    pub fn sees(&self, r: usize, key: usize) -> bool {
        (self.seen[r].0..self.seen[r].1).contains(&key)
    }

    pub fn kv_head(&self) -> usize {
        self.kv_head
    }

    /// The key of a row that sees no other, and where its score is, if the view has it.
    #[inline]
    pub fn single_score(&self, view: &View, r: usize) -> Option<(usize, *mut f32)> {
        let (key, end) = self.seen[r];
        (end.wrapping_sub(key) == 1).then(|| view.score(r, key)).flatten().map(|score| (key, score))
    }

    /// Dropout of a row: that of its head, and the query.
    #[inline(always)]
    fn dropout(&self, r: usize) -> Option<(HeadDropout, usize)> {
        let dropout = self.call.dropout?;
        let (head, query) = self.place(r);
        Some((dropout.of_head(self.job.request.number, head), query))
    }

    /// The run of rows from `r` on whose queries are consecutive: head and query of the first row, and the number of
    /// rows.
    #[cfg(target_arch = "x86_64")]
    pub fn run(&self, r: usize) -> (usize, usize, usize) {
        let (head, query) = self.place(r);
        (head, query, (self.rows - r).min(self.job.queries.end - query))
    }

    /// The query head and the query of a row.
    #[inline]
    pub fn place(&self, r: usize) -> (usize, usize) {
        let row = self.first + r;
        let len = self.job.queries.len();
        (self.kv_head * self.call.group + row / len, self.job.queries.start + row % len)
    }

    /// The panels of a block of keys that some row sees.
    pub fn panels(&self, block: &Range<usize>) -> Range<usize> {
        let from = self.keys.start.max(block.start);
        let to = self.keys.end.min(block.end);
        if from >= to { 0..0 } else { (from - block.start) / PANEL..(to - block.start).div_ceil(PANEL) }
    }

    /// The scores of a panel of keys.
    pub fn scores(scratch: *mut f32, panel: usize) -> *mut f32 {
        scratch.wrapping_add(panel.wrapping_mul(ROWS * PANEL))
    }

    /// The exponentials, as rows of a left operand.
    pub fn exponentials(scratch: *mut f32) -> *mut f32 {
        Self::scores(scratch, KEYS / PANEL)
    }

    /// The sums over the present segment, from column `panel * PANEL` on.
    pub fn sums(&self, panel: usize) -> *mut f32 {
        self.current.row(0, panel * PANEL)
    }

    /// Whether there are such sums.
    pub fn has_sums(&self) -> bool {
        self.has_sums
    }

    /// Marks the sums as present.
    pub fn note_sums(&mut self) {
        self.has_sums = true;
    }

    /// Begins a segment.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    pub unsafe fn begin(&mut self) {
        self.has_sums = false;
        // SAFETY: passed on.
        unsafe { self.current.clear() };
    }
}
