//! `add_gelu`: `out = gelu(x + bias)` over the last dimension.
//!
//! - Shapes: `x` and `out` are `[..., hidden]`, `bias` is `[hidden]`; any strides.
//! - `approximate` is `none` for `gelu` or `tanh` for `gelu_tanh`, as `activation` defines them.
//! - Types: f32, f16 or bf16, the same for all. Arithmetic is in f32 and the result is rounded once: `x + bias` is
//!   **not** rounded to the tensors' type before the function, unlike in two separate steps. For 16-bit types the
//!   function itself is computed to 2^-13 of its value.
//! - NaN and infinities give what the formula gives.
//! - `out` may be `x`, in place. An empty tensor is left alone.
//!
//! `add_gelu_backward` computes `dx = dout gelu'(x + bias)` and, if asked for, `dbias`, the sum of `dx` over rows. It
//! sums in f32 before `dx` is rounded, in an order that depends on shapes, layouts, alignment and the device alone.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
mod run;

pub use backward::{AddGeluBackward, Backward};

use super::elementwise::function::Kind;
use super::elementwise::{Grid, Stream as Operand};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, Matcher,
    OneOutput, Op, OpSpec, SizeSpec, shape,
};
use crate::tensor::TensorView;

const X: usize = 0;
const BIAS: usize = 1;
const OUT: usize = 2;
const DOUT: usize = 2;
const DX: usize = 3;
const DBIAS: usize = 4;
const APPROXIMATE: usize = 0;

/// The functions in the order of the option's choices.
const KINDS: [Kind; 2] = [Kind::Gelu, Kind::GeluTanh];
const ATTRS: &[AttrSpec] = &[AttrSpec {
    name: "approximate",
    kind: AttrKind::Choice(&["none", "tanh"]),
    doc: "none for the exact function, tanh for its tanh form",
}];
const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 32768, doc: "number of rows" },
    SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
];

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    grid: Grid,
    kind: Kind,
    hidden: usize,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "add_gelu",
        summary: "GELU of the sum of rows and a bias",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::input("bias", shape![hidden], DTypeRule::Same(X), "added to every row"),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "add_gelu_backward",
            inputs: &[(X, Source::Input(X)), (BIAS, Source::Input(BIAS)), (DOUT, Source::Incoming(OUT))],
            results: &[(X, InputGradient::Output(DX)), (BIAS, InputGradient::Output(DBIAS))],
            ..Gradient::EMPTY
        }),
        autocast: Autocast::Widest,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let (sizes, dtype) = (Matcher::of(args, attrs)?, args.at(X).dtype());
        let (x, out) = (Operand::of(args, X), Operand::of(args, OUT));
        let bias = Operand::repeated(args, BIAS, x.layout.shape())?;
        let grid = Grid::new(dtype, [x, bias, out], &[]);
        Ok(Problem { grid, kind: KINDS[attrs.choice(APPROXIMATE)], hidden: sizes.size("hidden") })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = p.grid.len() as f64;
        Cost::moving((2.0 * elements + p.hidden as f64) * p.grid.dtype.size() as f64, 2.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("add_gelu_avx512", Tier::Avx512, cpu::forward),
    Kernel::cpu("add_gelu_avx2", Tier::Avx2, cpu::forward),
    Kernel::cpu("add_gelu_portable", Tier::Portable, cpu::forward),
];

/// A call of `add_gelu`.
///
/// ```
/// use warpsmith::{ops::AddGelu, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let bias = Tensor::randn(&[64], DType::F32, Device::Cpu, 1)?;
/// let out = AddGelu::new(&x, &bias).tanh().run()?;
/// assert_eq!(out.shape(), [4, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type AddGelu<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The GELU of the rows of `x` plus `bias`.
    pub fn new(x: impl Into<TensorView<'a>>, bias: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x).input(BIAS, bias)
    }

    /// The tanh form instead of the exact function.
    pub fn tanh(self) -> Self {
        self.choice(APPROXIMATE, 1)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::tensor::DType;
    use crate::{Device, Tensor};

    #[test]
    fn a_bias_of_another_length_is_named() {
        let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
        let error = AddGelu::new(&tensor(&[2, 3]), &tensor(&[4])).run().unwrap_err();
        assert_eq!(error.to_string(), "add_gelu: argument `bias`: expected shape [hidden=3], got [4]");
    }
}
