//! `mul_add` on the CPU.

use super::backward::{self, Wanted};
use super::{A, B, C, OUT, Problem};
use crate::cpu::{CpuElement, Simd};
use crate::error::Result;
use crate::op::Launch;
use crate::ops::elementwise::MAX_STREAMS;
use crate::ops::elementwise::cpu::{Expression, run};

#[derive(Clone, Copy)]
struct MulAdd;

impl Expression<3, 1> for MulAdd {
    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [a, b, c]: [S::V; 3]) -> [S::V; 1] {
        [s.fma(a, b, c)]
    }
}

#[derive(Clone, Copy)]
struct Gradients;

impl Expression<3, 2> for Gradients {
    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [a, b, dout]: [S::V; 3]) -> [S::V; 2] {
        [s.mul(dout, b), s.mul(dout, a)]
    }
}

#[derive(Clone, Copy)]
struct Product;

impl Expression<2, 1> for Product {
    #[inline(always)]
    fn apply<S: Simd, T: CpuElement>(self, s: S, [x, dout]: [S::V; 2]) -> [S::V; 1] {
        [s.mul(dout, x)]
    }
}

pub(super) fn forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let at = [A, B, C, OUT].map(|index| launch.args.address(index));
    // SAFETY: `check` made the grid of these tensors.
    unsafe { run(&launch.problem.grid, launch.tier, &at, MulAdd) };
    Ok(())
}

pub(super) fn backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let backward::Problem { grid, wanted } = launch.problem;
    let operands = wanted.operands();
    let mut at = [0; MAX_STREAMS];
    for (at, &index) in at.iter_mut().zip(operands) {
        *at = launch.args.address(index);
    }
    let at = &at[..operands.len()];
    // SAFETY: `check` made the grid of these tensors.
    unsafe {
        match wanted {
            Wanted::Neither => {}
            Wanted::Da | Wanted::Db => run(grid, launch.tier, at, Product),
            Wanted::Both => run(grid, launch.tier, at, Gradients),
        }
    }
    Ok(())
}
