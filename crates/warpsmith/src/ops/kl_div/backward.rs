//! `kl_div_backward`: the gradient of `kl_div` with respect to the student's logits. With `q` and `p` the distributions of
//! student and teacher in a row: `dstudent = g (q - p)`, and `g q ((ln q - ln p) - loss)` with `direction=reverse`. `g` is
//! `dloss / temperature` with `reduction=sum`, the same over `count` with `mean`, and that of the row's `dloss` with `none`.
//!
//! - `student`, `teacher`, `targets` and the options are those of the forward call; the others are what it returned. `row_losses`
//!   are read only with `direction=reverse`, and `count` only with `reduction=mean`.
//! - Shapes: `student`, `teacher` and `dstudent` are `[..., vocab]`, `targets`, `lse`, `teacher_lse` and `row_losses` are `[...]`,
//!   `count` is `[]`, and `dloss` has the shape of the loss. Any strides. `dstudent` may be `student`, in place.
//! - Types: f32, f16 or bf16 for `student`, the same for `teacher` and `dstudent`; i64 or i32 for `targets`; f32 for the others.
//!   Everything is computed in f32; the result is rounded once.
//! - Rows whose target is `ignore_index` get zeros, whatever their logits are. NaN in a row, as in its `lse`, makes it NaN, and so
//!   does an infinite loss with `direction=reverse`. A logit without probability has a gradient of zero there.
//! - A row has the same bits whatever the other rows are.

use super::options::{ATTRS, Options};
use super::{LOSS_SHAPE, Reduction, SIZES, check_vocab, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, shape};
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

pub(super) const STUDENT: usize = 0;
pub(super) const TEACHER: usize = 1;
pub(super) const LSE: usize = 2;
pub(super) const TEACHER_LSE: usize = 3;
pub(super) const ROW_LOSSES: usize = 4;
pub(super) const COUNT: usize = 5;
pub(super) const DLOSS: usize = 6;
pub(super) const TARGETS: usize = 7;
pub(super) const DSTUDENT: usize = 8;

