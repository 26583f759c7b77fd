//! `paged_attention`: attention of new tokens over a cache of keys and values that lies in pages, for many requests of
//! different lengths in one call: prompts, chunks of prompts after cached tokens, and single tokens.
//!
//! - Shapes: `q` and `out` are `[num_tokens, num_heads, head_dim]`: the queries of all requests, one request after the
//!   other. `k_pages` and `v_pages` are `[num_pages, page_size, num_kv_heads, head_dim]` with any strides: heads before or
//!   after the slots of a page in memory, keys and values in one allocation or two. `num_heads` is a multiple of
//!   `num_kv_heads`: neighbouring query heads share a KV head. `head_dim` is 32, 64, 80, 96, 128, 160, 192 or 256,
//!   `page_size` from 1 to 256.
//! - Requests: with `q_starts`, i32 `[requests + 1]`, request `r` has the queries from token `q_starts[r]` to below
//!   `q_starts[r + 1]`; without it all requests have the same number, one each when decoding. Rows of no request
//!   (before the first start, after the last) are not written; `run` gives zeros there. `kv_lens`, i32 `[requests]`,
//!   counts the keys of a request in the cache, those of its new tokens among them; key `j` is slot `j % page_size` of
//!   page `page_table[r][j / page_size]`. `page_table`, i32 `[requests, max_pages]`, may be wider than needed: entries
//!   past a request's keys are not read.
//! - Types: f32, f16 or bf16 for `q` and `out`, the same or f8e4m3 or f8e5m2 for the cache; `lse`, `sinks`, `k_scale`
//!   and `v_scale` are f32. The scales, `[1]` or `[num_kv_heads]`, multiply the contents of an 8-bit cache, and are 1
//!   if left out.
//! - The score of a query and a key is `scale * q · k`, with `scale` `1 / sqrt(head_dim)` unless given; with a `softcap`
//!   above zero it becomes `softcap * tanh(score / softcap)`.
//! - Query `i` of `n` is at position `p = kv_len - n + i`. It sees keys up to `p`, or all of them if not `causal`; with a
//!   `window` above zero it does not see keys before `p - window`.
//! - `sinks`, `[num_heads]`, holds a score for each head that takes part in the softmax and has no value.
//! - `lse`, `[num_tokens, num_heads]`, is the natural logarithm of the sum of the exponentials of a row's scores, that of
//!   its sink included.
//! - Range: as in `attention`. Beside an 8-bit cache, CUDA kernels multiply queries and exponentials as f16: queries are
//!   infinite from 65520 on, and exponentials below `2^-25` of a row's largest count as zero.
//! - A row that sees nothing (no keys yet, or a position before the first) gives zeros, and the sink as `lse`, or minus
//!   infinity without sinks.
//! - Rounding: scores, exponentials and all sums are in f32. Where the type has 16 bits, the exponentials may be rounded
//!   to 16 bits before they multiply values, but not before they are added up. The result is rounded once.
//! - NaN and infinities give what the formula gives. Slots that no key of a request uses are never read. A key that a
//!   row does not see, but another row of its request does, does not affect it either; its value must be finite, or the
//!   row may become NaN.
//! - Wrong numbers: on the CPU a page that does not exist, lengths below zero or longer than the table, and starts that
//!   descend or leave `q` are errors, found before anything is written. On a GPU, which cannot inspect values in time,
//!   a page that does not exist holds no keys, lengths are clamped to what the table can hold, each start is clamped to
//!   `q` and each end to be no less than its start, and where requests then overlap, rows may belong to either or not
//!   be written; nothing outside the tensors is touched.
//! - Shared prefixes (cascade): `group_starts`, i32 `[levels, groups + 1]`, and `prefix_lens`, i32 `[levels, groups]`,
//!   say which requests begin with the same pages. They affect only the time: kernels may read the first
//!   `prefix_lens[l][g]` keys of the requests from `group_starts[l][g]` to below `group_starts[l][g + 1]` once for all
//!   of them, through the first one's row of the page table, and merge with the rest of each request. All those rows
//!   must begin with the same pages, and all queries come after these keys. Levels make a tree: a group lies within one
//!   of the level before, or outside all of them, and its prefix counts from key 0 as that one's does; requests may be
//!   in no group, and groups may be empty. Prefixes that are not really shared, or starts that descend, are errors on
//!   the CPU; on a GPU they give wrong rows but touch nothing outside the tensors. Not available with a `window`.
//! - Bits: a row's keys are added up in ranges of fixed size, counted from key 0. So the bits of a row depend on its
//!   own request alone: not on other requests, nor on how many of the queries before it are part of the call, nor on
//!   prefixes that are shared. There is one exception on Hopper: requests of up to 32 rows per KV head (a query has a
//!   row for each head that shares it) use other ranges than larger ones; with `always_share` all use the ranges of the
//!   former.
//! - Launches and memory depend on shapes alone: a captured graph stays valid when lengths and tables change.
//!
//! # Speed of shared prefixes
//!
//! Shapes decide whether prefixes are shared: where even full tables would not save enough to pay for the launches, every
//! request reads its own keys, unless the caller sets `always_share`. On Hopper, requests that may have more than 32 rows
//! per KV head read their own keys too, because their products take longer than reading. So omit `q_starts` where all have
//! the same number of queries. Where tables are not full, [`SharedPrefixes::that_pay`] takes the lengths and drops groups
//! that cost more than they save.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
mod groups;
mod numbers;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod plan;
pub(in crate::ops) mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
mod sm90;
#[cfg(feature = "tests")]
mod tests;

