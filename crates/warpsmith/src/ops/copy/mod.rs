//! `copy`: `out = x`, from any strides to any others; with the option `order` swapped, `out` is `x` with its last two
//! dimensions exchanged. [`concat`] joins tensors along a dimension with it.
//!
//! - Shapes: `x` and `out` have the same shape, of any rank; swapped, `x` is `[..., rows, cols]` and `out` is
//!   `[..., cols, rows]`. Any strides, repeated elements of `x` (stride 0) included.
//! - Types: any, the same for both. Elements are copied bit for bit, NaN included.
//! - `out` may not share memory with `x`. An empty tensor is left alone.

#[cfg(feature = "lab")]
mod cases;
mod concat;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use concat::{concat, concat_into};

use crate::cpu::Tier;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, OneOutput, Op, OpSpec,
    ShapeSpec, SizeSpec, dims,
};
use crate::tensor::{MAX_RANK, Space, TensorView};

const X: usize = 0;
const OUT: usize = 1;
const ORDER: usize = 0;
const SWAPPED: usize = 1;

/// The most bytes one access moves.
const WIDEST: usize = 16;

/// What is moved together. `out` is always written in memory order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Part {
    /// Lines of neighbouring elements on both sides.
    Runs,
    /// Lines whose elements may be apart.
    Lines,
    /// Planes whose neighbours are along the columns in `x` and along the lines in `out`.
    Planes,
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    /// Bytes of an element.
    size: usize,
    part: Part,
    /// Where parts start in x and out (each twice), in elements.
    starts: Space<4>,
    /// Lines of a part, and elements of a line.
    lines: usize,
    len: usize,
    /// Elements from one line to the next in x and out.
    pitches: [isize; 2],
    /// Elements from neighbour to neighbour of a line in x and out.
    steps: [isize; 2],
    /// Bytes that can be moved at once: with [`Part::Runs`], all lines start at and consist of multiples.
    width: usize,
}

impl Problem {
    fn elements(&self) -> usize {
        self.starts.len() * self.lines * self.len
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    Matcher::of(args, attrs)?;
    let (x, out) = (args.at(X), args.at(OUT));
    let rank = out.layout().rank();
    let mut swapped: Vec<usize> = (0..rank).collect();
    if attrs.choice(ORDER) == SWAPPED {
        swapped.swap(rank - 2, rank - 1);
    }
    // The order of copying does not matter: memory order of `out` gives the longest runs.
    let seen = x.layout().permute(&swapped);
    let strides = out.layout().strides();
    let mut order: Vec<usize> = (0..rank).filter(|&d| out.shape()[d] != 1).collect();
    order.sort_by_key(|&d| std::cmp::Reverse(strides[d]));
    order.extend((0..rank).filter(|&d| out.shape()[d] == 1));
    let [from, to] = [&seen, out.layout()].map(|layout| layout.permute(&order));
    let all = Space::new(rank, [&from, &to]);

    let last = all.rank - 1;
    let steps = [all.strides[0][last], all.strides[1][last]];
    let size = x.dtype().size();
    // The dimension along which x is dense, if that is not the one along which out is.
    let crossing = (0..last).rev().find(|&d| all.strides[0][d] == 1 && all.sizes[d] > 1);
    let (part, line_dim) = match (steps, crossing) {
        ([1, 1], _) => (Part::Runs, None),
        ([_, 1], Some(d)) => (Part::Planes, Some(d)),
        _ => (Part::Lines, None),
    };
    let outer: Vec<usize> = (0..last).filter(|&d| Some(d) != line_dim).collect();
    let starts = starts_of(&all, &outer);
    let bits = starts.strides[..2].iter().flat_map(|strides| &strides[..starts.rank]);
    let bits = bits.fold(x.address() | out.address() | (all.sizes[last] * size), |bits, &stride| {
        bits | (stride as usize * size)
    });
    Ok(Problem {
        size,
        part,
        starts,
        lines: line_dim.map_or(1, |d| all.sizes[d]),
        len: all.sizes[last],
        pitches: line_dim.map_or([0, 0], |d| [all.strides[0][d], all.strides[1][d]]),
        steps,
        width: match part {
            Part::Runs => 1 << bits.trailing_zeros().min(WIDEST.trailing_zeros()),
            Part::Lines | Part::Planes => size,
        },
    })
}

/// The space over some dimensions of another.
fn starts_of(all: &Space<2>, dims: &[usize]) -> Space<4> {
    let mut starts = Space { rank: 1, sizes: [0; MAX_RANK], strides: [[0; MAX_RANK]; 4] };
    starts.sizes[0] = 1;
    for (to, &from) in dims.iter().enumerate() {
        starts.rank = to + 1;
        starts.sizes[to] = all.sizes[from];
        (0..4).for_each(|t| starts.strides[t][to] = all.strides[t % 2][from]);
    }
    starts
}

/// The op, as listed in [`crate::ops::PROVABLE`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "copy",
        summary: "A copy of a tensor in another memory layout",
        args: &[
            ArgSpec::input(
                "x",
                ShapeSpec::by_option(ORDER, &[dims![..], dims![.., rows, cols]]),
                DTypeRule::ANY,
                "",
            ),
            ArgSpec::output(
                "out",
                ShapeSpec::by_option(ORDER, &[dims![..], dims![.., cols, rows]]),
                DTypeRule::Same(X),
                "contiguous where it is allocated for the call",
            ),
        ],
        attrs: &[AttrSpec {
            name: "order",
            kind: AttrKind::Choice(&["kept", "swapped"]),
            doc: "of the last two dimensions",
        }],
        sizes: &[
            SizeSpec { name: "batch", default: 1, doc: "number of matrices" },
            SizeSpec { name: "rows", default: 8192, doc: "rows of a matrix" },
            SizeSpec { name: "cols", default: 4096, doc: "columns of a matrix" },
        ],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        Cost::moving(2.0 * p.elements() as f64 * p.size as f64, 0.0)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("copy_cuda"),
    Kernel::cpu("copy_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("copy_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("copy_portable", Tier::Portable, cpu::run),
];

/// A call of `copy`.
///
/// ```
/// use warpsmith::{ops::Copy, DType, Device, Tensor};
/// let x = Tensor::randn(&[4, 64, 8], DType::BF16, Device::Cpu, 0)?;
/// let heads_first = x.view().permute(&[1, 0, 2]).expect("three dimensions");
/// let dense = Copy::new(heads_first).run()?;
/// assert!(dense.shape() == [64, 4, 8] && dense.layout().is_contiguous());
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Copy<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// Copies `x`.
    pub fn new(x: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(X, x)
    }

    /// With the last two dimensions swapped.
    pub fn swapped(self) -> Self {
        self.choice(ORDER, SWAPPED as u8)
    }
}
