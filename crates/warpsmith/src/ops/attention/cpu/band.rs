//! A band: the rows that go through one product together, and their softmax.

use super::plan::Job;
use super::{KEYS, Space, result_of};
use crate::cpu::gemm::Blocks;
use crate::cpu::rows::{for_vectors, load_at};
use crate::cpu::{CpuElement, Simd, bf16, math};
use crate::dtype::DType;
use crate::ops::attention::problem::{Grid, Problem};
use crate::ops::attention::{BIAS, LSE, MASK, SINKS};
use crate::registry::Launch;
use half::{bf16 as Bf16, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The most rows of a band.
const ROWS: usize = Blocks::PANEL;
/// Lanes of the widest vectors that are summed in.
const LANES: usize = 16;
const PANEL: usize = Blocks::PANEL;

/// Lane numbers, for choosing keys.
static INDICES: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Where the rows of a band stand in one softmax: the largest score so far, the sum of the exponentials of the scores
/// less that, and the sums of the values weighted with them.
#[derive(Clone, Copy)]
pub(super) struct State {
    most: *mut f32,
    sum: *mut f32,
    /// Sums of exponentials by lane, which make `sum` in the end.
    lanes: *mut f32,
    /// Panels of `stride` floats.
    values: *mut f32,
    stride: usize,
}

impl State {
    /// Floats before the values.
    pub const LEN: usize = 2 * ROWS + ROWS * LANES;

    /// The state of a band at `data`.
    pub fn at(data: *mut f32, space: &Space) -> State {
        let sum = data.wrapping_add(ROWS);
        let lanes = sum.wrapping_add(ROWS);
        State { most: data, sum, lanes, values: data.wrapping_add(Self::LEN), stride: space.rows * PANEL }
    }

    /// Forgets everything.
    ///
    /// # Safety
    /// The memory must be the caller's.
    unsafe fn clear(&self) {
        // SAFETY: passed on.
        unsafe {
            std::slice::from_raw_parts_mut(self.most, ROWS).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(self.sum, ROWS + ROWS * LANES).fill(0.0);
        }
    }

    fn row(&self, r: usize, column: usize) -> *mut f32 {
        self.values.wrapping_add(column / PANEL * self.stride + r * PANEL + column % PANEL)
    }
}

/// Rows of a job.
pub(super) struct Band<'a> {
    job: &'a Job,
    kv_head: usize,
    /// The first row of its head.
    first: usize,
    rows: usize,
    group: usize,
    /// The keys that each row sees, masks aside.
    seen: [(usize, usize); ROWS],
    /// The keys that some row sees.
    keys: Range<usize>,
    /// All segments so far.
    total: State,
    /// The present segment.
    current: State,
    has_sums: bool,
}

/// `e^x` of one number.
#[inline(always)]
fn exp<S: Simd>(s: S, x: f32) -> f32 {
    s.reduce_max(math::exp(s, s.splat(x)))
}

/// What scores are taken less of: their largest, or zero if there is none, because minus infinity less itself is NaN.
#[inline(always)]
fn base(most: f32) -> f32 {
    if most == f32::NEG_INFINITY { 0.0 } else { most }
}

impl<'a> Band<'a> {
    /// Floats a band works in: scores, exponentials, and a row.
    pub const SCRATCH: usize = KEYS / PANEL * ROWS * PANEL + ROWS * Blocks::ROW + Self::LONGEST;
    const LONGEST: usize = 256;

