//! `kv_store`: writes the keys and values of new tokens to their slots in a paged cache, optionally rotating the keys
//! and casting both on the way.
//!
//! - Shapes: `k` and `v` are `[num_tokens, num_kv_heads, head_dim]`, `slots` is `[num_tokens]`, `k_cache` and `v_cache` are
//!   `[num_pages, page_size, num_kv_heads, head_dim]`, changed in place. Any strides: `k` and `v` may lie in a packed
//!   projection, pages may have heads before slots, and the two caches may take turns page by page.
//! - Token `i` goes to slot `slots[i] % page_size` of page `slots[i] / page_size`. A token whose slot is -1 is skipped.
//! - Any other slot out of range is an error on the CPU, found before anything is written. On a GPU, which cannot
//!   inspect values in time, the token is skipped.
//! - No two tokens should have the same slot. If some have, the CPU stores the last of them; on a device each element
//!   stored there is that of one of them.
//! - Types: f32, f16 or bf16 for `k` and `v`; the same or f8e4m3 or f8e5m2 for the caches; i64 or i32 for `slots` and
//!   `positions`; f32 for the rest.
//! - With `positions`, `[num_tokens]`, keys are rotated as `rope` defines it, by the options and tables it has: a position
//!   outside the tables is an error on the CPU, and the nearest row is used on a device. On a device at most 512 elements
//!   of a head can be rotated.
//! - With 8-bit caches, `k_scale` and `v_scale` may be given: one scale for all heads, `[1]`, or one for each,
//!   `[num_kv_heads]`. Stored values are divided by them: `stored = round(x / scale)`, saturating as in `cast`.
//! - Rounding: rotation and quotient are formed in f32, and the result is rounded once. Values that are neither rotated
//!   nor cast keep their bits.
//! - An empty cache is left alone.

#[cfg(feature = "lab")]
pub(in crate::ops) mod cases;
pub(in crate::ops) mod cpu;
#[cfg(feature = "cuda")]
pub(in crate::ops) mod cuda;
#[cfg(feature = "lab")]
mod reference;
pub(in crate::ops) mod slots;
#[cfg(feature = "tests")]
mod tests;

use crate::cpu::Tier;
use crate::device::Stream;
use crate::error::{Error, Result};
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::ops::rope::{self, Rotation};
use crate::tensor::{DType, TensorView, TensorViewMut};
use slots::Slots;

const K: usize = 0;
const V: usize = 1;
const SLOTS: usize = 2;
const POSITIONS: usize = 3;
const COS: usize = 4;
const SIN: usize = 5;
const K_SCALE: usize = 6;
const V_SCALE: usize = 7;
const K_CACHE: usize = 8;
const V_CACHE: usize = 9;

// The first options are those of `rope`, at the positions they have there.

/// Keys or values: where they come from and where they go, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Side {
    /// Distances of tokens, heads and elements of a head.
    source: [isize; 3],
    /// Distances of pages, slots, heads and elements of a head.
    cache: [isize; 4],
    /// Distance of the heads' scales; `None` without scales.
    scale: Option<isize>,
}

