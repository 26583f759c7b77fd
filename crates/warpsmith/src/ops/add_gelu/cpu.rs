//! `add_gelu` on the CPU.

use super::{BIAS, DBIAS, DOUT, DX, OUT, Problem, X, backward as back};
use crate::cpu::rows::{DenseRows, can_stream, for_vectors, load_at, put_at, store_at, with_float};
use crate::cpu::{CpuElement, Region, Simd, Task, Tier, dispatch, parallel_for_with_scratch, should_stream};
use crate::error::Result;
use crate::op::{Kernel, Launch};
use crate::ops::column_sum::cpu as column_sum;
use crate::ops::elementwise::cpu::{Expression, run};
use crate::ops::elementwise::function::{Function, with_function};
use std::marker::PhantomData;
use std::ops::Range;

/// The fewest elements a thread works on: less does not pay for waking a thread.
const GRAIN: usize = 1 << 15;

#[derive(Clone, Copy)]
struct Value<F>(PhantomData<F>);

impl<F: Function> Expression<2, 1> for Value<F> {
    const NEAR: bool = true;
    const SHARES: bool = true;

    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [x, bias]: [S::V; 2]) -> [S::V; 1] {
        [F::value::<S, T>(s, s.add(x, bias))]
    }
}

pub(super) fn forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = [X, BIAS, OUT].map(|index| launch.args.address(index));
    // SAFETY: `check` made the grid of these tensors.
    with_function!(p.kind, F in Gelu GeluTanh => unsafe { run(&p.grid, launch.tier, &at, Value::<F>(PhantomData)) });
    Ok(())
}

/// The backward kernel of a tier.
pub(super) const fn backward(name: &'static str, tier: Tier) -> Kernel<back::Problem> {
    Kernel::cpu(name, tier, run_backward)
        .with_workspace(|p, _| column_sum::workspace(p.has_dbias as usize, p.num_rows, p.hidden))
}

fn run_backward(launch: &Launch<'_, back::Problem>) -> Result<()> {
    let p = launch.problem;
    let per_group = column_sum::rows_per_group(p.num_rows);
    let grain = GRAIN.div_ceil(p.hidden.max(1) * per_group);
    let need = DenseRows::<f32>::need(p.dtype, p.hidden, &p.steps);
    parallel_for_with_scratch(column_sum::groups(p.num_rows), grain, need, |groups, region| {
        with_float!(p.dtype, T => with_function!(p.kind, F in Gelu GeluTanh => {
            dispatch(launch.tier, Groups::<T, F> { launch, groups, region, types: PhantomData })
        }))
    });
    if p.has_dbias {
        let target = (launch.args.address(DBIAS), p.steps[4]);
        // SAFETY: the workspace has the size asked for; `check` bound the gradient's shape.
        unsafe { column_sum::add(launch.workspace, p.num_rows, p.hidden, p.dtype, [target]) };
    }
    Ok(())
}

/// Some groups of rows: their dx, and for each the sum of it.
struct Groups<'a, T, F> {
    launch: &'a Launch<'a, back::Problem>,
    groups: Range<usize>,
    region: Region<'a>,
    types: PhantomData<(T, F)>,
}

impl<T: CpuElement, F: Function> Task for Groups<'_, T, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let s = s.pair();
        let (p, args) = (self.launch.problem, self.launch.args);
        let at = |index: usize, offset: usize| (args.address(index) as *mut T).wrapping_add(offset);
        let n = p.hidden;
        let want_stream = should_stream(p.num_rows * n * p.dtype.size());
        let per_group = column_sum::rows_per_group(p.num_rows);
        let mut scratch = DenseRows::<T>::new(&mut self.region, n, &p.steps);
        let [x_step, dout_step, dx_step, bias_step, _] = p.steps;
        // SAFETY: `check` bound all shapes to these sizes and strides; groups of rows and their partial sums are
        // disjoint; dx overlaps dout only element for element, and each element is read before it is written.
        unsafe {
            let bias = scratch.gather(3, at(BIAS, 0), bias_step);
            for group in self.groups {
                let sums = (self.launch.workspace as *mut f32).wrapping_add(group * n);
                if p.has_dbias {
                    sums.write_bytes(0, n);
                }
                for row in group * per_group..((group + 1) * per_group).min(p.num_rows) {
                    let [x_at, dout_at, dx_at, _] = p.rows.offsets(row);
                    let x = scratch.gather(0, at(X, x_at), x_step);
                    let dout = scratch.gather(1, at(DOUT, dout_at), dout_step);
                    let dx = scratch.target(2, at(DX, dx_at), dx_step);
                    let stream = want_stream && dx_step == 1 && can_stream::<S::Pair, T>(dx);
                    for_vectors::<S::Pair>(
                        n,
                        #[inline(always)]
                        |i, count| {
                            let v = s.add(load_at(s, x, i, count), load_at(s, bias, i, count));
                            let d = s.mul(load_at(s, dout, i, count), F::derivative::<_, T>(s, v));
                            if p.has_dbias {
                                let sum = load_at(s, sums.cast_const(), i, count);
                                store_at(s, sums, i, count, s.add(sum, d));
                            }
                            put_at(s, dx, i, count, d, stream);
                        },
                    );
                    scratch.scatter(2, at(DX, dx_at), dx_step);
                }
            }
        }
        if want_stream {
            s.fence();
        }
    }
}
