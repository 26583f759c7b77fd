//! `attention_backward`: the gradients of `attention` with respect to `q`, `k`, `v`, `bias` and `sinks`, given those of its
//! results.
//!
//! With the scores `s` of `attention`, before the bias `z`, and for the keys `j` that query `i` sees:
//! `p = exp(s - lse)`, `dp = dout · v`, `D = sum(dout * out) - dlse`, `dz = p * (dp - D)`, and then `ds` is `dz`, times
//! `1 - (z / softcap)²` with a softcap. `dq = scale * sum(ds * k)` over the keys, `dk = scale * sum(ds * q)` and
//! `dv = sum(p * dout)` over the queries of all heads that share the KV head, `dbias = dz`, summed over the requests and
//! heads that share an element of it, and `dsinks = -sum(exp(sink - lse) * D)` over all queries.
//!
//! With `dropout`, whose factors `m` of `p` are 0 or `1 / (1 - dropout)`: `dz = p * (m * dp - D)` and `dv = sum(m * p * dout)`.
//!
//! - `q`, `k`, `v`, `q_starts`, `kv_starts`, `mask`, `bias` and `sinks` are those of the forward call, and so are the options;
//!   `out` and `lse` are what it returned. `dlse`, the gradient of `lse`, counts as zero unless it is given.
//! - Shapes: `dq`, `dk` and `dv` have those of `q`, `k` and `v`, `dout` that of `out`, `dlse` that of `lse`, `dbias` that of
//!   `bias`, `dsinks` that of `sinks`; any strides. `dbias` and `dsinks` are optional; they need `bias` and `sinks`.
//! - Types: those of `attention`; `dq`, `dk`, `dv` and `dout` have the type of `q`, while `lse`, `dlse`, `dbias` and `dsinks`
//!   are f32.
//! - Every element is written: queries that see no key get zeros in `dq`, keys that no query sees get zeros in `dk` and `dv`.
//!   Packed requests are told apart as in the forward call; rows of no request (padding) are not written, and `run` gives
//!   zeros there.
//! - Rounding: scores, exponentials and all sums are in f32. Where the type has 16 bits, `p` and `ds` are rounded to it before
//!   they multiply `dout`, `q` and `k`. Results are rounded once.
//! - Range: `p` and `ds` below `2^-126` count as zero. Scores are rounded to f32 on the way, so `p` loses digits where they are
//!   large: a score near `2^20` has a weight that may be off by a sixteenth. On CPUs with AMX or AVX-512 BF16, products and `D`
//!   take subnormal numbers of bf16 for zero.
//! - NaN and infinities give what the formula gives. What the tensors hold for a key and a query of which one does not see the
//!   other does not meet in any score, but `q`, `k` and `dout` must be finite there, or the other's gradients may become NaN.
//!   Tokens of other requests never matter.
//! - Bits: sums have a fixed order, and two calls give the same bits. The gradients of a request do not depend on the batch nor
//!   on other requests, but for `dbias` and `dsinks` where requests share them.
//! - Memory is linear in the lengths.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod problem;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "cuda")]
mod sm80;
#[cfg(feature = "cuda")]
mod sm90;

pub use problem::Problem;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Op, OpSpec, Products, SizeSpec,
    shape,
};
use crate::tensor::{DType, Tensor, TensorView, TensorViewMut};

pub(super) const Q: usize = 0;
pub(super) const K: usize = 1;
pub(super) const V: usize = 2;
pub(super) const OUT: usize = 3;
pub(super) const LSE: usize = 4;
pub(super) const DOUT: usize = 5;
pub(super) const Q_STARTS: usize = 6;
pub(super) const KV_STARTS: usize = 7;
pub(super) const MASK: usize = 8;
pub(super) const BIAS: usize = 9;
pub(super) const SINKS: usize = 10;
pub(super) const DLSE: usize = 11;
pub(super) const DQ: usize = 12;
pub(super) const DK: usize = 13;
pub(super) const DV: usize = 14;
pub(super) const DBIAS: usize = 15;
pub(super) const DSINKS: usize = 16;

const CAUSAL: usize = 0;
const WINDOW: usize = 1;
const SOFTCAP: usize = 2;
const SCALE: usize = 3;
const DROPOUT: usize = 4;
const SEED: usize = 5;
const OFFSET: usize = 6;

