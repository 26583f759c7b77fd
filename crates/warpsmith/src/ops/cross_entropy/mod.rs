//! `cross_entropy`: the loss of logits against targets. For a row with logits `x` and target `t`, over a vocabulary of `v`:
//! `loss = (1 - s) (lse - z[t]) + s mean(lse - z) + z_loss lse²`, where `z = x`, or `z = softcap tanh(x / softcap)` with a
//! `softcap` above zero, `lse = ln(sum(exp(z)))` and `s` is `label_smoothing`.
//!
//! - Shapes: `logits` is `[..., vocab]`, `targets` and `lse` are `[...]`; any strides. `loss` is one number, `[]`: the sum of
//!   the rows' losses with `reduction=sum`, their mean with `mean`; with `none` it is `[...]`. There is at least one column.
//! - Rows whose target is `ignore_index` do not count: their loss and their `lse` are zero, and their logits are not read.
//!   `count`, `[]`, is the number of the other rows, over which the mean is taken. The mean of no rows is NaN.
//! - Types: f32, f16 or bf16 for `logits`; i64 or i32 for `targets`; f32 for `loss`, `lse` and `count`, whatever the logits are.
//!   Everything is computed in f32; differences to the largest logit are taken before anything else. Losses of rows are added
//!   in a fixed order.
//! - NaN or `+inf` in a row makes its loss and `lse` NaN, and so does a row that is all `-inf`. Any other `-inf` has no
//!   probability: the loss is `+inf` where the target is such a logit, and with label smoothing.
//! - Targets must be `ignore_index` or from 0 to below the vocabulary. On the CPU others are an error, found before
//!   anything is written. A GPU cannot inspect values in time: there the loss of such a row is NaN.
//! - `softcap` and `z_loss` must be finite and not negative, `label_smoothing` from 0 to 1.
//! - A row's loss and `lse` have the same bits whatever the other rows are.
//!
//! `cross_entropy_backward` computes the gradient of the logits, in their place if that is wanted.

mod backward;
#[cfg(feature = "lab")]
pub(in crate::ops) mod cases;
pub(in crate::ops) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(in crate::ops) mod options;
#[cfg(feature = "lab")]
pub(in crate::ops) mod reference;
pub(in crate::ops) mod rows;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, CrossEntropyBackward};
pub use options::Reduction;

use crate::cpu::Tier;
use crate::error::{Error, Result};
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput, Op, OpSpec, ShapeSpec,
    SizeSpec, dims, shape,
};
use crate::tensor::{DType, Layout, Space, Tensor, TensorView, TensorViewMut};
use options::{ATTRS, IGNORE_INDEX, LABEL_SMOOTHING, Options, REDUCTION, SOFTCAP, Z_LOSS};

const LOGITS: usize = 0;
const TARGETS: usize = 1;
const LOSS: usize = 2;
const LSE: usize = 3;
const COUNT: usize = 4;

/// The shape of the loss and of its gradient.
const LOSS_SHAPE: ShapeSpec = ShapeSpec::by_option(REDUCTION, &[dims![], dims![], dims![..]]);

const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 2048, doc: "number of rows" },
    SizeSpec { name: "vocab", default: 32_000, doc: "length of a row" },
];

/// A checked call of `cross_entropy`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    target_dtype: DType,
    num_rows: usize,
    vocab: usize,
    options: Options,
    /// Leading dimensions of logits, targets, `lse` and `loss`. Of an output without them, those of the targets.
    rows: Space<4>,
    /// Stride along a row of logits.
    step: isize,
    has_lse: bool,
    has_count: bool,
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    vector_rows: bool,
}

/// The length of rows, which have a target.
pub(in crate::ops) fn check_vocab(
    op: &'static str,
    arg: &'static str,
    vocab: usize,
    got: &[usize],
) -> Result<()> {
    match vocab > 0 && vocab <= i32::MAX as usize {
        true => Ok(()),
        false => Err(Error::argument(op, arg, format!("a vocab from 1 to {}", i32::MAX), format!("{got:?}"))),
    }
}

