//! `gated_act_backward`: the gradient of `gated_act`.

use super::{ATTRS, DOUT, DX, INTERLEAVED, KIND, KINDS, LAYOUT, Problem, SIZES, X, unpack};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, shape};
use crate::ops::elementwise::{Grid, Stream as Operand};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BackwardProblem {
    pub(super) of: Problem,
    /// Elements from the first of `dgate` to the first of `dup`.
    pub(super) to_dup: isize,
}

impl BackwardProblem {
    /// The addresses of gate, up, dout, dgate and dup.
    pub(super) fn addresses(&self, args: &Args<'_>) -> [usize; 5] {
        let [gate, up] = self.of.halves(args.address(X));
        let [dgate, dup] = Problem { to_up: self.to_dup, ..self.of }.halves(args.address(DX));
        [gate, up, args.address(DOUT), dgate, dup]
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = BackwardProblem;

    const SPEC: OpSpec = OpSpec {
        name: "gated_act_backward",
        summary: "Gradient of gated_act with respect to its packed input",
        args: &[
            ArgSpec::input("x", shape![.., 2 * hidden], DTypeRule::FLOAT, "input of the forward call"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(X), "gradient of out"),
            ArgSpec::output(
                "dx",
                shape![.., 2 * hidden],
                DTypeRule::Same(X),
                "gradient of x, packed as x is",
            )
            .in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<BackwardProblem> {
        Matcher::of(args, attrs)?;
        let (dtype, interleaved) = (args.at(X).dtype(), attrs.choice(LAYOUT) == INTERLEAVED);
        let shape = args.at(DOUT).layout().shape();
        let ([gate, up], to_up) = unpack(args, X, shape, interleaved)?;
        let ([dgate, dup], to_dup) = unpack(args, DX, shape, interleaved)?;
        let paired: &[usize] = if interleaved { &[0, 3] } else { &[] };
        let grid = Grid::new(dtype, [gate, up, Operand::of(args, DOUT), dgate, dup], paired);
        Ok(BackwardProblem { of: Problem { grid, kind: KINDS[attrs.choice(KIND)], to_up }, to_dup })
    }

    fn kernels() -> &'static [Kernel<BackwardProblem>] {
        KERNELS
    }

    fn cost(problem: &BackwardProblem) -> Cost {
        super::cost(&problem.of, 5)
    }
}

static KERNELS: &[Kernel<BackwardProblem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("gated_act_backward_avx512", Tier::Avx512, super::cpu::backward),
    Kernel::cpu("gated_act_backward_avx2", Tier::Avx2, super::cpu::backward),
    Kernel::cpu("gated_act_backward_portable", Tier::Portable, super::cpu::backward),
];

/// A call of `gated_act_backward`.
pub type GatedActBackward<'a> = Call<'a, Backward>;

/// A constructor for each function.
macro_rules! constructors {
    ($($name:ident $index:literal $doc:literal;)*) => {$(
        #[doc = $doc]
        pub fn $name(x: impl Into<TensorView<'a>>, dout: impl Into<TensorView<'a>>) -> Self {
            Call::start().input(X, x).input(DOUT, dout).choice(KIND, $index)
        }
    )*};
}

impl<'a> Call<'a, Backward> {
    constructors! {
        silu 0 "The gradient of `silu(gate) * up`, given that of the result.";
        gelu 1 "The gradient of `gelu(gate) * up`, given that of the result.";
        gelu_tanh 2 "The gradient of `gelu_tanh(gate) * up`, given that of the result.";
        relu 3 "The gradient of `relu(gate) * up`, given that of the result.";
    }

    /// Gate at the even and up at the odd places of a row, instead of one half each.
    pub fn interleaved(self) -> Self {
        self.choice(LAYOUT, INTERLEAVED as u8)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut dx = self.like(X, &stream)?;
        self.run_into(&mut dx, &stream)?;
        Ok(dx)
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, dx: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DX, dx.into())], stream)
    }
}
