//! `linear_quant`: `out = residual + scale * act(x · wᵀ + bias)` with a weight in the blocks of a GGUF file; everything
//! but the product is optional.
//!
//! - Shapes: `x` is `[..., k]`; `w` holds the bytes of `n` rows (`2 * n` with a gate), each of `k` weights in blocks of the
//!   option `format`, so `k` must be a multiple of the block's 32 or 256 weights; `out` and `residual` are `[..., n]`. Any
//!   strides. Gates and `bias` are as for `linear`.
//! - Types: f32, f16 or bf16 for `x`, u8 for `w`; f32, f16 or bf16 for `out`, by default that of `x`; bias and residual
//!   have the type of `out`.
//! - Activations are rounded to eight bits, on every device: by up to 1/254 of the largest of 32 neighbours, which is far more
//!   than other ops round. Of each 32 neighbours of a row of `x`, with `most` the largest magnitude: `scale_x = most / 127` and
//!   `q = round(x * (127 / most))`, in f32, ties to even. 32 that are all below 2^-100 count as zero; NaN or infinity among
//!   them makes the row of the result NaN.
//! - With `precision=full`, and with `auto` and a `tolerance` below 1/254, activations are not rounded: weights become f32,
//!   products are added in f32, those of 32 neighbours first, and NaN and infinities give what the formula gives. That is
//!   several times slower. CUDA kernels do not have it.
//! - Weights are `scale_w * (quant - zero) + min` as the format says, with `scale_w` and `min` exact in f32. The products of
//!   quants over 32 of K (over 16 for q2_k, q3_k and q6_k, which have a scale for each 16) are added exactly, in integers;
//!   times `scale_x * scale_w` they are added in f32, and so is `min` times the sum of the activations. Then follow bias, activation,
//!   factor and residual in f32, and the result is rounded once.
//! - The sums of a row have the same bits whatever the other rows are, however many there are, and on every tier of the
//!   CPU: see `tiles`. On a GPU they are added in another order.
//! - Scales that are NaN or infinite give what the formula gives. `out` may be `residual`, in place.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod finish;
mod format;
mod packed;
mod problem;
mod quantize;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;
mod tiles;

pub use format::QuantFormat;
pub use packed::PackedQuantWeight;
pub use problem::Problem;

use super::linear::{Activation, Gate};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Choice, Cost, DTypeRule, DerivedSize, Kernel, OneOutput,
    Op, OpSpec, SizeRule, SizeSpec, shape,
};
use crate::ops::FLOATS;
use crate::tensor::{DType, TensorView, TensorViewMut};

const X: usize = 0;
const W: usize = 1;
const BIAS: usize = 2;
const RESIDUAL: usize = 3;
const OUT: usize = 4;

const FORMAT: usize = 0;
const ACT: usize = 1;
const GATE: usize = 2;
const SCALE: usize = 3;
const TO: usize = 4;
const PRECISION: usize = 5;
const TOLERANCE: usize = 6;

/// The form in which activations are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum QuantPrecision {
    /// Rounded to eight bits, with a scale for each 32, unless the tolerance forbids it.
    #[default]
    Auto,
    /// As they are.
    Full,
}

impl QuantPrecision {
    const NAMES: &[&str] = &["auto", "full"];
    const ALL: [QuantPrecision; 2] = [QuantPrecision::Auto, QuantPrecision::Full];

    /// What is meant where each activation may be off by `tolerance` of the largest of its 32: rounding takes up to half a step,
    /// of which the largest has 127.
    fn chosen(self, tolerance: f64) -> QuantPrecision {
        if tolerance > 0.0 && tolerance < 0.5 / 127.0 { QuantPrecision::Full } else { self }
    }
}

impl Choice for QuantPrecision {
    fn position(self) -> u8 {
        self as u8
    }
}

impl Choice for QuantFormat {
    fn position(self) -> u8 {
        self as u8
    }
}