impl Side {
    /// Whether all heads of a token are one run on both sides, under one scale.
    fn is_one_run(&self, head_dim: usize) -> bool {
        let run = |strides: &[isize]| strides == [head_dim as isize, 1];
        run(&self.source[1..]) && run(&self.cache[2..]) && self.scale.unwrap_or(0) == 0
    }
}

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    from: DType,
    to: DType,
    slots: Slots,
    /// Type and stride of the positions, if keys are rotated.
    positions: Option<(DType, isize)>,
    rotation: Option<Rotation>,
    num_tokens: usize,
    num_heads: usize,
    head_dim: usize,
    /// Keys, then values.
    sides: [Side; 2],
    num_scales: [usize; 2],
    /// Heads, and the parts a rotation divides them into, consist of 16-byte pieces of `k` and `v`, whose results can be
    /// stored at once.
    vector: bool,
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let op = Forward::SPEC.name;
    let mut sizes = Matcher::of(args, attrs)?;
    let (from, to) = (args.at(K).dtype(), args.at(K_CACHE).dtype());
    let (num_tokens, num_heads, head_dim) =
        (sizes.size("num_tokens"), sizes.size("num_kv_heads"), sizes.size("head_dim"));

    rope::check_numbers(&sizes, args, attrs)?;
    let mut rotation = None;
    let mut position = None;
    if let Some(positions) = args.get(POSITIONS) {
        let empty = num_tokens * num_heads * head_dim == 0;
        rotation = Some(Rotation::check(&mut sizes, args, attrs, [COS, SIN], head_dim, empty)?);
        position = Some((positions.dtype(), positions.layout().step()));
    } else if args.get(COS).is_some() || args.get(SIN).is_some() {
        return Err(Error::argument(op, "positions", "a tensor, because there are tables", "nothing"));
    }

    let scales = check_scales(args, [K_SCALE, V_SCALE], to)?;
    let sides = [(K, K_CACHE, scales[0]), (V, V_CACHE, scales[1])].map(|(x, cache, scale)| Side {
        source: args.at(x).layout().strides().try_into().expect("three dimensions"),
        cache: args.at(cache).layout().strides().try_into().expect("four dimensions"),
        scale,
    });
    let piece = 16 / from.size();
    let vector = rotation.is_none_or(|r| r.pairs().is_multiple_of(piece))
        && [K, V, K_CACHE, V_CACHE].iter().all(|&index| args.at(index).has_rows_of(piece));
    Ok(Problem {
        from,
        to,
        slots: Slots::of(args, SLOTS, &sizes),
        positions: position,
        rotation,
        num_tokens,
        num_heads,
        head_dim,
        sides,
        num_scales: [K_SCALE, V_SCALE].map(|index| args.get(index).map_or(0, |s| s.layout().numel())),
        vector,
    })
}

/// Distances of the heads' scales of keys and values, where there are some: only with caches of 8 bits.
pub(in crate::ops) fn check_scales(
    args: &Args<'_>,
    indices: [usize; 2],
    cache: DType,
) -> Result<[Option<isize>; 2]> {
    let mut steps = [None; 2];
    for (step, index) in steps.iter_mut().zip(indices) {
        let Some(scale) = args.get(index) else { continue };
        if cache.size() != 1 {
            let expected = "nothing, because the caches are not of an 8-bit type";
            return Err(Error::argument(
                args.spec().name,
                args.spec().args[index].name,
                expected,
                "a tensor",
            ));
        }
        *step = Some(if scale.layout().numel() == 1 { 0 } else { scale.layout().step() });
    }
    Ok(steps)
}

/// The op, as listed in [`crate::ops::ALL`].
#[derive(Default)]
pub struct Forward;

// SAFETY: only `check` makes a problem; it holds the types, sizes and strides of the arguments it judged, and the kernels
// go by these alone. Indices that tensors hold are checked or clamped where they are used.
unsafe impl Op for Forward {
    type Problem = Problem;

