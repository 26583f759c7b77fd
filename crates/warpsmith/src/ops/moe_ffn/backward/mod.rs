//! `moe_ffn_backward`: the gradients of `moe_ffn`, given that of its result. What is between the two products is computed again.
//!
//! For slot `s` of token `t` with expert `e` and weight `r`, where `z = x[t] · w1[e]ᵀ + b1[e]`, `h` is what activation and gate
//! make of it, and `dy = scale * dout[t]`:
//!
//! - `da = dy · w2[e]`, `dweights[t, s] = da · h + dy · b2[e]`, and `dz` is the gradient of `z` given that `r * da` is that of `h`.
//! - `dw1[e]`, `dw2[e]`, `db1[e]` and `db2[e]` are the sums of `dzᵀ · x[t]`, `dyᵀ · (r * h)`, `dz` and `r * dy` over the slots of
//!   `e`, in their order. Experts without slots have gradients of zero.
//! - `dx[t]` is the sum of `dz · w1[e]` over the slots of `t`, in their order; that of the shared expert comes last.
//!
//! The shared expert has all tokens with a weight of one. A dropped slot has a `dweights` of zero. The gradient of a residual is
//! `dout`.
//!
//! - Shapes and ids are those of `moe_ffn`; each gradient has the shape of what it is a gradient of. Each is optional, but at
//!   least one must be asked for.
//! - Types: f32, f16 or bf16, the same for all but `ids`, `weights` and `dweights`: those two may be f32.
//! - Rounding: `z`, `da` and everything computed of them are in f32. `dy`, `h`, `r * h` and `dz` are rounded to the type of `x`
//!   before they are multiplied; `db1` adds the unrounded `dz`. Sums are in f32, and results are rounded once.
//! - Where products take subnormal numbers of bf16 for zero is as in `moe_ffn`.
//! - A token's `dx` and `dweights` have the same bits whatever the other tokens are.
//! - Memory: for each slot rows of `z`, `dz`, `h`, `da` and `dx`, where those of `dx` take the place of `z` on a GPU; on the CPU also of
//!   `x` and `dy`.
//! - On a GPU nothing waits for the ids, and ids that are no experts count as dropped, as in `moe_ffn`.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::problem::{self, Positions, Problem, bias};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, DerivedSize, Kernel, Op, OpSpec,
    Products, SizeRule, shape,
};
use crate::ops::grouped::Matrices;
use crate::ops::grouped_linear::problem::has_pieces;
use crate::ops::linear::problem::Matrix;
use crate::ops::linear::{Activation, Gate};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

pub(super) const X: usize = 0;
pub(super) const W1: usize = 1;
pub(super) const W2: usize = 2;
pub(super) const IDS: usize = 3;
pub(super) const ROUTING: usize = 4;
pub(super) const DOUT: usize = 5;
pub(super) const B1: usize = 6;
pub(super) const SHARED_W1: usize = 7;
pub(super) const SHARED_W2: usize = 8;
pub(super) const B2: usize = 9;
pub(super) const DX: usize = 10;
pub(super) const DW1: usize = 11;
pub(super) const DW2: usize = 12;
pub(super) const DROUTING: usize = 13;
pub(super) const DB1: usize = 14;
pub(super) const DB2: usize = 15;
pub(super) const DSHARED_W1: usize = 16;
pub(super) const DSHARED_W2: usize = 17;

pub(super) const ACT: usize = 0;
pub(super) const GATE: usize = 1;
pub(super) const SCALE: usize = 2;

const POSITIONS: Positions = Positions {
    x: X,
    w1: W1,
    w2: W2,
    ids: IDS,
    routing: ROUTING,
    b1: B1,
    b2: B2,
    shared_w1: SHARED_W1,
    shared_w2: SHARED_W2,
    residual: DOUT,
    out: DX,
};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackwardProblem {
    /// The forward call, with `dout` in place of the residual and `dx` in place of the result.
    forward: Problem,
    has_dx: bool,
    dw1: Option<Matrices>,
    dw2: Option<Matrices>,
    dshared_w1: Option<Matrices>,
    dshared_w2: Option<Matrices>,
    /// Strides from expert to expert and along a row.
    db1: Option<[isize; 2]>,
    db2: Option<[isize; 2]>,
    /// The tokens in `dweights`, and the stride along a row.
    dweights: Option<(Space<1>, isize)>,
    /// The rows of `dout`, if all are the same distance apart.
    dout: Option<Matrix>,
    /// Whether rows of the gradients of matrices consist of whole aligned pieces of 16 bytes.
    dw_pieces: [bool; 4],
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
    if (DX..=DSHARED_W2).all(|index| args.get(index).is_none()) {
        return Err(Error::argument(SPEC.name, "dx", "at least one gradient", "nothing"));
    }
    let options = [attrs.choice(ACT), attrs.choice(GATE)];
    let (forward, sizes) = problem::check_at(args, attrs, &POSITIONS, options, attrs.float(SCALE))?;
    for (index, of) in [(DB1, B1), (DB2, B2), (DSHARED_W1, SHARED_W1), (DSHARED_W2, SHARED_W2)] {
        if args.get(index).is_some() && args.get(of).is_none() {
            let expected = format!("nothing, because there is no {}", SPEC.args[of].name);
            return Err(Error::argument(SPEC.name, SPEC.args[index].name, expected, "a tensor"));
        }
    }
    let matrices = |index: usize| args.get(index).map(Matrices::of);
    let rank = sizes.leading_rank();
    Ok(BackwardProblem {
        forward,
        has_dx: args.get(DX).is_some(),
        dw1: matrices(DW1),
        dw2: matrices(DW2),
        dshared_w1: matrices(DSHARED_W1),
        dshared_w2: matrices(DSHARED_W2),
        db1: bias(args, DB1),
        db2: bias(args, DB2),
        dweights: args.get(DROUTING).map(|view| (Space::new(rank, [view.layout()]), view.layout().step())),
        dout: Matrix::of_rows(SPEC.name, "dout", args.at(DOUT)).ok(),
        dw_pieces: [DW1, DW2, DSHARED_W1, DSHARED_W2].map(|index| args.get(index).is_some_and(has_pieces)),
    })
}

