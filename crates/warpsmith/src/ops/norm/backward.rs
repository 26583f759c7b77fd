//! The gradients of both norms.

#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;

use super::check_eps;
use crate::error::Result;
use crate::op::{Args, Attrs, Cost, Matcher};
use crate::tensor::{DType, Layout, Space};

// Both ops declare their arguments in this order; rms_norm has no dbias.
pub(in crate::ops) const X: usize = 0;
pub(in crate::ops) const WEIGHT: usize = 1;
pub(in crate::ops) const DOUT: usize = 2;
pub(in crate::ops) const DSUM: usize = 3;
pub(in crate::ops) const DX: usize = 4;
pub(in crate::ops) const DWEIGHT: usize = 5;
pub(in crate::ops) const DBIAS: usize = 6;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) num_rows: usize,
    /// Leading dimensions of x, dout, dx, dsum (dsum repeats x when absent).
    pub(super) rows: Space<4>,
    /// Stride along a row of x, dout, dx, dsum, weight, dweight, dbias.
    pub(super) steps: [isize; 7],
    /// The mean was subtracted: layer_norm.
    pub(super) center: bool,
    pub(super) has_weight: bool,
    pub(super) has_dsum: bool,
    pub(super) has_dweight: bool,
    pub(super) has_dbias: bool,
    /// The rows of x, dout, dx and dsum are dense, 16-byte aligned and multiples of 16 bytes long.
    pub(super) vector_rows: bool,
    /// The weight is.
    pub(super) vector_weight: bool,
    pub(super) eps_bits: u32,
}

impl Problem {
    /// How many gradients are summed over rows.
    pub(super) fn num_sums(&self) -> usize {
        self.has_dweight as usize + self.has_dbias as usize
    }
}

pub(in crate::ops) fn check(center: bool, args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let eps = check_eps(&sizes, attrs)?;
    let given = |index: usize| args.get(index).map(|t| t.layout());
    let (x, dout, dx) = (args.at(X).layout(), args.at(DOUT).layout(), args.at(DX).layout());
    let dsum = given(DSUM).unwrap_or(x);
    let step = |index| given(index).map_or(1, Layout::step);
    Ok(Problem {
        dtype: args.at(X).dtype(),
        hidden: sizes.size("hidden"),
        num_rows: sizes.leading_count(),
        rows: Space::new(sizes.leading_rank(), [x, dout, dx, dsum]),
        steps: [x.step(), dout.step(), dx.step(), dsum.step(), step(WEIGHT), step(DWEIGHT), step(DBIAS)],
        center,
        has_weight: given(WEIGHT).is_some(),
        has_dsum: given(DSUM).is_some(),
        has_dweight: given(DWEIGHT).is_some(),
        has_dbias: given(DBIAS).is_some(),
        vector_rows: args.are_vector_rows(&[X, DOUT, DX, DSUM]),
        vector_weight: args.are_vector_rows(&[WEIGHT]),
        eps_bits: eps.to_bits(),
    })
}

pub(in crate::ops) fn cost(p: &Problem) -> Cost {
    let elements = (p.num_rows * p.hidden) as f64;
    let passes = if p.has_dsum { 4.0 } else { 3.0 };
    let vectors = p.hidden as f64 * (p.has_weight as usize + p.num_sums()) as f64;
    let flops = if p.center { 16.0 } else { 12.0 };
    Cost::moving((passes * elements + vectors) * p.dtype.size() as f64, flops * elements)
}
