//! The last steps of every sum: bias, activation, gate, factor and residual, and the one rounding.

use super::{BIAS, OUT, Problem, RESIDUAL};
use crate::cpu::gemm::Output;
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, Simd, Task, prefetch};
use crate::op::Launch;
use crate::ops::elementwise::function::{Function, with_function};
use crate::ops::linear::Gate;
use std::ops::Range;

/// Columns of the result that are finished at a time: a multiple of every tier's lanes.
pub(super) const STRIP: usize = 32;

/// Sums of some rows and of up to [`STRIP`] columns.
pub(super) struct Finish<'a> {
    pub launch: &'a Launch<'a, Problem>,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
    /// Of the columns or their gates, a row after the other.
    pub sums: &'a mut [[f32; STRIP]],
    /// Of up; unused without a gate.
    pub ups: &'a mut [[f32; STRIP]],
}

/// Prefetches the memory of some results for writing, and the residual.
pub(super) fn ask_for_memory(launch: &Launch<'_, Problem>, rows: Range<usize>, cols: &Range<usize>) {
    let p = launch.problem;
    let size = p.out_dtype.size();
    if p.out_step != 1 || p.residual_step.is_some_and(|step| step != 1) {
        return;
    }
    for row in rows {
        let [_, residual, out, _] = p.rows.offsets(row);
        let place =
            |arg: usize, offset: usize| launch.args.address(arg).wrapping_add((offset + cols.start) * size);
        let out = place(OUT, out);
        prefetch::claim(out as *mut u8, cols.len() * size);
        if p.residual_step.is_some() && place(RESIDUAL, residual) != out {
            prefetch::fetch_near(place(RESIDUAL, residual) as *const u8, cols.len() * size);
        }
    }
}

impl Task for Finish<'_> {
    type Out = ();

    // One step after the other, in place: fused, they would be compiled for each combination of type and function.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.launch.problem;
        let gated = p.gate != Gate::None;
        if p.bias_step.is_some() {
            with_float!(p.out_dtype, T => {
                add_bias::<S, T>(s, self.launch, &self.cols, 0, self.sums);
                if gated {
                    add_bias::<S, T>(s, self.launch, &self.cols, 1, self.ups);
                }
            });
        }
        if let Some(kind) = p.activation {
            with_function!(kind, F in Gelu GeluTanh Silu Relu => {
                for_each(s, self.sums, #[inline(always)] |z| F::value_anywhere::<S, f32>(s, z))
            });
        }
        if gated {
            for (sums, ups) in self.sums.iter_mut().zip(self.ups.iter()) {
                for i in (0..STRIP).step_by(S::N) {
                    // SAFETY: strips are whole vectors.
                    unsafe {
                        let y = s.mul(s.load(sums.as_ptr().add(i)), s.load(ups.as_ptr().add(i)));
                        s.store(sums.as_mut_ptr().add(i), y);
                    }
                }
            }
        }
        with_float!(p.out_dtype, T => self.store::<S, T>(s));
    }
}

/// Adds the bias of the columns, `half` of a gate.
#[inline(always)]
fn add_bias<S: Simd, T: CpuElement>(
    s: S,
    launch: &Launch<'_, Problem>,
    cols: &Range<usize>,
    half: usize,
    sums: &mut [[f32; STRIP]],
) {
    let p = launch.problem;
    let step = p.bias_step.unwrap_or(0);
    let (first, apart) = match (p.gate, half) {
        (Gate::Interleaved, _) => (half, 2),
        (_, 0) => (0, 1),
        _ => (p.n, 1),
    };
    let bias = Output::<T> {
        data: (launch.args.address(BIAS) as *mut T).wrapping_offset(first as isize * step),
        row_stride: 0,
        col_stride: apart * step,
    };
    for i in (0..cols.len()).step_by(S::N) {
        let count = S::N.min(cols.len() - i);
        // SAFETY: `check` bound the bias to the rows of the weight; strips are whole vectors.
        unsafe {
            let bias = bias.load(s, 0, cols.start + i, count);
            for row in &mut *sums {
                let at = row.as_mut_ptr().add(i);
                s.store(at, s.add(s.load(at), bias));
            }
        }
    }
}

impl Finish<'_> {
    /// Factor and residual.
    #[inline(always)]
    fn store<S: Simd, T: CpuElement>(&self, s: S) {
        let p = self.launch.problem;
        let factor = s.splat(f32::from_bits(p.scale_bits));
        let place = |arg: usize, offset: usize, step: isize| Output::<T> {
            data: (self.launch.args.address(arg) as *mut T).wrapping_add(offset),
            row_stride: 0,
            col_stride: step,
        };
        for (row, sums) in self.rows.clone().zip(self.sums.iter()) {
            let [_, residual, out, _] = p.rows.offsets(row);
            let out = place(OUT, out, p.out_step);
            for i in (0..self.cols.len()).step_by(S::N) {
                let (col, count) = (self.cols.start + i, S::N.min(self.cols.len() - i));
                // SAFETY: `check` bound out and residual to these rows and columns; they are apart or the same, and each
                // element is read before it is written.
                unsafe {
                    let y = s.load(sums.as_ptr().add(i));
                    let y = match p.residual_step {
                        Some(step) => {
                            s.fma(factor, y, place(RESIDUAL, residual, step).load(s, 0, col, count))
                        }
                        None => s.mul(factor, y),
                    };
                    out.store(s, 0, col, count, y, false);
                }
            }
        }
    }
}

/// Replaces each value.
#[inline(always)]
fn for_each<S: Simd>(s: S, sums: &mut [[f32; STRIP]], f: impl Fn(S::V) -> S::V) {
    for row in sums {
        for i in (0..STRIP).step_by(S::N) {
            // SAFETY: strips are whole vectors.
            unsafe {
                let at = row.as_mut_ptr().add(i);
                s.store(at, f(s.load(at)));
            }
        }
    }
}
