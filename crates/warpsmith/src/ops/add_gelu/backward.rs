//! `add_gelu_backward`: the gradients of `add_gelu`.

use super::{APPROXIMATE, ATTRS, BIAS, DBIAS, DOUT, DX, KINDS, SIZES, X};
use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, shape};
use crate::ops::elementwise::function::Kind;
use crate::tensor::{DType, Layout, Space, Tensor, TensorView, TensorViewMut};

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub(super) dtype: DType,
    pub(super) kind: Kind,
    pub(super) hidden: usize,
    pub(super) num_rows: usize,
    /// Leading dimensions of x, dout, dx (and x again).
    pub(super) rows: Space<4>,
    /// Stride along a row of x, dout, dx, bias, dbias.
    pub(super) steps: [isize; 5],
    pub(super) has_dbias: bool,
    /// All rows are dense, 16-byte aligned and multiples of 16 bytes long.
    pub(super) vector_rows: bool,
    /// Set if x, dout and dx are one run of elements each: how many elements past a multiple of 16 bytes they all
    /// begin.
    pub(super) run: Option<usize>,
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "add_gelu_backward",
        summary: "Gradients of add_gelu with respect to x and bias",
        args: &[
            ArgSpec::input("x", shape![.., hidden], DTypeRule::FLOAT, "of the forward call"),
            ArgSpec::input("bias", shape![hidden], DTypeRule::Same(X), "of the forward call"),
            ArgSpec::input("dout", shape![.., hidden], DTypeRule::Same(X), "gradient of out"),
            ArgSpec::output("dx", shape![.., hidden], DTypeRule::Same(X), "gradient of x").in_place_of(DOUT),
            ArgSpec::output(
                "dbias",
                shape![hidden],
                DTypeRule::Same(X),
                "gradient of bias: dx summed over rows in f32",
            )
            .optional(),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        let (sizes, dtype) = (Matcher::of(args, attrs)?, args.at(X).dtype());
        let [x, dout, dx] = [X, DOUT, DX].map(|index| args.at(index).layout());
        let steps =
            [X, DOUT, DX, BIAS, DBIAS].map(|index| args.get(index).map_or(1, |t| Layout::step(t.layout())));
        let (hidden, rows) = (sizes.size("hidden"), Space::new(sizes.leading_rank(), [x, dout, dx, x]));
        let is_run = steps[..3] == [1; 3]
            && rows.rank == 1
            && (rows.sizes[0] == 1 || rows.strides.iter().all(|strides| strides[0] == hidden as isize));
        let [shift, others @ ..] = [X, DOUT, DX].map(|index| args.address(index) % 16 / dtype.size());
        Ok(Problem {
            dtype,
            kind: KINDS[attrs.choice(APPROXIMATE)],
            hidden,
            num_rows: sizes.leading_count(),
            rows,
            steps,
            has_dbias: args.get(DBIAS).is_some(),
            vector_rows: args.have_vector_rows(),
            run: (is_run && others == [shift; 2]).then_some(shift),
        })
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let elements = (p.num_rows * p.hidden) as f64;
        let vectors = p.hidden as f64 * (1 + p.has_dbias as u8) as f64;
        let flops = if p.has_dbias { 4.0 } else { 3.0 };
        Cost::moving((3.0 * elements + vectors) * p.dtype.size() as f64, flops * elements)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    super::cuda::BACKWARD,
    super::cpu::backward("add_gelu_backward_avx512", Tier::Avx512),
    super::cpu::backward("add_gelu_backward_avx2", Tier::Avx2),
    super::cpu::backward("add_gelu_backward_portable", Tier::Portable),
];

/// A call of `add_gelu_backward`.
pub type AddGeluBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// Gradients for rows `x` and `bias`, given the gradient `dout` of the result.
    pub fn new(
        x: impl Into<TensorView<'a>>,
        bias: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(X, x).input(BIAS, bias).input(DOUT, dout)
    }

    /// The tanh form instead of the exact function, as in the forward call.
    pub fn tanh(self) -> Self {
        self.choice(APPROXIMATE, 1)
    }

    /// Returns the gradients of `x` and of `bias`.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let (mut dx, mut dbias) = (self.like(X, &stream)?, self.like(BIAS, &stream)?);
        self.run_into(&mut dx, &mut dbias, &stream)?;
        Ok((dx, dbias))
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(
        self,
        dx: impl Into<TensorViewMut<'b>>,
        dbias: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DX, dx.into()), (DBIAS, dbias.into())], stream)
    }
}
