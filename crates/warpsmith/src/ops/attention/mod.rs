//! `attention`: `out = softmax(scale * q · kᵀ) · v` for each head, without ever holding the scores of a whole row.
//!
//! - Shapes: `q` and `out` are `[batch, q_len, num_heads, head_dim]`; `k` and `v` are `[batch, kv_len, num_kv_heads,
//!   head_dim]`; any strides, so heads may come before tokens in memory. `num_heads` is a multiple of `num_kv_heads`:
//!   neighbouring query heads share a KV head. `head_dim` is 32, 64, 80, 96, 128, 160, 192 or 256. All other sizes may
//!   be zero.
//! - Requests of different lengths: with `q_starts` and `kv_starts`, both i32 `[requests + 1]`, `batch` is 1, and
//!   request `r` is the tokens from `starts[r]` to below `starts[r + 1]` of the packed tensors. Either side of a
//!   request may be empty. Rows of no request (padding, before the first start or after the last) are not written;
//!   `run` gives zeros there. Starts that descend or leave the tensor are an error on the CPU, found before anything is
//!   written. A GPU cannot inspect values in time: it clamps each start to the tensor and each end to be no less than
//!   its start, and where requests then overlap, rows may belong to either or not be written.
//! - Types: f32, f16 or bf16, the same for `q`, `k`, `v` and `out`; `lse` and `sinks` are f32.
//! - The score of query `i` and key `j` is `scale * q[i] · k[j]`, with `scale` `1 / sqrt(head_dim)` unless given; with a
//!   `softcap` above zero it becomes `softcap * tanh(score / softcap)`; then `bias` is added. `bias`, in f32 or the type
//!   of `q`, and `mask`, in bool or u8, are `[batch or 1, num_heads or 1, q_len, kv_len]`, and not for packed requests.
//! - Query `i` is at position `p = i + kv_len - q_len` among the keys: the last query belongs to the last key. With
//!   `causal` it sees keys up to `p`; with a `window` above zero it sees no keys before `p - window`, that is, `window`
//!   keys and its own; with `mask` it sees only keys whose element is not zero. A score of minus infinity, as from such
//!   a bias, hides a key too.
//! - `sinks`, `[num_heads]`, holds a score for each head that takes part in the softmax and has no value: it only makes the
//!   probabilities smaller.
//! - `lse`, `[batch, num_heads, q_len]`, is the natural logarithm of the sum of the exponentials of a row's scores,
//!   that of its sink included.
//! - A row that sees nothing gives zeros, and the sink as `lse`, or minus infinity without sinks.
//! - With a `dropout` above zero, probabilities are multiplied by zero, with this probability, or else by its inverse share: each
//!   element of `softmax(scores)` by 0 or `1 / (1 - dropout)` (`dropout` counts in steps of `2^-16`). `lse` does not change. What
//!   is dropped is a function of `seed`, `offset`, the number of the request (its place in the batch, or among the packed), the
//!   head, and the query and the key in their request: the same on every device, in every kernel and beside any other requests,
//!   and in `attention_backward` with the same options. A captured graph repeats it. Kernels without it refuse the call.
//! - Rounding: scores, exponentials and all sums are in f32. Where the type has 16 bits, the exponentials are rounded to
//!   it before they multiply `v`, but not before they are added up. The result is rounded once.
//! - Range: where scores are above `2^28` in magnitude, or values above `2^80`, CUDA kernels of 16-bit types may overflow on the
//!   way and give NaN. Those of f32 take numbers within `2^-12` of the end of the range for infinity. Exponentials below `2^-126` of a row's largest count as zero, and on
//!   CPUs with AMX so do their products with values.
//! - NaN and infinities give what the formula gives. A row is never affected by `k` of a key that it does not see; `v`
//!   must be finite there, or the row may become NaN.
//! - Bits: a row's keys are added up from key 0 in blocks of fixed size. So the bits of a row depend on its own request
//!   alone: not on the batch, nor on other requests, nor on how many of the queries before it are part of the call.
//!   There are two exceptions on CUDA devices, both for 16-bit requests that are not packed and have neither mask nor
//!   bias. Requests with up to 32 rows per KV head (a query has a row for each head that shares it) use different
//!   blocks from larger ones; and in f16, requests whose queries see all keys (neither `causal` nor `window`) use
//!   different blocks with more than 1024 keys.
//! - Blocks: `block_q`, 16, 64, 128, 192 or 256, is how many rows of queries a kernel works on at a time, and
//!   `block_kv`, 32, 64, 80, 96 or 128, how many keys; zero, the default, lets the kernel choose. Kernels whose blocks
//!   have another size refuse the call. The number of rows does not change bits. The number of keys does, except for
//!   heads of 128 in bf16 on Hopper. (Even there it may, in rows with a weight more than `2^32` times that of their
//!   first key and others below `2^-94` of it.)
//! - Memory is linear in the lengths.

