//! From the sums of segments to results.

use super::Band;
use crate::cpu::attention::state::{LANES, State, base};
use crate::cpu::prefetch::claim;
use crate::cpu::{CpuElement, Simd, math};

/// Result rows that are prefetched ahead.
const CLAIMED: usize = 2;

/// `e^x` of one number.
#[inline(always)]
fn exp<S: Simd>(s: S, x: f32) -> f32 {
    s.reduce_max(math::exp(s, s.splat(x)))
}

impl Band<'_> {
    /// Adds the present segment to the total.
    ///
    /// # Safety
    /// The states must be memory of the caller's.
    #[inline(always)]
    pub unsafe fn end<S: Simd>(&mut self, s: S) {
        if !self.has_sums {
            return;
        }
        // SAFETY: the states hold ROWS rows.
        unsafe {
            for r in 0..self.rows {
                *self.current.sum.add(r) = s.reduce_add(s.load(self.current.lanes.add(r * LANES)));
            }
            self.merge(s, self.current);
        }
    }

    /// Adds the softmax over later keys to the total.
    ///
    /// # Safety
    /// `part` must hold the state of the same rows.
    #[inline(always)]
    pub unsafe fn merge<S: Simd>(&mut self, s: S, part: State) {
        let (total, head_dim) = (self.total, self.call.head_dim);
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
    pub unsafe fn finish<T: CpuElement, S: Simd>(&self, s: S, scratch: *mut f32) {
        let (call, row) = (self.call, scratch);
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
                // With no value columns, a NaN sum must still show.
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
