//! `moe_route`: the experts of each token of a mixture of experts, their weights, and the order in which a grouped product
//! takes the tokens. For a token with the logits `x`:
//!
//! 1. *Scores*: `s = softmax(x)` over all experts, or `s = sigmoid(x)`.
//! 2. *Choice*: the `top_k` experts with the largest `s + bias`, of equal ones the lowest. `bias` balances the load without
//!    a loss: it changes the choice, never the weights. With `top_groups` below `groups`, the experts are in equal groups of
//!    neighbours, and only those of the best groups are candidates. A group's score is the sum of its two largest
//!    `s + bias` (of its only one), or with `group_score=max` the largest; of equal groups the lowest is the best.
//! 3. *Weights*: `w[j] = scale s[ids[j]] / d`, with `d = sum(s[ids])` if `normalize`, else 1. To the sum of sigmoids, which can
//!    vanish, 1e-20 is added.
//! 4. *Places*: `order` lists the slots, numbered `token * top_k + slot`, by expert and within each by token; `positions` has
//!    the place of each slot there. An expert with more than `capacity` tokens keeps the first: the others' slots have
//!    weight 0 and position -1, keep their id, and count in `dropped`. Weights are normalised before anything is dropped.
//!    `counts` has the tokens that an expert keeps. Behind the slots that are kept, `order` is -1.
//!
//! - *Noisy gating*: with `noise` above 0, the choice is made with `x + noise z` in place of `x`. `z` is normally distributed and
//!   a function of `seed`, the token's number in the call, and the expert: the same on every device. Weights are those of `x`.
//! - Shapes: `logits` is `[..., experts]`, with 1 to 1024 experts; `bias`, `counts` and `dropped` are `[experts]`, `weights`, `ids`,
//!   `order` and `positions` `[..., top_k]`. Any strides. There are at most 2^31 - 1 slots.
//! - Types: f32, f16 or bf16 for `logits`; f32 for `bias` and `weights`; i32 for the others. Everything is computed in f32.
//! - Where only the order of scores decides (no bias, no sums of groups), the choice is made by the logits, whose order is the
//!   same: no two are equal because scores were rounded. Otherwise it is made by scores in an arithmetic of its own, with the
//!   same roundings everywhere and whole numbers in the sum of the softmax (`arithmetic.rs`). So ids are the same on
//!   every device; small differences of scores, below about 1e-7, are ties.
//! - A logit of NaN counts as minus infinity, plus infinity as the largest number of f32; so does `s + bias`. Experts whose
//!   logit is minus infinity have weight 0, and are chosen last whatever their bias is. A token without any other logit gets the
//!   lowest ids and weights of 0. The ids of a token are always distinct.
//! - A token's ids and weights have the same bits whatever the other tokens are, but for what a capacity drops.
//! - On a GPU nothing waits for the host: a captured call can be replayed whatever the counts are.
//!
//! Mixtral and Qwen3-MoE use softmax with `normalize`; DeepSeek-V3 sigmoid with `normalize`, `bias`, `scale=2.5`, `groups=8`,
//! `top_groups=4`; DeepSeek-V2 softmax with `group_score=max`. (Transformers gives experts of other groups the score 0 where
//! they are excluded here. That differs where a biased score is negative.)
//!
//! `moe_route_backward` computes the gradient of the logits.

mod arithmetic;
mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(in crate::ops) mod options;
pub(in crate::ops) mod places;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, MoeRouteBackward};
pub use options::{GroupScore, RouteScore};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, DerivedSize, Gradient, Kernel, Matcher, Op, OpSpec,
    SizeRule, SizeSpec, shape,
};
use crate::tensor::{DType, Layout, Space, Tensor, TensorView, TensorViewMut};
use options::{
    ATTRS, CAPACITY, GROUP_SCORE, GROUPS, NOISE, NORMALIZE, Options, SCALE, SCORE, SEED, TOP_GROUPS, TOP_K,
};

const LOGITS: usize = 0;
const BIAS: usize = 1;
const WEIGHTS: usize = 2;
const IDS: usize = 3;
const COUNTS: usize = 4;
const ORDER: usize = 5;
const POSITIONS: usize = 6;
const DROPPED: usize = 7;

/// The most experts.
pub(in crate::ops) const MOST_EXPERTS: usize = 1024;

const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 4096, doc: "number of tokens" },
    SizeSpec { name: "experts", default: 128, doc: "number of experts" },
];

