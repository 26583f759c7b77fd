//! The checked call of `moe_ffn`, and the products it consists of.

use super::{ACT, B1, B2, GATE, IDS, OUT, RESIDUAL, ROUTING, SCALE, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::op::{Args, Attrs, Matcher, survey};
use crate::ops::elementwise::function::Kind;
use crate::ops::grouped::Matrices;
use crate::ops::grouped_linear::problem::{has_pieces, has_pieces_across};
use crate::ops::linear::problem::{Matrix, Problem as Product};
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, Space};

/// Tensors with a row for each token, in the order of [`Problem::space`].
pub(super) const ROW_X: usize = 0;
pub(super) const ROW_IDS: usize = 1;
pub(super) const ROW_ROUTING: usize = 2;
pub(super) const ROW_RESIDUAL: usize = 3;
pub(super) const ROW_OUT: usize = 4;

/// Bytes of what is between the products, at most, unless a token alone has more.
const PART_BYTES: usize = 1 << 28;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) w_dtype: DType,
    pub(super) id_dtype: DType,
    pub(super) weight_dtype: DType,
    pub(super) tokens: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    /// Of the shared expert.
    pub(super) shared_ffn: Option<usize>,
    pub(super) activation: Option<Kind>,
    pub(super) gate: Gate,
    pub(super) scale_bits: u32,
    /// The tokens in the tensors with a row for each; one that is absent counts as `x`.
    pub(super) space: Space<5>,
    /// Strides along their rows.
    pub(super) steps: [isize; 5],
    pub(super) w1: Matrices,
    pub(super) w2: Matrices,
    pub(super) shared_w1: Matrices,
    pub(super) shared_w2: Matrices,
    /// Strides from expert to expert and along a row.
    pub(super) b1: Option<[isize; 2]>,
    pub(super) b2: Option<[isize; 2]>,
    pub(super) has_residual: bool,
    /// The rows of `x`, if all are the same distance apart.
    pub(super) x: Option<Matrix>,
    /// Whether rows consist of whole aligned pieces of 16 bytes: those of `w1`, `w2`, `shared_w1` and `shared_w2`, and below those of
    /// residual and result.
    pub(super) w_pieces: [bool; 4],
    /// Whether columns of those matrices do.
    pub(super) w_across: [bool; 4],
    pub(super) row_pieces: bool,
}

impl Problem {
    /// Rows of a first matrix that makes `ffn` results.
    pub(super) fn rows_of(&self, ffn: usize) -> usize {
        if self.gate == Gate::None { ffn } else { 2 * ffn }
    }

    /// The factor of the sum.
    pub(super) fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }

    /// How kernels multiply, as text.
    pub(super) fn arithmetic(&self) -> String {
        self.second(self.w2, self.ffn, None).arithmetic()
    }

    /// Bytes that a token takes between the products.
    pub(super) fn token_bytes(&self) -> usize {
        let row = |ffn: usize| {
            let narrow = (self.hidden + ffn).saturating_mul(self.dtype.size());
            narrow.saturating_add(self.hidden.saturating_mul(size_of::<f32>()))
        };
        self.top_k.saturating_mul(row(self.ffn)).saturating_add(self.shared_ffn.map_or(0, row))
    }

    /// The most tokens that are computed together.
    pub(super) fn part_tokens(&self) -> usize {
        let most = (PART_BYTES / self.token_bytes().max(1)).max(1);
        // Parts of the same size: the fewer tokens an expert has, the less its weights are used.
        self.tokens.div_ceil(self.tokens.div_ceil(most).max(1)).max(1)
    }

    /// The first product of any number of dense rows, with a matrix of this kind.
    pub(super) fn first(&self, w: Matrices, ffn: usize, bias: Option<[isize; 2]>) -> Product {
        let product = self.product(w, [ffn, self.hidden], bias);
        Product { gate: self.gate, activation: self.activation, ..product }
    }

    /// The second product, whose results are in f32.
    pub(super) fn second(&self, w: Matrices, ffn: usize, bias: Option<[isize; 2]>) -> Product {
        self.product(w, [self.hidden, ffn], bias).into_f32()
    }

    pub(super) fn product(&self, w: Matrices, [n, k]: [usize; 2], bias: Option<[isize; 2]>) -> Product {
        let dense = |columns: usize| Matrix { row: columns as isize, col: 1, aligned: true };
        let w = Matrix { row: w.row, col: w.col, aligned: false };
        let product = Product::product(self.dtype, false, [1, n, k], [dense(k), w, dense(n)]);
        let (has_bias, bias_step) = (bias.is_some(), bias.map_or(0, |[_, step]| step));
        Product { w_dtype: self.w_dtype, has_bias, bias_step, ..product }
    }
}

