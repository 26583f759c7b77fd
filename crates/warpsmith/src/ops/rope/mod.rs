//! `rope`: rotary position embedding. Pair `i` of a head, elements `(a, b)`, is rotated by an angle that grows with
//! the token's position: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.
//!
//! - Shapes: `x` and `out` are `[..., num_tokens, num_heads, head_dim]`, `positions` is `[..., num_tokens]`; any
//!   strides, so that the queries and keys inside a packed projection need no copy.
//! - Types: f32, f16 or bf16 for `x` and `out`; i64 or i32 for `positions`, which may be negative.
//! - The first `rotary_dim` elements of a head are rotated (all of them if it is zero), the rest pass through. Pair
//!   `i` is elements `i` and `i + rotary_dim / 2` in the layout `half`, `2 i` and `2 i + 1` in `interleaved`.
//! - The angle is `position * scale * theta^(-2 i / rotary_dim)`. It is reduced to a fraction of a turn in 64-bit fixed
//!   point before anything is rounded to f32: sine and cosine are accurate to two units in the last place at any
//!   position a model can have, not only at small ones.
//! - Tables: with `cos` and `sin`, both f32 `[max_pos, rotary_dim / 2]`, row `position` gives cosine and sine instead,
//!   and `theta` and `scale` are not used. A position outside the tables is an error on the CPU, found before anything
//!   is written; on a GPU, which cannot inspect values in time, the nearest row is used.
//! - Rounding: products are formed in f32, the result is rounded once.
//! - NaN and infinity reach both elements of their pair as the formula says.
//! - `out` may be `x`, in place. An empty tensor is left alone.
//!
//! `rope_backward` takes the gradient of `out` to that of `x`: the rotation by the opposite angle.

mod angles;
mod backward;
#[cfg(feature = "lab")]
pub(in crate::ops) mod cases;
pub(in crate::ops) mod cpu;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
#[cfg(feature = "lab")]
pub(in crate::ops) mod reference;
mod rotation;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, RopeBackward};
pub(in crate::ops) use rotation::{Rotation, check_numbers};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, DerivedSize, Gradient, Kernel, Matcher,
    OneOutput, Op, OpSpec, SizeRule, SizeSpec, shape,
};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

// The backward op has the same arguments and options: `dout` and `dx` take the places of `x` and `out`.
const X: usize = 0;
const POSITIONS: usize = 1;
const COS: usize = 2;
const SIN: usize = 3;
const OUT: usize = 4;
pub(in crate::ops) const LAYOUT: usize = 0;
pub(in crate::ops) const THETA: usize = 1;
pub(in crate::ops) const ROTARY_DIM: usize = 2;
pub(in crate::ops) const SCALE: usize = 3;

pub(in crate::ops) const ATTRS: &[AttrSpec] = &[
    AttrSpec {
        name: "layout",
        kind: AttrKind::Choice(&["half", "interleaved"]),
        doc: "which elements form a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1",
    },
    AttrSpec { name: "theta", kind: AttrKind::Float(10000.0), doc: "base of the frequencies" },
    AttrSpec {
        name: "rotary_dim",
        kind: AttrKind::Int(0),
        doc: "elements of a head that are rotated; 0 for all",
    },
    AttrSpec { name: "scale", kind: AttrKind::Float(1.0), doc: "factor on positions" },
];

/// What the tables' columns are half of.
pub(in crate::ops) const DERIVED: &[DerivedSize] =
    &[DerivedSize { name: "rotary_dim", rule: SizeRule::OptionOr { option: ROTARY_DIM, size: "head_dim" } }];
const SIZES: &[SizeSpec] = &[
    SizeSpec { name: "num_tokens", default: 8192, doc: "number of tokens" },
    SizeSpec { name: "num_heads", default: 32, doc: "number of heads" },
    SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
];

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    position_dtype: DType,
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    rotation: Rotation,
    /// Leading dimensions and tokens of x, out, positions (twice).
    tokens: Space<4>,
    /// Strides of heads in x and out.
    head_strides: [isize; 2],
    /// Strides of elements of a head in x and out.
    steps: [isize; 2],
    /// Heads, their halves and what is not rotated can all be moved in 16-byte pieces.
    vector_rows: bool,
}

