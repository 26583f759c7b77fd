//! `linear`: `out = residual + scale * act(x · wᵀ + bias)`; everything but the product is optional.
//!
//! With a gate, `w` has two rows for each column of the result: `out = residual + scale * (act(g) * u)`, where
//! `g = x · w_gᵀ + bias_g` and `u = x · w_uᵀ + bias_u` are never written. The option `gate` says how the rows are
//! stored: `halves`, all gate rows and then all up rows; or `interleaved`, gate rows at even and up rows at odd places.
//! `bias` has an element for each row of `w`, in the same order.
//!
//! - Shapes: `x` is `[..., k]`; `w` is `[n, k]` (`[2 * n, k]` with a gate), or one such matrix for each leading index
//!   of `x` except the last (`x` `[b, m, k]`, `w` `[b, n, k]`); `out` and `residual` are `[..., n]`. Any strides, so
//!   transposed views too. Any size may be zero: with `k = 0` the sums are zero.
//! - `act`: none, gelu, gelu_tanh, silu or relu, as `activation` defines them.
//! - Types: `x` and `w` are both f32, both f16, both bf16, or each one of f8e4m3 and f8e5m2. On the CPU `w` may also be
//!   f16 or bf16 where `x` is f32: the result has the same bits as with `w` in f32, and half as many bytes are read.
//!   `out` is f32, f16 or bf16, whatever the inputs are; bias and residual have its type. The option `to` says which
//!   type to allocate where nobody gives `out`; by default that of `x`, and bf16 for 8-bit inputs.
//! - 8-bit inputs may have scales, in f32: `x_scale` and `w_scale`, with `scaling=tensor` of shape `[1]`; with
//!   `scaling=row` one for each row of `x` and of `w`; with `scaling=block` one for 128 elements of a row of `x`
//!   (`[..., ceil(k / 128)]`) and one for 128 x 128 elements of `w` (`[ceil(n / 128), ceil(k / 128)]`). Scales by block
//!   multiply the sum over their block, the others the whole sum.
//! - Precision: products are exact or rounded to f32, sums are in f32, and so are scales, bias, activation, factor and
//!   residual; the result is rounded once. `precision=tf32` allows f32 inputs to be cut to the 10 bits of mantissa of
//!   TF32; `auto` does so where `tolerance` is 0.002 or more, the most that a product is off then. With `auto`, products
//!   of 8-bit inputs may be added as tensor cores add them: 32 at a time, each and the sum so far cut to 13 bits below the
//!   leading bit of the largest; `full` adds them in f32, and so does `auto` with a tolerance below the most that those
//!   cuts can sum up to, 33 * 2^-13 for every 32 of k. For 16-bit results without a residual, the activation itself is
//!   only as accurate as that type needs.
//! - On GPUs of sm_80, sm_90 and sm_100 f32 is multiplied as three numbers of bf16 whose sum it is: six products,
//!   smallest first, those of every 16 elements of K added by the tensor cores and their sums in f32. Sums that are not
//!   finite are computed again as f32, and so are sums below 2^-60 of rows with elements below 2^-100. In larger sums,
//!   bits of elements below 2^-133 are lost.
//! - On CPUs with AMX f32 and f16 are multiplied as three numbers of bf16 each, whose sum they are: six products, all
//!   added in f32. The omitted products are below the precision of f32, and sums are more exact than those of plain
//!   f32.
//! - With CPU vector instructions, sums of more than 512 elements are computed in blocks that are added in order. The
//!   blocks follow from K alone.
//! - The bf16 instructions of CPUs (AMX, AVX512-BF16) take elements, products and sums below 2^-126 for zero, and so do the
//!   kernels that use them; times infinity these are NaN. With f32 on AMX this applies to terms and their products, in sums
//!   so much larger that the loss is below their precision. Smaller sums, and those of rows with infinities, NaN or very
//!   large numbers, are computed again as f32.
//! - On GPUs of sm_90, and in f32 at full precision also of sm_80 and sm_100, long sums with few columns are computed in parts
//!   along K, which are added in order, in f32. The parts follow from the rows of `w`, K and the types alone.
//! - On CUDA devices, where results have 16 bits, silu and gelu_tanh count as zero below 2^-132, also before the gate.
//! - NaN and infinities give what the formula gives. `out` may be `residual`, in place.
//! - A row of the result has the same bits whatever the other rows are and however many there are.
//!
//! `linear_backward` computes the gradients of `x`, `w` and `bias`, where `x` and `w` have the same type.