mod backward;
#[cfg(feature = "lab")]
pub(in crate::ops) mod cases;
mod cpu;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod sm90;
#[cfg(feature = "cuda")]
mod split;
#[cfg(feature = "tests")]
mod tests;

pub use backward::{AttentionBackward, Backward};
pub use problem::Problem;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::gradient::{InputGradient, Source};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Autocast, Call, Cost, DTypeRule, Gradient, Kernel, Op, OpSpec,
    Products, SizeSpec, shape,
};
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};

pub(in crate::ops) const Q: usize = 0;
pub(in crate::ops) const K: usize = 1;
pub(in crate::ops) const V: usize = 2;
pub(in crate::ops) const Q_STARTS: usize = 3;
pub(in crate::ops) const KV_STARTS: usize = 4;
pub(in crate::ops) const MASK: usize = 5;
pub(in crate::ops) const BIAS: usize = 6;
pub(in crate::ops) const SINKS: usize = 7;
pub(in crate::ops) const OUT: usize = 8;
pub(in crate::ops) const LSE: usize = 9;

const CAUSAL: usize = 0;
const WINDOW: usize = 1;
const SOFTCAP: usize = 2;
const SCALE: usize = 3;
const DROPOUT: usize = 4;
const SEED: usize = 5;
const OFFSET: usize = 6;
const BLOCK_Q: usize = 7;
const BLOCK_KV: usize = 8;