    /// Band `index` of a job, which has seen nothing yet.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    pub unsafe fn new(
        p: &Problem,
        space: &Space,
        job: &'a Job,
        index: usize,
        total: State,
        current: State,
    ) -> Band<'a> {
        let first = index % space.head_bands * space.rows;
        let rows = first..(first + space.rows).min(job.queries.len() * p.group());
        let mut seen = [(0, 0); ROWS];
        let (mut start, mut end) = (usize::MAX, 0);
        for (slot, row) in seen.iter_mut().zip(rows.clone()) {
            let query = job.queries.start + row % job.queries.len();
            let range = p.keys(query, job.request.q_len, job.request.kv_len);
            if !range.is_empty() {
                (start, end) = (start.min(range.start), end.max(range.end));
            }
            *slot = (range.start, range.end);
        }
        // SAFETY: passed on.
        unsafe { total.clear() };
        Band {
            job,
            kv_head: job.kv_heads.start + index / space.head_bands,
            first,
            rows: rows.len(),
            group: p.group(),
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

    /// The query head and the query of a row.
    fn place(&self, r: usize) -> (usize, usize) {
        let row = self.first + r;
        let len = self.job.queries.len();
        (self.kv_head * self.group + row / len, self.job.queries.start + row % len)
    }

    /// The panels of a block of keys that some row sees.
    pub fn panels(&self, block: Range<usize>) -> Range<usize> {
        let from = self.keys.start.max(block.start);
        let to = self.keys.end.min(block.end);
        if from >= to { 0..0 } else { (from - block.start) / PANEL..(to - block.start).div_ceil(PANEL) }
    }

    /// The scores of a panel of keys.
    pub fn scores(scratch: *mut f32, panel: usize) -> *mut f32 {
        scratch.wrapping_add(panel * ROWS * PANEL)
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

    /// There are such sums now.
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

    /// Turns the scores of `panels` of the block of keys at `first` into exponentials, and scales what was summed
    /// before if some maximum grew.
    ///
    /// # Safety
    /// The scores must be in `scratch`, the tensors be as `launch` says. `narrow` only if `T` is bf16.
    #[inline(always)]
    pub unsafe fn softmax<T: CpuElement, S: Simd>(
        &mut self,
        s: S,
        launch: &Launch<'_, Problem>,
        narrow: bool,
        first: usize,
        panels: &Range<usize>,
        scratch: *mut f32,
    ) {
        let p = launch.problem;
        let plain = p.softcap_bits == 0 && p.mask.is_none() && p.bias.is_none() && p.scale() > 0.0;
        let factor = if plain { p.scale() } else { 1.0 };
        let columns = panels.start * PANEL..panels.end * PANEL;
        let score = |r: usize, column: usize| {
            Self::scores(scratch, column / PANEL).wrapping_add(r * PANEL + column % PANEL)
        };
        let mut scales = [0f32; ROWS];
        let mut bases = [0f32; ROWS];
        // SAFETY: the scores are rows of whole panels; the states hold ROWS rows.
        unsafe {
            for r in 0..self.rows {
                let (from, to) = self.seen[r];
                let (from, to) = (from.saturating_sub(first), to.saturating_sub(first));
                if !plain {
                    let visible = from.max(columns.start)..to.min(columns.end);
                    self.transform(s, launch, r, first, &columns, visible, score);
                }
                let whole = from <= columns.start && to >= columns.end;
                let lowest = s.splat(f32::NEG_INFINITY);
                let mut most = lowest;
                for panel in panels.clone() {
                    let row = Self::scores(scratch, panel).add(r * PANEL);
                    for i in (0..PANEL).step_by(S::N) {
                        let at = row.add(i);
                        let mut x = s.load(at);
                        if !whole {
                            let column = s.splat((panel * PANEL + i) as f32);
                            let index = s.add(s.load(INDICES.as_ptr()), column);
                            x = s.select(s.lt(index, s.splat(from as f32)), lowest, x);
                            x = s.select(s.lt(index, s.splat(to as f32)), x, lowest);
                            s.store(at, x);
                        }
                        // In this order NaN does not count: it shows in the sums.
                        most = s.max(x, most);
                    }
                }
                let before = *self.current.most.add(r);
                let now = (s.reduce_max(most) * factor).max(before);
                *self.current.most.add(r) = now;
                bases[r] = base(now);
                scales[r] = before - bases[r];
            }
            for_vectors::<S>(
                ROWS,
                #[inline(always)]
                |r, _| {
                    let x = s.load(scales.as_ptr().add(r));
                    s.store(scales.as_mut_ptr().add(r), math::exp(s, x));
                },
            );
            let target = Self::exponentials(scratch);
            for r in 0..self.rows {
                let lanes = self.current.lanes.add(r * LANES);
                let scale = s.splat(scales[r]);
                let mut sum = s.mul(s.load(lanes), scale);
                let (factor, base) = (s.splat(factor), s.splat(bases[r]));
                let row = target.add(r * Blocks::ROW);
                for panel in panels.clone() {
                    let scores = Self::scores(scratch, panel).add(r * PANEL);
                    for i in (0..PANEL).step_by(S::N) {
                        let x = s.sub(s.mul(s.load(scores.add(i)), factor), base);
                        let e = bf16::exp2_fine(s, s.mul(x, s.splat(LOG2_E)));
                        sum = s.add(sum, e);
                        let column = panel.wrapping_mul(PANEL).wrapping_add(i);
                        if narrow {
                            s.store_h(row.cast::<u16>().add(column), s.f32_to_bf16_flushed(e));
                        } else {
                            s.store(row.add(column), T::rounded(s, e));
                        }
                    }
                }
                s.store(lanes, sum);
                if self.has_sums && scales[r] != 1.0 {
                    self.scale_row(s, self.current, r, scale, p.head_dim);
                }
            }
        }
    }

    /// # Safety
    /// The state must hold the sums of the row.
    #[inline(always)]
    unsafe fn scale_row<S: Simd>(&self, s: S, state: State, r: usize, scale: S::V, head_dim: usize) {
        let mut column = 0;
        while column < head_dim {
            let at = state.row(r, column);
            // SAFETY: passed on; panels are whole vectors.
            unsafe { s.store(at, s.mul(s.load(at), scale)) };
            column = column.wrapping_add(S::N);
        }
    }

    /// Scale, cap, bias and mask of the scores of one row; `visible` are the columns that the row sees.
    ///
    /// # Safety
    /// As for [`Self::softmax`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    unsafe fn transform<S: Simd>(
        &self,
        s: S,
        launch: &Launch<'_, Problem>,
        r: usize,
        first: usize,
        columns: &Range<usize>,
        visible: Range<usize>,
        score: impl Fn(usize, usize) -> *mut f32,
    ) {
        let p = launch.problem;
        let (scale, cap) = (s.splat(p.scale()), s.splat(p.softcap()));
        let (head, query) = self.place(r);
        // Offset of the element of a mask or bias for a column of the block.
        let at = |grid: &Grid, column: usize| {
            self.job.request.batch as isize * grid.batch
                + head as isize * grid.head
                + query as isize * grid.query
                + (first + column) as isize * grid.key
        };
        // SAFETY: the scores are whole panels, and what is visible lies in the mask and the bias.
        unsafe {
            let mut column = columns.start;
            while column < columns.end {
                let slot = score(r, column);
                let mut x = s.mul(s.load(slot), scale);
                if p.softcap_bits != 0 {
                    x = s.mul(cap, math::tanh(s, s.div(x, cap)));
                }
                s.store(slot, x);
                column = column.wrapping_add(S::N);
            }
            for column in visible {
                if let Some(bias) = &p.bias {
                    let (data, offset) = (launch.args.address(BIAS), at(&bias.grid, column));
                    *score(r, column) += match bias.dtype {
                        DType::F16 => (*(data as *const f16).offset(offset)).to_f32(),
                        DType::BF16 => (*(data as *const Bf16).offset(offset)).to_f32(),
                        _ => *(data as *const f32).offset(offset),
                    };
                }
                if let Some(mask) = &p.mask {
                    let data = launch.args.address(MASK) as *const u8;
                    if *data.offset(at(mask, column)) == 0 {
                        *score(r, column) = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }

    /// Adds the present segment to the total.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    #[inline(always)]
    pub unsafe fn end<S: Simd>(&mut self, s: S, head_dim: usize) {
        if !self.has_sums {
            return;
        }
        // SAFETY: the states hold ROWS rows.
        unsafe {
            for r in 0..self.rows {
                *self.current.sum.add(r) = s.reduce_add(s.load(self.current.lanes.add(r * LANES)));
            }
            self.merge(s, self.current, head_dim);
        }
    }

    /// Adds the softmax over later keys to the total.
    ///
    /// # Safety
    /// `part` must hold the state of the same rows.
    #[inline(always)]
    pub unsafe fn merge<S: Simd>(&mut self, s: S, part: State, head_dim: usize) {
        let total = self.total;
        // SAFETY: both states hold the rows, in whole panels.
        unsafe {
            for r in 0..self.rows {
                let (sum, added) = (*total.sum.add(r), *part.sum.add(r));
                // A row that sees nothing of a part keeps its bits.
                if added == 0.0 {
                    continue;
                }
                let (before, here) = (*total.most.add(r), *part.most.add(r));
                let most = before.max(here);
                let (a, b) = match sum {
                    0.0 => (0.0, 1.0),
                    _ => (exp(s, before - base(most)), exp(s, here - base(most))),
                };
                *total.most.add(r) = most;
                *total.sum.add(r) = if sum == 0.0 { added } else { sum * a + added * b };
                let mut column = 0;
                while column < head_dim {
                    let (to, from) = (total.row(r, column), s.load(part.row(r, column)));
                    let merged = match sum {
                        0.0 => from,
                        _ => s.fma(s.load(to), s.splat(a), s.mul(from, s.splat(b))),
                    };
                    s.store(to, merged);
                    column = column.wrapping_add(S::N);
                }
            }
        }
    }

    /// Writes the results of the rows.
    ///
    /// # Safety
    /// The rows must be this band's alone, and `scratch` a band's.
    #[inline(always)]
    pub unsafe fn finish<T: CpuElement, S: Simd>(
        &self,
        s: S,
        launch: &Launch<'_, Problem>,
        scratch: *mut f32,
    ) {
        let p = launch.problem;
        let row = scratch;
        for r in 0..self.rows {
            let (head, query) = self.place(r);
            // SAFETY: the total holds the row, the scratch one more, and the tensors have the query.
            unsafe {
                let (mut most, mut sum) = (*self.total.most.add(r), *self.total.sum.add(r));
                let empty = sum == 0.0;
                let mut scale = 1.0;
                if let Some(step) = p.sinks {
                    let sink = *(launch.args.address(SINKS) as *const f32).offset(head as isize * step);
                    let before = most;
                    most = if sink.is_nan() { sink } else { most.max(sink) };
                    scale = exp(s, before - base(most));
                    sum = sum * scale + exp(s, sink - base(most));
                }
                for_vectors::<S>(
                    p.head_dim,
                    #[inline(always)]
                    |i, count| {
                        // Where there are no values, a sum that is NaN must show nevertheless.
                        let value = match empty {
                            true if sum == 0.0 => s.zero(),
                            true => s.div(s.zero(), s.splat(sum)),
                            false => s.div(s.mul(s.load(self.total.row(r, i)), s.splat(scale)), s.splat(sum)),
                        };
                        s.store_partial(row.add(i), value, count);
                    },
                );
                let out = result_of(launch, self.job, head, query) as *mut T;
                if p.out.dim == 1 {
                    for_vectors::<S>(
                        p.head_dim,
                        #[inline(always)]
                        |i, count| T::store_partial(s, out.add(i), load_at(s, row, i, count), count),
                    );
                } else {
                    for i in 0..p.head_dim {
                        *out.offset(i as isize * p.out.dim) = T::from_f32(*row.add(i));
                    }
                }
                if p.has_lse {
                    let token = self.job.request.first_query + query;
                    let at = self.job.request.batch as isize * p.lse.batch
                        + head as isize * p.lse.head
                        + token as isize * p.lse.query;
                    let lse = if sum == 0.0 { f32::NEG_INFINITY } else { most + sum.ln() };
                    *(launch.args.address(LSE) as *mut f32).offset(at) = lse;
                }
            }
        }
    }
}
