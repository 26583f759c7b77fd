//! `moe_ffn`: the experts of a mixture in one call, from the routing to the weighted sum.
//!
//! `out[t] = residual[t] + scale * (sum over slots s of weights[t, s] * E(ids[t, s], x[t]) + S(x[t]))`, with
//! `E(e, x) = h · w2[e]ᵀ + b2[e]`. Without a gate `h = act(x · w1[e]ᵀ + b1[e])`; with a gate `w1` and `b1` have rows for gate
//! and up, and `h = act(gate) * up`, as in `linear`. `S` is the shared expert, if there is one: the same with `shared_w1` and
//! `shared_w2`, without biases. Several shared experts are one whose rows are theirs, side by side.
//!
//! - Shapes: `x`, `residual` and `out` are `[..., hidden]`; `ids` and `weights` are `[..., top_k]`; `w1` is `[experts, rows,
//!   hidden]` with `ffn` rows, or `2 * ffn` with a gate, and `w2` is `[experts, hidden, ffn]`; `b1` is `[experts, rows]`, `b2`
//!   `[experts, hidden]`; `shared_w1` and `shared_w2` are matrices like those of an expert, with an `ffn` of their own. Any
//!   strides, any size may be zero.
//! - Types: f32, f16 or bf16 for `x`, the same for biases, residual and `out`; `weights` may be f32 instead. On the CPU `w1`,
//!   `w2` and the shared ones may also be f16 or bf16 where `x` is f32. i32 or i64 for `ids`.
//! - An id of -1 means that the slot is dropped: it contributes nothing. On the CPU other ids below zero, and those from
//!   `experts` on, are an error, found before anything is written; on a GPU, which cannot inspect values in time, they count as
//!   dropped. An expert may be in several slots of a token. Weights of experts without tokens are not read.
//! - Rounding: products have sums in f32. `h` is computed in f32 and rounded to the type of `x`. Results of experts stay in
//!   f32; bias, weight, the sum over the slots, in their order, the shared expert after them, factor and residual are in f32,
//!   and the result is rounded once. What products on CPUs with AMX or AVX-512 BF16 take for zero is as in `linear`.
//! - NaN and infinities give what the formula gives: a weight of zero does not hide them, a dropped slot does.
//! - On CUDA devices, where `x` has 16 bits, silu and gelu_tanh count as zero below 2^-132, also before the gate.
//! - Bits: a token's result depends on its own row, ids and weights alone, not on the other tokens nor on who is sent where.
//! - Memory: tokens are computed in parts, so that what is between the products stays below a fixed size.
//! - On a GPU nothing waits for the ids: a call can be captured in a graph and replayed with others.
//!
//! `moe_ffn_backward` computes the gradients of all inputs, where the weights have the type of `x`.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, BackwardProblem, MoeFfnBackward};
pub use problem::Problem;

use super::linear::problem::WEIGHTS;
use super::linear::{Activation, Gate};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, DerivedSize, Gradient, Kernel,
    OneOutput, Op, OpSpec, Products, SizeRule, SizeSpec, shape,
};
use crate::tensor::{DType, TensorView, TensorViewMut};

const X: usize = 0;
const W1: usize = 1;
const W2: usize = 2;
const IDS: usize = 3;
const ROUTING: usize = 4;
const B1: usize = 5;
const B2: usize = 6;
const SHARED_W1: usize = 7;
const SHARED_W2: usize = 8;
const RESIDUAL: usize = 9;
const OUT: usize = 10;

const ACT: usize = 0;
const GATE: usize = 1;
const SCALE: usize = 2;

/// The rows of a first matrix, from its number of results: what an option for the gate divides them by.
const ROWS: &[usize] = &[1, 2, 2];

