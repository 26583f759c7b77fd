//! `gated_act`: `out = f(gate) * up` for each element, where `gate` and `up` are the two parts of each row of `x` and
//! `f` is silu (SwiGLU), gelu or gelu_tanh (GeGLU) or relu (ReGLU), as `activation` defines them.
//!
//! - Shapes: `x` is `[..., 2 * hidden]`, `out` is `[..., hidden]`; any strides. The option `layout` says how a row is
//!   packed: `split`, all of `gate` and then all of `up`; or `interleaved`, `gate` at the even and `up` at the odd
//!   places.
//! - Types: f32, f16 or bf16, the same for both. Arithmetic is in f32, the result is rounded once; `f(gate)` is not
//!   rounded in between. For 16-bit types `f` itself is computed to 2^-13 of its value.
//! - NaN and infinities give what the formula gives. An empty tensor is left alone.
//!
//! `gated_act_backward` computes the gradient of `x`, packed in the same way: `dgate = dout * up * f'(gate)` and
//! `dup = dout * f(gate)`. The kernels are those of `ops/elementwise`.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;

pub use backward::{Backward, GatedActBackward};

use super::elementwise::function::Kind;
use super::elementwise::{Grid, Stream as Operand};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, Op, OpSpec,
    SizeSpec, shape,
};
use crate::tensor::{Layout, Shape, Tensor, TensorView, TensorViewMut};

const X: usize = 0;
const OUT: usize = 1;
const DOUT: usize = 1;
const DX: usize = 2;
const KIND: usize = 0;
const LAYOUT: usize = 1;
const INTERLEAVED: usize = 1;

/// The functions in the order of the option's choices.
const KINDS: [Kind; 4] = [Kind::Silu, Kind::Gelu, Kind::GeluTanh, Kind::Relu];
const ATTRS: &[AttrSpec] = &[
    AttrSpec {
        name: "act",
        kind: AttrKind::Choice(&[KINDS[0].name(), KINDS[1].name(), KINDS[2].name(), KINDS[3].name()]),
        doc: "the function applied to the gate",
    },
    AttrSpec {
        name: "layout",
        kind: AttrKind::Choice(&["split", "interleaved"]),
        doc: "how gate and up share a row",
    },
];
const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
    SizeSpec { name: "hidden", default: 14336, doc: "length of a row of the result" },
];

/// A checked call, of the op or of its gradient.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    grid: Grid,
    kind: Kind,
    /// Elements from the first of `gate` to the first of `up`.
    to_up: isize,
}

impl Problem {
    /// The addresses of gate and up in a packed tensor.
    fn halves(&self, packed: usize) -> [usize; 2] {
        [packed, packed.wrapping_add_signed(self.to_up * self.grid.dtype.size() as isize)]
    }
}

/// Gate and up of a packed tensor, as tensors of `shape`.
fn unpack(args: &Args<'_>, index: usize, shape: &Shape, interleaved: bool) -> Result<([Operand; 2], isize)> {
    let view = args.at(index);
    let (mut strides, step) = (view.layout().strides().to_vec(), view.layout().step());
    let hidden = shape[shape.len() - 1];
    let to_up = if interleaved { step } else { hidden as isize * step };
    *strides.last_mut().expect("a row") = if interleaved { 2 * step } else { step };
    let gate = Operand { layout: Layout::strided(*shape, &strides)?, address: view.address() };
    let up = gate.address.wrapping_add_signed(to_up * view.dtype().size() as isize);
    Ok(([gate, Operand { address: up, ..gate }], to_up))
}