/// A checked call of `moe_route`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    num_tokens: usize,
    experts: usize,
    options: Options,
    /// Leading dimensions of logits, weights, ids and positions; those of ids for what is left out.
    rows: Space<4>,
    /// Strides along their rows.
    steps: [isize; 4],
    /// Leading dimensions of the order, or of ids, and the stride along its rows.
    order: Space<1>,
    order_step: isize,
    /// Strides of bias, counts and dropped.
    by_expert: [isize; 3],
    /// A bit for each argument that is given.
    given: u32,
}

impl Problem {
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let op = Forward::SPEC.name;
        let sizes = Matcher::of(args, attrs)?;
        let logits = args.at(LOGITS);
        let experts = sizes.size("experts");
        check_experts(op, experts, logits.shape())?;
        let options = Options::check(&sizes, attrs, op, experts)?;
        let num_tokens = sizes.leading_count();
        check_slots(op, num_tokens, options.top_k, logits.shape())?;
        let (ids, rank) = (args.at(IDS), sizes.leading_rank());
        let or_ids = |index: usize| -> &Layout { args.get(index).unwrap_or(ids).layout() };
        let rows = [logits.layout(), args.at(WEIGHTS).layout(), ids.layout(), or_ids(POSITIONS)];
        let step = |index: usize| args.get(index).map_or(0, |view| view.layout().step());
        Ok(Problem {
            dtype: logits.dtype(),
            num_tokens,
            experts,
            options,
            rows: Space::new(rank, rows),
            steps: rows.map(Layout::step),
            order: Space::new(rank, [or_ids(ORDER)]),
            order_step: or_ids(ORDER).step(),
            by_expert: [BIAS, COUNTS, DROPPED].map(step),
            given: (0..Forward::SPEC.args.len())
                .fold(0, |bits, index| bits | u32::from(args.get(index).is_some()) << index),
        })
    }

    fn gives(&self, index: usize) -> bool {
        self.given & (1 << index) != 0
    }

    fn num_slots(&self) -> usize {
        self.num_tokens * self.options.top_k
    }

    /// Whether the call needs to know how many tokens each expert has.
    fn has_places(&self) -> bool {
        self.options.capacity > 0
            || [COUNTS, ORDER, POSITIONS, DROPPED].iter().any(|&index| self.gives(index))
    }

    fn compares_scores(&self) -> bool {
        self.options.compares_scores(self.gives(BIAS))
    }
}

/// How many experts there may be.
pub(in crate::ops) fn check_experts(op: &'static str, experts: usize, got: &[usize]) -> Result<()> {
    match (1..=MOST_EXPERTS).contains(&experts) {
        true => Ok(()),
        false => Err(Error::argument(
            op,
            "logits",
            format!("from 1 to {MOST_EXPERTS} experts"),
            format!("{got:?}"),
        )),
    }
}

