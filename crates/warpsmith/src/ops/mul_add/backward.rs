//! `mul_add_backward`: the gradients of `mul_add`.

use super::{A, B, DA, DB, DOUT, SIZES};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, shape};
use crate::ops::elementwise::{Grid, Stream as Operand};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) grid: Grid,
    pub(super) wanted: Wanted,
}

/// Which gradients a call asks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Wanted {
    Neither,
    Da,
    Db,
    Both,
}

impl Wanted {
    /// The arguments that take part: inputs, then outputs.
    pub(super) fn operands(self) -> &'static [usize] {
        match self {
            Wanted::Neither => &[],
            Wanted::Da => &[B, DOUT, DA],
            Wanted::Db => &[A, DOUT, DB],
            Wanted::Both => &[A, B, DOUT, DA, DB],
        }
    }
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "mul_add_backward",
        summary: "Gradients of mul_add with respect to a and b; that of c is dout",
        args: &[
            ArgSpec::input("a", shape![.., hidden], DTypeRule::FLOAT, "of the forward call"),
            ArgSpec::input("b", shape![.., hidden], DTypeRule::Same(A), "of the forward call"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(A), "gradient of out, and of c"),
            ArgSpec::output("da", shape![.., hidden], DTypeRule::Same(A), "gradient of a")
                .optional()
                .in_place_of(DOUT),
            ArgSpec::output("db", shape![.., hidden], DTypeRule::Same(A), "gradient of b").optional(),
        ],
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        Matcher::of(args, attrs)?;
        let dtype = args.at(A).dtype();
        let wanted = match (args.get(DA).is_some(), args.get(DB).is_some()) {
            (false, false) => Wanted::Neither,
            (true, false) => Wanted::Da,
            (false, true) => Wanted::Db,
            (true, true) => Wanted::Both,
        };
        let operand = |index: usize| Operand::of(args, index);
        let grid = match *wanted.operands() {
            [x, dout, dx] => Grid::new(dtype, [x, dout, dx].map(operand), &[]),
            [a, b, dout, da, db] => Grid::new(dtype, [a, b, dout, da, db].map(operand), &[]),
            _ => Grid::new(dtype, [operand(A)], &[]),
        };
        Ok(Problem { grid, wanted })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        let (elements, tensors) = (problem.grid.len() as f64, problem.wanted.operands().len());
        let flops = if problem.wanted == Wanted::Both { 2.0 } else { 1.0 };
        Cost::moving(elements * (tensors * problem.grid.dtype.size()) as f64, flops * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    Kernel::cpu("mul_add_backward_avx512", Tier::Avx512, super::cpu::backward),
    Kernel::cpu("mul_add_backward_avx2", Tier::Avx2, super::cpu::backward),
    Kernel::cpu("mul_add_backward_portable", Tier::Portable, super::cpu::backward),
];

/// A call of `mul_add_backward`.
pub type MulAddBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// Gradients for the factors `a` and `b`, given the gradient `dout` of the result.
    pub fn new(
        a: impl Into<TensorView<'a>>,
        b: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(A, a).input(B, b).input(DOUT, dout)
    }

    /// Returns the gradients of `a` and of `b`.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut da, mut db) = (self.like(A, &stream)?, self.like(B, &stream)?);
        self.run_into(&mut da, &mut db, &stream)?;
        Ok((da, db))
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(
        self,
        da: impl Into<TensorViewMut<'b>>,
        db: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DA, da.into()), (DB, db.into())], stream)
    }

    /// Computes the gradient of `a` alone, into the caller's memory.
    pub fn run_da_into<'b>(self, da: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DA, da.into())], stream)
    }

    /// Computes the gradient of `b` alone, into the caller's memory.
    pub fn run_db_into<'b>(self, db: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DB, db.into())], stream)
    }
}
