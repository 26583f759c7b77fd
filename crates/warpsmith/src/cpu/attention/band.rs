//! A band: the rows that go through one product together, and their softmax.

use super::plan::Job;
use super::{Call, Grid, KEYS, Space};
use crate::cpu::gemm::Blocks;
use crate::cpu::prefetch::claim;
use crate::cpu::rows::for_vectors;
use crate::cpu::{CpuElement, Simd, bf16, math};
use crate::dtype::DType;
use half::{bf16 as Bf16, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The most rows of a band.
const ROWS: usize = Blocks::PANEL;
/// Lanes of the widest vectors that are summed in.
const LANES: usize = 16;
const PANEL: usize = Blocks::PANEL;
/// Rows of results whose memory is asked for ahead.
const CLAIMED: usize = 2;

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
    /// Factor of the scores.
    scale: f32,
    /// Factor of the values.
    value_scale: f32,
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

/// The scores of a band over some panels of a block of keys.
#[derive(Clone)]
pub(super) struct View {
    /// The first key of the block.
    first: usize,
    panels: Range<usize>,
    /// Where the scores are.
    scratch: *mut f32,
    /// Whether nothing but a factor changes scores, which the exponential includes.
    plain: bool,
    factor: f32,
}

impl View {
    #[cfg(target_arch = "x86_64")]
    pub fn panels(&self) -> Range<usize> {
        self.panels.clone()
    }

    #[cfg(target_arch = "x86_64")]
    pub fn scratch(&self) -> *mut f32 {
        self.scratch
    }
}

/// How the maxima of a band's rows grew with a block of keys.
pub(super) struct Growth {
    /// Factors of what was summed before; their logarithms at first.
    scales: [f32; ROWS],
    /// What scores are taken less of.
    bases: [f32; ROWS],
}

impl Default for Growth {
    fn default() -> Growth {
        Growth { scales: [0.0; ROWS], bases: [0.0; ROWS] }
    }
}

impl Growth {
    /// Makes factors of logarithms.
    #[inline(always)]
    pub fn make_scales<S: Simd>(&mut self, s: S) {
        for_vectors::<S>(
            ROWS,
            #[inline(always)]
            |r, _| {
                let at = self.scales.as_mut_ptr().wrapping_add(r);
                // SAFETY: the rows are whole vectors.
                unsafe { s.store(at, math::exp(s, s.load(at))) };
            },
        );
    }
}

/// The exponential of scores times `factor`, less `base`.
#[inline(always)]
fn exponential<S: Simd>(s: S, scores: S::V, factor: S::V, base: S::V) -> S::V {
    let x = s.sub(s.mul(scores, factor), base);
    bf16::exp2_fine(s, s.mul(x, s.splat(LOG2_E)))
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
        call: &Call<'_>,
        space: &Space,
        job: &'a Job,
        index: usize,
        total: State,
        current: State,
    ) -> Band<'a> {
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
        // SAFETY: the states are the caller's; the scales of the KV head are there.
        let [k_scale, v_scale] = unsafe {
            total.clear();
            [call.cache.k_scale, call.cache.v_scale].map(|scale| scale.map_or(1.0, |scale| scale.at(kv_head)))
        };
        Band {
            job,
            kv_head,
            first,
            rows: rows.len(),
            group: call.group,
            scale: call.scale * k_scale,
            value_scale: v_scale,
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

    /// Whether a row sees a key, masks aside.
    #[cfg(target_arch = "x86_64")]
    pub fn sees(&self, r: usize, key: usize) -> bool {
        (self.seen[r].0..self.seen[r].1).contains(&key)
    }

    /// The rows from `r` on whose queries follow each other: head and query of the first, and how many.
    #[cfg(target_arch = "x86_64")]
    pub fn run(&self, r: usize) -> (usize, usize, usize) {
        let (head, query) = self.place(r);
        (head, query, (self.rows - r).min(self.job.queries.end - query))
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

    /// The view of the scores in `scratch` over some panels of the block of keys at `first`.
    pub fn view(&self, call: &Call<'_>, first: usize, panels: Range<usize>, scratch: *mut f32) -> View {
        let plain = call.softcap == 0.0 && call.mask.is_none() && call.bias.is_none() && self.scale > 0.0;
        View { first, panels, scratch, plain, factor: if plain { self.scale } else { 1.0 } }
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

    /// Turns the scores of a block into exponentials, and scales what was summed before if some maximum grew.
    ///
    /// # Safety
    /// The scores must be there, the tensors be as `call` says. `narrow` only if `T` is bf16.
    #[inline(always)]
    pub unsafe fn softmax<T: CpuElement, S: Simd>(
        &mut self,
        s: S,
        call: &Call<'_>,
        narrow: bool,
        view: &View,
    ) {
        let mut growth = Growth::default();
        // SAFETY: passed on; rows of exponentials are as long as a block.
        unsafe {
            for r in 0..self.rows {
                self.raise(s, call, view, r, &mut growth);
            }
            growth.make_scales(s);
            for r in 0..self.rows {
                let row = Self::exponentials(view.scratch).add(r * Blocks::ROW);
                self.rescale(s, r, &growth, call.head_dim);
                self.exponentiate(
                    s,
                    view,
                    r,
                    view.panels.clone(),
                    &growth,
                    #[inline(always)]
                    |column, a, b| {
                        if narrow {
                            let row = row.cast::<u16>().add(column);
                            s.store_h(row, s.f32_to_bf16_flushed(a));
                            s.store_h(row.add(S::N), s.f32_to_bf16_flushed(b));
                        } else {
                            let row = row.add(column);
                            s.store(row, T::rounded(s, a));
                            s.store(row.add(S::N), T::rounded(s, b));
                        }
                    },
                );
            }
        }
    }

    /// The first half of [`Self::softmax`] for a row: raises its maximum to that of its scores.
    ///
    /// # Safety
    /// As for [`Self::softmax`].
    #[inline(always)]
    pub unsafe fn raise<S: Simd>(
        &mut self,
        s: S,
        call: &Call<'_>,
        view: &View,
        r: usize,
        growth: &mut Growth,
    ) {
        let View { first, scratch, plain, factor, .. } = *view;
        let columns = view.panels.start * PANEL..view.panels.end * PANEL;
        // SAFETY: the scores are rows of whole panels; the states hold ROWS rows.
        unsafe {
            let (from, to) = self.seen[r];
            let (from, to) = (from.saturating_sub(first), to.saturating_sub(first));
            if !plain {
                let visible = from.max(columns.start)..to.min(columns.end);
                let score = |r: usize, column: usize| {
                    Self::scores(scratch, column / PANEL).wrapping_add(r * PANEL + column % PANEL)
                };
                self.transform(s, call, r, first, &columns, visible, score);
            }
            let whole = from <= columns.start && to >= columns.end;
            let lowest = s.splat(f32::NEG_INFINITY);
            let mut most = lowest;
            for panel in view.panels.clone() {
                let row = Self::scores(scratch, panel).add(r.wrapping_mul(PANEL));
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
            growth.bases[r] = base(now);
            growth.scales[r] = before - growth.bases[r];
        }
    }

    /// Scales what a row summed before.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    #[inline(always)]
    pub unsafe fn rescale<S: Simd>(&mut self, s: S, r: usize, growth: &Growth, head_dim: usize) {
        let scale = s.splat(growth.scales[r]);
        // SAFETY: passed on; the states hold ROWS rows.
        unsafe {
            let lanes = self.current.lanes.add(r.wrapping_mul(LANES));
            s.store(lanes, s.mul(s.load(lanes), scale));
            if self.has_sums && growth.scales[r] != 1.0 {
                self.scale_row(s, self.current, r, scale, head_dim);
            }
        }
    }

    /// Hands the exponentials of a row over some panels to `store`, two vectors at a time, and sums them.
    ///
    /// # Safety
    /// As for [`Self::softmax`].
    #[inline(always)]
    pub unsafe fn exponentiate<S: Simd>(
        &mut self,
        s: S,
        view: &View,
        r: usize,
        panels: Range<usize>,
        growth: &Growth,
        mut store: impl FnMut(usize, S::V, S::V),
    ) {
        // SAFETY: the scores are rows of whole panels; the states hold ROWS rows.
        unsafe {
            let lanes = self.current.lanes.add(r.wrapping_mul(LANES));
            let mut sum = s.load(lanes);
            let (factor, base) = (s.splat(view.factor), s.splat(growth.bases[r]));
            for panel in panels {
                let scores = Self::scores(view.scratch, panel).add(r.wrapping_mul(PANEL));
                for i in (0..PANEL).step_by(2 * S::N) {
                    let a = exponential(s, s.load(scores.add(i)), factor, base);
                    let b = exponential(s, s.load(scores.add(i).add(S::N)), factor, base);
                    sum = s.add(s.add(sum, a), b);
                    store(panel.wrapping_mul(PANEL).wrapping_add(i), a, b);
                }
            }
            s.store(lanes, sum);
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
        call: &Call<'_>,
        r: usize,
        first: usize,
        columns: &Range<usize>,
        visible: Range<usize>,
        score: impl Fn(usize, usize) -> *mut f32,
    ) {
        let (scale, cap) = (s.splat(self.scale), s.splat(call.softcap));
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
                if call.softcap != 0.0 {
                    x = s.mul(cap, math::tanh(s, s.div(x, cap)));
                }
                s.store(slot, x);
                column = column.wrapping_add(S::N);
            }
            for column in visible {
                if let Some((bias, dtype)) = &call.bias {
                    let (data, offset) = (bias.data, at(bias, column));
                    *score(r, column) += match dtype {
                        DType::F16 => (*(data as *const f16).offset(offset)).to_f32(),
                        DType::BF16 => (*(data as *const Bf16).offset(offset)).to_f32(),
                        _ => *(data as *const f32).offset(offset),
                    };
                }
                if let Some(mask) = &call.mask
                    && *(mask.data as *const u8).offset(at(mask, column)) == 0
                {
                    *score(r, column) = f32::NEG_INFINITY;
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
    pub unsafe fn finish<T: CpuElement, S: Simd>(&self, s: S, call: &Call<'_>, scratch: *mut f32) {
        let row = scratch;
        let out = |r: usize| {
            let (head, query) = self.place(r);
            let place = [self.job.request.batch, self.job.request.first_query + query, head];
            (place, call.out.at(size_of::<T>(), place) as *mut T)
        };
        for r in 0..self.rows {
            if r + CLAIMED < self.rows && call.out.dim == 1 {
                claim(out(r + CLAIMED).1.cast(), call.head_dim * size_of::<T>());
            }
            let (place, out) = out(r);
            // SAFETY: the total holds the row, the scratch one more, and the tensors have the query.
            unsafe {
                let (mut most, mut sum) = (*self.total.most.add(r), *self.total.sum.add(r));
                let empty = sum == 0.0;
                let mut scale = self.value_scale;
                if let Some(sinks) = call.sinks {
                    let sink = sinks.at(place[2]);
                    let before = most;
                    most = if sink.is_nan() { sink } else { most.max(sink) };
                    let kept = exp(s, before - base(most));
                    scale *= kept;
                    sum = sum * kept + exp(s, sink - base(most));
                }
                // Where there are no values, a sum that is NaN must show nevertheless.
                let factor = s.splat(match (empty, sum) {
                    (true, 0.0) => 0.0,
                    (true, sum) => 1.0 / sum,
                    (false, sum) => scale / sum,
                });
                let mut column = 0;
                while column < call.head_dim {
                    let values = if empty { s.zero() } else { s.load(self.total.row(r, column)) };
                    let value = s.mul(values, factor);
                    if call.out.dim == 1 {
                        T::store(s, out.add(column), value);
                    } else {
                        s.store(row.add(column), value);
                    }
                    column = column.wrapping_add(S::N);
                }
                if call.out.dim != 1 {
                    for i in 0..call.head_dim {
                        *out.offset(i as isize * call.out.dim) = T::from_f32(*row.add(i));
                    }
                }
                if let Some(heads) = &call.lse {
                    let lse = if sum == 0.0 { f32::NEG_INFINITY } else { most + sum.ln() };
                    *(heads.at(size_of::<f32>(), place) as *mut f32) = lse;
                }
            }
        }
    }
}
