//! Turns scores into exponentials and rescales the running sums.

use super::{Band, PANEL};
use crate::cpu::attention::heads::Grid;
use crate::cpu::attention::state::{LANES, ROWS, State, base};
use crate::cpu::gemm::Blocks;
use crate::cpu::math16::exp2_fine;
use crate::cpu::rows::for_vectors;
use crate::cpu::{CpuElement, Simd, math};
use crate::tensor::DType;
use half::{bf16 as Bf16, f16};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Lane numbers, for choosing keys.
static INDICES: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// The scores of a band over some panels of a block of keys.
#[derive(Clone)]
pub(in crate::cpu::attention) struct View {
    /// The first key of the block.
    first: usize,
    panels: Range<usize>,
    /// Where the scores are.
    scratch: *mut f32,
    /// Whether scores are only scaled; the exponential folds the factor in.
    plain: bool,
    factor: f32,
}

impl View {
    /// The first key of the block.
    #[cfg(target_arch = "x86_64")]
    pub fn first(&self) -> usize {
        self.first
    }

    pub fn panels(&self) -> Range<usize> {
        self.panels.clone()
    }

    /// The scores of a panel of keys.
    pub fn scores(&self, panel: usize) -> *mut f32 {
        Band::scores(self.scratch, panel)
    }

    /// Where a row's score of a key is, if the panels have it.
    pub fn score(&self, r: usize, key: usize) -> Option<*mut f32> {
        let column = key.checked_sub(self.first).filter(|column| self.columns().contains(column))?;
        Some(self.scores(column / PANEL).wrapping_add(r * PANEL + column % PANEL))
    }

    /// The exponentials, as rows of a left operand.
    pub fn exponentials(&self) -> *mut f32 {
        Band::exponentials(self.scratch)
    }

    /// The columns of the panels.
    fn columns(&self) -> Range<usize> {
        self.panels.start * PANEL..self.panels.end * PANEL
    }
}

/// How much a block of keys raised the row maxima of a band.
pub(in crate::cpu::attention) struct Growth {
    /// Factors for the running sums; logarithms of them at first.
    scales: [f32; ROWS],
    /// What is subtracted from scores.
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

/// `exp(score * factor - base)`.
#[inline(always)]
fn exponential<S: Simd>(s: S, scores: S::V, factor: S::V, base: S::V) -> S::V {
    let x = s.sub(s.mul(scores, factor), base);
    exp2_fine(s, s.mul(x, s.splat(LOG2_E)))
}

/// Exponentials as tiles take them. Those of f16 multiply subnormals, those of bf16 do not.
#[inline(always)]
fn halves<T: CpuElement, S: Simd>(s: S, v: S::V) -> S::H {
    match T::DTYPE {
        DType::F16 => s.f32_to_f16(v),
        _ => s.f32_to_bf16_flushed(v),
    }
}

impl Band<'_> {
    /// The view of the scores in `scratch` over some panels of the block of keys at `first`.
    pub fn view(&self, first: usize, panels: Range<usize>, scratch: *mut f32) -> View {
        let call = self.call;
        let plain = call.softcap == 0.0 && call.mask.is_none() && call.bias.is_none() && self.scale > 0.0;
        View { first, panels, scratch, plain, factor: if plain { self.scale } else { 1.0 } }
    }

