//! `moe_losses`: what the router of a mixture of experts is trained with besides the task, and how its experts are used. For
//! `t` tokens with logits `x`, `e` experts and `k` slots a token:
//!
//! - probabilities `p = softmax(x)`, or with `score=sigmoid` `p = sigmoid(x) / sum(sigmoid(x))`;
//! - `load[i]`: the part of all `t k` slots that has expert `i`; `probability[i] = mean(p[i])` over the tokens;
//! - `load_balance = e sum(load probability)`: 1 where everything is even (Switch Transformers). The `load_balancing_loss_func`
//!   of transformers divides by tokens instead of slots: it is `k` times as much.
//! - `z_loss = mean(lse²)` with `lse = ln(sum(exp(x)))`, whatever the score is (ST-MoE);
//! - `importance`: the squared coefficient of variation of `probability`, `mean((probability - m)²) / m²` with its mean `m`
//!   (Shazeer et al., 2017). Of sums over the tokens it is the same.
//! - `entropy = mean(-sum(p ln p))`.
//!
//! - Shapes: `logits` is `[..., experts]`, with 1 to 1024 experts, `ids` `[..., top_k]`; `load` and `probability` are `[experts]`, the
//!   others one number, `[]`. Any strides. There are at most 2^31 - 1 slots. Without tokens all results are 0.
//! - Types: f32, f16 or bf16 for `logits`; i32 for `ids`; f32 for the results. Everything is computed in f32, and added in an
//!   order that depends on the shapes alone: two runs give the same bits.
//! - NaN or plus infinity in a token's logits, or nothing but minus infinity, makes the results NaN that depend on them. Any
//!   other minus infinity has no probability.
//! - Ids must be from 0 to below the number of experts. On the CPU others are an error, found before anything is written; on a
//!   GPU such a slot is counted with no expert.
//!
//! `moe_losses_backward` computes the gradient of the logits. The loads are constant there: they follow from a choice.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, MoeLossesBackward};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrSpec, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::ops::moe_route::options::SCORE_SPEC;
use crate::ops::moe_route::{RouteScore, check_experts, check_slots};
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

const LOGITS: usize = 0;
const IDS: usize = 1;
const LOAD_BALANCE: usize = 2;
const Z_LOSS: usize = 3;
const IMPORTANCE: usize = 4;
const LOAD: usize = 5;
const PROBABILITY: usize = 6;
const ENTROPY: usize = 7;

const SCORE: usize = 0;
const ATTRS: &[AttrSpec] = &[SCORE_SPEC];

const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 4096, doc: "number of tokens" },
    SizeSpec { name: "experts", default: 128, doc: "number of experts" },
    SizeSpec { name: "top_k", default: 8, doc: "experts of a token" },
];