const SPEC: OpSpec = OpSpec {
    name: "attention",
    summary: "Softmax attention of queries over keys and values, in linear memory",
    args: &[
        ArgSpec::input("q", shape![batch, q_len, num_heads, head_dim], DTypeRule::FLOAT, ""),
        ArgSpec::input("k", shape![batch, kv_len, num_kv_heads, head_dim], DTypeRule::Same(Q), ""),
        ArgSpec::input("v", shape![batch, kv_len, num_kv_heads, head_dim], DTypeRule::Same(Q), ""),
        ArgSpec::input(
            "q_starts",
            shape![requests + 1],
            DTypeRule::I32,
            "where each request's queries begin, and the end",
        )
        .optional(),
        ArgSpec::input(
            "kv_starts",
            shape![requests + 1],
            DTypeRule::I32,
            "the same of keys; given with q_starts",
        )
        .with(Q_STARTS),
        ArgSpec::input(
            "mask",
            shape![(1 or batch), (1 or num_heads), q_len, kv_len],
            DTypeRule::OneOf(&[DType::Bool, DType::U8]),
            "keys that are seen",
        )
        .optional(),
        ArgSpec::input(
            "bias",
            shape![(1 or batch), (1 or num_heads), q_len, kv_len],
            DTypeRule::SameOr(Q, &[DType::F32]),
            "f32 or of the type of q: added to scores",
        )
        .optional(),
        ArgSpec::input("sinks", shape![num_heads], DTypeRule::F32, "a score without a value").optional(),
        ArgSpec::output("out", shape![batch, q_len, num_heads, head_dim], DTypeRule::Same(Q), "")
            .zeroed_with(Q_STARTS),
        ArgSpec::output(
            "lse",
            shape![batch, num_heads, q_len],
            DTypeRule::F32,
            "logarithm of the sum of exponentials",
        )
        .optional()
        .zeroed_with(Q_STARTS),
    ],
    attrs: &[
        AttrSpec {
            name: "causal",
            kind: AttrKind::Bool(false),
            doc: "queries see keys up to their own position, counted from the end",
        },
        AttrSpec {
            name: "window",
            kind: AttrKind::Int(0),
            doc: "keys before a query's own position that it sees at most; 0 for all",
        },
        AttrSpec {
            name: "softcap",
            kind: AttrKind::Float(0.0),
            doc: "limit that scores approach; 0 for none",
        },
        AttrSpec {
            name: "scale",
            kind: AttrKind::OptionalFloat,
            doc: "factor of the scores; left out, 1 / sqrt(head_dim)",
        },
        AttrSpec {
            name: "dropout",
            kind: AttrKind::Float(0.0),
            doc: "share of probabilities that do not count, from 0 to below 1; the others count for more",
        },
        AttrSpec { name: "seed", kind: AttrKind::Int(0), doc: "decides what dropout drops" },
        AttrSpec {
            name: "offset",
            kind: AttrKind::Int(0),
            doc: "with another number, the same seed drops others",
        },
        AttrSpec {
            name: "block_q",
            kind: AttrKind::Int(0),
            doc: "rows of queries that are worked on at a time: 16, 64, 128, 192 or 256; 0 to let the kernel choose",
        },
        AttrSpec {
            name: "block_kv",
            kind: AttrKind::Int(0),
            doc: "keys that are worked on at a time: 32, 64, 80, 96 or 128; 0 to let the kernel choose",
        },
    ],
    sizes: &[
        SizeSpec { name: "batch", default: 8, doc: "number of requests" },
        SizeSpec { name: "q_len", default: 2048, doc: "queries of the longest request" },
        SizeSpec { name: "kv_len", default: 2048, doc: "keys of the longest request" },
        SizeSpec { name: "num_heads", default: 32, doc: "number of query heads" },
        SizeSpec { name: "num_kv_heads", default: 8, doc: "number of KV heads" },
        SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
    ],
    gradient: Some(Gradient {
        op: "attention_backward",
        inputs: &[
            (backward::Q, Source::Input(Q)),
            (backward::K, Source::Input(K)),
            (backward::V, Source::Input(V)),
            (backward::OUT, Source::Output(OUT)),
            (backward::LSE, Source::Output(LSE)),
            (backward::DOUT, Source::Incoming(OUT)),
            (backward::Q_STARTS, Source::Input(Q_STARTS)),
            (backward::KV_STARTS, Source::Input(KV_STARTS)),
            (backward::MASK, Source::Input(MASK)),
            (backward::BIAS, Source::Input(BIAS)),
            (backward::SINKS, Source::Input(SINKS)),
            (backward::DLSE, Source::Incoming(LSE)),
        ],
        results: &[
            (Q, InputGradient::Output(backward::DQ)),
            (K, InputGradient::Output(backward::DK)),
            (V, InputGradient::Output(backward::DV)),
            (BIAS, InputGradient::Output(backward::DBIAS)),
            (SINKS, InputGradient::Output(backward::DSINKS)),
        ],
        ..Gradient::EMPTY
    }),
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

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let element = p.dtype.size() as f64;
        let (queries, keys) = ((p.batch * p.q_len) as f64, (p.batch * p.kv_len) as f64);
        let heads = 2.0 * queries * p.num_heads as f64 + 2.0 * keys * p.num_kv_heads as f64;
        let given = |bytes: Option<usize>| bytes.map_or(0.0, |n| n as f64);
        let bytes = heads * p.head_dim as f64 * element
            + given(p.mask.map(|m| m.elements))
            + given(p.bias.map(|b| b.grid.elements * b.dtype.size()))
            + if p.has_lse { 4.0 * queries * p.num_heads as f64 } else { 0.0 };
        let flops = 4.0 * p.head_dim as f64 * p.num_heads as f64 * p.seen_pairs();
        Cost::multiplying(bytes, flops, Products::of(p.dtype))
    }
}

/// Preferred first. Conditions and ranks may depend on anything but lengths and batch, since a row's bits must not
/// depend on those.
static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    split::SPLIT,
    #[cfg(feature = "cuda")]
    sm90::SM90,
    #[cfg(feature = "cuda")]
    cuda::SM80,
    #[cfg(feature = "cuda")]
    split::SPLIT_GENERIC,
    #[cfg(feature = "cuda")]
    cuda::SM80_F32,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    Kernel::cpu("attention_avx512", Tier::Avx512, cpu::run).when(cpu::supports).flushing_subnormals(),
    Kernel::cpu("attention_avx2", Tier::Avx2, cpu::run).when(cpu::supports),
    Kernel::cpu("attention_portable", Tier::Portable, cpu::run).when(cpu::supports),
];