/// A checked call of `kl_div_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    /// `None` without targets.
    pub(super) target_dtype: Option<DType>,
    pub(super) num_rows: usize,
    pub(super) vocab: usize,
    pub(super) options: Options,
    /// Leading dimensions of `student`, `teacher`, `dstudent` and targets; without targets, of the student.
    pub(super) rows: Space<4>,
    /// Those of both `lse`, of `row_losses` and of `dloss`; of a `dloss` without them, of the student.
    pub(super) values: Space<4>,
    /// Strides along a row of `student`, `teacher` and `dstudent`.
    pub(super) steps: [isize; 3],
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    pub(super) vector_rows: bool,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Targets, which are values of a tensor, are only compared.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "kl_div_backward",
        summary: "Gradient of kl_div with respect to the student's logits",
        args: &[
            ArgSpec::input("student", shape![.., vocab], DTypeRule::FLOAT, "those of the forward call"),
            ArgSpec::input(
                "teacher",
                shape![.., vocab],
                DTypeRule::Same(STUDENT),
                "those of the forward call",
            ),
            ArgSpec::input("lse", shape![..], DTypeRule::F32, "what it returned"),
            ArgSpec::input("teacher_lse", shape![..], DTypeRule::F32, "what it returned"),
            ArgSpec::input("row_losses", shape![..], DTypeRule::F32, "what it returned"),
            ArgSpec::input("count", shape![], DTypeRule::F32, "what it returned"),
            ArgSpec::input("dloss", LOSS_SHAPE, DTypeRule::F32, "gradient of the loss"),
            ArgSpec::input("targets", shape![..], DTypeRule::INDEX, "those of the forward call").optional(),
            ArgSpec::output("dstudent", shape![.., vocab], DTypeRule::Same(STUDENT), "gradient of student")
                .in_place_of(STUDENT),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let options = Options::check(&sizes, attrs)?;
        let logits = [STUDENT, TEACHER, DSTUDENT].map(|index| args.at(index));
        let [student, teacher, dstudent] = logits.map(|view| view.layout());
        let vocab = sizes.size("vocab");
        check_vocab(Self::SPEC.name, "student", vocab, logits[0].shape())?;
        let rank = sizes.leading_rank();
        let targets = args.get(TARGETS);
        let [lse, teacher_lse, losses] = [LSE, TEACHER_LSE, ROW_LOSSES].map(|index| args.at(index).layout());
        let by_row = options.reduction == Reduction::None;
        let dloss = if by_row { args.at(DLOSS).layout() } else { student };
        Ok(Problem {
            dtype: logits[0].dtype(),
            target_dtype: targets.map(|targets| targets.dtype()),
            num_rows: sizes.leading_count(),
            vocab,
            options,
            rows: Space::new(
                rank,
                [student, teacher, dstudent, targets.map_or(student, |view| view.layout())],
            ),
            values: Space::new(rank, [lse, teacher_lse, losses, dloss]),
            steps: [student, teacher, dstudent].map(|layout| layout.step()),
            vector_rows: logits.iter().all(|view| view.has_rows_of(16 / view.dtype().size())),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_rows * p.vocab) as f64;
        let values = 2 + p.options.is_reverse() as usize + (p.options.reduction == Reduction::None) as usize;
        let by_row = 4 * values + p.target_dtype.map_or(0, DType::size);
        let bytes = 3.0 * elements * p.dtype.size() as f64 + (p.num_rows * by_row) as f64;
        Cost::moving(bytes, 8.0 * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("kl_div_backward_avx512", Tier::Avx512, cpu::run_backward),
    Kernel::cpu("kl_div_backward_avx2", Tier::Avx2, cpu::run_backward),
    Kernel::cpu("kl_div_backward_portable", Tier::Portable, cpu::run_backward),
];

/// What a forward call leaves for its gradient.
#[derive(Debug)]
pub struct Kept {
    /// The student's.
    pub lse: Tensor,
    /// The teacher's.
    pub teacher_lse: Tensor,
    /// The losses before they are reduced.
    pub row_losses: Tensor,
    /// The number of rows that are not ignored.
    pub count: Tensor,
}

/// A call of `kl_div_backward`.
///
/// ```
/// use warpsmith::{ops::{KlDiv, KlDivBackward}, Device, Tensor};
/// let student = Tensor::from_slice(&[0.0f32, 0.0], &[1, 2], Device::Cpu)?;
/// let teacher = Tensor::from_slice(&[0.0f32, 3f32.ln()], &[1, 2], Device::Cpu)?;
/// let (loss, kept) = KlDiv::new(&student, &teacher).run_for_gradient()?;
/// let dloss = Tensor::from_slice(&[1.0f32], &[], Device::Cpu)?;
/// let dstudent = KlDivBackward::new(&student, &teacher, &kept, &dloss).run()?;
/// let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
/// assert!(dstudent.to_vec::<f32>()?.iter().zip(&[0.25, -0.25]).all(close));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type KlDivBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradient of the student's logits in a forward call, given what that returned and the gradient of its loss.
    pub fn new(
        student: impl Into<TensorView<'a>>,
        teacher: impl Into<TensorView<'a>>,
        kept: &'a Kept,
        dloss: impl Into<TensorView<'a>>,
    ) -> Self {
        Self::in_place(teacher, kept, dloss).input(STUDENT, student)
    }

    /// A call whose student's logits are given to [`Self::run_in_place`].
    pub fn in_place(
        teacher: impl Into<TensorView<'a>>,
        kept: &'a Kept,
        dloss: impl Into<TensorView<'a>>,
    ) -> Self {
        let call = Call::start().input(TEACHER, teacher).input(LSE, &kept.lse);
        let call = call.input(TEACHER_LSE, &kept.teacher_lse).input(ROW_LOSSES, &kept.row_losses);
        call.input(COUNT, &kept.count).input(DLOSS, dloss)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut dstudent = self.like(STUDENT, &stream)?;
        self.run_into(&mut dstudent, &stream)?;
        Ok(dstudent)
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, dstudent: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DSTUDENT, dstudent.into())], stream)
    }

    /// Replaces the student's logits by their gradient. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, student: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(STUDENT, DSTUDENT, student.into(), stream)
    }
}
