//! `grouped_linear_backward`: the gradients of `grouped_linear` with respect to `x`, `w` and `bias`, given that of its result.
//!
//! With `z = x · w[g]ᵀ + bias[g]` and `out = scale * act(z)` for the rows of each group `g`: `dz = dout * scale * act'(z)`,
//! `dx = dz · w[g]`, `dw[g] = dzᵀ · x` and `dbias[g]` is the sum of `dz`, both over the rows of `g` alone. Groups without rows
//! have gradients of zero, and so have rows of `x` past the sum of `counts`.
//!
//! - Shapes: `x` and `dx` are `[rows, k]`, `w` and `dw` `[groups, n, k]`, `dout` and `z` `[rows, n]`, `dbias` `[groups, n]`,
//!   `counts` `[groups]`; any strides. Each gradient is optional, but at least one must be asked for. `z` is needed, and read,
//!   only with an activation.
//! - Counts that are refused, or cut on a GPU, are those of `grouped_linear`.
//! - Types: f32, f16 or bf16, the same for all but `counts`. `dz` is computed in f32 and rounded to that type before the
//!   products, whose sums are in f32; `dbias` adds the unrounded values, in their order. Where products take subnormal numbers
//!   of bf16 for zero is as in `grouped_linear`.
//! - A row of `dx` has the same bits whatever the other rows are.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod weights;

use super::problem::{Numbers, has_pieces, has_pieces_across};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, Products,
    SizeSpec, shape,
};
use crate::ops::elementwise::function::Kind;
use crate::ops::grouped::Matrices;
use crate::ops::linear::Activation;
use crate::ops::linear::problem::Matrix;
use crate::tensor::{DType, TensorView, TensorViewMut};

pub(super) const X: usize = 0;
pub(super) const W: usize = 1;
pub(super) const COUNTS: usize = 2;
pub(super) const DOUT: usize = 3;
pub(super) const Z: usize = 4;
pub(super) const DX: usize = 5;
pub(super) const DW: usize = 6;
pub(super) const DBIAS: usize = 7;

pub(super) const ACT: usize = 0;
pub(super) const SCALE: usize = 1;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackwardProblem {
    dtype: DType,
    rows: usize,
    groups: usize,
    n: usize,
    k: usize,
    activation: Option<Kind>,
    scale_bits: u32,
    counts_step: isize,
    x: Matrix,
    dout: Matrix,
    z: Matrix,
    w: Matrices,
    dx: Option<Matrix>,
    dw: Option<Matrices>,
    /// Strides from group to group and along a row.
    dbias: Option<[isize; 2]>,
    pieces: Pieces,
}

/// Whether rows of tensors consist of whole aligned pieces of 16 bytes, and columns of `w`. Those of absent ones do not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Pieces {
    x: bool,
    w: bool,
    w_across: bool,
    dout: bool,
    dx: bool,
    dw: bool,
}

impl BackwardProblem {
    /// Whether `dz` differs from `dout`.
    fn changes_dout(&self) -> bool {
        self.activation.is_some() || f32::from_bits(self.scale_bits) != 1.0
    }

    /// Whether `dz` goes into scratch memory.
    fn stores_dz(&self) -> bool {
        (self.dx.is_some() || self.dw.is_some()) && self.changes_dout()
    }

