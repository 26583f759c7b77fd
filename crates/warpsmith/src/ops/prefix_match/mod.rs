//! `prefix_match`: the longest prefix of each of a batch of token sequences that a radix tree holds.
//!
//! The tree is given as arrays: [`radix::flat`](crate::radix::flat) describes them, and
//! [`radix::Mirror`](crate::radix::Mirror) keeps them on a device. All are i32 and may have any strides.
//!
//! - `table` `[num_slots, 4]`, `num_slots` a power of two: the edges, by hash. `edge_tokens` `[num_pages, page_size]` and
//!   `edge_pages` `[num_pages]`: the token and page ids of all edges. `seed` is that of the hash.
//! - Sequence `b` is `tokens[starts[b]..starts[b + 1]]`; `tokens` may be longer than the last sequence needs.
//! - The paths of the tree are the tokens of the edges from the root to a node. `matched[b]` is the length of the longest
//!   prefix that sequence `b` has in common with one of them, in tokens, cut to whole pages. `nodes[b]` is the node in
//!   whose edge it ends, 0 (the root) where nothing matched.
//! - `pages[b]` begins with the pages of the match, as many as the `max_pages` columns hold; what is left is -1.
//!
//! Bad input: starts that are not in order or outside `tokens` are an error on the CPU, found before anything is
//! written. A GPU cannot inspect values in time: it clamps them, and a sequence that ends before it begins is empty. A
//! slot of the table that points outside the arrays matches nothing. Whatever the arrays hold, what is matched has the
//! sequence's tokens, and a search ends after as many steps as the sequence has pages.
//!
//! The answer is about the tree as it was when it was copied, whose [`Version`] comes with it. The tree may give nodes
//! and pages to others until they are pinned: [`RadixTree::pin_match`](crate::radix::RadixTree::pin_match) does that,
//! and detects if it is too late.

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
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, DerivedSize, Kernel, Matcher, Op,
    OpSpec, SizeRule, SizeSpec, shape,
};
use crate::radix::{Mirror, Version};
use crate::tensor::{Tensor, TensorView, TensorViewMut};

const TABLE: usize = 0;
const EDGE_TOKENS: usize = 1;
const EDGE_PAGES: usize = 2;
const TOKENS: usize = 3;
const STARTS: usize = 4;
const MATCHED: usize = 5;
const NODES: usize = 6;
const PAGES: usize = 7;
const MAX_PAGES: usize = 0;
const SEED: usize = 1;

/// Most slots, and most tokens of a page.
const LIMIT: usize = 1 << 30;

/// What is known about the memory layout of the inputs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Memory {
    /// Elements may be apart.
    Strided,
    /// Every input is dense.
    Dense,
    /// Every input is dense and starts on a 16-byte boundary, and so does every page.
    Vector,
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    batch: usize,
    /// Tokens of all sequences, with what no sequence uses.
    total: usize,
    page_size: usize,
    num_slots: usize,
    num_pages: usize,
    max_pages: usize,
    seed: u32,
    memory: Memory,
    /// By argument; rows and columns, or elements and nothing.
    strides: [[isize; 2]; 8],
}

