//! `grouped_linear`: products of rows that are sorted by group with the matrix of their group, in one call.
//!
//! The first `counts[0]` rows belong to group 0, the next `counts[1]` to group 1, and so on. For a row `r` of group `g`:
//! `out[r] = residual[r] + scale * row_scale[r] * act(x[r] · w[g]ᵀ + bias[g])`; everything but the product is optional. With a
//! gate, `w` and `bias` have rows for gate and up, and it is `act(gate) * up`, as in `linear`.
//!
//! - Shapes: `x` is `[x_rows, k]`, `w` is `[groups, w_rows, k]` with `w_rows` of `n`, or `2 * n` with a gate, `counts` is
//!   `[groups]`, `bias` is `[groups, w_rows]`, `row_scale` is `[rows]`, `residual` and `out` are `[rows, n]`. Without `index`,
//!   `rows` is `x_rows`. Any strides, any size may be zero.
//! - `index`, `[rows]`, says which row of `x` each row is made from; with -1 it is made from zeros. On the CPU other rows that `x`
//!   does not have are an error, found before anything is written; on a GPU they count as -1.
//! - Rows of `out` past the sum of `counts` are zeros: without residual, and whatever their index is.
//! - On the CPU, counts below zero and a sum of counts above `rows` are an error, found before anything is written. On a GPU a
//!   count below zero counts as zero, and rows past the last one as absent.
//! - Types: f32, f16 or bf16 for `x`, the same for bias, residual and `out`; `row_scale` may be f32 instead. On the CPU `w` may
//!   also be f16 or bf16 where `x` is f32. i32 for `counts`, i32 or i64 for `index`.
//! - Rounding: sums are in f32, and so are bias, activation, gate, factors and residual; the result is rounded once. What products
//!   on CPUs with AMX or AVX-512 BF16 take for zero is as in `linear`. NaN and infinities give what the formula gives.
//! - On CUDA devices, where results have 16 bits, silu and gelu_tanh count as zero below 2^-132, also before the gate.
//! - A row has the same bits whatever the other rows and counts are. Matrices of groups without rows are not read.
//! - On a GPU nothing waits for the counts: a call can be captured in a graph and replayed with others.
//!
//! `grouped_linear_backward` computes the gradients of `x`, `w` and `bias`, where there is no gate, no index and no scale of
//! rows, and `x` and `w` have the same type.

pub(in crate::ops) mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
pub(in crate::ops) mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod sm90;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, BackwardProblem, GroupedLinearBackward};
pub use problem::Problem;

use super::linear::problem::WEIGHTS;
use super::linear::{Activation, Gate};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, DerivedSize, Gradient, Kernel,
    OneOutput, Op, OpSpec, Products, SizeRule, SizeSpec, Value, shape,
};
use crate::tensor::{DType, TensorView};

const X: usize = 0;
const W: usize = 1;
const COUNTS: usize = 2;
const INDEX: usize = 3;
const BIAS: usize = 4;
const ROW_SCALE: usize = 5;
const RESIDUAL: usize = 6;
const OUT: usize = 7;

const ACT: usize = 0;
const GATE: usize = 1;
const SCALE: usize = 2;