/// Where the tensors of a call are among its arguments.
pub(super) struct Positions {
    pub x: usize,
    pub w1: usize,
    pub w2: usize,
    pub ids: usize,
    pub routing: usize,
    pub b1: usize,
    pub b2: usize,
    pub shared_w1: usize,
    pub shared_w2: usize,
    /// Tensors like `x`, the first of which may be absent.
    pub residual: usize,
    pub out: usize,
}

const FORWARD: Positions = Positions {
    x: X,
    w1: W1,
    w2: W2,
    ids: IDS,
    routing: ROUTING,
    b1: B1,
    b2: B2,
    shared_w1: SHARED_W1,
    shared_w2: SHARED_W2,
    residual: RESIDUAL,
    out: OUT,
};

pub(super) fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let options = [attrs.choice(ACT), attrs.choice(GATE)];
    check_at(args, attrs, &FORWARD, options, attrs.float(SCALE)).map(|(problem, _)| problem)
}

/// The problem of a call with these tensors, and its sizes. `options` are activation and gate.
pub(super) fn check_at<'c>(
    args: &'c Args<'c>,
    attrs: &'c Attrs,
    at: &Positions,
    [activation, gate]: [usize; 2],
    scale: f64,
) -> Result<(Problem, Matcher<'c>)> {
    let (op, gate) = (args.spec().name, Gate::ALL[gate]);
    let mut sizes = Matcher::new(args, attrs);
    for (index, rows) in [(at.x, ""), (at.w1, "rows"), (at.shared_w1, "shared_rows")] {
        sizes.arg(index)?;
        let odd = sizes.get(rows).is_some_and(|rows| !rows.is_multiple_of(2));
        if gate != Gate::None && odd {
            let expected = "an even number of rows, because of the gate";
            let got = format!("{:?}", args.at(index).shape());
            return Err(Error::argument(op, args.spec().args[index].name, expected, got));
        }
    }
    sizes.all()?;
    let (x, w1) = (args.at(at.x), args.at(at.w1));
    // In a survey, CPU tensors represent those of a GPU.
    if x.dtype() != w1.dtype() && (x.device() != Device::Cpu || survey::is_running()) {
        let expected = format!("dtype {}, that of x, because only the CPU mixes them", x.dtype());
        return Err(Error::argument(op, "w1", expected, w1.dtype().name()));
    }
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    let rows = [at.x, at.ids, at.routing, at.residual, at.out];
    let rows = rows.map(|index| args.get(index).unwrap_or(x).layout());
    let matrices = |index: usize| args.get(index).map_or_else(Matrices::default, Matrices::of);
    let weights = [at.w1, at.w2, at.shared_w1, at.shared_w2];
    let problem = Problem {
        dtype: x.dtype(),
        w_dtype: w1.dtype(),
        id_dtype: args.at(at.ids).dtype(),
        weight_dtype: args.at(at.routing).dtype(),
        tokens: sizes.leading_count(),
        experts: sizes.size("experts"),
        top_k: sizes.size("top_k"),
        hidden: sizes.size("hidden"),
        ffn: sizes.size("ffn"),
        shared_ffn: args.get(at.shared_w1).map(|_| sizes.size("shared_ffn")),
        activation: Activation::ALL[activation].kind(),
        gate,
        scale_bits: (scale as f32).to_bits(),
        space: Space::new(sizes.leading_rank(), rows),
        steps: rows.map(|layout| layout.step()),
        w1: matrices(at.w1),
        w2: matrices(at.w2),
        shared_w1: matrices(at.shared_w1),
        shared_w2: matrices(at.shared_w2),
        b1: bias(args, at.b1),
        b2: bias(args, at.b2),
        has_residual: args.get(at.residual).is_some(),
        x: Matrix::of_rows(op, "x", x).ok(),
        w_pieces: weights.map(|index| args.get(index).is_none_or(has_pieces)),
        w_across: weights.map(|index| args.get(index).is_none_or(has_pieces_across)),
        row_pieces: [at.residual, at.out].into_iter().all(|index| args.get(index).is_none_or(has_pieces)),
    };
    Ok((problem, sizes))
}

/// The strides of the biases of experts, if they are given.
pub(super) fn bias(args: &Args<'_>, index: usize) -> Option<[isize; 2]> {
    args.get(index).map(|bias| [bias.layout().strides()[0], bias.layout().strides()[1]])
}