    /// Rows of `dz`, wherever they are.
    fn dz(&self) -> Matrix {
        if self.stores_dz() { Matrix { row: self.n as isize, col: 1, aligned: true } } else { self.dout }
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
    let op = SPEC.name;
    let sizes = Matcher::of(args, attrs)?;
    let activation = Activation::ALL[attrs.choice(ACT)];
    if activation != Activation::None && args.get(Z).is_none() {
        let expected = format!("a tensor, because of act={}", activation.name());
        return Err(Error::argument(op, "z", expected, "nothing"));
    }
    if [DX, DW, DBIAS].iter().all(|&index| args.get(index).is_none()) {
        return Err(Error::argument(op, "dx", "at least one of dx, dw and dbias", "nothing"));
    }
    let scale = attrs.float(SCALE);
    sizes.option("scale", scale, "a finite number", (scale as f32).is_finite())?;
    let counts = Numbers::of(args.at(COUNTS));
    Ok(BackwardProblem {
        dtype: args.at(X).dtype(),
        rows: sizes.size("rows"),
        groups: sizes.size("groups"),
        n: sizes.size("n"),
        k: sizes.size("k"),
        activation: activation.kind(),
        scale_bits: (scale as f32).to_bits(),
        counts_step: counts.step,
        x: Matrix::of_weight(args.at(X)),
        dout: Matrix::of_weight(args.at(DOUT)),
        z: args.get(Z).map_or(Matrix { row: 0, col: 0, aligned: false }, Matrix::of_weight),
        w: Matrices::of(args.at(W)),
        dx: args.get(DX).map(Matrix::of_weight),
        dw: args.get(DW).map(Matrices::of),
        dbias: args.get(DBIAS).map(|dbias| [dbias.layout().strides()[0], dbias.layout().strides()[1]]),
        pieces: Pieces {
            x: has_pieces(args.at(X)),
            w: has_pieces(args.at(W)),
            w_across: has_pieces_across(args.at(W)),
            dout: has_pieces(args.at(DOUT)),
            dx: args.get(DX).is_some_and(has_pieces),
            dw: args.get(DW).is_some_and(has_pieces),
        },
    })
}

const SPEC: OpSpec = OpSpec {
    name: "grouped_linear_backward",
    summary: "Gradients of grouped_linear with respect to its input, weights and biases",
    args: &[
        ArgSpec::input("x", shape![rows, k], DTypeRule::FLOAT, "input of the forward call"),
        ArgSpec::input("w", shape![groups, n, k], DTypeRule::Same(X), "its weights"),
        ArgSpec::input("counts", shape![groups], DTypeRule::I32, "rows of each group"),
        ArgSpec::input("dout", shape![rows, n], DTypeRule::Same(X), "gradient of its result"),
        ArgSpec::input(
            "z",
            shape![rows, n],
            DTypeRule::Same(X),
            "what its activation was applied to, if it had one",
        )
        .optional(),
        ArgSpec::output("dx", shape![rows, k], DTypeRule::Same(X), "gradient of x").optional(),
        ArgSpec::output("dw", shape![groups, n, k], DTypeRule::Same(X), "gradient of w").optional(),
        ArgSpec::output("dbias", shape![groups, n], DTypeRule::Same(X), "gradient of the biases").optional(),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor of the forward result" },
    ],
    sizes: &[
        SizeSpec { name: "rows", default: 2048, doc: "rows of x" },
        SizeSpec { name: "groups", default: 64, doc: "number of groups" },
        SizeSpec { name: "n", default: 512, doc: "columns of dout" },
        SizeSpec { name: "k", default: 512, doc: "columns of x" },
    ],
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Counts, which are values of a tensor, are checked where they are used.
unsafe impl Op for Backward {
    type Problem = BackwardProblem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<BackwardProblem>] {
        KERNELS
    }

    /// As many groups as can have a row are read; the gradients of all are written.
    fn cost(p: &BackwardProblem) -> Cost {
        let (rows, n, k) = (p.rows as f64, p.n as f64, p.k as f64);
        let given = |is: bool, elements: f64| if is { elements } else { 0.0 };
        let elements = rows * n
            + given(p.activation.is_some(), rows * n)
            + given(p.dx.is_some(), rows.min(p.groups as f64) * n * k + rows * k)
            + given(p.dw.is_some(), rows * k + p.groups as f64 * n * k)
            + given(p.dbias.is_some(), p.groups as f64 * n);
        let products = u8::from(p.dx.is_some()) + u8::from(p.dw.is_some());
        let flops = 2.0 * f64::from(products) * rows * n * k + 3.0 * rows * n;
        Cost::multiplying(elements * p.dtype.size() as f64, flops, Products::of(p.dtype))
    }
}

/// Preferred first.
static KERNELS: &[Kernel<BackwardProblem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("grouped_linear_backward_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("grouped_linear_backward_avx2", Tier::Avx2),
    cpu::kernel("grouped_linear_backward_portable", Tier::Portable),
];

/// A call of `grouped_linear_backward`.
///
/// ```
/// use warpsmith::{ops::GroupedLinearBackward, DType, Device, Tensor};
/// let x = Tensor::randn(&[5, 64], DType::F32, Device::Cpu, 0)?;
/// let w = Tensor::randn(&[3, 32, 64], DType::F32, Device::Cpu, 1)?;
/// let counts = Tensor::from_slice(&[2i32, 0, 3], &[3], Device::Cpu)?;
/// let dout = Tensor::randn(&[5, 32], DType::F32, Device::Cpu, 2)?;
/// let mut dw = Tensor::zeros(&[3, 32, 64], DType::F32, Device::Cpu)?;
/// GroupedLinearBackward::new(&x, &w, &counts, &dout).dw(&mut dw).run(&Device::Cpu.default_stream()?)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type GroupedLinearBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradients of `x · w[g]ᵀ`, given that of the result.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w: impl Into<TensorView<'a>>,
        counts: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(W, w).input(COUNTS, counts).input(DOUT, dout)
    }

    /// The forward call had an activation, which was applied to `z`.
    pub fn activation(self, activation: Activation, z: impl Into<TensorView<'a>>) -> Self {
        self.choice(ACT, activation).input(Z, z)
    }

    /// The factor of the forward call.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Writes the gradient of `x`.
    pub fn dx(self, dx: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DX, dx)
    }

    /// Writes the gradient of `w`.
    pub fn dw(self, dw: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DW, dw)
    }

    /// Writes the gradient of the biases.
    pub fn dbias(self, dbias: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DBIAS, dbias)
    }

    /// Computes the gradients that were asked for.
    pub fn run(self, stream: &Stream) -> Result<()> {
        self.launch([], stream)
    }
}
