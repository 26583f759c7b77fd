//! `qkv_store`: prepares the heads of a packed projection for paged attention, in one pass. Queries and keys are
//! normalised and rotated; queries stay where they are, keys and values go to their slots in a paged cache.
//!
//! - Shapes: `qkv` is `[num_tokens, heads, head_dim]`: the heads of queries, then `num_kv_heads` of keys and as many of
//!   values. `slots` and `positions` are `[num_tokens]`, `q_weight` and `k_weight` `[head_dim]`, `k_cache` and `v_cache`
//!   `[num_pages, page_size, num_kv_heads, head_dim]`. Any strides.
//! - With `q_weight` and `k_weight`, heads of queries and keys are normalised first, as `rms_norm` defines it, each kind with
//!   its weight. With `positions` they are then rotated as `rope` defines it, by the options and tables it has: a position
//!   outside the tables is an error on the CPU, and the nearest row is used on a device.
//! - Queries are changed in place. Keys and values of token `i` go to slot `slots[i] % page_size` of page
//!   `slots[i] / page_size`; in `qkv` they stay as they are. A token whose slot is -1 is not stored; its queries are
//!   changed all the same.
//! - Any other slot out of range is an error on the CPU, found before anything is written. On a GPU, which cannot
//!   inspect values in time, the token is not stored.
//! - No two tokens should have the same slot. If some have, each element stored there is that of one of them.
//! - Types: f32, f16 or bf16 for `qkv` and the weights; the same or f8e4m3 or f8e5m2 for the caches; i64 or i32 for `slots`
//!   and `positions`; f32 for the rest.
//! - With 8-bit caches, `k_scale` and `v_scale` may be given: one scale for all heads, `[1]`, or one for each,
//!   `[num_kv_heads]`. Stored values are divided by them, as in `kv_store`: `stored = round(x / scale)`, saturating as
//!   in `cast`.
//! - Rounding: norm, rotation and quotient are computed in f32, and the result is rounded once. Values, and heads that are
//!   neither normalised nor rotated, keep their bits, unless they are cast.
//! - NaN and infinity reach the elements that the formulas say.

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
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::ops::kv_store::check_scales;
use crate::ops::kv_store::slots::Slots;
use crate::ops::rope::{self, Rotation};
use crate::tensor::{DType, TensorView, TensorViewMut};

const SLOTS: usize = 0;
const POSITIONS: usize = 1;
const COS: usize = 2;
const SIN: usize = 3;
const Q_WEIGHT: usize = 4;
const K_WEIGHT: usize = 5;
const K_SCALE: usize = 6;
const V_SCALE: usize = 7;
const QKV: usize = 8;
const K_CACHE: usize = 9;
const V_CACHE: usize = 10;

// The first options are those of `rope`, at the positions they have there.
const EPS: usize = 4;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    /// The type of the caches.
    to: DType,
    slots: Slots,
    /// Type and stride of the positions; none if nothing is rotated.
    positions: Option<(DType, isize)>,
    rotation: Option<Rotation>,
    /// Distances of the elements of the weights of queries and keys, if heads are normalised.
    weights: Option<[isize; 2]>,
    eps_bits: u32,
    num_tokens: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// Distances of tokens, heads and elements of a head.
    qkv: [isize; 3],
    /// Distances of pages, slots, heads and elements of a head, of keys and of values.
    caches: [[isize; 4]; 2],
    /// Distances of the heads' scales, of keys and of values, where there are some.
    scales: [Option<isize>; 2],
    num_scales: usize,
    /// Heads are dense everywhere and can be moved so many elements at once, or 16 bytes if that is less.
    piece: usize,
}