#[cfg(feature = "cuda")]
pub(in crate::ops) mod align;
mod backward;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod bf16x3;
#[cfg(feature = "lab")]
mod cases;
pub(in crate::ops) mod cpu;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
#[cfg(feature = "cuda")]
mod finish;
mod packed;
pub(in crate::ops) mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod sm90;
#[cfg(feature = "cuda")]
mod split;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, BackwardProblem, LinearBackward};
pub use packed::PackedWeight;
pub use problem::Problem;

use super::elementwise::function::Kind;
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Choice, Cost, DTypeRule, DerivedSize, Gradient,
    Kernel, OneOutput, Op, OpSpec, Products, ShapeSpec, SizeRule, SizeSpec, Value, dims, shape,
};
use crate::ops::FLOATS;
use crate::tensor::{DType, TensorView, TensorViewMut};

pub(in crate::ops) const X: usize = 0;
pub(in crate::ops) const W: usize = 1;
pub(in crate::ops) const BIAS: usize = 2;
pub(in crate::ops) const RESIDUAL: usize = 3;
pub(in crate::ops) const X_SCALE: usize = 4;
pub(in crate::ops) const W_SCALE: usize = 5;
pub(in crate::ops) const OUT: usize = 6;

const ACT: usize = 0;
const GATE: usize = 1;
const SCALE: usize = 2;
const SCALING: usize = 3;
const PRECISION: usize = 4;
const TO: usize = 5;
const TOLERANCE: usize = 6;

/// An option with named choices.
macro_rules! choices {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub enum $name { $($(#[$doc])* $variant),* }

        impl $name {
            pub(in crate::ops) const NAMES: &[&str] = &[$($text),*];
            pub(in crate::ops) const ALL: &[$name] = &[$($name::$variant),*];

            /// The name on the command line.
            pub const fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }
        }

        impl Choice for $name {
            fn position(self) -> u8 {
                self as u8
            }
        }
    };
}

choices! {
    /// The function applied to `x · wᵀ + bias`, or to the gate.
    Activation {
        /// The identity.
        #[default]
        None "none",
        /// x Φ(x), with the error function.
        Gelu "gelu",
        /// The approximation of gelu with tanh.
        GeluTanh "gelu_tanh",
        /// x sigmoid(x).
        Silu "silu",
        /// max(x, 0).
        Relu "relu",
    }
}

impl Activation {
    pub(in crate::ops) fn kind(self) -> Option<Kind> {
        match self {
            Activation::None => None,
            Activation::Gelu => Some(Kind::Gelu),
            Activation::GeluTanh => Some(Kind::GeluTanh),
            Activation::Silu => Some(Kind::Silu),
            Activation::Relu => Some(Kind::Relu),
        }
    }
}

choices! {
    /// How gate and up rows share `w`.
    Gate {
        /// There is no gate.
        #[default]
        None "none",
        /// All gate rows, then all up rows.
        Halves "halves",
        /// Gate rows at even, up rows at odd places.
        Interleaved "interleaved",
    }
}

choices! {
    /// What shares a scale.
    Scaling {
        /// A whole tensor.
        #[default]
        Tensor "tensor",
        /// A row of `x`, and a row of `w`.
        Row "row",
        /// 128 elements of a row of `x`, and 128 x 128 elements of `w`.
        Block "block",
    }
}

choices! {
    /// How inputs are multiplied and added.
    Precision {
        /// What the tolerance allows. Without one as [`Precision::Full`], but 8-bit inputs as tensor cores do, with fewer bits than
        /// f32.
        #[default]
        Auto "auto",
        /// With sums in f32.
        Full "full",
        /// With the 10 bits of mantissa that TF32 has, on tensor cores.
        Tf32 "tf32",
    }
}

/// The error of a product whose factors are both cut to TF32: each loses less than 2^-10 of itself.
const TF32_ERROR: f64 = 0.002;

/// The most that cuts in tensor cores sum up to with 8-bit inputs and sums over `k`: 32 products and the sum so far are added at
/// once, each cut to 13 bits below the leading bit of the largest.
fn error_of_cuts(k: usize) -> f64 {
    33.0 * k.div_ceil(32) as f64 * 2f64.powi(-13)
}

impl Precision {
    /// Whether f32 is cut to TF32, where sums may be off by `tolerance` of the sum of the absolute products.
    fn is_tf32(self, tolerance: f64) -> bool {
        self == Precision::Tf32 || self == Precision::Auto && tolerance >= TF32_ERROR
    }

    /// Whether 8-bit inputs are added in f32.
    fn is_full(self, tolerance: f64, k: usize) -> bool {
        self == Precision::Full || self == Precision::Auto && tolerance > 0.0 && tolerance < error_of_cuts(k)
    }

    /// What is meant for inputs of `dtype` and sums over `k`.
    fn chosen(self, tolerance: f64, dtype: DType, k: usize) -> Precision {
        if dtype == DType::F32 && self.is_tf32(tolerance) {
            Precision::Tf32
        } else if problem::FP8.contains(&dtype) && self.is_full(tolerance, k) {
            Precision::Full
        } else {
            self
        }
    }
}

/// The doc of the option `tolerance`.
const TOLERANCE_DOC: &str = "what precision=auto may be off, of the sum of the absolute products; from 0.002 f32 is cut to TF32. \
0: as if left out";

/// The types of the result, in the order of the option `to`.
const RESULTS: [Option<DType>; 4] = [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)];