const SPEC: OpSpec = OpSpec {
    name: "attention_backward",
    summary: "Gradients of attention with respect to its inputs, in linear memory",
    args: &[
        ArgSpec::input("q", shape![batch, q_len, num_heads, head_dim], DTypeRule::FLOAT, ""),
        ArgSpec::input("k", shape![batch, kv_len, num_kv_heads, head_dim], DTypeRule::Same(Q), ""),
        ArgSpec::input("v", shape![batch, kv_len, num_kv_heads, head_dim], DTypeRule::Same(Q), ""),
        ArgSpec::input(
            "out",
            shape![batch, q_len, num_heads, head_dim],
            DTypeRule::Same(Q),
            "result of the forward call",
        ),
        ArgSpec::input("lse", shape![batch, num_heads, q_len], DTypeRule::F32, "its other result"),
        ArgSpec::input(
            "dout",
            shape![batch, q_len, num_heads, head_dim],
            DTypeRule::Same(Q),
            "gradient of out",
        ),
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
            shape![bias_batch, bias_heads, q_len, kv_len],
            DTypeRule::SameOr(Q, &[DType::F32]),
            "f32 or of the type of q: added to scores; 1 or batch, and 1 or num_heads",
        )
        .optional(),
        ArgSpec::input("sinks", shape![num_heads], DTypeRule::F32, "a score without a value").optional(),
        ArgSpec::input("dlse", shape![batch, num_heads, q_len], DTypeRule::F32, "gradient of lse").optional(),
        ArgSpec::output("dq", shape![batch, q_len, num_heads, head_dim], DTypeRule::Same(Q), "gradient of q")
            .zeroed_with(Q_STARTS),
        ArgSpec::output(
            "dk",
            shape![batch, kv_len, num_kv_heads, head_dim],
            DTypeRule::Same(Q),
            "gradient of k",
        )
        .zeroed_with(Q_STARTS),
        ArgSpec::output(
            "dv",
            shape![batch, kv_len, num_kv_heads, head_dim],
            DTypeRule::Same(Q),
            "gradient of v",
        )
        .zeroed_with(Q_STARTS),
        ArgSpec::output(
            "dbias",
            shape![bias_batch, bias_heads, q_len, kv_len],
            DTypeRule::F32,
            "gradient of bias",
        )
        .optional(),
        ArgSpec::output("dsinks", shape![num_heads], DTypeRule::F32, "gradient of sinks").optional(),
    ],
    attrs: &[
        AttrSpec { name: "causal", kind: AttrKind::Bool(false), doc: "that of the forward call" },
        AttrSpec { name: "window", kind: AttrKind::Int(0), doc: "that of the forward call; 0 for all keys" },
        AttrSpec { name: "softcap", kind: AttrKind::Float(0.0), doc: "that of the forward call; 0 for none" },
        AttrSpec {
            name: "scale",
            kind: AttrKind::OptionalFloat,
            doc: "that of the forward call; left out, 1 / sqrt(head_dim)",
        },
        AttrSpec { name: "dropout", kind: AttrKind::Float(0.0), doc: "that of the forward call; 0 for none" },
        AttrSpec { name: "seed", kind: AttrKind::Int(0), doc: "that of the forward call" },
        AttrSpec { name: "offset", kind: AttrKind::Int(0), doc: "that of the forward call" },
    ],
    sizes: &[
        SizeSpec { name: "batch", default: 4, doc: "number of requests" },
        SizeSpec { name: "q_len", default: 2048, doc: "queries of the longest request" },
        SizeSpec { name: "kv_len", default: 2048, doc: "keys of the longest request" },
        SizeSpec { name: "num_heads", default: 32, doc: "number of query heads" },
        SizeSpec { name: "num_kv_heads", default: 8, doc: "number of KV heads" },
        SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
    ],
    ..OpSpec::EMPTY
};

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Backward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Backward {
    type Problem = Problem;

    const SPEC: OpSpec = SPEC;

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        problem::check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let f = &p.forward;
        let element = f.dtype.size() as f64;
        let (queries, keys) = ((f.batch * f.q_len) as f64, (f.batch * f.kv_len) as f64);
        let heads = 4.0 * (queries * f.num_heads as f64 + keys * f.num_kv_heads as f64);
        let given = |bytes: Option<usize>| bytes.map_or(0.0, |n| n as f64);
        let rows = 1.0 + f64::from(u8::from(p.dlse.is_some()));
        let bytes = heads * f.head_dim as f64 * element
            + given(f.mask.map(|m| m.elements))
            + given(f.bias.map(|b| b.grid.elements * b.dtype.size()))
            + given(p.dbias.map(|grid| grid.elements * size_of::<f32>()))
            + 4.0 * rows * queries * f.num_heads as f64;
        let flops = 10.0 * f.head_dim as f64 * f.num_heads as f64 * f.seen_pairs();
        Cost::multiplying(bytes, flops, Products::of(f.dtype))
    }
}

/// Preferred first. Conditions and ranks may look at everything but the lengths and the batch: a request's bits must not
/// depend on those.
static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    sm90::SM90,
    #[cfg(feature = "cuda")]
    sm80::SM80,
    #[cfg(feature = "cuda")]
    cuda::GENERIC,
    Kernel::cpu("attention_backward_avx512", Tier::Avx512, cpu::run).flushing_subnormals(),
    Kernel::cpu("attention_backward_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("attention_backward_portable", Tier::Portable, cpu::run),
];

