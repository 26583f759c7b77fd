//! `rope_backward`: the gradient of `rope`, a rotation by the opposite angle.

use super::{ATTRS, COS, DERIVED, OUT, POSITIONS, Problem, SIZES, X, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Op, OpSpec, shape};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "rope_backward",
        summary: "Gradient of rope with respect to x",
        args: &[
            ArgSpec::input(
                "dout",
                shape![.., num_tokens, num_heads, head_dim],
                DTypeRule::FLOAT,
                "gradient of out",
            ),
            ArgSpec::input("positions", shape![.., num_tokens], DTypeRule::INDEX, ""),
            ArgSpec::input("cos", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "given with sin")
                .optional(),
            ArgSpec::input("sin", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "").with(COS),
            ArgSpec::output(
                "dx",
                shape![.., num_tokens, num_heads, head_dim],
                DTypeRule::Same(X),
                "gradient of x",
            )
            .in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        derived: DERIVED,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        super::check(true, args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        super::cost(problem)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::kernel("rope_backward_cuda"),
    Kernel::cpu("rope_backward_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("rope_backward_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("rope_backward_portable", Tier::Portable, cpu::run),
];

/// A call of `rope_backward`.
pub type RopeBackward<'a> = Call<'a, Backward>;

super::options!(Backward, scale, [super::COS, super::SIN]);

impl<'a> Call<'a, Backward> {
    /// The gradient of `x`, given that of the result; options as in the forward call.
    pub fn new(dout: impl Into<TensorView<'a>>, positions: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, dout).input(POSITIONS, positions)
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
        self.launch([(OUT, dx.into())], stream)
    }
}
