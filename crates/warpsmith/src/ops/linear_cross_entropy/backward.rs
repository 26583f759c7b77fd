//! `linear_cross_entropy_backward`: the gradients of `linear_cross_entropy` with respect to `x` and `w`, from those of the sum of
//! losses, which the forward call made: `dx = g dx_sum` and `dw = g dw_sum`. `g` is `dloss` with `reduction=sum`, and
//! `dloss / count` with `mean`.
//!
//! - Shapes: `dx_sum` and `dx` are `[..., hidden]`, `dw_sum` and `dw` are `[vocab, hidden]`, `count` and `dloss` one number each,
//!   `[]`; any strides. `dw` is given exactly when `dw_sum` is. Both results may be computed in place.
//! - Types: f32, f16 or bf16 for `dx_sum`, the same for the others, but f32 for `count` and `dloss`. Everything is computed in
//!   f32; results are rounded once.
//! - Where no row counts, the mean has gradients of zero.

use super::{Reduction, cpu};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Space, Tensor, TensorView, TensorViewMut};

pub(super) const DX_SUM: usize = 0;
pub(super) const COUNT: usize = 1;
pub(super) const DLOSS: usize = 2;
pub(super) const DW_SUM: usize = 3;
pub(super) const DX: usize = 4;
pub(super) const DW: usize = 5;

pub(super) const REDUCTION: usize = 0;

/// A gradient of the sum, and that of the loss.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Pair {
    pub rows: Space<4>,
    pub num_rows: usize,
    /// Strides along a row of either.
    pub steps: [isize; 2],
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    pub vector_rows: bool,
}

/// A checked call of `linear_cross_entropy_backward`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) hidden: usize,
    pub(super) is_mean: bool,
    pub(super) dx: Pair,
    pub(super) dw: Option<Pair>,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "linear_cross_entropy_backward",
        summary: "Gradients of linear_cross_entropy, from those of the sum of losses",
        args: &[
            ArgSpec::input("dx_sum", shape![.., hidden], DTypeRule::FLOAT, "dx of the forward call"),
            ArgSpec::input("count", shape![], DTypeRule::F32, "what it returned"),
            ArgSpec::input("dloss", shape![], DTypeRule::F32, "gradient of the loss"),
            ArgSpec::input(
                "dw_sum",
                shape![vocab, hidden],
                DTypeRule::Same(DX_SUM),
                "dw of the forward call",
            )
            .optional(),
            ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(DX_SUM), "gradient of x")
                .in_place_of(DX_SUM),
            ArgSpec::output("dw", shape![vocab, hidden], DTypeRule::Same(DX_SUM), "gradient of w")
                .in_place_of(DW_SUM)
                .with(DW_SUM),
        ],
        attrs: &[AttrSpec {
            name: "reduction",
            kind: AttrKind::Choice(Reduction::TO_A_NUMBER),
            doc: "that of the forward call",
        }],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 512, doc: "rows of dx" },
            SizeSpec { name: "vocab", default: 32_000, doc: "rows of dw" },
            SizeSpec { name: "hidden", default: 1024, doc: "columns of both" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let sizes = Matcher::of(args, attrs)?;
        let pair = |rank: usize, num_rows: usize, [from, to]: [&TensorView<'_>; 2]| {
            let vector_rows = [from, to].iter().all(|view| view.has_rows_of(16 / view.dtype().size()));
            let [from, to] = [from.layout(), to.layout()];
            Pair {
                rows: Space::new(rank, [from, to, from, to]),
                num_rows,
                steps: [from.step(), to.step()],
                vector_rows,
            }
        };
        let dw = args.get(DW_SUM).zip(args.get(DW));
        Ok(Problem {
            dtype: args.at(DX_SUM).dtype(),
            hidden: sizes.size("hidden"),
            is_mean: attrs.choice(REDUCTION) == Reduction::Mean as usize,
            dx: pair(sizes.leading_rank(), sizes.leading_count(), [args.at(DX_SUM), args.at(DX)]),
            dw: dw.map(|(from, to)| pair(1, sizes.size("vocab"), [from, to])),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let rows = p.dx.num_rows + p.dw.map_or(0, |dw| dw.num_rows);
        let elements = (rows * p.hidden) as f64;
        Cost::moving(2.0 * elements * p.dtype.size() as f64, elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("linear_cross_entropy_backward_avx512", Tier::Avx512, cpu::run_backward),
    Kernel::cpu("linear_cross_entropy_backward_avx2", Tier::Avx2, cpu::run_backward),
    Kernel::cpu("linear_cross_entropy_backward_portable", Tier::Portable, cpu::run_backward),
];

/// A call of `linear_cross_entropy_backward`.
pub type LinearCrossEntropyBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradients of a loss, given what the forward call returned and the gradient of the loss.
    pub fn new(
        dx_sum: impl Into<TensorView<'a>>,
        dw_sum: impl Into<TensorView<'a>>,
        count: impl Into<TensorView<'a>>,
        dloss: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(DX_SUM, dx_sum).input(DW_SUM, dw_sum).input(COUNT, count).input(DLOSS, dloss)
    }

    /// The reduction of the forward call (the mean unless set).
    pub fn reduction(self, reduction: Reduction) -> Self {
        self.choice(REDUCTION, reduction)
    }

    /// Runs on the device's default stream and returns new tensors: the gradients of `x` and `w`.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut dx, mut dw) = (self.like(DX_SUM, &stream)?, self.like(DW_SUM, &stream)?);
        self.run_into(&mut dx, &mut dw, &stream)?;
        Ok((dx, dw))
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(
        self,
        dx: impl Into<TensorViewMut<'b>>,
        dw: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DX, dx.into()), (DW, dw.into())], stream)
    }
}
