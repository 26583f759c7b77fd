//! `softmax_backward`: the gradient of `softmax`, `dx = scale y (dout - sum(y dout))`.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{ATTRS, Problem, SCALE, SIZES, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Op, OpSpec, shape};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub(super) const Y: usize = 0;
pub(super) const DOUT: usize = 1;
pub(super) const DX: usize = 2;

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "softmax_backward",
        summary: "Gradient of softmax with respect to x",
        args: &[
            ArgSpec::input("y", shape![.., hidden], DTypeRule::FLOAT, "what softmax returned"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(Y), "gradient of y"),
            ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(Y), "gradient of x").in_place_of(DOUT),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        problem.cost(3.0, 5.0)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::BACKWARD_ROW,
    #[cfg(feature = "cuda")]
    cuda::BACKWARD_SPLIT,
    #[cfg(feature = "cuda")]
    cuda::BACKWARD_LONG,
    Kernel::cpu("softmax_backward_avx512", Tier::Avx512, cpu::run_backward),
    Kernel::cpu("softmax_backward_avx2", Tier::Avx2, cpu::run_backward),
    Kernel::cpu("softmax_backward_portable", Tier::Portable, cpu::run_backward),
];

/// A call of `softmax_backward`.
pub type SoftmaxBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradient of `x`, given what softmax returned and the gradient `dout` of that.
    pub fn new(y: impl Into<TensorView<'a>>, dout: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(Y, y).input(DOUT, dout)
    }

    /// A call whose `dout` is given to [`Self::run_in_place`].
    pub fn in_place(y: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(Y, y)
    }

    /// The `scale` of the forward call.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut dx = self.like(Y, &stream)?;
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

    /// Replaces `dout` by the gradient of `x`. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, dout: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(DOUT, DX, dout.into(), stream)
    }
}