/// A call of `attention_backward`.
///
/// ```
/// use warpsmith::{ops::{Attention, AttentionBackward}, DType, Device, Tensor};
/// let q = Tensor::randn(&[1, 5, 8, 64], DType::F32, Device::Cpu, 0)?;
/// let k = Tensor::randn(&[1, 9, 2, 64], DType::F32, Device::Cpu, 1)?;
/// let v = Tensor::randn(&[1, 9, 2, 64], DType::F32, Device::Cpu, 2)?;
/// let (out, lse) = Attention::new(&q, &k, &v).causal().run_with_lse()?;
/// let dout = Tensor::randn(&[1, 5, 8, 64], DType::F32, Device::Cpu, 3)?;
/// let (dq, dk, dv) = AttentionBackward::new(&q, &k, &v, &out, &lse, &dout).causal().run()?;
/// assert_eq!((dq.shape(), dk.shape(), dv.shape()), (q.shape(), k.shape(), v.shape()));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type AttentionBackward<'a> = Call<'a, Backward>;

impl<'a> Call<'a, Backward> {
    /// The gradients of a call of `attention` with these inputs and results, given the gradient `dout` of the first.
    pub fn new(
        q: impl Into<TensorView<'a>>,
        k: impl Into<TensorView<'a>>,
        v: impl Into<TensorView<'a>>,
        out: impl Into<TensorView<'a>>,
        lse: impl Into<TensorView<'a>>,
        dout: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(Q, q).input(K, k).input(V, v).input(OUT, out).input(LSE, lse).input(DOUT, dout)
    }

    /// The forward call was causal.
    pub fn causal(self) -> Self {
        self.flag(CAUSAL, true)
    }

    /// The `window` of the forward call.
    pub fn window(self, window: usize) -> Self {
        self.int(WINDOW, window)
    }

    /// The `softcap` of the forward call.
    pub fn softcap(self, softcap: f32) -> Self {
        self.float(SOFTCAP, softcap)
    }

    /// The `scale` of the forward call.
    pub fn scale(self, scale: f32) -> Self {
        self.float(SCALE, scale)
    }

    /// The `dropout` of the forward call, with its seed.
    pub fn dropout(self, probability: f64, seed: u64) -> Self {
        self.float(DROPOUT, probability).int(SEED, seed as i64)
    }

    /// The `offset` of the forward call.
    pub fn offset(self, offset: u64) -> Self {
        self.int(OFFSET, offset as i64)
    }

    /// The forward call had packed requests.
    pub fn starts(self, q_starts: impl Into<TensorView<'a>>, kv_starts: impl Into<TensorView<'a>>) -> Self {
        self.input(Q_STARTS, q_starts).input(KV_STARTS, kv_starts)
    }

    /// The `mask` of the forward call.
    pub fn mask(self, mask: impl Into<TensorView<'a>>) -> Self {
        self.input(MASK, mask)
    }

    /// The `bias` of the forward call.
    pub fn bias(self, bias: impl Into<TensorView<'a>>) -> Self {
        self.input(BIAS, bias)
    }

    /// The `sinks` of the forward call.
    pub fn sinks(self, sinks: impl Into<TensorView<'a>>) -> Self {
        self.input(SINKS, sinks)
    }

    /// The gradient of `lse`.
    pub fn dlse(self, dlse: impl Into<TensorView<'a>>) -> Self {
        self.input(DLSE, dlse)
    }

    /// Also computes the gradient of `bias`.
    pub fn dbias(self, dbias: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DBIAS, dbias)
    }

    /// Also computes the gradient of `sinks`.
    pub fn dsinks(self, dsinks: impl Into<TensorViewMut<'a>>) -> Self {
        self.output(DSINKS, dsinks)
    }

    /// Runs on the device's default stream and returns new tensors: the gradients of `q`, `k` and `v`.
    pub fn run(self) -> Result<(Tensor, Tensor, Tensor)> {
        let stream = self.default_stream()?;
        let [mut dq, mut dk, mut dv] = [
            self.like_packed(Q, Q_STARTS, &stream)?,
            self.like_packed(K, Q_STARTS, &stream)?,
            self.like_packed(V, Q_STARTS, &stream)?,
        ];
        self.run_into(&mut dq, &mut dk, &mut dv, &stream)?;
        Ok((dq, dk, dv))
    }

    /// Runs on `stream` into memory of the caller's.
    pub fn run_into<'b>(
        self,
        dq: impl Into<TensorViewMut<'b>>,
        dk: impl Into<TensorViewMut<'b>>,
        dv: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(DQ, dq.into()), (DK, dk.into()), (DV, dv.into())], stream)
    }
}
