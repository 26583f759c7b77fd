//! `moe_losses_backward`: the gradient of `moe_losses` with respect to the logits, given those of the three losses. With the
//! probabilities `p` of a token and the mean `m` and the sum `s` of `probability`:
//!
//! - `v[i] = (e load[i] dload_balance + 2 e / s² (probability[i] - m - sum((probability - m)²) / s) dimportance) / t`;
//! - `dx = p (v - sum(p v))`, with `score=sigmoid` times `1 - sigmoid(x)`, and then
//!   `+ 2 lse softmax(x) dz_loss / t`.
//!
//! - `logits` and the options are those of the forward call, `load` and `probability` what it returned.
//! - Shapes: `logits` and `dlogits` are `[..., experts]`, with 1 to 1024 experts, `load` and `probability` `[experts]`; the gradients
//!   of losses are one number, `[]`. Any strides. `dlogits` may be `logits`, in place.
//! - Types: f32, f16 or bf16 for `logits`, the same for `dlogits`; f32 for the others. Everything is computed in f32; the result
//!   is rounded once.
//! - NaN or plus infinity in a token's logits, or nothing but minus infinity, makes its gradient NaN.
//! - A token's gradient has the same bits whatever the other tokens are, but for their number.

use super::{ATTRS, SCORE, SIZES, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec, shape};
use crate::ops::moe_route::{RouteScore, check_experts, check_slots};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

pub(super) const LOGITS: usize = 0;
pub(super) const LOAD: usize = 1;
pub(super) const PROBABILITY: usize = 2;
pub(super) const DLOAD_BALANCE: usize = 3;
pub(super) const DZ_LOSS: usize = 4;
pub(super) const DIMPORTANCE: usize = 5;
pub(super) const DLOGITS: usize = 6;

/// A checked call of `moe_losses_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) num_tokens: usize,
    pub(super) experts: usize,
    pub(super) score: RouteScore,
    /// Leading dimensions of logits and dlogits, each twice.
    pub(super) rows: Space<4>,
    /// Strides along their rows.
    pub(super) steps: [isize; 2],
    /// Strides of load and probability.
    pub(super) by_expert: [isize; 2],
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "moe_losses_backward",
        summary: "Gradient of moe_losses with respect to the logits",
        args: &[
            ArgSpec::input("logits", shape![.., experts], DTypeRule::FLOAT, "those of the forward call"),
            ArgSpec::input("load", shape![experts], DTypeRule::F32, "what it returned"),
            ArgSpec::input("probability", shape![experts], DTypeRule::F32, "what it returned"),
            ArgSpec::input("dload_balance", shape![], DTypeRule::F32, "gradient of load_balance"),
            ArgSpec::input("dz_loss", shape![], DTypeRule::F32, "gradient of z_loss"),
            ArgSpec::input("dimportance", shape![], DTypeRule::F32, "gradient of importance"),
            ArgSpec::output(
                "dlogits",
                shape![.., experts],
                DTypeRule::Same(LOGITS),
                "gradient of the logits",
            )
            .in_place_of(LOGITS)
            .across_rows(),
        ],
        attrs: ATTRS,
        sizes: &[SIZES[0], SIZES[1]],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let op = Self::SPEC.name;
        let sizes = Matcher::of(args, attrs)?;
        let (logits, out) = (args.at(LOGITS), args.at(DLOGITS).layout());
        let experts = sizes.size("experts");
        check_experts(op, experts, logits.shape())?;
        check_slots(op, sizes.leading_count(), 1, logits.shape())?;
        let x = logits.layout();
        Ok(Problem {
            dtype: logits.dtype(),
            num_tokens: sizes.leading_count(),
            experts,
            score: RouteScore::at(attrs.choice(SCORE)),
            rows: Space::new(sizes.leading_rank(), [x, out, x, out]),
            steps: [x.step(), out.step()],
            by_expert: [LOAD, PROBABILITY].map(|index| args.at(index).layout().step()),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_tokens * p.experts) as f64;
        Cost::moving(2.0 * elements * p.dtype.size() as f64 + 8.0 * p.experts as f64 + 12.0, 10.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("moe_losses_backward_avx512", Tier::Avx512, cpu::run_backward),
    Kernel::cpu("moe_losses_backward_avx2", Tier::Avx2, cpu::run_backward),
    Kernel::cpu("moe_losses_backward_portable", Tier::Portable, cpu::run_backward),
];

/// A call of `moe_losses_backward`.
///
/// ```
/// use warpsmith::{ops::{MoeLosses, MoeLossesBackward}, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 0.0], &[1, 2], Device::Cpu)?;
/// let ids = Tensor::from_slice(&[1i32], &[1, 1], Device::Cpu)?;
/// let losses = MoeLosses::new(&logits, &ids).run()?;
/// let [one, zero] = [1.0f32, 0.0].map(|x| Tensor::from_slice(&[x], &[], Device::Cpu));
/// let (one, zero) = (one?, zero?);
/// let call = MoeLossesBackward::new(&logits, &losses.load, &losses.probability, [&one, &zero, &zero]);
/// assert_eq!(call.run()?.to_vec::<f32>()?, [-0.5, 0.5]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type MoeLossesBackward<'a> = Call<'a, Backward>;

impl OneOutput for Backward {
    const OUTPUT: usize = DLOGITS;
}

impl<'a> Call<'a, Backward> {
    /// The gradient of the logits of a forward call, given what that returned and the gradients of `load_balance`, `z_loss` and
    /// `importance`.
    pub fn new<T: Into<TensorView<'a>>>(
        logits: impl Into<TensorView<'a>>,
        load: impl Into<TensorView<'a>>,
        probability: impl Into<TensorView<'a>>,
        dlosses: [T; 3],
    ) -> Self {
        Self::in_place(load, probability, dlosses).input(LOGITS, logits)
    }

    /// A call whose logits are given to [`Self::run_in_place`].
    pub fn in_place<T: Into<TensorView<'a>>>(
        load: impl Into<TensorView<'a>>,
        probability: impl Into<TensorView<'a>>,
        [dload_balance, dz_loss, dimportance]: [T; 3],
    ) -> Self {
        let call = Call::start().input(LOAD, load).input(PROBABILITY, probability);
        call.input(DLOAD_BALANCE, dload_balance).input(DZ_LOSS, dz_loss).input(DIMPORTANCE, dimportance)
    }

    /// From logits to probabilities (softmax unless set).
    pub fn score(self, score: RouteScore) -> Self {
        self.choice(SCORE, score)
    }

    /// Replaces the logits by their gradient. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, logits: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(LOGITS, DLOGITS, logits.into(), stream)
    }
}