const SPEC: OpSpec = OpSpec {
    name: "moe_ffn",
    summary: "The experts of a mixture: both products, activation, gate and the weighted sum",
    args: &[
        ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, "tokens"),
        ArgSpec::input(
            "w1",
            shape![experts, rows, hidden],
            DTypeRule::With(X, &WEIGHTS),
            "ffn rows for each expert, with a gate 2 ffn",
        ),
        ArgSpec::input("w2", shape![experts, hidden, ffn], DTypeRule::Same(W1), "of the second product"),
        ArgSpec::input("ids", shape![.., top_k], DTypeRule::INDEX, "experts of each token, -1 for none"),
        ArgSpec::input(
            "weights",
            shape![.., top_k],
            DTypeRule::SameOr(X, &[DType::F32]),
            "of their results, in f32 or the type of x",
        ),
        ArgSpec::input("b1", shape![experts, rows], DTypeRule::Same(X), "added to the first product")
            .optional(),
        ArgSpec::input("b2", shape![experts, hidden], DTypeRule::Same(X), "added to the second").optional(),
        ArgSpec::input(
            "shared_w1",
            shape![shared_rows, hidden],
            DTypeRule::Same(W1),
            "w1 of the expert that all tokens are sent to",
        )
        .optional(),
        ArgSpec::input("shared_w2", shape![hidden, shared_ffn], DTypeRule::Same(W1), "its w2")
            .with(SHARED_W1),
        ArgSpec::input("residual", shape![.., hidden], DTypeRule::Same(X), "added last").optional(),
        ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(RESIDUAL),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec {
            name: "gate",
            kind: AttrKind::Choice(Gate::NAMES),
            doc: "act(gate) * up, and how their rows share w1",
        },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor before the residual is added" },
    ],
    sizes: &[
        SizeSpec { name: "num_tokens", default: 256, doc: "rows of x" },
        SizeSpec { name: "experts", default: 64, doc: "number of experts" },
        SizeSpec { name: "top_k", default: 8, doc: "experts of a token" },
        SizeSpec { name: "hidden", default: 512, doc: "length of a token" },
        SizeSpec { name: "ffn", default: 256, doc: "length of what is between the products" },
        SizeSpec { name: "shared_ffn", default: 256, doc: "the same of the shared expert" },
    ],
    derived: &[
        DerivedSize { name: "ffn", rule: SizeRule::Divided { size: "rows", option: GATE, by: ROWS } },
        DerivedSize {
            name: "shared_ffn",
            rule: SizeRule::Divided { size: "shared_rows", option: GATE, by: ROWS },
        },
    ],
    gradient: Some(Gradient {
        op: "moe_ffn_backward",
        inputs: &[
            (backward::X, Source::Input(X)),
            (backward::W1, Source::Input(W1)),
            (backward::W2, Source::Input(W2)),
            (backward::IDS, Source::Input(IDS)),
            (backward::ROUTING, Source::Input(ROUTING)),
            (backward::DOUT, Source::Incoming(OUT)),
            (backward::B1, Source::Input(B1)),
            (backward::SHARED_W1, Source::Input(SHARED_W1)),
            (backward::SHARED_W2, Source::Input(SHARED_W2)),
            (backward::B2, Source::Input(B2)),
        ],
        results: &[
            (X, InputGradient::Output(backward::DX)),
            (W1, InputGradient::Output(backward::DW1)),
            (W2, InputGradient::Output(backward::DW2)),
            (ROUTING, InputGradient::Output(backward::DROUTING)),
            (B1, InputGradient::Output(backward::DB1)),
            (B2, InputGradient::Output(backward::DB2)),
            (SHARED_W1, InputGradient::Output(backward::DSHARED_W1)),
            (SHARED_W2, InputGradient::Output(backward::DSHARED_W2)),
            (RESIDUAL, InputGradient::Incoming(OUT)),
        ],
        ..Gradient::EMPTY
    }),
    autocast: Autocast::Low,
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Ids, which are values of a tensor, are checked where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    /// As many experts as can have a token are read.
    fn cost(p: &Problem) -> Cost {
        let (tokens, hidden) = (p.tokens as f64, p.hidden as f64);
        let slots = tokens * p.top_k as f64;
        let weights = |ffn: usize| (p.rows_of(ffn) + ffn) as f64 * hidden;
        let (expert, shared) = (weights(p.ffn), p.shared_ffn.map_or(0.0, weights));
        let rows = 2.0 + f64::from(u8::from(p.has_residual));
        let bytes = (slots.min(p.experts as f64) * expert + shared) * p.w_dtype.size() as f64
            + rows * tokens * hidden * p.dtype.size() as f64
            + slots * (p.id_dtype.size() + p.weight_dtype.size()) as f64;
        Cost::multiplying(bytes, 2.0 * (slots * expert + tokens * shared), Products::of(p.dtype))
    }
}