const SPEC: OpSpec = OpSpec {
    name: "grouped_linear",
    summary: "Products of rows that are sorted by group with the matrix of their group",
    args: &[
        ArgSpec::input(
            "x",
            shape![x_rows, k],
            DTypeRule::FLOAT,
            "sorted by group, unless an index says where",
        ),
        ArgSpec::input(
            "w",
            shape![groups, w_rows, k],
            DTypeRule::With(X, &WEIGHTS),
            "n rows for each group, with a gate 2 n",
        ),
        ArgSpec::input("counts", shape![groups], DTypeRule::I32, "rows of each group"),
        ArgSpec::input(
            "index",
            shape![index_rows],
            DTypeRule::INDEX,
            "the row of x that each row is made from, -1 for zeros",
        )
        .optional(),
        ArgSpec::input("bias", shape![groups, w_rows], DTypeRule::Same(X), "added to the products")
            .optional(),
        ArgSpec::input(
            "row_scale",
            shape![rows],
            DTypeRule::SameOr(X, &[DType::F32]),
            "a factor of each row, in f32 or the type of x",
        )
        .optional(),
        ArgSpec::input("residual", shape![rows, n], DTypeRule::Same(X), "added last").optional(),
        ArgSpec::output("out", shape![rows, n], DTypeRule::Same(X), "").in_place_of(RESIDUAL),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec {
            name: "gate",
            kind: AttrKind::Choice(Gate::NAMES),
            doc: "act(gate) * up, and how their rows share w",
        },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor before the residual is added" },
    ],
    sizes: &[
        SizeSpec { name: "rows", default: 2048, doc: "rows of the result" },
        SizeSpec { name: "groups", default: 64, doc: "number of groups" },
        SizeSpec { name: "n", default: 512, doc: "columns of the result" },
        SizeSpec { name: "k", default: 512, doc: "length of a row of x and w" },
        SizeSpec { name: "x_rows", default: 256, doc: "rows of x, if there is an index" },
    ],
    derived: &[
        DerivedSize { name: "rows", rule: SizeRule::Else { size: "index_rows", or: "x_rows" } },
        DerivedSize { name: "n", rule: SizeRule::Divided { size: "w_rows", option: GATE, by: &[1, 2, 2] } },
    ],
    gradient: Some(Gradient {
        op: "grouped_linear_backward",
        inputs: &[
            (backward::X, Source::Input(X)),
            (backward::W, Source::Input(W)),
            (backward::COUNTS, Source::Input(COUNTS)),
            (backward::DOUT, Source::Incoming(OUT)),
            (
                backward::Z,
                Source::Recomputed {
                    output: OUT,
                    options: &[(ACT, Value::Choice(0)), (SCALE, Value::Float(1.0))],
                    without: &[RESIDUAL],
                },
            ),
        ],
        results: &[
            (X, InputGradient::Output(backward::DX)),
            (W, InputGradient::Output(backward::DW)),
            (BIAS, InputGradient::Output(backward::DBIAS)),
        ],
        only_if: &[(GATE, Value::Choice(0))],
        without: &[INDEX, ROW_SCALE, RESIDUAL],
    }),
    autocast: Autocast::Low,
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Counts and indices, which are values of tensors, are checked where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    /// All rows belong to a group, and as many groups as can have a row are read.
    fn cost(p: &Problem) -> Cost {
        let product = &p.product;
        let (rows, n, k) = (p.rows as f64, product.n as f64, product.k as f64);
        let weights = product.weight_rows() as f64;
        let results = rows * n * (1.0 + f64::from(u8::from(product.has_residual)));
        let x_rows = p.rows.min(p.x_rows) as f64;
        let bytes = (x_rows * k + results) * product.x_dtype.size() as f64
            + rows.min(p.groups as f64) * weights * k * product.w_dtype.size() as f64;
        Cost::multiplying(bytes, 2.0 * rows * weights * k, Products::of(product.x_dtype))
    }
}

/// Preferred first.
static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    sm90::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("grouped_linear_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("grouped_linear_avx2", Tier::Avx2),
    cpu::kernel("grouped_linear_portable", Tier::Portable),
];

/// A call of `grouped_linear`.
///
/// ```
/// use warpsmith::{ops::GroupedLinear, DType, Device, Tensor};
/// let x = Tensor::randn(&[5, 64], DType::F32, Device::Cpu, 0)?;
/// let w = Tensor::randn(&[3, 32, 64], DType::F32, Device::Cpu, 1)?;
/// let counts = Tensor::from_slice(&[2i32, 0, 3], &[3], Device::Cpu)?;
/// assert_eq!(GroupedLinear::new(&x, &w, &counts).silu().run()?.shape(), [5, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type GroupedLinear<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// `x · w[g]ᵀ`, with `counts[g]` rows for each group.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w: impl Into<TensorView<'a>>,
        counts: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(W, w).input(COUNTS, counts)
    }

    /// Makes each row from the row of `x` with this number.
    pub fn gather(self, index: impl Into<TensorView<'a>>) -> Self {
        self.input(INDEX, index)
    }

    /// Adds a bias of each group to its products.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// Applies a function to product and bias.
    pub fn activation(self, activation: Activation) -> Self {
        self.choice(ACT, activation)
    }

    /// Applies silu.
    pub fn silu(self) -> Self {
        self.activation(Activation::Silu)
    }

    /// `activation(gate) * up`, from a `w` that holds the rows of both.
    pub fn gated(self, gate: Gate, activation: Activation) -> Self {
        self.choice(GATE, gate).activation(activation)
    }

    /// Multiplies each row by a number of its own.
    pub fn row_scale(self, row_scale: impl Into<TensorView<'a>>) -> Self {
        self.input(ROW_SCALE, row_scale)
    }

    /// Multiplies the result before the residual is added.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Adds a tensor to the result.
    pub fn residual(self, residual: impl Into<TensorView<'a>>) -> Self {
        self.input(RESIDUAL, residual)
    }
}