impl Problem {
    fn heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// Whether heads of queries and keys are computed, not only moved.
    fn computes(&self) -> bool {
        self.weights.is_some() || self.rotation.is_some()
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = Forward::SPEC.name;
    let mut sizes = Matcher::new(args, attrs);
    // First, because scales may have one number for each of its heads.
    sizes.arg(K_CACHE)?;
    sizes.all()?;
    let (qkv, to) = (args.at(QKV), args.at(K_CACHE).dtype());
    let [num_tokens, heads, num_kv_heads, head_dim] =
        ["num_tokens", "heads", "num_kv_heads", "head_dim"].map(|name| sizes.size(name));
    let Some(num_heads) = heads.checked_sub(2 * num_kv_heads) else {
        let expected = format!("at least twice num_kv_heads={num_kv_heads} heads");
        return Err(Error::argument(op, "qkv", expected, format!("{heads}")));
    };
    let eps = attrs.float(EPS);
    sizes.option("eps", eps, "a finite number, zero or more", eps.is_finite() && eps >= 0.0)?;
    rope::check_numbers(&sizes, args, attrs)?;
    let (mut rotation, mut position) = (None, None);
    if let Some(positions) = args.get(POSITIONS) {
        let empty = num_tokens * heads * head_dim == 0;
        rotation = Some(Rotation::check(&mut sizes, args, attrs, [COS, SIN], head_dim, empty)?);
        position = Some((positions.dtype(), positions.layout().step()));
    } else if args.get(COS).is_some() || args.get(SIN).is_some() {
        return Err(Error::argument(op, "positions", "a tensor, because there are tables", "nothing"));
    }
    let step = |index: usize| args.get(index).map(|weight| weight.layout().step());
    let weights = match (step(Q_WEIGHT), step(K_WEIGHT)) {
        (Some(q), Some(k)) => Some([q, k]),
        _ => None,
    };
    let scales = check_scales(args, [K_SCALE, V_SCALE], to)?;
    let fits = |piece: usize| {
        let rows = [QKV, K_CACHE, V_CACHE].map(|index| args.at(index));
        rows.iter().all(|view| view.has_rows_of(piece.min(16 / view.dtype().size())))
    };
    Ok(Problem {
        dtype: qkv.dtype(),
        to,
        slots: Slots::of(args, SLOTS, &sizes),
        positions: position,
        rotation,
        weights,
        eps_bits: (eps as f32).to_bits(),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        qkv: qkv.layout().strides().try_into().expect("three dimensions"),
        caches: [K_CACHE, V_CACHE]
            .map(|index| args.at(index).layout().strides().try_into().expect("four dimensions")),
        scales,
        num_scales: [K_SCALE, V_SCALE]
            .iter()
            .flat_map(|&index| args.get(index))
            .map(|s| s.layout().numel())
            .sum(),
        piece: [8, 4, 2].into_iter().find(|&piece| fits(piece)).unwrap_or(1),
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
        name: "qkv_store",
        summary: "Norm and rope of packed queries and keys; keys and values into a paged cache",
        args: &[
            ArgSpec::input(
                "slots",
                shape![num_tokens],
                DTypeRule::INDEX,
                "page * page_size + place in it, -1 to skip",
            ),
            ArgSpec::input(
                "positions",
                shape![num_tokens],
                DTypeRule::INDEX,
                "queries and keys are rotated if given",
            )
            .optional(),
            ArgSpec::input("cos", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "given with sin")
                .optional(),
            ArgSpec::input("sin", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "").with(COS),
            ArgSpec::input(
                "q_weight",
                shape![head_dim],
                DTypeRule::Same(QKV),
                "heads are normalised if given",
            )
            .optional(),
            ArgSpec::input("k_weight", shape![head_dim], DTypeRule::Same(QKV), "").with(Q_WEIGHT),
            ArgSpec::input(
                "k_scale",
                shape![(1 or num_kv_heads)],
                DTypeRule::F32,
                "what keys are divided by, with 8-bit caches",
            )
            .optional(),
            ArgSpec::input(
                "v_scale",
                shape![(1 or num_kv_heads)],
                DTypeRule::F32,
                "what values are divided by",
            )
            .with(K_SCALE),
            ArgSpec::in_out(
                "qkv",
                shape![num_tokens, heads, head_dim],
                DTypeRule::FLOAT,
                "queries, keys, values; queries are changed",
            ),
            ArgSpec::in_out(
                "k_cache",
                shape![num_pages, page_size, num_kv_heads, head_dim],
                DTypeRule::SameOr(QKV, &[DType::F8E4M3, DType::F8E5M2]),
                "of the type of qkv, or 8-bit",
            ),
            ArgSpec::in_out(
                "v_cache",
                shape![num_pages, page_size, num_kv_heads, head_dim],
                DTypeRule::Same(K_CACHE),
                "",
            ),
        ],
        attrs: &[
            rope::ATTRS[rope::LAYOUT],
            rope::ATTRS[rope::THETA],
            rope::ATTRS[rope::ROTARY_DIM],
            AttrSpec { name: "position_scale", ..rope::ATTRS[rope::SCALE] },
            AttrSpec {
                name: "eps",
                kind: AttrKind::Float(1e-6),
                doc: "added to the mean square where heads are normalised",
            },
            AttrSpec {
                name: "to",
                kind: AttrKind::Choice(&["auto", "f8e4m3", "f8e5m2"]),
                doc: "type of the caches where they are made for a test; auto: that of qkv",
            },
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of new tokens" },
            SizeSpec { name: "heads", default: 48, doc: "heads of queries, keys and values together" },
            SizeSpec { name: "num_kv_heads", default: 8, doc: "heads of keys, and of values" },
            SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
            SizeSpec { name: "page_size", default: 16, doc: "tokens of a page" },
            SizeSpec { name: "num_pages", default: 1024, doc: "pages of a cache" },
            SizeSpec { name: "num_scales", default: 1, doc: "scales, if given: 1 or num_kv_heads" },
        ],
        derived: rope::DERIVED,
        ..OpSpec::EMPTY
    };

    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
        check(args, attrs)
    }

    fn kernels() -> &'static [Kernel<Problem>] {
        KERNELS
    }