/// A call of `attention`.
///
/// ```
/// use warpsmith::{ops::Attention, DType, Device, Tensor};
/// let q = Tensor::randn(&[1, 5, 8, 64], DType::F32, Device::Cpu, 0)?;
/// let k = Tensor::randn(&[1, 9, 2, 64], DType::F32, Device::Cpu, 1)?;
/// let v = Tensor::randn(&[1, 9, 2, 64], DType::F32, Device::Cpu, 2)?;
/// let out = Attention::new(&q, &k, &v).causal().run()?;
/// assert_eq!(out.shape(), [1, 5, 8, 64]);
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type Attention<'a> = Call<'a, Forward>;

impl<'a> Call<'a, Forward> {
    /// Attention of the queries over the keys and values.
    pub fn new(
        q: impl Into<TensorView<'a>>,
        k: impl Into<TensorView<'a>>,
        v: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(Q, q).input(K, k).input(V, v)
    }

    /// Queries see no keys after their own position; the last query is at the last key.
    pub fn causal(self) -> Self {
        self.flag(CAUSAL, true)
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

    /// Drops this share of the probabilities, chosen by the seed, and gives the others more weight. Zero for none.
    ///
    /// ```
    /// use warpsmith::{ops::Attention, DType, Device, Tensor};
    /// let x = Tensor::randn(&[1, 300, 2, 64], DType::F32, Device::Cpu, 0)?;
    /// let [a, b] = [1, 1].map(|seed| Attention::new(&x, &x, &x).dropout(0.1, seed).run());
    /// assert_eq!(a?.to_vec::<f32>()?, b?.to_vec::<f32>()?);
    /// let error = Attention::new(&x, &x, &x).dropout(1.0, 1).run().unwrap_err();
    /// assert!(error.to_string().contains("dropout"));
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn dropout(self, probability: f64, seed: u64) -> Self {
        self.float(DROPOUT, probability).int(SEED, seed as i64)
    }

    /// With another number, the same seed drops others: for instance that of a layer, or of a step.
    pub fn offset(self, offset: u64) -> Self {
        self.int(OFFSET, offset as i64)
    }

    /// How many rows of queries, and how many keys, are worked on at a time. Zero lets the kernel choose.
    ///
    /// A row is a query of one head; some kernels take the heads that share a KV head together. Kernels that have no such
    /// blocks for the call are passed over.
    ///
    /// ```
    /// use warpsmith::{ops::Attention, DType, Device, Tensor};
    /// let x = Tensor::randn(&[1, 300, 2, 64], DType::F32, Device::Cpu, 0)?;
    /// let out = Attention::new(&x, &x, &x).blocks(64, 32).run()?;
    /// assert_eq!(out.shape(), x.shape());
    /// let error = Attention::new(&x, &x, &x).blocks(100, 0).run().unwrap_err();
    /// assert!(error.to_string().contains("block_q"));
    /// # Ok::<(), warpsmith::Error>(())
    /// ```
    pub fn blocks(self, block_q: usize, block_kv: usize) -> Self {
        self.int(BLOCK_Q, block_q).int(BLOCK_KV, block_kv)
    }

    /// The tensors hold several requests one after the other, which begin at these tokens.
    pub fn starts(self, q_starts: impl Into<TensorView<'a>>, kv_starts: impl Into<TensorView<'a>>) -> Self {
        self.input(Q_STARTS, q_starts).input(KV_STARTS, kv_starts)
    }

    /// Which keys each query sees: those whose element is not zero.
    pub fn mask(self, mask: impl Into<TensorView<'a>>) -> Self {
        self.input(MASK, mask)
    }

    /// Adds to the scores.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// A score without a value for each head.
    pub fn sinks(self, sinks: impl Into<TensorView<'a>>) -> Self {
        self.input(SINKS, sinks)
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
