//! `layer_norm_backward`: the gradients of `layer_norm`.

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Op, OpSpec, SizeSpec, shape,
};
use crate::ops::norm::backward::{self as back, DBIAS, DOUT, DSUM, DWEIGHT, DX, Problem, WEIGHT, X};
use crate::ops::norm::{self, EPS};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "layer_norm_backward",
        summary: "Gradients of layer_norm with respect to x (and residual), weight and bias",
        args: &[
            ArgSpec::input(
                "x",
                shape![.., hidden],
                DTypeRule::FLOAT,
                "what was normalised: x, or the sum if a residual was added",
            ),
            ArgSpec::input("weight", shape![hidden], DTypeRule::Same(X), "").optional(),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(X), "gradient of out"),
            ArgSpec::input(
                "dsum",
                shape![.., hidden],
                DTypeRule::Same(X),
                "gradient of the sum from its other uses",
            )
            .optional(),
            ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(X), "gradient of x and of residual")
                .in_place_of(DOUT),
            ArgSpec::output("dweight", shape![hidden], DTypeRule::Same(X), "summed over rows in f32")
                .optional(),
            ArgSpec::output("dbias", shape![hidden], DTypeRule::Same(X), "summed over rows in f32")
                .optional(),
        ],
        attrs: &[AttrSpec { name: "eps", kind: AttrKind::Float(1e-5), doc: "as in the forward call" }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of rows" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        back::check(true, args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        back::cost(problem)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    norm::backward::cuda::row("layer_norm_backward_row", true),
    #[cfg(feature = "cuda")]
    norm::backward::cuda::split("layer_norm_backward_split", true),
    #[cfg(feature = "cuda")]
    norm::backward::cuda::long("layer_norm_backward_long", true),
    norm::cpu::backward("layer_norm_backward_avx512", Tier::Avx512),
    norm::cpu::backward("layer_norm_backward_avx2", Tier::Avx2),
    norm::cpu::backward("layer_norm_backward_portable", Tier::Portable),
];

/// A call of `layer_norm_backward`.
pub type LayerNormBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// Gradients for rows `x` that were normalised, given the gradient `dout` of the result.
    pub fn new(x: impl Into<TensorView<'a>>, dout: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x).input(DOUT, dout)
    }

    /// The weight of the forward call.
    pub fn weight(self, weight: impl Into<TensorView<'a>>) -> Self {
        self.input(WEIGHT, weight)
    }

    /// The gradient that reaches the sum `x + residual` from its other uses; added to `dx`.
    pub fn dsum(self, dsum: impl Into<TensorView<'a>>) -> Self {
        self.input(DSUM, dsum)
    }

    /// The `eps` of the forward call.
    pub fn eps(self, eps: f32) -> Self {
        self.float(EPS, eps)
    }

    /// Returns the gradients of `x`, the weight and the bias.
    pub fn run(self) -> Result<(Tensor, Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let mut dx = self.like(X, &stream)?;
        let hidden = *dx.shape().last().unwrap_or(&1);
        let mut dweight = Tensor::empty_on(&[hidden], dx.dtype(), &stream)?;
        let mut dbias = Tensor::empty_on(&[hidden], dx.dtype(), &stream)?;
        self.run_into(&mut dx, &mut dweight, &mut dbias, &stream)?;
        Ok((dx, dweight, dbias))
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(
        self,
        dx: impl Into<TensorViewMut<'b>>,
        dweight: impl Into<TensorViewMut<'b>>,
        dbias: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DX, dx.into()), (DWEIGHT, dweight.into()), (DBIAS, dbias.into())], stream)
    }
}
