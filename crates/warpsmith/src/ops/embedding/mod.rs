//! `embedding`: looks up rows of a table by id, `out[..., :] = weight[ids[...], :]`.
//!
//! - Shapes: `weight` is `[vocab, hidden]`, `ids` is `[...]`, of any rank, `out` is `[..., hidden]`; any strides.
//! - Types: f32, f16 or bf16 for `weight` and `out`, whose elements are moved as they are; i64 or i32 for `ids`.
//! - An id outside the table (negative, or `vocab` and above) is an error on the CPU, found before anything is written.
//!   On a GPU, which cannot inspect values in time, it gives zeros.
//! - An empty `out` is left alone.
//!
//! `embedding_backward` sums the rows of `dout` into `dweight`: row `v` is the sum, in f32 and in the order of the ids,
//! of the rows whose id is `v`, rounded once; zeros where there are none. The bits depend on nothing else. Ids out of
//! range are an error on the CPU and add nothing on a device.

mod backward;
#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{Backward, EmbeddingBackward};

use crate::cpu::Tier;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Gradient, Kernel, Matcher, OneOutput, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Space, TensorView};

const WEIGHT: usize = 0;
const IDS: usize = 1;
const OUT: usize = 2;

/// The most bytes one access moves.
const WIDEST: usize = 16;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    id_dtype: DType,
    vocab: usize,
    hidden: usize,
    num_ids: usize,
    /// Where ids and rows of out are (each twice), in elements.
    rows: Space<4>,
    /// Elements from one row of weight to the next.
    weight_pitch: isize,
    /// Stride in elements along a row of weight and of out.
    steps: [isize; 2],
    /// Bytes that can be moved at once: all rows are dense, start at and consist of multiples, or it is an element.
    width: usize,
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let (weight, ids, out) = (args.at(WEIGHT), args.at(IDS), args.at(OUT));
    let (hidden, size) = (sizes.size("hidden"), weight.dtype().size());
    let rows = Space::new(sizes.leading_rank(), [ids.layout(), out.layout(), ids.layout(), out.layout()]);
    let steps = [weight.layout().step(), out.layout().step()];
    let weight_pitch = weight.layout().strides()[0];
    let places = rows.strides[1][..rows.rank].iter().chain([&weight_pitch]);
    let places = places.fold(weight.address() | out.address() | (hidden * size), |bits, &stride| {
        bits | (stride as usize * size)
    });
    Ok(Problem {
        dtype: weight.dtype(),
        id_dtype: ids.dtype(),
        vocab: sizes.size("vocab"),
        hidden,
        num_ids: sizes.leading_count(),
        rows,
        weight_pitch,
        steps,
        width: match steps {
            [1, 1] => 1 << places.trailing_zeros().min(WIDEST.trailing_zeros()),
            _ => size,
        },
    })
}

/// The op, as listed in [`crate::ops::PROVABLE`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "embedding",
        summary: "Rows of a table, looked up by id",
        args: &[
            ArgSpec::input("weight", shape![vocab, hidden], DTypeRule::FLOAT, "the table"),
            ArgSpec::input("ids", shape![..], DTypeRule::INDEX, "rows of weight"),
            ArgSpec::output("out", shape![.., hidden], DTypeRule::Same(WEIGHT), ""),
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of ids" },
            SizeSpec { name: "vocab", default: 32_768, doc: "rows of the table" },
            SizeSpec { name: "hidden", default: 4096, doc: "length of a row" },
        ],
        gradient: Some(Gradient {
            op: "embedding_backward",
            inputs: &[(backward::IDS, Source::Input(IDS)), (backward::DOUT, Source::Incoming(OUT))],
            results: &[(WEIGHT, InputGradient::Output(backward::DWEIGHT))],
            ..Gradient::EMPTY
        }),
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    /// The fewest bytes: a row with several ids is read once.
    fn cost(p: &Problem) -> Cost {
        let read = p.num_ids.min(p.vocab);
        let elements = (read + p.num_ids) as f64 * p.hidden as f64;
        Cost::moving(elements * p.dtype.size() as f64 + (p.num_ids * p.id_dtype.size()) as f64, 0.0)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::forward("embedding_cuda"),
    Kernel::cpu("embedding_avx512", Tier::Avx512, cpu::forward),
    Kernel::cpu("embedding_avx2", Tier::Avx2, cpu::forward),
    Kernel::cpu("embedding_portable", Tier::Portable, cpu::forward),
];

/// A call of `embedding`.
///
/// ```
/// use warpsmith::{ops::Embedding, DType, Device, Tensor};
/// let weight = Tensor::randn(&[100, 64], DType::BF16, Device::Cpu, 0)?;
/// let ids = Tensor::from_slice(&[7i32, 0, 99], &[3], Device::Cpu)?;
/// assert_eq!(Embedding::new(&weight, &ids).run()?.shape(), [3, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Embedding<'a> = Call<'a, Forward>;

impl OneOutput for Forward {
    const OUTPUT: usize = OUT;
}

impl<'a> Call<'a, Forward> {
    /// The rows of `weight` that `ids` name.
    pub fn new(weight: impl Into<TensorView<'a>>, ids: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(WEIGHT, weight).input(IDS, ids)
    }
}