/// Slots are counted in i32.
pub(in crate::ops) fn check_slots(
    op: &'static str,
    tokens: usize,
    top_k: usize,
    got: &[usize],
) -> Result<()> {
    match tokens.checked_mul(top_k.max(1)).is_some_and(|slots| slots <= i32::MAX as usize) {
        true => Ok(()),
        false => {
            let expected = format!("at most {} slots, with top_k={top_k}", i32::MAX);
            Err(Error::argument(op, "logits", expected, format!("{got:?}")))
        }
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Ids that index anything are those that the kernels chose.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "moe_route",
        summary: "Experts of each token, their weights, and the order of tokens by expert",
        args: &[
            ArgSpec::input("logits", shape![.., experts], DTypeRule::FLOAT, ""),
            ArgSpec::input("bias", shape![experts], DTypeRule::F32, "added to scores for the choice only")
                .optional(),
            // By the capacity.
            ArgSpec::output("weights", shape![.., top_k], DTypeRule::F32, "").across_rows(),
            ArgSpec::output("ids", shape![.., top_k], DTypeRule::I32, "experts, by falling score"),
            ArgSpec::output("counts", shape![experts], DTypeRule::I32, "tokens that each expert keeps")
                .optional(),
            ArgSpec::output(
                "order",
                shape![.., top_k],
                DTypeRule::I32,
                "slots by expert, then by token; -1 behind them",
            )
            .across_rows()
            .optional(),
            ArgSpec::output(
                "positions",
                shape![.., top_k],
                DTypeRule::I32,
                "of slots in `order`; -1 if dropped",
            )
            .across_rows()
            .optional(),
            ArgSpec::output("dropped", shape![experts], DTypeRule::I32, "tokens beyond the capacity")
                .optional(),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        derived: &[DerivedSize {
            name: "top_k",
            rule: SizeRule::Option { option: TOP_K, most: MOST_EXPERTS },
        }],
        gradient: Some(Gradient {
            op: "moe_route_backward",
            inputs: &[
                (backward::LOGITS, Source::Input(LOGITS)),
                (backward::IDS, Source::Output(IDS)),
                (backward::WEIGHTS, Source::Output(WEIGHTS)),
                (backward::DWEIGHTS, Source::Incoming(WEIGHTS)),
            ],
            results: &[(LOGITS, InputGradient::Output(backward::DLOGITS))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_tokens * p.experts) as f64;
        let by_slot = 2 + [ORDER, POSITIONS].iter().filter(|&&index| p.gives(index)).count();
        let by_expert = [BIAS, COUNTS, DROPPED].iter().filter(|&&index| p.gives(index)).count();
        let words = (p.num_slots() * by_slot + p.experts * by_expert) as f64;
        Cost::moving(elements * p.dtype.size() as f64 + 4.0 * words, 6.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::SMALL,
    #[cfg(feature = "cuda")]
    cuda::BLOCKS,
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("moe_route_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("moe_route_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("moe_route_portable", Tier::Portable, cpu::run),
];

/// A call of `moe_route`.
///
/// ```
/// use warpsmith::{ops::MoeRoute, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 2.0, 1.0, 3.0, 3.0, 0.0], &[2, 3], Device::Cpu)?;
/// let route = MoeRoute::new(&logits, 2).run()?;
/// assert_eq!(route.ids.to_vec::<i32>()?, [1, 2, 0, 1]);
/// let weights = route.weights.to_vec::<f32>()?;
/// assert!((weights[0] - 0.731_059).abs() < 1e-5 && weights[2] == 0.5);
/// // Slots by expert: expert 0 has slot 2, expert 1 slots 0 and 3, expert 2 slot 1.
/// assert_eq!(route.counts.to_vec::<i32>()?, [1, 2, 1]);
/// assert_eq!(route.order.to_vec::<i32>()?, [2, 0, 3, 1]);
/// assert_eq!(route.positions.to_vec::<i32>()?, [1, 3, 0, 2]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeRoute<'a> = Call<'a, Forward>;

/// What [`MoeRoute::run`] returns.
#[derive(Debug)]
pub struct Routed {
    /// `[..., top_k]`, f32.
    pub weights: Tensor,
    /// `[..., top_k]`, i32: experts by falling score.
    pub ids: Tensor,
    /// `[experts]`, i32: tokens that each expert keeps.
    pub counts: Tensor,
    /// `[..., top_k]`, i32: slots by expert.
    pub order: Tensor,
    /// `[..., top_k]`, i32: places of the slots in `order`.
    pub positions: Tensor,
    /// `[experts]`, i32: tokens beyond the capacity.
    pub dropped: Tensor,
}

impl<'a> Call<'a, Forward> {
    /// The `top_k` experts of each token.
    pub fn new(logits: impl Into<TensorView<'a>>, top_k: usize) -> Self {
        Call::start().input(LOGITS, logits).int(TOP_K, top_k)
    }

    /// Added to the scores for the choice, never to the weights.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
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

    /// Takes the experts of a token from the best `top_groups` of `groups` equal groups.
    pub fn groups(self, groups: usize, top_groups: usize, score: GroupScore) -> Self {
        self.int(GROUPS, groups).int(TOP_GROUPS, top_groups).choice(GROUP_SCORE, score)
    }

    /// Chooses by logits with noise of this standard deviation.
    pub fn noise(self, deviation: f32, seed: i64) -> Self {
        self.float(NOISE, deviation).int(SEED, seed)
    }

    /// The most tokens of an expert.
    pub fn capacity(self, capacity: usize) -> Self {
        self.int(CAPACITY, capacity)
    }

    /// Also writes how many tokens each expert keeps.
    pub fn counts(self, counts: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(COUNTS, counts)
    }

    /// Also writes the slots by expert.
    pub fn order(self, order: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(ORDER, order)
    }

    /// Also writes the places of the slots in the order.
    pub fn positions(self, positions: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(POSITIONS, positions)
    }

    /// Also writes how many tokens of each expert are dropped.
    pub fn dropped(self, dropped: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DROPPED, dropped)
    }

    /// Runs on the device's default stream and returns everything as new tensors.
    pub fn run(self) -> Result<Routed> {
        let [weights, ids, counts, order, positions, dropped] =
            self.run_for([WEIGHTS, IDS, COUNTS, ORDER, POSITIONS, DROPPED])?;
        Ok(Routed { weights, ids, counts, order, positions, dropped })
    }

    /// Runs on `stream` into the caller's memory; what else is wanted is given before.
    pub fn run_into<'b>(
        self,
        weights: impl Into<TensorViewMut<'b>>,
        ids: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(WEIGHTS, weights.into()), (IDS, ids.into())], stream)
    }
}
