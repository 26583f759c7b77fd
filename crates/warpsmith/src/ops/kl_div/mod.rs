//! `kl_div`: how far a student's distribution is from a teacher's, both given as logits. For a row with logits `x` of the
//! student and `y` of the teacher: `q = softmax(x / temperature)`, `p = softmax(y / temperature)`, and
//! `loss = sum(p (ln p - ln q))`, or `sum(q (ln q - ln p))` with `direction=reverse`. No distribution is ever stored.
//!
//! - Shapes: `student` and `teacher` are `[..., vocab]`, `targets`, `lse`, `teacher_lse` and `row_losses` are `[...]`; any
//!   strides. `loss` is one number, `[]`: the sum of the rows' losses with `reduction=sum`, their mean with `mean`; with `none`
//!   it is `[...]`. There is at least one column.
//! - With `targets`, rows whose target is `ignore_index` do not count: their loss and both `lse` are zero, and their logits are
//!   not read. All other targets, which need not be columns, and all rows without `targets`, count. `count`, `[]`, is their
//!   number, over which the mean is taken: the mean of no rows is NaN. That is PyTorch's `batchmean`; its `mean` divides by the
//!   vocabulary too.
//! - The loss is not multiplied by the square of the temperature, as some do to keep gradients of one size.
//! - Types: f32, f16 or bf16 for `student`, the same for `teacher`; i64 or i32 for `targets`; f32 for the results. Everything is
//!   computed in f32; differences to the largest logit are taken before anything else. Losses of rows are added in a fixed
//!   order. A loss near zero may be below it by a rounding.
//! - `lse = temperature ln(sum(exp(x / temperature)))`, so that `ln q = (x - lse) / temperature`; `teacher_lse` is that of the
//!   teacher. `row_losses` are the losses before they are reduced.
//! - Logits of `-inf` have no probability. Where that is so in the distribution that weighs, the column adds nothing; where it is so
//!   in the other alone, the loss is `+inf`. NaN or `+inf` in either row makes the loss NaN, and so does a row that is all `-inf`.
//! - `temperature` must be a positive number whose inverse is one too.
//! - A row's results have the same bits whatever the other rows are.
//!
//! `kl_div_backward` computes the gradient of the student's logits, in their place if that is wanted. The teacher has none.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod options;
#[cfg(feature = "lab")]
mod reference;
mod rows;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, KlDivBackward};
pub use options::Direction;

use super::cross_entropy::{Reduction, check_vocab};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput, Op, OpSpec, ShapeSpec,
    SizeSpec, dims, shape,
};
use crate::tensor::{DType, Layout, Space, Tensor, TensorView, TensorViewMut};
use options::{ATTRS, DIRECTION, IGNORE_INDEX, Options, REDUCTION, TEMPERATURE};

const STUDENT: usize = 0;
const TEACHER: usize = 1;
const TARGETS: usize = 2;
const LOSS: usize = 3;
const LSE: usize = 4;
const TEACHER_LSE: usize = 5;
const ROW_LOSSES: usize = 6;
const COUNT: usize = 7;

/// The shape of the loss and of its gradient.
const LOSS_SHAPE: ShapeSpec = ShapeSpec::by_option(REDUCTION, &[dims![], dims![], dims![..]]);

const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 2048, doc: "number of rows" },
    SizeSpec { name: "vocab", default: 32_000, doc: "length of a row" },
];

/// A checked call of `kl_div`. Of the two rows, the first is that of the distribution that weighs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    /// `None` without targets.
    target_dtype: Option<DType>,
    num_rows: usize,
    vocab: usize,
    options: Options,
    /// Leading dimensions of first and second logits, targets and `loss`; of the student where there are no such.
    rows: Space<4>,
    /// Those of `lse` of the first and of the second, and of `row_losses`.
    values: Space<4>,
    /// Strides along a row of first and second logits.
    steps: [isize; 2],
    /// Whether `lse` of the first and of the second are wanted.
    has_lse: [bool; 2],
    has_row_losses: bool,
    has_count: bool,
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    vector_rows: bool,
}

impl Problem {
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let options = Options::check(&sizes, attrs)?;
        let (student, vocab) = (args.at(STUDENT), sizes.size("vocab"));
        check_vocab(Forward::SPEC.name, "student", vocab, student.shape())?;
        let by_row = |index: usize| -> &Layout { args.get(index).unwrap_or(student).layout() };
        let loss = if options.reduction == Reduction::None { by_row(LOSS) } else { student.layout() };
        let [first, second] = logits_of(&options).map(|index| args.at(index));
        let lse = lse_of(&options);
        let rank = sizes.leading_rank();
        let dense = [first, second].iter().all(|view| view.has_rows_of(16 / view.dtype().size()));
        Ok(Problem {
            dtype: student.dtype(),
            target_dtype: args.get(TARGETS).map(|targets| targets.dtype()),
            num_rows: sizes.leading_count(),
            vocab,
            options,
            rows: Space::new(rank, [first.layout(), second.layout(), by_row(TARGETS), loss]),
            values: Space::new(rank, [lse[0], lse[1], ROW_LOSSES, ROW_LOSSES].map(by_row)),
            steps: [first, second].map(|view| view.layout().step()),
            has_lse: lse.map(|index| args.get(index).is_some()),
            has_row_losses: args.get(ROW_LOSSES).is_some(),
            has_count: args.get(COUNT).is_some(),
            vector_rows: dense,
        })
    }
}

/// The logits of the distribution that weighs, and of the other.
fn logits_of(options: &Options) -> [usize; 2] {
    if options.is_reverse() { [STUDENT, TEACHER] } else { [TEACHER, STUDENT] }
}

