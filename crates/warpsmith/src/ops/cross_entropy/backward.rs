//! `cross_entropy_backward`: the gradient of `cross_entropy` with respect to the logits. For a row with target `t`:
//! `dz = g ((1 + 2 z_loss lse) exp(z - lse) - s / v - (1 - s) [j = t])` and `dlogits = dz`, times `1 - (z / softcap)²` with
//! a softcap. `g` is `dloss` with `reduction=sum`, `dloss / count` with `mean`, and the row's `dloss` with `none`.
//!
//! - `logits`, `targets` and the options are those of the forward call; `lse` and `count` are what it returned. `count` is read
//!   only with `reduction=mean`.
//! - Shapes: `logits` and `dlogits` are `[..., vocab]`, `targets` and `lse` are `[...]`, `count` is `[]`, and `dloss` has the
//!   shape of the loss. Any strides. `dlogits` may be `logits`, in place.
//! - Types: f32, f16 or bf16 for `logits`, the same for `dlogits`; i64 or i32 for `targets`; f32 for the others. Everything is
//!   computed in f32; the result is rounded once.
//! - Rows whose target is `ignore_index` get zeros, whatever their logits are. NaN in a row, as in its `lse`, makes it NaN.
//! - Other targets must be from 0 to below the vocabulary. On the CPU others are an error, found before anything is
//!   written; on a GPU such a row becomes NaN.
//! - A row has the same bits whatever the other rows are.

use super::options::{ATTRS, Options};
use super::{LOSS_SHAPE, Reduction, SIZES, check_vocab, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, shape};
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

pub(super) const LOGITS: usize = 0;
pub(super) const TARGETS: usize = 1;
pub(super) const LSE: usize = 2;
pub(super) const COUNT: usize = 3;
pub(super) const DLOSS: usize = 4;
pub(super) const DLOGITS: usize = 5;

/// A checked call of `cross_entropy_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) target_dtype: DType,
    pub(super) num_rows: usize,
    pub(super) vocab: usize,
    pub(super) options: Options,
    /// Leading dimensions of logits, targets, `lse` and `dlogits`.
    pub(super) rows: Space<4>,
    /// Those of `dloss`; without them, those of the targets.
    pub(super) dloss: Space<4>,
    /// Strides along a row of logits and `dlogits`.
    pub(super) steps: [isize; 2],
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    pub(super) vector_rows: bool,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Targets, which are values of a tensor, are checked where they are used.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "cross_entropy_backward",
        summary: "Gradient of cross_entropy with respect to the logits",
        args: &[
            ArgSpec::input("logits", shape![.., vocab], DTypeRule::FLOAT, "those of the forward call"),
            ArgSpec::input("targets", shape![..], DTypeRule::INDEX, "those of the forward call"),
            ArgSpec::input("lse", shape![..], DTypeRule::F32, "what it returned"),
            ArgSpec::input("count", shape![], DTypeRule::F32, "what it returned"),
            ArgSpec::input("dloss", LOSS_SHAPE, DTypeRule::F32, "gradient of the loss"),
            ArgSpec::output("dlogits", shape![.., vocab], DTypeRule::Same(LOGITS), "gradient of the logits")
                .in_place_of(LOGITS),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let options = Options::check(&sizes, attrs)?;
        let [logits, targets, lse, dlogits] = [LOGITS, TARGETS, LSE, DLOGITS].map(|index| args.at(index));
        let vocab = sizes.size("vocab");
        check_vocab(Self::SPEC.name, "logits", vocab, logits.shape())?;
        let rank = sizes.leading_rank();
        let dloss = if options.reduction == Reduction::None { args.at(DLOSS) } else { targets };
        Ok(Problem {
            dtype: logits.dtype(),
            target_dtype: targets.dtype(),
            num_rows: sizes.leading_count(),
            vocab,
            options,
            rows: Space::new(rank, [logits, targets, lse, dlogits].map(|view| view.layout())),
            dloss: Space::new(rank, [dloss.layout(); 4]),
            steps: [logits, dlogits].map(|view| view.layout().step()),
            vector_rows: [logits, dlogits].iter().all(|view| view.has_rows_of(16 / view.dtype().size())),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_rows * p.vocab) as f64;
        let by_row = p.target_dtype.size() + 4 + 4 * (p.options.reduction == Reduction::None) as usize;
        let bytes = 2.0 * elements * p.dtype.size() as f64 + (p.num_rows * by_row) as f64;
        Cost::moving(bytes, 4.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("cross_entropy_backward_avx512", Tier::Avx512, cpu::run_backward),
    Kernel::cpu("cross_entropy_backward_avx2", Tier::Avx2, cpu::run_backward),
    Kernel::cpu("cross_entropy_backward_portable", Tier::Portable, cpu::run_backward),
];

/// A call of `cross_entropy_backward`.
///
/// ```
/// use warpsmith::{ops::{CrossEntropy, CrossEntropyBackward}, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 0.0, 3.0, 3.0], &[2, 2], Device::Cpu)?;
/// let targets = Tensor::from_slice(&[1i64, -100], &[2], Device::Cpu)?;
/// let (loss, lse, count) = CrossEntropy::new(&logits, &targets).run_for_gradient()?;
/// let dloss = Tensor::from_slice(&[1.0f32], &[], Device::Cpu)?;
/// let dlogits = CrossEntropyBackward::new(&logits, &targets, &lse, &count, &dloss).run()?;
/// let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
/// assert!(dlogits.to_vec::<f32>()?.iter().zip(&[0.5, -0.5, 0.0, 0.0]).all(close));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type CrossEntropyBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradient of the logits of a forward call, given what that returned and the gradient of its loss.
    pub fn new(
        logits: impl Into<TensorView<'a>>,
        targets: impl Into<TensorView<'a>>,
        lse: impl Into<TensorView<'a>>,
        count: impl Into<TensorView<'a>>,
        dloss: impl Into<TensorView<'a>>,
    ) -> Self {
        Self::in_place(targets, lse, count, dloss).input(LOGITS, logits)
    }

    /// A call whose logits are given to [`Self::run_in_place`].
    pub fn in_place(
        targets: impl Into<TensorView<'a>>,
        lse: impl Into<TensorView<'a>>,
        count: impl Into<TensorView<'a>>,
        dloss: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(TARGETS, targets).input(LSE, lse).input(COUNT, count).input(DLOSS, dloss)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut dlogits = self.like(LOGITS, &stream)?;
        self.run_into(&mut dlogits, &stream)?;
        Ok(dlogits)
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, dlogits: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DLOGITS, dlogits.into())], stream)
    }

    /// Replaces the logits by their gradient. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, logits: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(LOGITS, DLOGITS, logits.into(), stream)
    }
}