fn cost(problem: &Problem, tensors: usize) -> Cost {
    let elements = problem.grid.len() as f64;
    let flops = if tensors == 3 { 2.0 } else { 5.0 };
    Cost::moving(elements * (tensors * problem.grid.dtype.size()) as f64, flops * elements)
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "gated_act",
        summary: "An activation of one half of each row times the other half: SwiGLU, GeGLU, ReGLU",
        args: &[
            ArgSpec::input("x", shape![.., 2 * hidden], DTypeRule::FLOAT, "gate and up"),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(X), "act(gate) * up"),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "gated_act_backward",
            inputs: &[(X, Source::Input(X)), (DOUT, Source::Incoming(OUT))],
            results: &[(X, InputGradient::Output(DX))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Matcher::of(args, attrs)?;
        let (dtype, interleaved) = (args.at(X).dtype(), attrs.choice(LAYOUT) == INTERLEAVED);
        let ([gate, up], to_up) = unpack(args, X, args.at(OUT).layout().shape(), interleaved)?;
        let paired: &[usize] = if interleaved { &[0] } else { &[] };
        let grid = Grid::new(dtype, [gate, up, Operand::of(args, OUT)], paired);
        Ok(Problem { grid, kind: KINDS[attrs.choice(KIND)], to_up })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        cost(problem, 3)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("gated_act_avx512", Tier::Avx512, cpu::forward),
    Kernel::cpu("gated_act_avx2", Tier::Avx2, cpu::forward),
    Kernel::cpu("gated_act_portable", Tier::Portable, cpu::forward),
];

/// A call of `gated_act`.
///
/// ```
/// use warpsmith::{ops::GatedAct, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64], DType::F32, Device::Cpu, 0)?;
/// let out = GatedAct::silu(&x).run()?;
/// assert_eq!(out.shape(), [4, 32]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type GatedAct<'a> = Call<'a, Forward>;

/// A constructor for each function.
macro_rules! constructors {
    ($($name:ident $index:literal $doc:literal;)*) => {$(
        #[doc = $doc]
        pub fn $name(x: impl Into<TensorView<'a>>) -> Self {
            Call::start().input(X, x).choice(KIND, $index)
        }
    )*};
}

impl<'a> Call<'a, Forward> {
    constructors! {
        silu 0 "`silu(gate) * up` of the packed rows `x`.";
        gelu 1 "`gelu(gate) * up` of the packed rows `x`.";
        gelu_tanh 2 "`gelu_tanh(gate) * up` of the packed rows `x`.";
        relu 3 "`relu(gate) * up` of the packed rows `x`.";
    }

    /// Gate at the even and up at the odd places of a row, instead of one half each.
    pub fn interleaved(self) -> Self {
        self.choice(LAYOUT, INTERLEAVED as u8)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let x = self.view(X);
        let mut shape = x.shape().to_vec();
        if let Some(columns) = shape.last_mut() {
            *columns /= 2;
        }
        let mut out = Tensor::empty_on(&shape, x.dtype(), &stream)?;
        self.run_into(&mut out, &stream)?;
        Ok(out)
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, out: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(OUT, out.into())], stream)
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::Device;
    use crate::tensor::DType;

    #[test]
    fn odd_rows_and_wrong_halves_are_named() {
        let tensor = |shape: &[usize]| Tensor::zeros(shape, DType::F32, Device::Cpu).unwrap();
        let stream = Device::Cpu.default_stream().unwrap();
        let error = GatedAct::silu(&tensor(&[2, 7])).run_into(&mut tensor(&[2, 3]), &stream).unwrap_err();
        assert!(error.to_string().contains("`x`: expected shape [..., 2 * hidden], got [2, 7]"), "{error}");
        let error = GatedAct::silu(&tensor(&[2, 8])).run_into(&mut tensor(&[2, 3]), &stream).unwrap_err();
        assert_eq!(error.to_string(), "gated_act: argument `out`: expected shape [2, hidden=4], got [2, 3]");
    }

    #[test]
    fn layouts_agree() {
        let split: Vec<f32> = (0..10).map(|i| i as f32 / 3.0 - 1.0).collect();
        let mixed: Vec<f32> = (0..10).map(|i| split[i / 2 + i % 2 * 5]).collect();
        let run = |x: &[f32], interleaved: bool| {
            let x = Tensor::from_slice(x, &[10], Device::Cpu).unwrap();
            let call = GatedAct::gelu(&x);
            let call = if interleaved { call.interleaved() } else { call };
            call.run().unwrap().to_vec::<f32>().unwrap()
        };
        assert_eq!(run(&split, false), run(&mixed, true));
    }
}
