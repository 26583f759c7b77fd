//! `gated_act` on the CPU.

use super::backward::BackwardProblem;
use super::{OUT, Problem, X};
use crate::cpu::{CpuElement, Simd};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::elementwise::cpu::{Expression, run};
use crate::ops::elementwise::function::{Function, with_function};
use std::marker::PhantomData;

#[derive(Clone, Copy)]
struct Value<F>(PhantomData<F>);

impl<F: Function> Expression<2, 1> for Value<F> {
    const PAIRS: bool = true;
    const NEAR: bool = true;

    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [gate, up]: [S::V; 2]) -> [S::V; 1] {
        [s.mul(F::value::<S, T>(s, gate), up)]
    }
}

#[derive(Clone, Copy)]
struct Gradients<F>(PhantomData<F>);

impl<F: Function> Expression<3, 2> for Gradients<F> {
    const PAIRS: bool = true;
    const NEAR: bool = true;

    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [gate, up, dout]: [S::V; 3]) -> [S::V; 2] {
        let dgate = s.mul(s.mul(dout, up), F::derivative::<_, T>(s, gate));
        [dgate, s.mul(dout, F::value::<S, T>(s, gate))]
    }
}

pub(super) fn forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let [gate, up] = p.halves(launch.args.address(X));
    let at = [gate, up, launch.args.address(OUT)];
    // SAFETY: `check` made the grid of these tensors.
    with_function!(p.kind, F in Gelu GeluTanh Silu Relu => unsafe { run(&p.grid, launch.tier, &at, Value::<F>(PhantomData)) });
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_, BackwardProblem>) -> Result<()> {
    let (at, p) = (launch.problem.addresses(launch.args), &launch.problem.of);
    // SAFETY: `check` made the grid of these tensors.
    with_function!(p.kind, F in Gelu GeluTanh Silu Relu => unsafe { run(&p.grid, launch.tier, &at, Gradients::<F>(PhantomData)) });
    Ok(())
}