    /// Turns the scores of a block into exponentials, and rescales the running sums if a maximum grew.
    ///
    /// # Safety
    /// The scores must be there, the tensors be as the call says. `narrow` only if `T` is bf16 or f16: then they are stored as `T`.
    #[inline(always)]
    pub unsafe fn softmax<T: CpuElement, S: Simd>(&mut self, s: S, narrow: bool, view: &View) {
        let mut growth = Growth::default();
        // SAFETY: passed on; rows of exponentials are as long as a block.
        unsafe {
            for r in 0..self.rows {
                self.raise(s, view, r, &mut growth);
            }
            growth.make_scales(s);
            for r in 0..self.rows {
                let row = view.exponentials().add(r * Blocks::ROW);
                self.rescale(s, r, &growth);
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
                            s.store_h(row, halves::<T, S>(s, a));
                            s.store_h(row.add(S::N), halves::<T, S>(s, b));
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
    pub unsafe fn raise<S: Simd>(&mut self, s: S, view: &View, r: usize, growth: &mut Growth) {
        let View { first, plain, factor, .. } = *view;
        let columns = view.columns();
        // SAFETY: the scores are rows of whole panels; the states hold ROWS rows.
        unsafe {
            let (from, to) = self.seen[r];
            let (from, to) = (from.saturating_sub(first), to.saturating_sub(first));
            if !plain {
                let visible = from.max(columns.start)..to.min(columns.end);
                self.transform(s, view, r, visible);
            }
            let whole = from <= columns.start && to >= columns.end;
            let lowest = s.splat(f32::NEG_INFINITY);
            let mut most = lowest;
            for panel in view.panels.clone() {
                let row = view.scores(panel).add(r.wrapping_mul(PANEL));
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
                    // This operand order ignores NaN, which shows in the sums.
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

    /// Rescales the running sums of a row.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    #[inline(always)]
    pub unsafe fn rescale<S: Simd>(&mut self, s: S, r: usize, growth: &Growth) {
        let scale = s.splat(growth.scales[r]);
        // SAFETY: passed on; the states hold ROWS rows.
        unsafe {
            let lanes = self.current.lanes.add(r.wrapping_mul(LANES));
            s.store(lanes, s.mul(s.load(lanes), scale));
            if self.has_sums && growth.scales[r] != 1.0 {
                self.scale_row(s, self.current, r, scale);
            }
        }
    }

    /// Hands the exponentials of a row over some panels to `store`, two vectors at a time, and sums them. Those that
    /// dropout drops are summed as well, but handed over as zeros.
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
            let dropout = self.dropout(r);
            let mut kept = [1.0; PANEL];
            for panel in panels {
                let scores = view.scores(panel).add(r.wrapping_mul(PANEL));
                if let Some((dropout, query)) = &dropout {
                    dropout.of_keys(*query, view.first.wrapping_add(panel.wrapping_mul(PANEL)), &mut kept);
                }
                for i in (0..PANEL).step_by(2 * S::N) {
                    let mut a = exponential(s, s.load(scores.add(i)), factor, base);
                    let mut b = exponential(s, s.load(scores.add(i).add(S::N)), factor, base);
                    sum = s.add(s.add(sum, a), b);
                    if dropout.is_some() {
                        let kept = kept.as_ptr().add(i);
                        a = s.select(s.lt(s.zero(), s.load(kept)), a, s.zero());
                        b = s.select(s.lt(s.zero(), s.load(kept.add(S::N))), b, s.zero());
                    }
                    store(panel.wrapping_mul(PANEL).wrapping_add(i), a, b);
                }
            }
            s.store(lanes, sum);
        }
    }

    /// # Safety
    /// The state must hold the sums of the row.
    #[inline(always)]
    unsafe fn scale_row<S: Simd>(&self, s: S, state: State, r: usize, scale: S::V) {
        let head_dim = self.call.head_dim;
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
    unsafe fn transform<S: Simd>(&self, s: S, view: &View, r: usize, visible: Range<usize>) {
        let (call, columns) = (self.call, view.columns());
        let (scale, cap) = (s.splat(self.scale), s.splat(call.softcap));
        let (head, query) = self.place(r);
        // Offset of the element of a mask or bias for a column of the block.
        let at = |grid: &Grid, column: usize| {
            self.job.request.batch as isize * grid.batch
                + head as isize * grid.head
                + query as isize * grid.query
                + (view.first + column) as isize * grid.key
        };
        let score = |column: usize| view.scores(column / PANEL).wrapping_add(r * PANEL + column % PANEL);
        // SAFETY: the scores are whole panels, and what is visible lies in the mask and the bias.
        unsafe {
            let mut column = columns.start;
            while column < columns.end {
                let slot = score(column);
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
                    *score(column) += match dtype {
                        DType::F16 => (*(data as *const f16).offset(offset)).to_f32(),
                        DType::BF16 => (*(data as *const Bf16).offset(offset)).to_f32(),
                        _ => *(data as *const f32).offset(offset),
                    };
                }
                if let Some(mask) = &call.mask
                    && *(mask.data as *const u8).offset(at(mask, column)) == 0
                {
                    *score(column) = f32::NEG_INFINITY;
                }
            }
        }
    }
}
