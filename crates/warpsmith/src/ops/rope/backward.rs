//! `rope_backward`: the gradient of `rope`, a rotation by the opposite angle.

use super::{ATTRS, OUT, POSITIONS, Problem, SIZES, X, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, Kernel, Op, OpSpec};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "rope_backward",
        summary: "Gradient of rope with respect to x",
        args: &[
            ArgSpec::input("dout", "[..., num_tokens, num_heads, head_dim], gradient of out"),
            ArgSpec::input("positions", "[..., num_tokens], i64 or i32"),
            ArgSpec::input("cos", "[max_pos, rotary_dim / 2], f32; given exactly when sin is").optional(),
            ArgSpec::input("sin", "[max_pos, rotary_dim / 2], f32").optional(),
            ArgSpec::output("dx", "[..., num_tokens, num_heads, head_dim], gradient of x").in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        super::check(&Self::SPEC, true, args, attrs)
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

super::options!(Backward);

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

    /// Runs on `stream` into memory of the caller's.
    pub fn run_into<'b>(self, dx: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(OUT, dx.into())], stream)
    }
}
