//! `rms_norm`: `out = s / sqrt(mean(s²) + eps) * weight` over the last dimension, where `s` is `x`, or
//! `x + residual` if a residual is given; then `s` is returned too.
//!
//! - Shapes: `x`, `residual`, `out`, `sum` are `[..., hidden]`, `weight` is `[hidden]`; any strides.
//! - Types: f32, f16 or bf16, the same for all tensors. Sums are accumulated in f32.
//! - Rounding: `s` is rounded to the tensors' type before it is normalised, so that the fused form gives the same
//!   bits as adding first; the result is rounded once.
//! - NaN or infinity anywhere in a row reaches the row's results as the formula says.
//! - `out` may be `x`, and `sum` may be `residual`, in place. An empty tensor is left alone.
//!
//! `rms_norm_backward` computes the gradients of `x` (the same as that of `residual`) and of `weight`. The kernels
//! are shared with `layer_norm`, in `ops/norm`.

mod backward;
#[cfg(feature = "lab")]
mod cases;
#[cfg(feature = "lab")]
mod reference;

pub use backward::{Backward, RmsNormBackward};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, OneOutput,
    Op, OpSpec, SizeSpec, shape,
};
use crate::ops::norm::backward as back;
use crate::ops::norm::{self, EPS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "rms_norm",
        summary: "RMS normalisation of rows, with an optional residual added first",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::input("weight", shape![hidden], DTypeRule::Same(X), "multiplies the normalised row")
                .optional(),
            ArgSpec::input("residual", shape![.., hidden], DTypeRule::Same(X), "added to x first").optional(),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(X),
            ArgSpec::output("sum", shape![.., hidden], DTypeRule::Same(X), "x + residual")
                .with(RESIDUAL)
                .in_place_of(RESIDUAL),
        ],
        attrs: &[AttrSpec { name: "eps", kind: AttrKind::Float(1e-6), doc: "added to the mean square" }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        gradient: Some(Gradient {
            op: "rms_norm_backward",
            inputs: &[
                (back::X, Source::OutputOrInput(SUM, X)),
                (back::WEIGHT, Source::Input(WEIGHT)),
                (back::DOUT, Source::Incoming(OUT)),
                (back::DSUM, Source::Incoming(SUM)),
            ],
            results: &[
                (X, InputGradient::Output(back::DX)),
                (RESIDUAL, InputGradient::Output(back::DX)),
                (WEIGHT, InputGradient::Output(back::DWEIGHT)),
            ],
            ..Gradient::EMPTY
        }),
        autocast: Autocast::Rows,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        norm::check(false, args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        norm::cost(problem)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    norm::cuda::row("rms_norm_row", false),
    #[cfg(feature = "cuda")]
    norm::cuda::long("rms_norm_long", false),
    Kernel::cpu("rms_norm_avx512", Tier::Avx512, norm::cpu::run),
    Kernel::cpu("rms_norm_avx2", Tier::Avx2, norm::cpu::run),
    Kernel::cpu("rms_norm_portable", Tier::Portable, norm::cpu::run),
];

/// A call of `rms_norm`.
///
/// ```
/// use warpsmith::{ops::RmsNorm, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let weight = Tensor::randn(&[64], DType::F32, Device::Cpu, 1)?;
/// let out = RmsNorm::new(&x).weight(&weight).eps(1e-5).run()?;
/// assert_eq!(out.shape(), [4, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type RmsNorm<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// Normalises the rows of `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// A call whose rows are given to [`Self::run_in_place`].
    pub fn in_place() -> Self {
        Call::start()
    }

    /// Multiplies the normalised rows by `weight`.
    pub fn weight(self, weight: impl Into<TensorView<'a>>) -> Self {
        self.input(WEIGHT, weight)
    }

    /// Adds `eps` to the mean square (1e-6 unless set).
    pub fn eps(self, eps: f32) -> Self {
        self.float(EPS, eps)
    }

    /// Normalises the rows of `x` in place. Set weight and options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, x: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(X, OUT, x.into(), stream)
    }

    /// Adds `residual` first; returns the normalised rows and the sum.
    pub fn run_add(self, residual: impl Into<TensorView<'a>>) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut out, mut sum) = (self.like(X, &stream)?, self.like(X, &stream)?);
        self.run_add_into(residual, &mut out, &mut sum, &stream)?;
        Ok((out, sum))
    }

    /// Adds `residual` first; writes the normalised rows and the sum into the caller's memory.
    pub fn run_add_into<'b>(
        self,
        residual: impl Into<TensorView<'a>>,
        out: impl Into<TensorViewMut<'b>>,
        sum: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.input(RESIDUAL, residual).launch([(OUT, out.into()), (SUM, sum.into())], stream)
    }

    /// Adds `x` to `sum` in place, and writes the normalised rows of that to `out`.
    pub fn run_add_to<'b>(
        self,
        sum: impl Into<TensorViewMut<'b>>,
        out: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place_with((RESIDUAL, SUM, sum.into()), [(OUT, out.into())], stream)
    }
}