    const SPEC: OpSpec = OpSpec {
        name: "kv_store",
        summary: "Stores keys and values in a paged cache, with optional rope and 8-bit cast",
        args: &[
            ArgSpec::input("k", shape![num_tokens, num_kv_heads, head_dim], DTypeRule::FLOAT, ""),
            ArgSpec::input("v", shape![num_tokens, num_kv_heads, head_dim], DTypeRule::Same(K), ""),
            ArgSpec::input(
                "slots",
                shape![num_tokens],
                DTypeRule::INDEX,
                "page * page_size + place in it, -1 to skip",
            ),
            ArgSpec::input("positions", shape![num_tokens], DTypeRule::INDEX, "keys are rotated if given")
                .optional(),
            ArgSpec::input("cos", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "given with sin")
                .optional(),
            ArgSpec::input("sin", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "").with(COS),
            ArgSpec::input(
                "k_scale",
                shape![(1 or num_kv_heads)],
                DTypeRule::F32,
                "what keys are divided by",
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
                "k_cache",
                shape![num_pages, page_size, num_kv_heads, head_dim],
                DTypeRule::SameOr(K, &[DType::F8E4M3, DType::F8E5M2]),
                "of the type of k, or 8-bit",
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
                name: "to",
                kind: AttrKind::Choice(&["auto", "f8e4m3", "f8e5m2"]),
                doc: "type of the caches where they are made for a test; auto: that of k",
            },
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of new tokens" },
            SizeSpec { name: "num_kv_heads", default: 8, doc: "number of heads" },
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
        let elements = (p.num_tokens * p.num_heads * p.head_dim) as f64;
        let indices = p.slots.dtype.size() + p.positions.map_or(0, |(dtype, _)| dtype.size());
        let tables = p.rotation.map_or(0, |r| r.table_bytes(p.num_tokens));
        let scales = (p.num_scales[0] + p.num_scales[1]) * size_of::<f32>();
        let rotations = p.rotation.map_or(0, |r| p.num_tokens * p.num_heads * r.pairs()) as f64;
        let quotients = if scales > 0 { 2.0 * elements } else { 0.0 };
        let tokens = 2.0 * elements * (p.from.size() + p.to.size()) as f64;
        let others = (p.num_tokens * indices + tables + scales) as f64;
        Cost::moving(tokens + others, 6.0 * rotations + quotients)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::kernel("kv_store_cuda"),
    Kernel::cpu("kv_store_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("kv_store_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("kv_store_portable", Tier::Portable, cpu::run),
];

/// A call of `kv_store`.
///
/// ```
/// use warpsmith::{ops::KvStore, DType, Device, Tensor};
/// let k = Tensor::randn(&[3, 2, 64], DType::BF16, Device::Cpu, 0)?;
/// let v = Tensor::randn(&[3, 2, 64], DType::BF16, Device::Cpu, 1)?;
/// // The last places of page 4 and the first of page 7.
/// let slots = Tensor::from_slice(&[4i64 * 16 + 14, 4 * 16 + 15, 7 * 16], &[3], Device::Cpu)?;
/// let positions = Tensor::from_slice(&[30i64, 31, 32], &[3], Device::Cpu)?;
/// let mut k_cache = Tensor::zeros(&[10, 16, 2, 64], DType::BF16, Device::Cpu)?;
/// let mut v_cache = Tensor::zeros(&[10, 16, 2, 64], DType::BF16, Device::Cpu)?;
/// KvStore::new(&k, &v, &slots).rope(&positions).theta(500_000.0).run(&mut k_cache, &mut v_cache)?;
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type KvStore<'a> = Call<'a, Forward>;

rope::options!(Forward, position_scale, [COS, SIN]);

impl<'a> Call<'a, Forward> {
    /// Stores the heads of `k` and `v` at their tokens' `slots`.
    pub fn new(
        k: impl Into<TensorView<'a>>,
        v: impl Into<TensorView<'a>>,
        slots: impl Into<TensorView<'a>>,
    ) -> Self {
        Call::start().input(K, k).input(V, v).input(SLOTS, slots)
    }

    /// Rotates the keys by their tokens' `positions` first; the next options say how.
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
        k_cache: impl Into<TensorViewMut<'b>>,
        v_cache: impl Into<TensorViewMut<'b>>,
    ) -> Result<()>
    where
        'a: 'b,
    {
        let stream = self.default_stream()?;
        self.run_into(k_cache, v_cache, &stream)
    }

    /// Runs on `stream`.
    pub fn run_into<'b>(
        self,
        k_cache: impl Into<TensorViewMut<'b>>,
        v_cache: impl Into<TensorViewMut<'b>>,
        stream: &Stream,
    ) -> Result<()>
    where
        'a: 'b,
    {
        self.launch([(K_CACHE, k_cache.into()), (V_CACHE, v_cache.into())], stream)
    }
}