/// A checked call of `moe_losses`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    num_tokens: usize,
    experts: usize,
    top_k: usize,
    score: RouteScore,
    /// Leading dimensions of logits and ids, each twice.
    rows: Space<4>,
    /// Strides along their rows.
    steps: [isize; 2],
    /// Strides of load and probability; `None` for what is left out.
    by_expert: [Option<isize>; 2],
    has_entropy: bool,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Ids, which are values of a tensor, are checked where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "moe_losses",
        summary: "Losses of a mixture of experts' router, and how its experts are used",
        args: &[
            ArgSpec::input("logits", shape![.., experts], DTypeRule::FLOAT, ""),
            ArgSpec::input("ids", shape![.., top_k], DTypeRule::I32, "experts, as moe_route returns them"),
            ArgSpec::output("load_balance", shape![], DTypeRule::F32, "1 where everything is even"),
            ArgSpec::output("z_loss", shape![], DTypeRule::F32, "mean of the squares of lse"),
            ArgSpec::output("importance", shape![], DTypeRule::F32, "squared variation of the probabilities"),
            ArgSpec::output("load", shape![experts], DTypeRule::F32, "part of the slots of each expert")
                .optional(),
            ArgSpec::output("probability", shape![experts], DTypeRule::F32, "mean of each expert's")
                .optional(),
            ArgSpec::output("entropy", shape![], DTypeRule::F32, "mean of the tokens' distributions")
                .optional(),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "moe_losses_backward",
            inputs: &[
                (backward::LOGITS, Source::Input(LOGITS)),
                (backward::LOAD, Source::Output(LOAD)),
                (backward::PROBABILITY, Source::Output(PROBABILITY)),
                (backward::DLOAD_BALANCE, Source::Incoming(LOAD_BALANCE)),
                (backward::DZ_LOSS, Source::Incoming(Z_LOSS)),
                (backward::DIMPORTANCE, Source::Incoming(IMPORTANCE)),
            ],
            results: &[(LOGITS, InputGradient::Output(backward::DLOGITS))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let op = Self::SPEC.name;
        let sizes = Matcher::of(args, attrs)?;
        let (logits, ids) = (args.at(LOGITS), args.at(IDS).layout());
        let (experts, top_k) = (sizes.size("experts"), sizes.size("top_k"));
        check_experts(op, experts, logits.shape())?;
        check_slots(op, sizes.leading_count(), top_k, logits.shape())?;
        let x = logits.layout();
        Ok(Problem {
            dtype: logits.dtype(),
            num_tokens: sizes.leading_count(),
            experts,
            top_k,
            score: RouteScore::at(attrs.choice(SCORE)),
            rows: Space::new(sizes.leading_rank(), [x, ids, x, ids]),
            steps: [x.step(), ids.step()],
            by_expert: [LOAD, PROBABILITY].map(|index| args.get(index).map(|view| view.layout().step())),
            has_entropy: args.get(ENTROPY).is_some(),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_tokens * p.experts) as f64;
        let by_expert = p.by_expert.iter().flatten().count() * p.experts;
        let words = (p.num_tokens * p.top_k + by_expert + 3 + p.has_entropy as usize) as f64;
        Cost::moving(elements * p.dtype.size() as f64 + 4.0 * words, 8.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("moe_losses_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("moe_losses_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("moe_losses_portable", Tier::Portable, cpu::run),
];

/// A call of `moe_losses`.
///
/// ```
/// use warpsmith::{ops::MoeLosses, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32; 8], &[2, 4], Device::Cpu)?;
/// let ids = Tensor::from_slice(&[0i32, 1, 2, 3], &[2, 2], Device::Cpu)?;
/// let losses = MoeLosses::new(&logits, &ids).run()?;
/// assert_eq!(losses.load_balance.to_vec::<f32>()?, [1.0]);
/// assert_eq!(losses.importance.to_vec::<f32>()?, [0.0]);
/// assert_eq!(losses.load.to_vec::<f32>()?, [0.25; 4]);
/// assert!((losses.z_loss.to_vec::<f32>()?[0] - 4f32.ln().powi(2)).abs() < 1e-6);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeLosses<'a> = Call<'a, Forward>;

/// What [`MoeLosses::run`] returns: f32, all but two of them one number.
#[derive(Debug)]
pub struct RouterLosses {
    /// 1 where everything is even.
    pub load_balance: Tensor,
    /// Mean of the squares of lse.
    pub z_loss: Tensor,
    /// Squared variation of the probabilities.
    pub importance: Tensor,
    /// `[experts]`: part of the slots of each.
    pub load: Tensor,
    /// `[experts]`: mean probability of each.
    pub probability: Tensor,
    /// Mean of the tokens' distributions.
    pub entropy: Tensor,
}

impl<'a> Call<'a, Forward> {
    /// The losses of a router with these logits, from which these experts were chosen.
    pub fn new(logits: impl Into<TensorView<'a>>, ids: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(LOGITS, logits).input(IDS, ids)
    }

    /// From logits to probabilities (softmax unless set).
    pub fn score(self, score: RouteScore) -> Self {
        self.choice(SCORE, score)
    }

    /// Also writes the part of the slots that each expert has.
    pub fn load(self, load: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(LOAD, load)
    }

    /// Also writes the mean probability of each expert.
    pub fn probability(self, probability: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(PROBABILITY, probability)
    }

    /// Also writes the mean entropy of the tokens' distributions.
    pub fn entropy(self, entropy: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(ENTROPY, entropy)
    }

    /// Runs on the device's default stream and returns everything as new tensors.
    pub fn run(self) -> Result<RouterLosses> {
        let [load_balance, z_loss, importance, load, probability, entropy] =
            self.run_for([LOAD_BALANCE, Z_LOSS, IMPORTANCE, LOAD, PROBABILITY, ENTROPY])?;
        Ok(RouterLosses { load_balance, z_loss, importance, load, probability, entropy })
    }

    /// Runs on `stream` into the caller's memory, one number each; what else is wanted is given before.
    pub fn run_into<'b>(
        self,
        load_balance: impl Into<TensorViewMut<'b>>,
        z_loss: impl Into<TensorViewMut<'b>>,
        importance: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let losses =
            [(LOAD_BALANCE, load_balance.into()), (Z_LOSS, z_loss.into()), (IMPORTANCE, importance.into())];
        self.launch(losses, stream)
    }
}