    fn cost(p: &Problem) -> Cost {
        let queries = if p.computes() { p.num_heads } else { 0 };
        let head = (p.num_tokens * p.head_dim) as f64;
        let (from, to) = (p.dtype.size(), p.to.size());
        let heads = head * (2 * queries * from + 2 * p.num_kv_heads * (from + to)) as f64;
        let quotients = if p.num_scales > 0 { 2.0 * head * p.num_kv_heads as f64 } else { 0.0 };
        let indices = p.slots.dtype.size() + p.positions.map_or(0, |(dtype, _)| dtype.size());
        let tables = p.rotation.map_or(0, |r| r.table_bytes(p.num_tokens));
        let computed = (p.num_tokens * (p.num_heads + p.num_kv_heads)) as f64;
        let rotations = p.rotation.map_or(0.0, |r| 6.0 * r.pairs() as f64);
        let norms = p.weights.map_or(0.0, |_| 4.0 * p.head_dim as f64);
        let others = (p.num_tokens * indices + tables + p.num_scales * size_of::<f32>()) as f64;
        Cost::moving(heads + others, computed * (rotations + norms) + quotients)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("qkv_store_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("qkv_store_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("qkv_store_portable", Tier::Portable, cpu::run),
];

/// A call of `qkv_store`.
///
/// ```
/// use warpsmith::{ops::QkvStore, DType, Device, Tensor};
/// // Four heads of queries, two of keys and two of values.
/// let mut qkv = Tensor::randn(&[3, 8, 64], DType::BF16, Device::Cpu, 0)?;
/// let weight = Tensor::randn(&[64], DType::BF16, Device::Cpu, 1)?;
/// // The last places of page 4 and the first of page 7.
/// let slots = Tensor::from_slice(&[4i64 * 16 + 14, 4 * 16 + 15, 7 * 16], &[3], Device::Cpu)?;
/// let positions = Tensor::from_slice(&[30i64, 31, 32], &[3], Device::Cpu)?;
/// let mut k_cache = Tensor::zeros(&[10, 16, 2, 64], DType::BF16, Device::Cpu)?;
/// let mut v_cache = Tensor::zeros(&[10, 16, 2, 64], DType::BF16, Device::Cpu)?;
/// let call = QkvStore::new(&slots).norms(&weight, &weight).rope(&positions).theta(1e6);
/// call.run(&mut qkv, &mut k_cache, &mut v_cache)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type QkvStore<'a> = Call<'a, Forward>;

rope::options!(Forward, position_scale, [COS, SIN]);

impl<'a> Call<'a, Forward> {
    /// Stores keys and values at their tokens' `slots`.
    pub fn new(slots: impl Into<TensorView<'a>>) -> Self {
        Call::start().input(SLOTS, slots)
    }

    /// Normalises the heads of queries and keys first, each kind with its weight.
    pub fn norms(self, q_weight: impl Into<TensorView<'a>>, k_weight: impl Into<TensorView<'a>>) -> Self {
        self.input(Q_WEIGHT, q_weight).input(K_WEIGHT, k_weight)
    }

    /// What is added to the mean square where heads are normalised (1e-6 unless set).
    pub fn eps(self, eps: f32) -> Self {
        self.float(EPS, eps)
    }

    /// Rotates the heads of queries and keys by their tokens' `positions`; the next options say how.
    pub fn rope(self, positions: impl Into<TensorView<'a>>) -> Self {
        self.input(POSITIONS, positions)
    }

    /// Divides keys and values by these before they are rounded to the 8-bit type of the caches.
    pub fn scales(self, k_scale: impl Into<TensorView<'a>>, v_scale: impl Into<TensorView<'a>>) -> Self {
        self.input(K_SCALE, k_scale).input(V_SCALE, v_scale)
    }

    /// Runs on the device's default stream.
    pub fn run<'b>(
        self,
        qkv: impl Into<TensorViewMut<'b>>,
        k_cache: impl Into<TensorViewMut<'b>>,
        v_cache: impl Into<TensorViewMut<'b>>,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let stream = self.default_stream()?;
        self.run_into(qkv, k_cache, v_cache, &stream)
    }

    /// Runs on `stream`.
    pub fn run_into<'b>(
        self,
        qkv: impl Into<TensorViewMut<'b>>,
        k_cache: impl Into<TensorViewMut<'b>>,
        v_cache: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(QKV, qkv.into()), (K_CACHE, k_cache.into()), (V_CACHE, v_cache.into())], stream)
    }
}
