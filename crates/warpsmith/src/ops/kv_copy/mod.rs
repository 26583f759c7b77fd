//! `kv_copy`: copies pages of a KV cache onto other pages of it, in every layer at once.
//!
//! - Shapes: `cache` is `[..., num_pages, page_size, num_kv_heads, head_dim]`, changed in place; `pairs` is `[num_pairs, 2]`:
//!   page `pairs[i, 0]` is copied onto page `pairs[i, 1]`, for each index of the leading dimensions: layers, keys and
//!   values, or none. Any strides, so that one call serves a single cache, one allocation for keys and values of all
//!   layers, keys and values by turns in each page, and heads before slots.
//! - Types: any for `cache`, whose elements are moved as they are; i64 or i32 for `pairs`.
//! - A pair with -1 in it is skipped, so that a captured call can serve fewer pairs; so is a page onto itself.
//! - Any other page out of range is an error on the CPU, found before anything is written. On a GPU, which cannot
//!   inspect values in time, the pair is skipped.
//! - A page may be the source of several pairs. One that is a destination must occur in no other pair: on the CPU this is
//!   an error, found before anything is written; on a device each element of such a page, and of what is copied from it,
//!   is one that some pair copies there or that was there before.
//! - An empty cache is left alone.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{ArgSpec, Args, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec, shape};
use crate::tensor::{DType, Space, TensorView, TensorViewMut};

const PAIRS: usize = 0;
const CACHE: usize = 1;

/// The most bytes one access moves.
const WIDEST: usize = 16;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pair_dtype: DType,
    /// Distance of pairs, and of the two pages of a pair.
    pair_strides: [isize; 2],
    num_pairs: usize,
    num_pages: usize,
    /// Bytes of an element.
    size: usize,
    /// Elements from one page to the next.
    page_stride: isize,
    /// Starts of the contiguous runs that every page consists of, layers included (four times).
    runs: Space<4>,
    /// Elements of a run.
    run: usize,
    /// Bytes that can be moved at once: all runs start at and consist of multiples.
    width: usize,
}

impl Problem {
    fn run_bytes(&self) -> usize {
        self.run * self.size
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let (pairs, cache) = (args.at(PAIRS), args.at(CACHE));

    // The order of copying within a page does not matter: memory order gives the longest runs.
    let layout = cache.layout();
    let page = sizes.leading_rank();
    let mut order: Vec<usize> = (0..layout.rank()).filter(|&d| d != page).collect();
    order.sort_by_key(|&d| std::cmp::Reverse(layout.strides()[d]));
    order.push(page);
    let sorted = layout.permute(&order);
    let mut runs = Space::new(layout.rank() - 1, [&sorted; 4]);
    let mut run = 1;
    let last = runs.rank - 1;
    if runs.sizes[last] > 1 && runs.strides[0][last] == 1 {
        run = runs.sizes[last];
        // What is left of the dimension, if it was the only one, is a single start without a distance to the next.
        runs.sizes[last] = 1;
        runs.strides.iter_mut().for_each(|strides| strides[last] = 0);
        runs.rank = last.max(1);
    }
    let size = cache.dtype().size();
    let page_stride = layout.strides()[page];
    let strides = runs.strides[0][..runs.rank].iter().chain([&page_stride]);
    let places =
        strides.fold(cache.address() | (run * size), |bits, &stride| bits | (stride as usize * size));
    Ok(Problem {
        pair_dtype: pairs.dtype(),
        pair_strides: [pairs.layout().strides()[0], pairs.layout().strides()[1]],
        num_pairs: sizes.size("num_pairs"),
        num_pages: sizes.size("num_pages"),
        size,
        page_stride,
        runs,
        run,
        width: 1 << places.trailing_zeros().min(WIDEST.trailing_zeros()),
    })
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "kv_copy",
        summary: "Copies of whole KV cache pages, all layers at once",
        args: &[
            ArgSpec::input(
                "pairs",
                shape![num_pairs, 2],
                DTypeRule::INDEX,
                "source and destination pages, -1 to skip",
            ),
            ArgSpec::in_out(
                "cache",
                shape![.., num_pages, page_size, num_kv_heads, head_dim],
                DTypeRule::ANY,
                "",
            ),
        ],
        sizes: &[
            SizeSpec { name: "num_pairs", default: 2048, doc: "number of pages that are copied" },
            SizeSpec { name: "num_layers", default: 1, doc: "number of caches: layers, keys and values" },
            SizeSpec { name: "num_pages", default: 8192, doc: "pages of a cache" },
            SizeSpec { name: "page_size", default: 16, doc: "tokens of a page" },
            SizeSpec { name: "num_kv_heads", default: 8, doc: "number of heads" },
            SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
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
        let pairs = p.num_pairs * 2 * p.pair_dtype.size();
        let pages = p.num_pairs as f64 * p.runs.len() as f64 * p.run_bytes() as f64;
        Cost::moving(2.0 * pages + pairs as f64, 0.0)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("kv_copy_cuda"),
    Kernel::cpu("kv_copy_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("kv_copy_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("kv_copy_portable", Tier::Portable, cpu::run),
];

/// A call of `kv_copy`.
///
/// ```
/// use warpsmith::{ops::KvCopy, DType, Device, Tensor};
/// // Keys and values of 4 layers, in one allocation: 10 pages of 16 tokens, 2 heads of 64.
/// let mut cache = Tensor::randn(&[4, 2, 10, 16, 2, 64], DType::BF16, Device::Cpu, 0)?;
/// // A request that shares pages 3 and 4 gets copies of its own.
/// let pairs = Tensor::from_slice(&[3i64, 7, 4, 8], &[2, 2], Device::Cpu)?;
/// KvCopy::new(&pairs).run(&mut cache)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type KvCopy<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Copies page `pairs[i, 0]` onto page `pairs[i, 1]`.
    pub fn new(pairs: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(PAIRS, pairs)
    }

    /// Runs on the device's default stream.
    pub fn run<'b>(self, cache: impl Into<TensorViewMut<'b>>) -> Result<()>
    where
        'a: 'b,
    {
        let stream = self.default_stream()?;
        self.run_into(cache, &stream)
    }

    /// Runs on `stream`.
    pub fn run_into<'b>(self, cache: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(CACHE, cache.into())], stream)
    }
}