fn check(backward: bool, args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let mut sizes = Matcher::new(args, attrs);
    sizes.arg(X)?;
    let (x, out, positions) = (args.at(X), args.at(OUT), args.at(POSITIONS));
    let (dtype, position_dtype) = (x.dtype(), positions.dtype());
    let (num_heads, head_dim) = (sizes.size("num_heads"), sizes.size("head_dim"));

    let empty = x.layout().numel() == 0;
    let rotation = Rotation::check(&mut sizes, args, attrs, [COS, SIN], head_dim, empty)?;
    sizes.all()?;
    let rotary_dim = rotation.rotary_dim;

    let rank = sizes.leading_rank() + 1;
    let (x_layout, out_layout) = (x.layout(), out.layout());
    let per_vector = 16 / dtype.size();
    let whole = (rotary_dim / 2).is_multiple_of(per_vector);
    let vector_rows = whole && x.has_rows_of(per_vector) && out.has_rows_of(per_vector);
    Ok(Problem {
        dtype,
        position_dtype,
        num_tokens: positions.layout().numel(),
        num_heads,
        head_dim,
        rotation: Rotation { backward, ..rotation },
        tokens: Space::new(rank, [x_layout, out_layout, positions.layout(), positions.layout()]),
        head_strides: [x_layout.strides()[rank], out_layout.strides()[rank]],
        steps: [x_layout.step(), out_layout.step()],
        vector_rows,
    })
}

fn cost(p: &Problem) -> Cost {
    let elements = (p.num_tokens * p.num_heads * p.head_dim) as f64;
    let positions = (p.num_tokens * p.position_dtype.size()) as f64;
    let tables = p.rotation.table_bytes(p.num_tokens) as f64;
    let rotations = (p.num_tokens * p.num_heads * p.rotation.pairs()) as f64;
    Cost::moving(2.0 * elements * p.dtype.size() as f64 + positions + tables, 6.0 * rotations)
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "rope",
        summary: "Rotary position embedding of queries or keys",
        args: &[
            ArgSpec::input("x", shape![.., num_tokens, num_heads, head_dim], DTypeRule::FLOAT, ""),
            ArgSpec::input("positions", shape![.., num_tokens], DTypeRule::INDEX, ""),
            ArgSpec::input("cos", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "given with sin")
                .optional(),
            ArgSpec::input("sin", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "").with(COS),
            ArgSpec::output("out", shape![.., num_tokens, num_heads, head_dim], DTypeRule::Same(X), "")
                .in_place_of(X),
        ],
        attrs: ATTRS,
        sizes: SIZES,
        derived: DERIVED,
        gradient: Some(Gradient {
            op: "rope_backward",
            inputs: &[
                (X, Source::Incoming(OUT)),
                (POSITIONS, Source::Input(POSITIONS)),
                (COS, Source::Input(COS)),
                (SIN, Source::Input(SIN)),
            ],
            results: &[(X, InputGradient::Output(OUT))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(false, args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        cost(problem)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("rope_cuda"),
    Kernel::cpu("rope_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("rope_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("rope_portable", Tier::Portable, cpu::run),
];

/// A call of `rope`.
///
/// ```
/// use warpsmith::{ops::Rope, DType, Device, Tensor};
/// let q = Tensor::randn(&[4, 8, 64], DType::F32, Device::Cpu, 0)?;
/// let positions = Tensor::from_slice(&[0i64, 1, 2, 3], &[4], Device::Cpu)?;
/// let out = Rope::new(&q, &positions).theta(500_000.0).run()?;
/// assert_eq!(out.shape(), [4, 8, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Rope<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// Rotates the heads of `x` by their tokens' `positions`.
    pub fn new(x: impl Into<TensorView<'a>>, positions: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x).input(POSITIONS, positions)
    }

    /// A call whose heads are given to [`Self::run_in_place`].
    pub fn in_place(positions: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(POSITIONS, positions)
    }

    /// Rotates the heads of `x` in place. Set options on a call made with [`Self::in_place`].
    pub fn run_in_place<'b>(self, x: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch_in_place(X, OUT, x.into(), stream)
    }
}

/// The options of an op that rotates: which method sets the factor of positions, and which arguments are the tables.
macro_rules! options {
    ($op:ty, $scale:ident, [$cos:expr, $sin:expr]) => {
        impl<'a> $crate::op::Call<'a, $op> {
            /// Pairs of the rotation are neighbours, elements `2 i` and `2 i + 1`, instead of half a head apart.
            pub fn interleaved(self) -> Self {
                self.choice($crate::ops::rope::LAYOUT, 1)
            }

            /// The base of the rotation's frequencies (10000 unless set).
            pub fn theta(self, theta: f64) -> Self {
                self.float($crate::ops::rope::THETA, theta)
            }

            /// Rotates only the first `rotary_dim` elements of a head.
            pub fn rotary_dim(self, rotary_dim: usize) -> Self {
                self.int($crate::ops::rope::ROTARY_DIM, rotary_dim)
            }

            /// Multiplies positions by `scale`.
            pub fn $scale(self, scale: f64) -> Self {
                self.float($crate::ops::rope::SCALE, scale)
            }

            /// Takes the rotation's cosine and sine from tables instead of computing them.
            pub fn tables(
                self,
                cos: impl Into<$crate::tensor::TensorView<'a>>,
                sin: impl Into<$crate::tensor::TensorView<'a>>,
            ) -> Self {
                self.input($cos, cos).input($sin, sin)
            }
        }
    };
}
pub(in crate::ops) use options;
options!(Forward, scale, [COS, SIN]);
