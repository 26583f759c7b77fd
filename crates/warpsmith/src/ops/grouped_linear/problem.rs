//! The checked call of `grouped_linear`.

use super::{ACT, BIAS, COUNTS, GATE, INDEX, OUT, RESIDUAL, ROW_SCALE, SCALE, SPEC, W, X};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher, survey};
use crate::ops::grouped::Matrices;
use crate::ops::linear::problem::{Matrix, Problem as Product, Strides};
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, TensorView};

/// Numbers of a tensor with one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::ops) struct Numbers {
    pub dtype: DType,
    pub step: isize,
}

impl Numbers {
    pub fn of(view: &TensorView<'_>) -> Numbers {
        Numbers { dtype: view.dtype(), step: view.layout().step() }
    }
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    /// The product of the rows of `x` with one matrix, and what follows it, but for the scale of rows; its `m` means nothing.
    pub(in crate::ops) product: Product,
    pub(in crate::ops) rows: usize,
    pub(in crate::ops) x_rows: usize,
    pub(in crate::ops) groups: usize,
    pub(in crate::ops) w: Matrices,
    /// Strides from group to group and along a row.
    pub(in crate::ops) bias: Option<[isize; 2]>,
    pub(in crate::ops) counts_step: isize,
    pub(in crate::ops) index: Option<Numbers>,
    pub(in crate::ops) row_scale: Option<Numbers>,
    /// Whether rows consist of whole aligned pieces of 16 bytes: those of `x`, those of `w`, and those of results and residual.
    pub(in crate::ops) x_pieces: bool,
    pub(in crate::ops) w_pieces: bool,
    pub(in crate::ops) out_pieces: bool,
    /// Whether columns of the matrices of `w` do.
    pub(in crate::ops) w_across: bool,
    /// Whether rows that belong to no group are written.
    pub(in crate::ops) clears: bool,
}

/// Whether the rows of a tensor consist of whole aligned pieces of 16 bytes. Distances between things of which there is but one
/// count as well, so that the answer does not depend on how many there are.
pub(in crate::ops) fn has_pieces(view: &TensorView<'_>) -> bool {
    has_pieces_along(view, view.layout().rank() - 1)
}

/// Whether the columns of matrices do.
pub(in crate::ops) fn has_pieces_across(view: &TensorView<'_>) -> bool {
    has_pieces_along(view, view.layout().rank() - 2)
}

fn has_pieces_along(view: &TensorView<'_>, dim: usize) -> bool {
    let (strides, length) = (view.layout().strides(), view.shape()[dim]);
    let whole = |elements: usize| (elements * view.dtype().size()).is_multiple_of(16);
    let others = strides.iter().enumerate().filter(|&(other, _)| other != dim);
    let apart = others.map(|(_, stride)| stride.unsigned_abs()).all(whole);
    view.is_aligned(16) && (length <= 1 || strides[dim] == 1) && whole(length) && apart
}

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = SPEC.name;
    let gate = Gate::ALL[attrs.choice(GATE)];
    let mut sizes = Matcher::new(args, attrs);
    sizes.arg(X)?;
    sizes.arg(W)?;
    let (x, w, out) = (args.at(X), args.at(W), args.at(OUT));
    if gate != Gate::None && !sizes.size("w_rows").is_multiple_of(2) {
        let expected = "an even number of rows, because of the gate";
        return Err(Error::argument(op, "w", expected, format!("{:?}", w.shape())));
    }
    sizes.all()?;
    // In a survey, CPU tensors represent those of a GPU.
    if x.dtype() != w.dtype() && (x.device() != Device::Cpu || survey::is_running()) {
        let expected = format!("dtype {}, that of x, because only the CPU mixes them", x.dtype());
        return Err(Error::argument(op, "w", expected, w.dtype().name()));
    }
    let scale = attrs.float(SCALE);
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    let (n, k) = (sizes.size("n"), sizes.size("k"));
    let matrices = Matrices::of(w);
    let row = Matrix { row: matrices.row, col: matrices.col, aligned: false };
    let bias = args.get(BIAS).map(|bias| [bias.layout().strides()[0], bias.layout().strides()[1]]);
    let residual = args.get(RESIDUAL).map(Matrix::of_weight);
    let product =
        Product::product(x.dtype(), false, [1, n, k], [Matrix::of_weight(x), row, Matrix::of_weight(out)]);
    Ok(Problem {
        product: Product {
            w_dtype: w.dtype(),
            gate,
            activation: Activation::ALL[attrs.choice(ACT)].kind(),
            scale_bits: (scale as f32).to_bits(),
            has_bias: bias.is_some(),
            bias_step: bias.map_or(0, |[_, step]| step),
            has_residual: residual.is_some(),
            residual: residual.map_or(Strides::default(), |m| Strides { batch: 0, row: m.row, col: m.col }),
            ..product
        },
        rows: sizes.size("rows"),
        x_rows: sizes.size("x_rows"),
        groups: sizes.size("groups"),
        w: matrices,
        bias,
        counts_step: args.at(COUNTS).layout().step(),
        index: args.get(INDEX).map(Numbers::of),
        row_scale: args.get(ROW_SCALE).map(Numbers::of),
        x_pieces: has_pieces(x),
        w_pieces: has_pieces(w),
        w_across: has_pieces_across(w),
        out_pieces: has_pieces(out) && args.get(RESIDUAL).is_none_or(has_pieces),
        clears: true,
    })
}