const SPEC: OpSpec = OpSpec {
    name: "moe_ffn_backward",
    summary: "Gradients of moe_ffn with respect to all its inputs",
    args: &[
        ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, "tokens"),
        ArgSpec::input("w1", shape![experts, rows, hidden], DTypeRule::Same(X), "of the forward call"),
        ArgSpec::input("w2", shape![experts, hidden, ffn], DTypeRule::Same(X), "of the forward call"),
        ArgSpec::input("ids", shape![.., top_k], DTypeRule::INDEX, "experts of each token, -1 for none"),
        ArgSpec::input("weights", shape![.., top_k], DTypeRule::SameOr(X, &[DType::F32]), "of their results"),
        ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(X), "gradient of the result"),
        ArgSpec::input("b1", shape![experts, rows], DTypeRule::Same(X), "if the forward call had it")
            .optional(),
        ArgSpec::input("shared_w1", shape![shared_rows, hidden], DTypeRule::Same(X), "the same").optional(),
        ArgSpec::input("shared_w2", shape![hidden, shared_ffn], DTypeRule::Same(X), "the same")
            .with(SHARED_W1),
        ArgSpec::input("b2", shape![experts, hidden], DTypeRule::Same(X), "the same").optional(),
        ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(X), "gradient of x").optional(),
        ArgSpec::output("dw1", shape![experts, rows, hidden], DTypeRule::Same(X), "gradient of w1")
            .optional(),
        ArgSpec::output("dw2", shape![experts, hidden, ffn], DTypeRule::Same(X), "gradient of w2").optional(),
        ArgSpec::output("dweights", shape![.., top_k], DTypeRule::Same(ROUTING), "gradient of weights")
            .optional(),
        ArgSpec::output("db1", shape![experts, rows], DTypeRule::Same(X), "gradient of b1").optional(),
        ArgSpec::output("db2", shape![experts, hidden], DTypeRule::Same(X), "gradient of b2").optional(),
        ArgSpec::output(
            "dshared_w1",
            shape![shared_rows, hidden],
            DTypeRule::Same(X),
            "gradient of shared_w1",
        )
        .optional(),
        ArgSpec::output(
            "dshared_w2",
            shape![hidden, shared_ffn],
            DTypeRule::Same(X),
            "gradient of shared_w2",
        )
        .optional(),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec {
            name: "gate",
            kind: AttrKind::Choice(Gate::NAMES),
            doc: "act(gate) * up, and how their rows share w1",
        },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor of the forward result" },
    ],
    sizes: super::SPEC.sizes,
    derived: &[
        DerivedSize { name: "ffn", rule: SizeRule::Divided { size: "rows", option: GATE, by: super::ROWS } },
        DerivedSize {
            name: "shared_ffn",
            rule: SizeRule::Divided { size: "shared_rows", option: GATE, by: super::ROWS },
        },
    ],
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Ids, which are values of a tensor, are checked where they are used.
unsafe impl Op for Backward {
    type Problem = BackwardProblem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<BackwardProblem>] {
        KERNELS
    }

    /// As many experts as can have a token are read; the gradients of all are written.
    fn cost(p: &BackwardProblem) -> Cost {
        let f = &p.forward;
        let (tokens, hidden) = (f.tokens as f64, f.hidden as f64);
        let slots = tokens * f.top_k as f64;
        let given = |is: bool, amount: f64| if is { amount } else { 0.0 };
        let [first, second] = [f.rows_of(f.ffn) as f64 * hidden, f.ffn as f64 * hidden];
        let shared =
            f.shared_ffn.map_or([0.0; 2], |ffn| [f.rows_of(ffn) as f64 * hidden, ffn as f64 * hidden]);
        let elements = slots.min(f.experts as f64) * (first + second)
            + shared[0]
            + shared[1]
            + (2.0 + given(p.has_dx, 1.0)) * tokens * hidden
            + given(p.dw1.is_some(), f.experts as f64 * first)
            + given(p.dw2.is_some(), f.experts as f64 * second)
            + given(p.dshared_w1.is_some(), shared[0])
            + given(p.dshared_w2.is_some(), shared[1]);
        // Recomputed, and for each of its gradients.
        let of_first = 1.0 + given(p.has_dx, 1.0) + given(p.dw1.is_some(), 1.0);
        let of_second = 1.0 + given(p.dw2.is_some(), 1.0);
        let flops = 2.0 * slots * (of_first * first + of_second * second)
            + 2.0 * tokens * (of_first * shared[0] + of_second * shared[1]);
        Cost::multiplying(elements * f.dtype.size() as f64, flops, Products::of(f.dtype))
    }
}

