//! `moe_route_backward`: the gradient of `moe_route` with respect to the logits. The choice of experts is constant. With the
//! logits `x` of a token, `j` over its slots, `g[j] = dweights[j]`, or 0 where `weights[j]` is 0, `q[j] = weights[j] / scale` as
//! it is before anything is dropped, and `dot = sum(g q)`:
//!
//! - softmax, normalised: `dx[ids[j]] = scale q[j] (g[j] - dot)`;
//! - softmax: `dx[i] = scale p[i] (g[j] - dot)` with `p = softmax(x)`, and without `g[j]` where no slot has expert `i`;
//! - sigmoid, normalised: `dx[ids[j]] = scale q[j] (g[j] - dot) (1 - sigmoid(x))`;
//! - sigmoid: `dx[ids[j]] = scale q[j] g[j] (1 - sigmoid(x))`.
//!
//! All other elements are zero. Slots that were dropped have weight 0, and pass nothing on.
//!
//! - `logits` and the options are those of the forward call; `ids` and `weights` are what it returned.
//! - Shapes: `logits` and `dlogits` are `[..., experts]`, with 1 to 1024 experts; `ids`, `weights` and `dweights` are
//!   `[..., top_k]`. Any strides.
//! - Types: f32, f16 or bf16 for `logits`, the same for `dlogits`; i32 for `ids`; f32 for the others. Everything is computed
//!   in f32; the result is rounded once.
//! - Logits of NaN and infinity count as in the forward call, where NaN has no weight: its gradient is 0.
//! - Ids must be from 0 to below the number of experts. On the CPU others are an error, found before anything is written; on a
//!   GPU such a slot counts as if it were not there. Slots with the same id add up.
//! - A token's gradient has the same bits whatever the other tokens are.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use super::options::{NORMALIZE_SPEC, RouteScore, SCALE_SPEC, SCORE_SPEC, check_scale};
use super::{SIZES, check_experts, check_slots};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Space, TensorView};

pub(super) const LOGITS: usize = 0;
pub(super) const IDS: usize = 1;
pub(super) const WEIGHTS: usize = 2;
pub(super) const DWEIGHTS: usize = 3;
pub(super) const DLOGITS: usize = 4;

pub(super) const SCORE: usize = 0;
pub(super) const NORMALIZE: usize = 1;
pub(super) const SCALE: usize = 2;

const ATTRS: &[AttrSpec] = &[SCORE_SPEC, NORMALIZE_SPEC, SCALE_SPEC];

/// A checked call of `moe_route_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    num_tokens: usize,
    experts: usize,
    top_k: usize,
    score: RouteScore,
    normalize: bool,
    scale_bits: u32,
    /// Leading dimensions of logits, ids, weights and dweights, and strides along their rows.
    rows: Space<4>,
    steps: [isize; 4],
    /// Those of dlogits.
    out: Space<1>,
    out_step: isize,
}

impl Problem {
    fn scale(&self) -> f32 {
        f32::from_bits(self.scale_bits)
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Ids, which are values of a tensor, are checked where they are used.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "moe_route_backward",
        summary: "Gradient of moe_route with respect to the logits",
        args: &[
            ArgSpec::input("logits", shape![.., experts], DTypeRule::FLOAT, "those of the forward call"),
            ArgSpec::input("ids", shape![.., top_k], DTypeRule::I32, "what it returned"),
            ArgSpec::input("weights", shape![.., top_k], DTypeRule::F32, "what it returned"),
            ArgSpec::input("dweights", shape![.., top_k], DTypeRule::F32, "gradient of the weights"),
            ArgSpec::output(
                "dlogits",
                shape![.., experts],
                DTypeRule::Same(LOGITS),
                "gradient of the logits",
            ),
        ],
        attrs: ATTRS,
        sizes: &[SIZES[0], SIZES[1], SizeSpec { name: "top_k", default: 8, doc: "experts of a token" }],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let op = Self::SPEC.name;
        let sizes = Matcher::of(args, attrs)?;
        let inputs = [LOGITS, IDS, WEIGHTS, DWEIGHTS].map(|index| args.at(index).layout());
        let (logits, out) = (args.at(LOGITS), args.at(DLOGITS).layout());
        let (experts, top_k) = (sizes.size("experts"), sizes.size("top_k"));
        check_experts(op, experts, logits.shape())?;
        check_slots(op, sizes.leading_count(), top_k, logits.shape())?;
        Ok(Problem {
            dtype: logits.dtype(),
            num_tokens: sizes.leading_count(),
            experts,
            top_k,
            score: RouteScore::at(attrs.choice(SCORE)),
            normalize: attrs.bool(NORMALIZE),
            scale_bits: check_scale(&sizes, attrs, SCALE)?,
            rows: Space::new(sizes.leading_rank(), inputs),
            steps: inputs.map(|layout| layout.step()),
            out: Space::new(sizes.leading_rank(), [out]),
            out_step: out.step(),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let read = if p.score == RouteScore::Softmax && !p.normalize { p.experts } else { p.top_k };
        let by_token = (p.experts + read) * p.dtype.size() + 12 * p.top_k;
        Cost::moving((p.num_tokens * by_token) as f64, 6.0 * (p.num_tokens * p.experts) as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("moe_route_backward_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("moe_route_backward_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("moe_route_backward_portable", Tier::Portable, cpu::run),
];

/// A call of `moe_route_backward`.
///
/// ```
/// use warpsmith::{ops::{MoeRoute, MoeRouteBackward}, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 2.0, 2.0], &[1, 3], Device::Cpu)?;
/// let route = MoeRoute::new(&logits, 2).run()?;
/// let dweights = Tensor::from_slice(&[1.0f32, 0.0], &[1, 2], Device::Cpu)?;
/// let dlogits = MoeRouteBackward::new(&logits, &route.ids, &route.weights, &dweights).run()?;
/// assert_eq!(dlogits.to_vec::<f32>()?, [0.0, 0.25, -0.25]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeRouteBackward<'a> = Call<'a, Backward>;

impl OneOutput for Backward {
    const OUTPUT: usize = DLOGITS;
}

impl<'a> Call<'a, Backward> {
    /// The gradient of the logits of a forward call, given what that returned and the gradient of its weights. Options are
    /// those of the forward call.
    pub fn new(
        logits: impl Into<TensorView<'a>>,
        ids: impl Into<TensorView<'a>>,
        weights: impl Into<TensorView<'a>>,
        dweights: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(LOGITS, logits).input(IDS, ids).input(WEIGHTS, weights).input(DWEIGHTS, dweights)
    }

    /// From logits to scores (softmax unless set).
    pub fn score(self, score: RouteScore) -> Self {
        self.choice(SCORE, score)
    }

    /// Whether the weights of a token are divided by their sum (they are unless set).
    pub fn normalize(self, normalize: bool) -> Self {
        self.flag(NORMALIZE, normalize)
    }

    /// Multiplies all weights.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }
}