fn check(spec: &OpSpec, args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let sizes = Matcher::of(args, attrs)?;
    let Ok(seed) = u32::try_from(attrs.int(SEED)) else {
        let expected = format!("a whole number from 0 to {}", u32::MAX);
        return Err(Error::argument(spec.name, "seed", expected, attrs.int(SEED).to_string()));
    };
    let refuse = |index: usize, expected: &str| {
        let got = format!("shape {:?}", args.at(index).shape());
        Err(Error::argument(spec.name, spec.args[index].name, expected, got))
    };
    let (num_slots, page_size) = (sizes.size("num_slots"), sizes.size("page_size"));
    if !num_slots.is_power_of_two() || num_slots > LIMIT {
        return refuse(TABLE, "a power of two of slots, up to 2^30");
    }
    if !(1..=LIMIT).contains(&page_size) {
        return refuse(EDGE_TOKENS, "pages of 1 to 2^30 tokens");
    }
    let (batch, max_pages) = (sizes.size("batch"), sizes.size("max_pages"));
    let inputs = || (TABLE..=STARTS).map(|index| args.at(index));
    let dense = inputs().all(|view| view.layout().is_contiguous());
    let aligned = page_size.is_multiple_of(4) && inputs().all(|view| view.is_aligned(16));
    Ok(Problem {
        batch,
        total: sizes.size("total"),
        page_size,
        num_slots,
        num_pages: sizes.size("num_pages"),
        max_pages,
        seed,
        memory: match (dense, aligned) {
            (true, true) => Memory::Vector,
            (true, false) => Memory::Dense,
            (false, _) => Memory::Strided,
        },
        strides: std::array::from_fn(|index| {
            let strides = args.at(index).layout().strides();
            [strides[0], strides.get(1).copied().unwrap_or(0)]
        }),
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
        name: "prefix_match",
        summary: "Longest prefix of each sequence that a radix tree holds",
        args: &[
            ArgSpec::input(
                "table",
                shape![num_slots, 4],
                DTypeRule::I32,
                "parent, child, first page and pages of each edge",
            ),
            ArgSpec::input("edge_tokens", shape![num_pages, page_size], DTypeRule::I32, ""),
            ArgSpec::input("edge_pages", shape![num_pages], DTypeRule::I32, ""),
            ArgSpec::input("tokens", shape![total], DTypeRule::I32, "the sequences, one after the other"),
            ArgSpec::input(
                "starts",
                shape![batch + 1],
                DTypeRule::I32,
                "where they start, and where the last ends",
            ),
            ArgSpec::output("matched", shape![batch], DTypeRule::I32, "tokens that match"),
            ArgSpec::output("nodes", shape![batch], DTypeRule::I32, "the node in whose edge the match ends"),
            ArgSpec::output(
                "pages",
                shape![batch, max_pages],
                DTypeRule::I32,
                "the pages of the match, then -1",
            ),
        ],
        attrs: &[
            AttrSpec { name: "max_pages", kind: AttrKind::Int(256), doc: "columns of `pages`" },
            AttrSpec {
                name: "seed",
                kind: AttrKind::Int(0),
                doc: "seed of the hash by which the table was filled",
            },
        ],
        sizes: &[
            SizeSpec { name: "batch", default: 64, doc: "number of sequences" },
            SizeSpec { name: "length", default: 4096, doc: "tokens of a sequence" },
            SizeSpec { name: "page_size", default: 16, doc: "tokens of a page" },
            SizeSpec { name: "paths", default: 64, doc: "sequences stored in the tree" },
            SizeSpec { name: "depth", default: 8, doc: "edges of a path, at least" },
        ],
        derived: &[DerivedSize {
            name: "max_pages",
            rule: SizeRule::Option { option: MAX_PAGES, most: i32::MAX as usize },
        }],
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(&Self::SPEC, args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    /// For sequences that match in full: their tokens and the tree's, the pages read and written.
    fn cost(p: &Problem) -> Cost {
        let pages = (p.total / p.page_size).min(p.batch * p.max_pages) + p.batch * p.max_pages;
        let numbers = 2 * p.total + pages + 3 * p.batch;
        Cost::moving((numbers * size_of::<i32>()) as f64, p.total as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    // Vectors would gain nothing: the time goes into memory latency and the C library's comparison.
    Kernel::cpu("prefix_match_portable", Tier::Portable, cpu::run),
];

/// A call of `prefix_match`.
///
/// ```
/// use warpsmith::radix::{Mirror, RadixTree};
/// use warpsmith::{Device, Tensor, ops::PrefixMatch};
/// let mut tree = RadixTree::new(2, 100)?;
/// tree.insert(&[1, 2, 3, 4], &[10, 11])?;
/// let mirror = Mirror::new(&tree, &Device::Cpu.default_stream()?)?;
/// let tokens = Tensor::from_slice(&[1, 2, 3, 9, 1, 2, 3, 4, 5], &[9], Device::Cpu)?;
/// let starts = Tensor::from_slice(&[0, 4, 9], &[3], Device::Cpu)?;
/// let found = PrefixMatch::new(&mirror, &tokens, &starts).max_pages(3).run()?;
/// assert_eq!(found.matched.to_vec::<i32>()?, [2, 4]);
/// assert_eq!(found.pages.to_vec::<i32>()?, [10, -1, -1, 10, 11, -1]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type PrefixMatch<'a> = Call<'a, Forward>;

/// The outputs of [`PrefixMatch`].
#[derive(Debug)]
pub struct Matches {
    /// `[batch]`: tokens that match.
    pub matched: Tensor,
    /// `[batch]`: the nodes in whose edges the matches end.
    pub nodes: Tensor,
    /// `[batch, max_pages]`: the pages of the matches, then -1.
    pub pages: Tensor,
    /// The state of the tree that was searched: see [`RadixTree::pin_match`](crate::radix::RadixTree::pin_match).
    pub version: Version,
}

impl<'a> Call<'a, Forward> {
    /// Looks for the sequences `tokens[starts[b]..starts[b + 1]]` in a tree.
    pub fn new(
        tree: &'a Mirror,
        tokens: impl Into<TensorView<'a>>,
        starts: impl Into<TensorView<'a>>,
    ) -> Self {
        // The mirror goes with the call because it knows what the answer is about.
        let call = Call::start().input(TABLE, tree.table()).prepared(TABLE, tree);
        let call = call.input(EDGE_TOKENS, tree.tokens());
        let call = call.input(EDGE_PAGES, tree.pages()).input(TOKENS, tokens).input(STARTS, starts);
        call.int(SEED, tree.seed())
    }

    /// Columns of `pages`, which is the most pages reported for a match. 256 if not set.
    pub fn max_pages(self, count: usize) -> Self {
        self.int(MAX_PAGES, count)
    }

    /// Runs on the device's default stream and returns new tensors.
    pub fn run(self) -> Result<Matches> {
        let stream = self.default_stream()?;
        let [mut matched, mut nodes, mut pages] = [
            self.allocate(MATCHED, &stream)?,
            self.allocate(NODES, &stream)?,
            self.allocate(PAGES, &stream)?,
        ];
        let version = self.run_into(&mut matched, &mut nodes, &mut pages, &stream)?;
        Ok(Matches { matched, nodes, pages, version })
    }

    /// Runs on `stream` into the caller's memory. `pages` must have the columns that [`Self::max_pages`] says. Returns
    /// the state of the tree that the answer will be about, for
    /// [`RadixTree::pin_match`](crate::radix::RadixTree::pin_match). A graph that replays the call finds what the
    /// mirror holds by then: it is about the [`Mirror::version`] at the time of the replay.
    pub fn run_into<'b>(
        self,
        matched: impl Into<TensorViewMut<'b>>,
        nodes: impl Into<TensorViewMut<'b>>,
        pages: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<Version>
    where
        'a: 'b,
    {
        let Some(version) = self.was_prepared::<Mirror>().map(Mirror::version) else {
            return Err(Error::argument(Forward::SPEC.name, "table", "that of a mirror", "another"));
        };
        self.launch([(MATCHED, matched.into()), (NODES, nodes.into()), (PAGES, pages.into())], stream)?;
        Ok(version)
    }
}