/// Preferred first. Conditions depend on sizes and weights, never on the tokens.
static KERNELS: &[Kernel<BackwardProblem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("moe_ffn_backward_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("moe_ffn_backward_avx2", Tier::Avx2),
    cpu::kernel("moe_ffn_backward_portable", Tier::Portable),
];

/// A call of `moe_ffn_backward`.
///
/// ```
/// use warpsmith::ops::{MoeFfnBackward, linear::{Activation, Gate}};
/// use warpsmith::{DType, Device, Tensor};
/// let randn = |shape: &[usize], seed| Tensor::randn(shape, DType::F32, Device::Cpu, seed);
/// let (x, dout) = (randn(&[3, 32], 0)?, randn(&[3, 32], 1)?);
/// let (w1, w2) = (randn(&[4, 2 * 16, 32], 2)?, randn(&[4, 32, 16], 3)?);
/// let ids = Tensor::from_slice(&[0i32, 3, 2, 3, 3, -1], &[3, 2], Device::Cpu)?;
/// let weights = randn(&[3, 2], 4)?;
/// let (mut dx, mut dweights) = (randn(&[3, 32], 0)?, randn(&[3, 2], 0)?);
/// MoeFfnBackward::new(&x, &w1, &w2, &ids, &weights, &dout)
///     .gated(Gate::Halves, Activation::Silu)
///     .dx(&mut dx)
///     .dweights(&mut dweights)
///     .run(&Device::Cpu.default_stream()?)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeFfnBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradients of a forward call without further tensors, given that of its result.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w1: impl Into<TensorView<'a>>,
        w2: impl Into<TensorView<'a>>,
        ids: impl Into<TensorView<'a>>,
        weights: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        let call = Call::start().input(X, x).input(W1, w1).input(W2, w2);
        call.input(IDS, ids).input(ROUTING, weights).input(DOUT, dout)
    }

    /// The activation of the forward call.
    pub fn activation(self, activation: Activation) -> Self {
        self.choice(ACT, activation)
    }

    /// Its gate and activation.
    pub fn gated(self, gate: Gate, activation: Activation) -> Self {
        self.choice(GATE, gate).activation(activation)
    }

    /// Its factor.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Its biases of the first product.
    pub fn first_bias(self, b1: impl Into<TensorView<'a>>) -> Self {
        self.input(B1, b1)
    }

    /// Its biases of the second product.
    pub fn second_bias(self, b2: impl Into<TensorView<'a>>) -> Self {
        self.input(B2, b2)
    }

    /// Its shared expert.
    pub fn shared(self, w1: impl Into<TensorView<'a>>, w2: impl Into<TensorView<'a>>) -> Self {
        self.input(SHARED_W1, w1).input(SHARED_W2, w2)
    }

    /// Writes the gradient of `x`.
    pub fn dx(self, dx: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DX, dx)
    }

    /// Writes the gradient of `w1`.
    pub fn dw1(self, dw1: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DW1, dw1)
    }

    /// Writes the gradient of `w2`.
    pub fn dw2(self, dw2: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DW2, dw2)
    }

    /// Writes the gradient of `weights`.
    pub fn dweights(self, dweights: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DROUTING, dweights)
    }

    /// Writes the gradient of the biases of the first product.
    pub fn db1(self, db1: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DB1, db1)
    }

    /// Writes the gradient of the biases of the second product.
    pub fn db2(self, db2: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DB2, db2)
    }

    /// Writes the gradients of the shared expert's weights.
    pub fn dshared(self, dw1: impl Into<TensorViewMut<'a>>, dw2: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DSHARED_W1, dw1).output(DSHARED_W2, dw2)
    }

    /// Computes the gradients that were asked for.
    pub fn run(self, stream: &Stream) -> Result<()> {
        self.launch([], stream)
    }
}
