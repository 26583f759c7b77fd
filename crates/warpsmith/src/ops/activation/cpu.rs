//! `activation` on the CPU.

use super::{DOUT, DX, OUT, Problem, X};
use crate::cpu::{CpuElement, Simd};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::elementwise::cpu::{self, Expression};
use crate::ops::elementwise::function::{Function, with_function};
use std::marker::PhantomData;

#[derive(Clone, Copy)]
struct Value<F>(PhantomData<F>);

impl<F: Function> Expression<1, 1> for Value<F> {
    const NEAR: bool = true;

    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [x]: [S::V; 1]) -> [S::V; 1] {
        [F::value::<S, T>(s, x)]
    }
}

#[derive(Clone, Copy)]
struct Gradient<F>(PhantomData<F>);

impl<F: Function> Expression<2, 1> for Gradient<F> {
    const NEAR: bool = true;

    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [x, dout]: [S::V; 2]) -> [S::V; 1] {
        [s.mul(dout, F::derivative::<_, T>(s, x))]
    }
}

pub(super) fn forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let Problem { grid, kind } = launch.problem;
    let at = [X, OUT].map(|index| launch.args.address(index));
    // SAFETY: `check` made the grid of these tensors.
    with_function!(kind, F in Gelu GeluTanh Silu Relu Mish => unsafe { cpu::run(grid, launch.tier, &at, Value::<F>(PhantomData)) });
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_, Problem>) -> Result<()> {
    let Problem { grid, kind } = launch.problem;
    let at = [X, DOUT, DX].map(|index| launch.args.address(index));
    // SAFETY: `check` made the grid of these tensors.
    with_function!(kind, F in Gelu GeluTanh Silu Relu Mish => unsafe { cpu::run(grid, launch.tier, &at, Gradient::<F>(PhantomData)) });
    Ok(())
}