const SPEC: OpSpec = OpSpec {
    name: "linear",
    summary: "Matrix product with fused bias, activation, gate, scale and residual",
    args: &[
        ArgSpec::input("x", shape![.., k], DTypeRule::OneOf(&problem::INPUTS), ""),
        ArgSpec::input(
            "w",
            shape![[..], rows, k],
            DTypeRule::With(X, &problem::WEIGHTS),
            "one matrix, or one for each of x; n rows, with a gate 2n",
        ),
        ArgSpec::input("bias", shape![rows], DTypeRule::Same(OUT), "of the result's type").optional(),
        ArgSpec::input("residual", shape![.., n], DTypeRule::Same(OUT), "of the result's type, added last")
            .optional(),
        ArgSpec::input(
            "x_scale",
            ShapeSpec::by_option(SCALING, &[dims![1], dims![..], dims![.., ceil(k / 128)]]),
            DTypeRule::F32,
            "scales of an 8-bit x",
        )
        .optional(),
        ArgSpec::input(
            "w_scale",
            ShapeSpec::by_option(
                SCALING,
                &[dims![1], dims![[..], rows], dims![[..], ceil(rows / 128), ceil(k / 128)]],
            ),
            DTypeRule::F32,
            "scales of an 8-bit w",
        )
        .with(X_SCALE),
        ArgSpec::output("out", shape![.., n], DTypeRule::Chosen { types: &FLOATS, option: TO, like: X }, "")
            .in_place_of(RESIDUAL),
    ],
    attrs: &[
        AttrSpec { name: "act", kind: AttrKind::Choice(Activation::NAMES), doc: "the activation" },
        AttrSpec {
            name: "gate",
            kind: AttrKind::Choice(Gate::NAMES),
            doc: "act(gate) * up, and how their rows share w",
        },
        AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor before the residual is added" },
        AttrSpec {
            name: "scaling",
            kind: AttrKind::Choice(Scaling::NAMES),
            doc: "what shares a scale of x and w",
        },
        AttrSpec {
            name: "precision",
            kind: AttrKind::Choice(Precision::NAMES),
            doc: "of f32 products; auto is full unless the tolerance allows less",
        },
        AttrSpec {
            name: "to",
            kind: AttrKind::Choice(&["auto", "f32", "f16", "bf16"]),
            doc: "type of `out` where it is allocated for the call; auto: that of x, bf16 for 8-bit inputs",
        },
        AttrSpec { name: "tolerance", kind: AttrKind::Float(0.0), doc: TOLERANCE_DOC },
    ],
    sizes: &[
        SizeSpec { name: "m", default: 4096, doc: "rows of x" },
        SizeSpec { name: "n", default: 4096, doc: "columns of the result" },
        SizeSpec { name: "k", default: 4096, doc: "length of a row of x and w" },
        SizeSpec { name: "batch", default: 1, doc: "number of x and w, if not 1" },
    ],
    derived: &[DerivedSize {
        name: "n",
        rule: SizeRule::Divided { size: "rows", option: GATE, by: &[1, 2, 2] },
    }],
    gradient: Some(Gradient {
        op: "linear_backward",
        inputs: &[
            (backward::X, Source::Input(X)),
            (backward::W, Source::Input(W)),
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
            (RESIDUAL, InputGradient::Incoming(OUT)),
        ],
        only_if: &[(GATE, Value::Choice(0))],
        without: &[X_SCALE, W_SCALE],
    }),
    autocast: Autocast::Low,
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
        let (matrices, rows) = ((p.outer.len() * p.batch) as f64, p.weight_rows() as f64);
        let (m, n, k) = (p.m as f64, p.n as f64, p.k as f64);
        // A weight that all share is read once.
        let weights = if p.w.batch == 0 { 1.0 } else { matrices };
        let results =
            (1 + p.has_residual as usize) as f64 * matrices * m * n + if p.has_bias { rows } else { 0.0 };
        let bytes = matrices * m * k * p.x_dtype.size() as f64
            + weights * rows * k * p.w_dtype.size() as f64
            + results * p.out_dtype.size() as f64;
        let products = if p.tf32 { Products::Tf32 } else { Products::of(p.x_dtype) };
        Cost::multiplying(bytes, 2.0 * matrices * m * rows * k, products)
    }
}

