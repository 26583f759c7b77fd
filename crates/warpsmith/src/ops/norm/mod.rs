//! What `rms_norm` and `layer_norm` share: they differ in whether the mean is subtracted.

pub(super) mod backward;
#[cfg(feature = "lab")]
pub(super) mod cases;
pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;

use crate::error::Result;
use crate::op::{Args, Attrs, Cost, Matcher};
use crate::tensor::{DType, Layout, Space};

// Both ops declare their arguments in this order; rms_norm has no bias.
pub(super) const X: usize = 0;
pub(super) const WEIGHT: usize = 1;
pub(super) const RESIDUAL: usize = 2;
pub(super) const OUT: usize = 3;
pub(super) const SUM: usize = 4;
pub(super) const BIAS: usize = 5;
pub(super) const EPS: usize = 0;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    hidden: usize,
    num_rows: usize,
    /// Leading dimensions of x, out, residual, sum (the last two repeat x and out when absent).
    rows: Space<4>,
    /// Stride along a row of x, out, residual, sum, weight, bias.
    steps: [isize; 6],
    /// Subtract the mean: layer_norm.
    center: bool,
    has_weight: bool,
    has_bias: bool,
    has_residual: bool,
    /// The rows of x, out, residual and sum are dense, 16-byte aligned and multiples of 16 bytes long.
    vector_rows: bool,
    /// Weight and bias are.
    vector_weights: bool,
    eps_bits: u32,
}

pub(super) fn check(center: bool, args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let eps = check_eps(&sizes, attrs)?;
    let layout = |index: usize| args.get(index).map(|t| t.layout());
    let (x, out) = (args.at(X).layout(), args.at(OUT).layout());
    let (residual, sum) = (layout(RESIDUAL).unwrap_or(x), layout(SUM).unwrap_or(out));
    let vector_step = |index| layout(index).map_or(1, Layout::step);
    Ok(Problem {
        dtype: args.at(X).dtype(),
        hidden: sizes.size("hidden"),
        num_rows: sizes.leading_count(),
        rows: Space::new(sizes.leading_rank(), [x, out, residual, sum]),
        steps: [x.step(), out.step(), residual.step(), sum.step(), vector_step(WEIGHT), vector_step(BIAS)],
        center,
        has_weight: args.get(WEIGHT).is_some(),
        has_bias: args.get(BIAS).is_some(),
        has_residual: args.get(RESIDUAL).is_some(),
        vector_rows: args.are_vector_rows(&[X, OUT, RESIDUAL, SUM]),
        vector_weights: args.are_vector_rows(&[WEIGHT, BIAS]),
        eps_bits: eps.to_bits(),
    })
}

fn check_eps(sizes: &Matcher<'_>, attrs: &Attrs) -> Result<f32> {
    let eps = attrs.float(EPS);
    sizes.option("eps", eps, "a finite number of zero or more", eps.is_finite() && eps >= 0.0)?;
    Ok(eps as f32)
}

pub(super) fn cost(p: &Problem) -> Cost {
    let elements = (p.num_rows * p.hidden) as f64;
    let passes = if p.has_residual { 4.0 } else { 2.0 };
    let vectors = p.hidden as f64 * (p.has_weight as u8 + p.has_bias as u8) as f64;
    let flops = if p.center { 6.0 } else { 4.0 } + if p.has_residual { 1.0 } else { 0.0 };
    Cost::moving((passes * elements + vectors) * p.dtype.size() as f64, flops * elements)
}
