//! `activation`: `out = f(x)` for each element, where `f` is one of
//!
//! - `gelu`: `x/2 (1 + erf(x / sqrt(2)))`,
//! - `gelu_tanh`: `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³)))`,
//! - `silu`: `x / (1 + e^-x)`,
//! - `relu`: `max(x, 0)`,
//! - `mish`: `x tanh(ln(1 + e^x))`.
//!
//! Contract:
//!
//! - Shapes: `x` and `out` have the same shape of one dimension or more; any strides.
//! - Types: f32, f16 or bf16, the same for both. Arithmetic is in f32, the result is rounded once. For 16-bit types
//!   `f` itself is computed to 2^-13 of its value, so that a result may be the neighbour of the correctly rounded one.
//! - NaN gives NaN; infinities give what the formula gives (`silu(-inf)` is `-inf * 0`, NaN).
//! - `out` may be `x`, in place. An empty tensor is left alone.
//!
//! `activation_backward` computes `dx = dout f'(x)`; `f'` is always computed to f32 accuracy, and is zero at the kink
//! of relu. The kernels are those of `ops/elementwise`.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

pub use backward::{ActivationBackward, Backward};

use super::elementwise::function::Kind;
use super::elementwise::{Grid, Stream as Operand};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput,
    Op, OpSpec, SizeSpec, shape,
};
use crate::tensor::TensorView;

const X: usize = 0;
const OUT: usize = 1;
const DOUT: usize = 1;
const DX: usize = 2;
const KIND: usize = 0;

/// The functions in the order of the option's choices.
const KINDS: [Kind; 5] = Kind::ALL;
const KIND_NAMES: &[&str] =
    &[KINDS[0].name(), KINDS[1].name(), KINDS[2].name(), KINDS[3].name(), KINDS[4].name()];
const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
    SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
];

/// A checked call, of the op or of its gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    grid: Grid,
    kind: Kind,
}

fn check<const N: usize>(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    Matcher::of(args, attrs)?;
    let streams: [Operand; N] = std::array::from_fn(|index| Operand::of(args, index));
    Ok(Problem { grid: Grid::new(args.at(X).dtype(), streams, &[]), kind: KINDS[attrs.choice(KIND)] })
}

fn cost(problem: &Problem, tensors: usize) -> Cost {
    let elements = problem.grid.len() as f64;
    Cost::moving(elements * (tensors * problem.grid.dtype.size()) as f64, elements)
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "activation",
        summary: "An activation function of each element: gelu, gelu_tanh, silu, relu or mish",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, ""),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "").in_place_of(X),
        ],
        attrs: &[AttrSpec { name: "kind", kind: AttrKind::Choice(KIND_NAMES), doc: "the function" }],
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "activation_backward",
            inputs: &[(X, Source::Input(X)), (DOUT, Source::Incoming(OUT))],
            results: &[(X, InputGradient::Output(DX))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check::<2>(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        cost(problem, 2)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("activation_avx512", Tier::Avx512, cpu::forward),
    Kernel::cpu("activation_avx2", Tier::Avx2, cpu::forward),
    Kernel::cpu("activation_portable", Tier::Portable, cpu::forward),
];

/// A call of `activation`.
///
/// ```
/// use warpsmith::{ops::Activation, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let out = Activation::silu(&x).run()?;
/// assert_eq!(out.shape(), [4, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Activation<'a> = Call<'a, Forward>;

/// A constructor for each function.
macro_rules! constructors {
    ($($name:ident $kind:ident $doc:literal;)*) => {$(
        #[doc = $doc]
        pub fn $name(x: impl Into<TensorView<'a>>) -> Self {
            Call::start().input(X, x).choice(KIND, Kind::$kind as u8)
        }
    )*};
}

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    constructors! {
        gelu Gelu "The exact GELU of `x`.";
        gelu_tanh GeluTanh "The tanh approximation of GELU of `x`.";
        silu Silu "The SiLU of `x`.";
        relu Relu "The ReLU of `x`.";
        mish Mish "The Mish of `x`.";
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::{DType, Device, Tensor};

    #[test]
    fn the_choices_are_the_functions() {
        assert!(KINDS.iter().enumerate().all(|(i, &kind)| kind as usize == i));
    }

    #[test]
    fn mismatched_outputs_are_named() {
        let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::Cpu).unwrap();
        let x = tensor(&[2, 3], DType::F32);
        let stream = Device::Cpu.default_stream().unwrap();
        let error = Activation::gelu(&x).run_into(&mut tensor(&[3, 2], DType::F32), &stream).unwrap_err();
        assert_eq!(error.to_string(), "activation: argument `out`: expected shape [2, hidden=3], got [3, 2]");
        let error = Activation::gelu(&x).run_into(&mut tensor(&[2, 3], DType::F16), &stream).unwrap_err();
        assert!(error.to_string().contains("expected dtype f32, got f16"), "{error}");
    }
}