const SPEC: OpSpec = OpSpec {
    name: "linear_quant",
    summary: "Matrix product with a weight in the quantised blocks of GGUF, activations rounded to 8 bits",
    args: &[
        ArgSpec::input("x", shape![.., k], DTypeRule::FLOAT, ""),
        ArgSpec::input(
            "w",
            shape![rows, bytes],
            DTypeRule::OneOf(&[DType::U8]),
            "rows of blocks; n rows, with a gate 2n",
        ),
        ArgSpec::input("bias", shape![rows], DTypeRule::Same(OUT), "of the result's type").optional(),
        ArgSpec::input("residual", shape![.., n], DTypeRule::Same(OUT), "of the result's type, added last")
            .optional(),
        ArgSpec::output("out", shape![.., n], DTypeRule::Chosen { types: &FLOATS, option: TO, like: X }, "")
            .in_place_of(RESIDUAL),
    ],
    attrs: &[
        AttrSpec { name: "format", kind: AttrKind::Choice(QuantFormat::NAMES), doc: "of the blocks of w" },
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec {
            name: "gate",
            kind: AttrKind::Choice(Gate::NAMES),
            doc: "act(gate) * up, and how their rows share w",
        },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor before the residual is added" },
        AttrSpec {
            name: "to",
            kind: AttrKind::Choice(&["auto", "f32", "f16", "bf16"]),
            doc: "type of `out` where it is allocated for the call; auto: that of x",
        },
        AttrSpec {
            name: "precision",
            kind: AttrKind::Choice(QuantPrecision::NAMES),
            doc: "auto: activations rounded to 8 bits, with a scale for each 32; full: as they are (CPU only)",
        },
        AttrSpec {
            name: "tolerance",
            kind: AttrKind::Float(0.0),
            doc: "what activations may be off with precision=auto, of the largest of 32; below 1/254 it is full. 0: as if left out",
        },
    ],
    sizes: &[
        SizeSpec { name: "m", default: 1, doc: "rows of x" },
        SizeSpec { name: "n", default: 4096, doc: "columns of the result" },
        SizeSpec { name: "k", default: 4096, doc: "length of a row of x" },
    ],
    derived: &[DerivedSize {
        name: "n",
        rule: SizeRule::Divided { size: "rows", option: GATE, by: &[1, 2, 2] },
    }],
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let rows = if p.gate == Gate::None { p.n } else { 2 * p.n };
        let weight = rows * (p.k / p.format.block_len()) * p.format.block_bytes();
        let results = (1 + p.residual_step.is_some() as usize) * p.m * p.n;
        let bias = if p.bias_step.is_some() { rows } else { 0 };
        let bytes = weight + p.m * p.k * p.x_dtype.size() + (results + bias) * p.out_dtype.size();
        Cost::moving(bytes as f64, 2.0 * p.m as f64 * rows as f64 * p.k as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("linear_quant_avx512", Tier::Avx512, cpu::run)
        .configured(|p, _| cpu::config(Tier::Avx512, p)),
    Kernel::cpu("linear_quant_avx2", Tier::Avx2, cpu::run).configured(|p, _| cpu::config(Tier::Avx2, p)),
    Kernel::cpu("linear_quant_portable", Tier::Portable, cpu::run)
        .configured(|p, _| cpu::config(Tier::Portable, p)),
];

/// A call of `linear_quant`.
///
/// ```
/// use warpsmith::{ops::{LinearQuant, QuantFormat}, DType, Device, Tensor};
/// let x = Tensor::from_slice(&[1.0f32; 32], &[1, 32], Device::Cpu)?;
/// let block = [&[0x00, 0x3c][..], &[2u8; 32]].concat(); // a scale of 1 and 32 times 2
/// let w = Tensor::from_slice(&block, &[1, 34], Device::Cpu)?;
/// let out = LinearQuant::new(&x, &w, QuantFormat::Q8_0).run()?;
/// assert_eq!(out.to_vec::<f32>()?, [64.0]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type LinearQuant<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// `x · wᵀ`.
    pub fn new(x: impl Into<TensorView<'a>>, w: impl Into<TensorView<'a>>, format: QuantFormat) -> Self {
        Call::start().input(X, x).input(W, w).choice(FORMAT, format)
    }

    /// Adds a bias to the product.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// Applies a function to product and bias.
    pub fn activation(self, activation: Activation) -> Self {
        self.choice(ACT, activation)
    }

    /// `activation(gate) * up`, from a `w` that holds the rows of both.
    pub fn gated(self, gate: Gate, activation: Activation) -> Self {
        self.choice(GATE, gate).activation(activation)
    }

    /// Multiplies the result before the residual is added.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Adds a tensor to the result.
    pub fn residual(self, residual: impl Into<TensorView<'a>>) -> Self {
        self.input(RESIDUAL, residual)
    }

    /// What activations are multiplied as: rounded to eight bits, unless said otherwise.
    pub fn precision(self, precision: QuantPrecision) -> Self {
        self.choice(PRECISION, precision)
    }

    /// What activations may be off, of the largest of each 32: with [`QuantPrecision::Auto`], the fastest way that keeps it is taken.
    pub fn tolerance(self, tolerance: f32) -> Self {
        self.float(TOLERANCE, tolerance)
    }

    /// The type of the tensor that [`LinearQuant::run`] returns; others than f32, f16 and bf16 are refused when it runs.
    pub fn out_dtype(self, dtype: DType) -> Self {
        let index = FLOATS.iter().position(|&known| known == dtype);
        self.choice(TO, index.map_or(u8::MAX, |index| index as u8 + 1))
    }

    /// Runs on `stream` and adds to `residual` in place.
    pub fn add_to<'b>(self, residual: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(RESIDUAL, OUT, residual.into(), stream)
    }
}