pub use groups::SharedPrefixes;
pub use problem::{HEAD_DIMS, Problem};

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, Kernel, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};

pub(in crate::ops) const Q: usize = 0;
pub(in crate::ops) const K_PAGES: usize = 1;
pub(in crate::ops) const V_PAGES: usize = 2;
pub(in crate::ops) const PAGE_TABLE: usize = 3;
pub(in crate::ops) const KV_LENS: usize = 4;
pub(in crate::ops) const Q_STARTS: usize = 5;
pub(in crate::ops) const K_SCALE: usize = 6;
pub(in crate::ops) const V_SCALE: usize = 7;
pub(in crate::ops) const SINKS: usize = 8;
pub(in crate::ops) const GROUP_STARTS: usize = 9;
pub(in crate::ops) const PREFIX_LENS: usize = 10;
pub(in crate::ops) const OUT: usize = 11;
pub(in crate::ops) const LSE: usize = 12;

const CAUSAL: usize = 0;
const WINDOW: usize = 1;
const SOFTCAP: usize = 2;
const SCALE: usize = 3;
const ALWAYS_SHARE: usize = 4;

const SPEC: OpSpec = OpSpec {
    name: "paged_attention",
    summary: "Attention over a paged cache of keys and values, for many requests",
    args: &[
        ArgSpec::input("q", shape![num_tokens, num_heads, head_dim], DTypeRule::FLOAT, ""),
        ArgSpec::input(
            "k_pages",
            shape![num_pages, page_size, num_kv_heads, head_dim],
            DTypeRule::SameOr(Q, &[DType::F8E4M3, DType::F8E5M2]),
            "of the type of q, or 8-bit",
        ),
        ArgSpec::input(
            "v_pages",
            shape![num_pages, page_size, num_kv_heads, head_dim],
            DTypeRule::Same(K_PAGES),
            "",
        ),
        ArgSpec::input(
            "page_table",
            shape![requests, max_pages],
            DTypeRule::I32,
            "the pages of each request",
        ),
        ArgSpec::input(
            "kv_lens",
            shape![requests],
            DTypeRule::I32,
            "keys of each request, new ones included",
        ),
        ArgSpec::input(
            "q_starts",
            shape![requests + 1],
            DTypeRule::I32,
            "where each request's queries begin, and the end; evenly if left out",
        )
        .optional(),
        ArgSpec::input(
            "k_scale",
            shape![(1 or num_kv_heads)],
            DTypeRule::F32,
            "factor of an 8-bit cache's keys",
        )
        .optional(),
        ArgSpec::input(
            "v_scale",
            shape![(1 or num_kv_heads)],
            DTypeRule::F32,
            "factor of an 8-bit cache's values",
        )
        .optional(),
        ArgSpec::input("sinks", shape![num_heads], DTypeRule::F32, "a score without a value").optional(),
        ArgSpec::input(
            "group_starts",
            shape![levels, groups + 1],
            DTypeRule::I32,
            "the requests that begin with the same pages",
        )
        .optional(),
        ArgSpec::input(
            "prefix_lens",
            shape![levels, groups],
            DTypeRule::I32,
            "keys that all of a group have; given with group_starts",
        )
        .with(GROUP_STARTS),
        ArgSpec::output("out", shape![num_tokens, num_heads, head_dim], DTypeRule::Same(Q), "")
            .zeroed_with(Q_STARTS),
        ArgSpec::output(
            "lse",
            shape![num_tokens, num_heads],
            DTypeRule::F32,
            "logarithm of the sum of exponentials",
        )
        .optional()
        .zeroed_with(Q_STARTS),
    ],
    attrs: &[
        AttrSpec { name: "causal", kind: AttrKind::Bool(true), doc: "queries see no keys after their own" },
        AttrSpec {
            name: "window",
            kind: AttrKind::Int(0),
            doc: "keys before its own that a query sees; 0 for all",
        },
        AttrSpec {
            name: "softcap",
            kind: AttrKind::Float(0.0),
            doc: "scores become softcap * tanh(score / softcap); 0 for none",
        },
        AttrSpec {
            name: "scale",
            kind: AttrKind::OptionalFloat,
            doc: "factor of scores; left out, 1 / sqrt(head_dim)",
        },
        AttrSpec {
            name: "always_share",
            kind: AttrKind::Bool(false),
            doc: "read shared prefixes once for a group even if that is not expected to be faster",
        },
    ],
    sizes: &[
        SizeSpec { name: "requests", default: 64, doc: "number of requests" },
        SizeSpec { name: "q_len", default: 1, doc: "queries of a request" },
        SizeSpec { name: "kv_len", default: 4096, doc: "keys of a request" },
        SizeSpec { name: "num_heads", default: 32, doc: "number of query heads" },
        SizeSpec { name: "num_kv_heads", default: 8, doc: "number of KV heads" },
        SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
        SizeSpec { name: "page_size", default: 16, doc: "keys of a page" },
        SizeSpec { name: "prefix_len", default: 0, doc: "keys that all requests share, with group_starts" },
    ],
    autocast: Autocast::Low,
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = SPEC;
    /// The page table has room for more keys than requests have.
    const COST_IS_A_BOUND: bool = true;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(problem: &Problem) -> Cost {
        problem.cost()
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    sm90::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    Kernel::cpu("paged_attention_avx512", Tier::Avx512, cpu::run).flushing_subnormals(),
    Kernel::cpu("paged_attention_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("paged_attention_portable", Tier::Portable, cpu::run),
];

/// A call of `paged_attention`.
///
/// ```
/// use warpsmith::{ops::PagedAttention, DType, Device, Tensor};
/// // Two requests with 5 and 2 keys in pages of 4; each asks with its last token.
/// let q = Tensor::randn(&[2, 8, 64], DType::F32, Device::Cpu, 0)?;
/// let k_pages = Tensor::randn(&[10, 4, 2, 64], DType::F32, Device::Cpu, 1)?;
/// let v_pages = Tensor::randn(&[10, 4, 2, 64], DType::F32, Device::Cpu, 2)?;
/// let page_table = Tensor::from_slice(&[7, 1, 3, 0], &[2, 2], Device::Cpu)?;
/// let kv_lens = Tensor::from_slice(&[5, 2], &[2], Device::Cpu)?;
/// let out = PagedAttention::new(&q, &k_pages, &v_pages, &page_table, &kv_lens).run()?;
/// assert_eq!(out.shape(), [2, 8, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type PagedAttention<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Attention of the queries over the pages of their requests.
    pub fn new(
        q: impl Into<TensorView<'a>>,
        k_pages: impl Into<TensorView<'a>>,
        v_pages: impl Into<TensorView<'a>>,
        page_table: impl Into<TensorView<'a>>,
        kv_lens: impl Into<TensorView<'a>>,
    ) -> Self {
        let call = Call::start().input(Q, q).input(K_PAGES, k_pages).input(V_PAGES, v_pages);
        call.input(PAGE_TABLE, page_table).input(KV_LENS, kv_lens)
    }

    /// Requests have different numbers of queries, and begin at these tokens.
    pub fn q_starts(self, q_starts: impl Into<TensorView<'a>>) -> Self {
        self.input(Q_STARTS, q_starts)
    }

    /// The factors of an 8-bit cache's keys and values.
    pub fn scales(self, k_scale: impl Into<TensorView<'a>>, v_scale: impl Into<TensorView<'a>>) -> Self {
        self.input(K_SCALE, k_scale).input(V_SCALE, v_scale)
    }

    /// Cascade: pages that requests of a group begin with are read once for the group. The groups of each level are
    /// described in the module's documentation; [`SharedPrefixes`] finds them. See [`Self::always_share`] for when it
    /// is done.
    pub fn cascade(
        self,
        group_starts: impl Into<TensorView<'a>>,
        prefix_lens: impl Into<TensorView<'a>>,
    ) -> Self {
        self.input(GROUP_STARTS, group_starts).input(PREFIX_LENS, prefix_lens)
    }

    /// Shares prefixes even where it is not expected to be faster.
    pub fn always_share(self) -> Self {
        self.flag(ALWAYS_SHARE, true)
    }

    /// A score without a value for each head.
    pub fn sinks(self, sinks: impl Into<TensorView<'a>>) -> Self {
        self.input(SINKS, sinks)
    }

    /// Every query sees every key of its request.
    pub fn not_causal(self) -> Self {
        self.flag(CAUSAL, false)
    }

    /// Queries see at most `window` keys before their own position. Zero for all.
    pub fn window(self, window: usize) -> Self {
        self.int(WINDOW, window)
    }

    /// Scores become `softcap * tanh(score / softcap)`. Zero for none.
    pub fn softcap(self, softcap: f32) -> Self {
        self.float(SOFTCAP, softcap)
    }

    /// The factor of the scores, instead of `1 / sqrt(head_dim)`.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// Runs on the device's default stream and returns a new tensor.
    pub fn run(self) -> Result<Tensor> {
        let stream = self.default_stream()?;
        let mut out = self.like_packed(Q, Q_STARTS, &stream)?;
        self.run_into(&mut out, &stream)?;
        Ok(out)
    }

    /// As [`Self::run`]; also returns the logarithms of the sums of exponentials.
    pub fn run_with_lse(self) -> Result<(Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let mut out = self.like_packed(Q, Q_STARTS, &stream)?;
        let mut lse = self.cleared_if(Q_STARTS, self.allocate(LSE, &stream)?, &stream)?;
        self.run_into_with_lse(&mut out, &mut lse, &stream)?;
        Ok((out, lse))
    }

    /// Runs on `stream` into the caller's memory.
    pub fn run_into<'b>(self, out: impl Into<TensorViewMut<'b>>, stream: &Stream) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(OUT, out.into())], stream)
    }

    /// Runs on `stream` into the caller's memory, with the logarithms of the sums of exponentials.
    pub fn run_into_with_lse<'b>(
        self,
        out: impl Into<TensorViewMut<'b>>,
        lse: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(OUT, out.into()), (LSE, lse.into())], stream)
    }
}