impl Problem {
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let options = Options::check(&sizes, attrs)?;
        let (logits, vocab) = (args.at(LOGITS), sizes.size("vocab"));
        check_vocab(Forward::SPEC.name, "logits", vocab, logits.shape())?;
        let targets = args.at(TARGETS);
        let by_row = |index: usize| -> &Layout { args.get(index).unwrap_or(targets).layout() };
        let loss = if options.reduction == Reduction::None { by_row(LOSS) } else { targets.layout() };
        let layouts = [logits.layout(), targets.layout(), by_row(LSE), loss];
        Ok(Problem {
            dtype: logits.dtype(),
            target_dtype: targets.dtype(),
            num_rows: sizes.leading_count(),
            vocab,
            options,
            rows: Space::new(sizes.leading_rank(), layouts),
            step: logits.layout().step(),
            has_lse: args.get(LSE).is_some(),
            has_count: args.get(COUNT).is_some(),
            vector_rows: logits.has_rows_of(16 / logits.dtype().size()),
        })
    }

    /// Bytes of the logits, and of a target and `values` numbers for each row.
    fn bytes(&self, values: usize) -> f64 {
        let row = (self.vocab * self.dtype.size() + self.target_dtype.size() + 4 * values) as f64;
        self.num_rows as f64 * row
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Targets, which are values of a tensor, are checked where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "cross_entropy",
        summary: "Cross-entropy of logits against targets",
        args: &[
            ArgSpec::input("logits", shape![.., vocab], DTypeRule::FLOAT, ""),
            ArgSpec::input("targets", shape![..], DTypeRule::INDEX, "columns, or ignore_index"),
            ArgSpec::output("loss", LOSS_SHAPE, DTypeRule::F32, "one number unless reduction=none"),
            ArgSpec::output("lse", shape![..], DTypeRule::F32, "logarithm of the sum of exponentials")
                .optional(),
            ArgSpec::output("count", shape![], DTypeRule::F32, "rows that are not ignored").optional(),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "cross_entropy_backward",
            inputs: &[
                (backward::LOGITS, Source::Input(LOGITS)),
                (backward::TARGETS, Source::Input(TARGETS)),
                (backward::LSE, Source::Output(LSE)),
                (backward::COUNT, Source::Output(COUNT)),
                (backward::DLOSS, Source::Incoming(LOSS)),
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
        let values = p.has_lse as usize + (p.options.reduction == Reduction::None) as usize;
        Cost::moving(p.bytes(values), 4.0 * (p.num_rows * p.vocab) as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("cross_entropy_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("cross_entropy_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("cross_entropy_portable", Tier::Portable, cpu::run),
];

/// A call of `cross_entropy`.
///
/// ```
/// use warpsmith::{ops::CrossEntropy, Device, Tensor};
/// let logits = Tensor::from_slice(&[0.0f32, 0.0, 0.0, 8.0, 9.0, 9.0], &[3, 2], Device::Cpu)?;
/// let targets = Tensor::from_slice(&[1i64, 1, -100], &[3], Device::Cpu)?;
/// let loss = CrossEntropy::new(&logits, &targets).run()?.to_vec::<f32>()?;
/// assert!((loss[0] - (0.693_147 + 0.000_335) / 2.0).abs() < 1e-6);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type CrossEntropy<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = LOSS;
}

/// What a loss is computed with, for `cross_entropy` and its gradient.
macro_rules! loss_options {
    ($op:ty) => {
        impl<'a> Call<'a, $op> {
            /// The target of rows that do not count (-100 unless set).
            pub fn ignore_index(self, index: i64) -> Self {
                self.int(IGNORE_INDEX, index)
            }

            /// Bounds logits by `softcap * tanh(logit / softcap)`.
            pub fn softcap(self, softcap: f32) -> Self {
                self.float(SOFTCAP, softcap)
            }

            /// How much of the target is spread over the vocabulary, from 0 to 1.
            pub fn label_smoothing(self, label_smoothing: f32) -> Self {
                self.float(LABEL_SMOOTHING, label_smoothing)
            }

            /// Adds `z_loss * lse²` to the loss of each row.
            pub fn z_loss(self, z_loss: f32) -> Self {
                self.float(Z_LOSS, z_loss)
            }

            /// From losses of rows to the result (the mean unless set).
            pub fn reduction(self, reduction: Reduction) -> Self {
                self.choice(REDUCTION, reduction)
            }
        }
    };
}
loss_options!(Forward);
loss_options!(Backward);

impl<'a> Call<'a, Forward> {
    /// The loss of `logits` against `targets`.
    pub fn new(logits: impl Into<TensorView<'a>>, targets: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(LOGITS, logits).input(TARGETS, targets)
    }

    /// Also writes the logarithm of the sum of exponentials of each row.
    pub fn lse(self, lse: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(LSE, lse)
    }

    /// Also writes the number of rows that are not ignored.
    pub fn count(self, count: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(COUNT, count)
    }

    /// Runs on the device's default stream and returns the loss and what the gradient needs: `lse` and `count`.
    pub fn run_for_gradient(self) -> Result<(Tensor, Tensor, Tensor)> {
        Ok(self.run_for([LOSS, LSE, COUNT])?.into())
    }
}