/// Preferred first. A row's bits must not depend on the number of rows, so conditions and ranks may depend on anything
/// but `m`, unless two kernels give the same bits.
static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    sm90::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    bf16x3::BF16X3,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    #[cfg(feature = "cuda")]
    cublaslt::CUBLASLT,
    Kernel::cpu("linear_avx512", Tier::Avx512, cpu::run)
        .configured(|p, _| p.arithmetic())
        .flushing_subnormals(),
    Kernel::cpu("linear_avx2", Tier::Avx2, cpu::run).configured(|p, _| p.arithmetic()),
    Kernel::cpu("linear_portable", Tier::Portable, cpu::run).configured(|p, _| p.arithmetic()),
];

/// A call of `linear`.
///
/// ```
/// use warpsmith::{ops::Linear, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let w = Tensor::randn(&[32, 64], DType::F32, Device::Cpu, 1)?;
/// let bias = Tensor::zeros(&[32], DType::F32, Device::Cpu)?;
/// let out = Linear::new(&x, &w).bias(&bias).gelu().run()?;
/// assert_eq!(out.shape(), [4, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Linear<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// `x · wᵀ`.
    pub fn new(x: impl Into<TensorView<'a>>, w: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x).input(W, w)
    }

    /// Adds a bias to the product.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// Applies a function to product and bias.
    pub fn activation(self, activation: Activation) -> Self {
        self.choice(ACT, activation)
    }

    /// Applies gelu, the one with the error function.
    pub fn gelu(self) -> Self {
        self.activation(Activation::Gelu)
    }

    /// Applies the approximation of gelu with tanh.
    pub fn gelu_tanh(self) -> Self {
        self.activation(Activation::GeluTanh)
    }

    /// Applies silu.
    pub fn silu(self) -> Self {
        self.activation(Activation::Silu)
    }

    /// Applies relu.
    pub fn relu(self) -> Self {
        self.activation(Activation::Relu)
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

    /// Scales of 8-bit inputs.
    pub fn input_scales(
        self,
        scaling: Scaling,
        x_scale: impl Into<TensorView<'a>>,
        w_scale: impl Into<TensorView<'a>>,
    ) -> Self {
        self.choice(SCALING, scaling).input(X_SCALE, x_scale).input(W_SCALE, w_scale)
    }

    /// How f32 inputs are multiplied.
    pub fn precision(self, precision: Precision) -> Self {
        self.choice(PRECISION, precision)
    }

    /// What the result may be off, of the sum of the absolute products: with [`Precision::Auto`], the fastest way that keeps it
    /// is taken.
    pub fn tolerance(self, tolerance: f32) -> Self {
        self.float(TOLERANCE, tolerance)
    }

    /// The type of the tensor that [`Linear::run`] returns. Types that are none of `linear` are refused when it runs.
    pub fn out_dtype(self, dtype: DType) -> Self {
        let index = RESULTS.iter().position(|result| *result == Some(dtype));
        self.choice(TO, index.unwrap_or(RESULTS.len()) as u8)
    }

    /// Runs on `stream` and adds to `residual` in place.
    pub fn add_to<'b>(self, residual: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(RESIDUAL, OUT, residual.into(), stream)
    }
}