/// Their `lse`.
fn lse_of(options: &Options) -> [usize; 2] {
    if options.is_reverse() { [LSE, TEACHER_LSE] } else { [TEACHER_LSE, LSE] }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Targets, which are values of a tensor, are only compared.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "kl_div",
        summary: "Kullback-Leibler divergence of two rows of logits, for distillation",
        args: &[
            ArgSpec::input("student", shape![.., vocab], DTypeRule::FLOAT, "logits"),
            ArgSpec::input("teacher", shape![.., vocab], DTypeRule::Same(STUDENT), "logits"),
            ArgSpec::input(
                "targets",
                shape![..],
                DTypeRule::INDEX,
                "ignore_index where a row does not count",
            )
            .optional(),
            ArgSpec::output("loss", LOSS_SHAPE, DTypeRule::F32, "one number unless reduction=none"),
            ArgSpec::output(
                "lse",
                shape![..],
                DTypeRule::F32,
                "temperature ln(sum(exp(student / temperature)))",
            )
            .optional(),
            ArgSpec::output("teacher_lse", shape![..], DTypeRule::F32, "that of the teacher").optional(),
            ArgSpec::output("row_losses", shape![..], DTypeRule::F32, "losses before they are reduced")
                .optional(),
            ArgSpec::output("count", shape![], DTypeRule::F32, "rows that are not ignored").optional(),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        gradient: Some(Gradient {
            op: "kl_div_backward",
            inputs: &[
                (backward::STUDENT, Source::Input(STUDENT)),
                (backward::TEACHER, Source::Input(TEACHER)),
                (backward::TARGETS, Source::Input(TARGETS)),
                (backward::LSE, Source::Output(LSE)),
                (backward::TEACHER_LSE, Source::Output(TEACHER_LSE)),
                (backward::ROW_LOSSES, Source::Output(ROW_LOSSES)),
                (backward::COUNT, Source::Output(COUNT)),
                (backward::DLOSS, Source::Incoming(LOSS)),
            ],
            results: &[(STUDENT, InputGradient::Output(backward::DSTUDENT))],
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
        let elements = (p.num_rows * p.vocab) as f64;
        let values = p.has_lse.map(usize::from).iter().sum::<usize>()
            + p.has_row_losses as usize
            + (p.options.reduction == Reduction::None) as usize;
        let by_row = 4 * values + p.target_dtype.map_or(0, DType::size);
        let bytes = 2.0 * elements * p.dtype.size() as f64 + (p.num_rows * by_row) as f64;
        Cost::moving(bytes, 8.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::FORWARD,
    Kernel::cpu("kl_div_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("kl_div_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("kl_div_portable", Tier::Portable, cpu::run),
];

/// A call of `kl_div`.
///
/// ```
/// use warpsmith::{ops::KlDiv, Device, Tensor};
/// let student = Tensor::from_slice(&[0.0f32, 0.0, 1.0, 2.0], &[2, 2], Device::Cpu)?;
/// let teacher = Tensor::from_slice(&[0.0f32, 3f32.ln(), 5.0, 6.0], &[2, 2], Device::Cpu)?;
/// let loss = KlDiv::new(&student, &teacher).run()?.to_vec::<f32>()?;
/// // The second rows are one distribution. The first: one half each, against a quarter and three.
/// let first = 0.25 * 0.5f32.ln() + 0.75 * 1.5f32.ln();
/// assert!((loss[0] - first / 2.0).abs() < 1e-6);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type KlDiv<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = LOSS;
}

/// What a loss is computed with, for `kl_div` and its gradient.
macro_rules! loss_options {
    ($op:ty, $targets:expr) => {
        impl<'a> Call<'a, $op> {
            /// Rows whose target is the `ignore_index` do not count.
            pub fn targets(self, targets: impl Into<TensorView<'a>>) -> Self {
                self.input($targets, targets)
            }

            /// The target of rows that do not count (-100 unless set).
            pub fn ignore_index(self, index: i64) -> Self {
                self.int(IGNORE_INDEX, index)
            }

            /// Divides all logits (1 unless set).
            pub fn temperature(self, temperature: f32) -> Self {
                self.float(TEMPERATURE, temperature)
            }

            /// Which distribution weighs (the teacher's unless set).
            pub fn direction(self, direction: Direction) -> Self {
                self.choice(DIRECTION, direction)
            }

            /// From losses of rows to the result (the mean unless set).
            pub fn reduction(self, reduction: Reduction) -> Self {
                self.choice(REDUCTION, reduction)
            }
        }
    };
}
loss_options!(Forward, TARGETS);
loss_options!(Backward, backward::TARGETS);

impl<'a> Call<'a, Forward> {
    /// The loss of the logits of a student against those of a teacher.
    pub fn new(student: impl Into<TensorView<'a>>, teacher: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(STUDENT, student).input(TEACHER, teacher)
    }

    /// Also writes the student's `lse` of each row.
    pub fn lse(self, lse: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(LSE, lse)
    }

    /// Also writes the teacher's `lse` of each row.
    pub fn teacher_lse(self, lse: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(TEACHER_LSE, lse)
    }

    /// Also writes the loss of each row.
    pub fn row_losses(self, losses: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(ROW_LOSSES, losses)
    }

    /// Also writes the number of rows that are not ignored.
    pub fn count(self, count: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(COUNT, count)
    }

    /// Runs on the device's default stream and returns the loss and what the gradient needs: both `lse`, the losses of rows
    /// and `count`.
    pub fn run_for_gradient(self) -> Result<(Tensor, backward::Kept)> {
        let [loss, lse, teacher_lse, row_losses, count] =
            self.run_for([LOSS, LSE, TEACHER_LSE, ROW_LOSSES, COUNT])?;
        Ok((loss, backward::Kept { lse, teacher_lse, row_losses, count }))
    }
}