/// Preferred first. Conditions depend on sizes and weights, never on the tokens.
static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    cpu::kernel("moe_ffn_avx512", Tier::Avx512).flushing_subnormals(),
    cpu::kernel("moe_ffn_avx2", Tier::Avx2),
    cpu::kernel("moe_ffn_portable", Tier::Portable),
];

/// A call of `moe_ffn`.
///
/// ```
/// use warpsmith::ops::{MoeFfn, linear::{Activation, Gate}};
/// use warpsmith::{DType, Device, Tensor};
/// let x = Tensor::randn(&[3, 32], DType::F32, Device::Cpu, 0)?;
/// let w1 = Tensor::randn(&[4, 2 * 16, 32], DType::F32, Device::Cpu, 1)?; // four experts, gate and up
/// let w2 = Tensor::randn(&[4, 32, 16], DType::F32, Device::Cpu, 2)?;
/// let ids = Tensor::from_slice(&[0i32, 3, 2, 3, 3, -1], &[3, 2], Device::Cpu)?; // two experts for a token
/// let weights = Tensor::from_slice(&[0.5f32, 0.5, 0.7, 0.3, 1.0, 0.0], &[3, 2], Device::Cpu)?;
/// let call = MoeFfn::new(&x, &w1, &w2, &ids, &weights);
/// let out = call.gated(Gate::Halves, Activation::Silu).residual(&x).run()?;
/// assert_eq!(out.shape(), [3, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeFfn<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The weighted sum of what the experts `ids` make of each row of `x`.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        w1: impl Into<TensorView<'a>>,
        w2: impl Into<TensorView<'a>>,
        ids: impl Into<TensorView<'a>>,
        weights: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(W1, w1).input(W2, w2).input(IDS, ids).input(ROUTING, weights)
    }

    /// Applies a function between the products.
    pub fn activation(self, activation: Activation) -> Self {
        self.choice(ACT, activation)
    }

    /// `activation(gate) * up` between the products, from a `w1` that holds the rows of both.
    pub fn gated(self, gate: Gate, activation: Activation) -> Self {
        self.choice(GATE, gate).activation(activation)
    }

    /// Adds a bias of each expert to its first product.
    pub fn first_bias(self, b1: impl Into<TensorView<'a>>) -> Self {
        self.input(B1, b1)
    }

    /// Adds a bias of each expert to its second product.
    pub fn second_bias(self, b2: impl Into<TensorView<'a>>) -> Self {
        self.input(B2, b2)
    }

    /// Adds an expert that all tokens are sent to, with weight one.
    pub fn shared(self, w1: impl Into<TensorView<'a>>, w2: impl Into<TensorView<'a>>) -> Self {
        self.input(SHARED_W1, w1).input(SHARED_W2, w2)
    }

    /// Multiplies the sum before the residual is added.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Adds a tensor to the result.
    pub fn residual(self, residual: impl Into<TensorView<'a>>) -> Self {
        self.input(RESIDUAL, residual)
    }

    /// Runs on `stream` and adds to `residual` in place.
    pub fn add_to<'b>(self, residual: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(RESIDUAL, OUT, residual.into(), stream)
    }
}
