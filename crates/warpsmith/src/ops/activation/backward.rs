//! `activation_backward`: the gradient of `activation`.

use super::{DOUT, DX, KIND, Problem, SIZES, X};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Op, OpSpec, shape};
use crate::ops::elementwise::function::Kind;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "activation_backward",
        summary: "Gradient of activation with respect to x",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, "input of the forward call"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(X), "gradient of out"),
            ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(X), "gradient of x").in_place_of(DOUT),
        ],
        attrs: &[AttrSpec {
            name: "kind",
            kind: AttrKind::Choice(super::KIND_NAMES),
            doc: "as in the forward call",
        }],
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        super::check::<3>(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        super::cost(problem, 3)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("activation_backward_avx512", Tier::Avx512, super::cpu::backward),
    Kernel::cpu("activation_backward_avx2", Tier::Avx2, super::cpu::backward),
    Kernel::cpu("activation_backward_portable", Tier::Portable, super::cpu::backward),
];

/// A call of `activation_backward`.
pub type ActivationBackward<'a> = Call<'a, Backward>;

/// A constructor for each function.
macro_rules! constructors {
    ($($name:ident $kind:ident $doc:literal;)*) => {$(
        #[doc = $doc]
        pub fn $name(x: impl Into<TensorView<'a>>, dout: impl Into<TensorView<'a>>) -> Self {
            Call::start().input(X, x).input(DOUT, dout).choice(KIND, Kind::$kind as u8)
        }
    )*};
}

impl<'a> Call<'a, Backward> {
    constructors! {
        gelu Gelu "The gradient of the exact GELU of `x`, given that of its result.";
        gelu_tanh GeluTanh "The gradient of the tanh approximation of GELU of `x`, given that of its result.";
        silu Silu "The gradient of the SiLU of `x`, given that of its result.";
        relu Relu "The gradient of the ReLU of `x`, given that of its result.";
        mish Mish "The gradient of the Mish of `x`, given that of its result.";
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
