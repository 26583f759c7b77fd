//! `qk_norm_rope`: normalises the heads of queries and keys, each kind with its weight, and rotates them by the positions of their
//! tokens, in one pass: what attention of Qwen3 and Gemma 3 does before its scores.
//!
//! - Shapes: `q` and `q_out` are `[..., num_tokens, num_heads, head_dim]`, `k` and `k_out` `[..., num_tokens, num_kv_heads, head_dim]`,
//!   `q_weight` and `k_weight` `[head_dim]`, `positions` is `[..., num_tokens]`; any strides, so that heads inside a packed projection
//!   need no copy.
//! - Types: f32, f16 or bf16 for `q`, the same for `k` and the results; the same or f32 for both weights; i64 or i32 for `positions`.
//! - Each head is normalised as `rms_norm` defines it, with `eps`, and then rotated as `rope` defines it, by the options and tables
//!   it has. A position outside the tables is an error on the CPU, found before anything is written; on a GPU, which cannot
//!   inspect values in time, the nearest row is used.
//! - Rounding: norm and rotation are computed in f32, and the result is rounded once.
//! - NaN and infinity reach the elements that the formulas say.
//! - `q_out` may be `q`, and `k_out` may be `k`, in place. An empty tensor is left alone.
//!
//! Its gradient is that of its parts: `rope_backward` and then `rms_norm_backward`, which need no more than its inputs.

#[cfg(feature = "lab")]
mod cases;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "lab")]
mod reference;
#[cfg(feature = "tests")]
mod tests;

use super::rope::{self, Rotation};
use crate::cpu::Tier;
use crate::error::Result;
use crate::op::{
    ArgSpec, Args, AttrKind, AttrSpec, Attrs, Call, Cost, DTypeRule, Kernel, Matcher, Op, OpSpec, SizeSpec,
    shape,
};
use crate::tensor::{DType, Space, Tensor, TensorView};

const Q: usize = 0;
const K: usize = 1;
const Q_WEIGHT: usize = 2;
const K_WEIGHT: usize = 3;
const POSITIONS: usize = 4;
const COS: usize = 5;
const SIN: usize = 6;
const Q_OUT: usize = 7;
const K_OUT: usize = 8;

// The first options are those of `rope`, at the positions they have there.
const EPS: usize = 4;

/// A checked call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    dtype: DType,
    weight_dtype: DType,
    position_dtype: DType,
    num_tokens: usize,
    /// Heads of queries and of keys.
    heads: [usize; 2],
    head_dim: usize,
    rotation: Rotation,
    eps_bits: u32,
    /// Leading dimensions and tokens of q, k, q_out and k_out.
    tokens: Space<4>,
    /// Those of positions.
    positions: Space<1>,
    /// Strides of heads in q, k, q_out and k_out.
    head_strides: [isize; 4],
    /// Strides of elements of a head in q, k, q_out and k_out.
    steps: [isize; 4],
    /// Strides of both weights.
    weight_steps: [isize; 2],
    /// All heads, and both weights, can be moved in pieces of this many elements.
    piece: usize,
}

impl Problem {
    fn heads(&self) -> usize {
        self.heads[0] + self.heads[1]
    }

    fn eps(&self) -> f32 {
        f32::from_bits(self.eps_bits)
    }
}

fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Problem> {
    let mut sizes = Matcher::new(args, attrs);
    sizes.arg(Q)?;
    sizes.arg(K)?;
    let [heads, kv_heads, head_dim] = ["num_heads", "num_kv_heads", "head_dim"].map(|name| sizes.size(name));
    let all = [Q, K, Q_OUT, K_OUT].map(|index| args.at(index));
    let empty = all[0].layout().numel() + all[1].layout().numel() == 0;
    let rotation = Rotation::check(&mut sizes, args, attrs, [COS, SIN], head_dim, empty)?;
    sizes.all()?;
    let eps = attrs.float(EPS);
    sizes.option("eps", eps, "a finite number, zero or more", eps.is_finite() && eps >= 0.0)?;
    let (positions, weights) = (args.at(POSITIONS), [Q_WEIGHT, K_WEIGHT].map(|index| args.at(index)));
    let rank = sizes.leading_rank() + 1;
    let fits = |piece: usize| {
        let heads = all.iter().all(|view| view.has_rows_of(piece.min(16 / view.dtype().size())));
        heads && weights.iter().all(|weight| weight.has_rows_of(piece.min(16 / weight.dtype().size())))
    };
    Ok(Problem {
        dtype: all[0].dtype(),
        weight_dtype: weights[0].dtype(),
        position_dtype: positions.dtype(),
        num_tokens: positions.layout().numel(),
        heads: [heads, kv_heads],
        head_dim,
        rotation,
        eps_bits: (eps as f32).to_bits(),
        tokens: Space::new(rank, all.map(|view| view.layout())),
        positions: Space::new(rank, [positions.layout()]),
        head_strides: all.map(|view| view.layout().strides()[rank]),
        steps: all.map(|view| view.layout().step()),
        weight_steps: weights.map(|weight| weight.layout().step()),
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
        name: "qk_norm_rope",
        summary: "RMS normalisation of the heads of queries and keys, then their rotary embedding",
        args: &[
            ArgSpec::input("q", shape![.., num_tokens, num_heads, head_dim], DTypeRule::FLOAT, ""),
            ArgSpec::input("k", shape![.., num_tokens, num_kv_heads, head_dim], DTypeRule::Same(Q), ""),
            ArgSpec::input(
                "q_weight",
                shape![head_dim],
                DTypeRule::SameOr(Q, &[DType::F32]),
                "of the norm; f32 too",
            ),
            ArgSpec::input("k_weight", shape![head_dim], DTypeRule::Same(Q_WEIGHT), "of the norm"),
            ArgSpec::input("positions", shape![.., num_tokens], DTypeRule::INDEX, ""),
            ArgSpec::input("cos", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "given with sin")
                .optional(),
            ArgSpec::input("sin", shape![max_pos, rotary_dim / 2], DTypeRule::F32, "").with(COS),
            ArgSpec::output("q_out", shape![.., num_tokens, num_heads, head_dim], DTypeRule::Same(Q), "")
                .in_place_of(Q),
            ArgSpec::output("k_out", shape![.., num_tokens, num_kv_heads, head_dim], DTypeRule::Same(Q), "")
                .in_place_of(K),
        ],
        attrs: &[
            rope::ATTRS[rope::LAYOUT],
            rope::ATTRS[rope::THETA],
            rope::ATTRS[rope::ROTARY_DIM],
            rope::ATTRS[rope::SCALE],
            AttrSpec {
                name: "eps",
                kind: AttrKind::Float(1e-6),
                doc: "added to the mean square where heads are normalised",
            },
        ],
        sizes: &[
            SizeSpec { name: "num_tokens", default: 8192, doc: "number of tokens" },
            SizeSpec { name: "num_heads", default: 32, doc: "heads of queries" },
            SizeSpec { name: "num_kv_heads", default: 8, doc: "heads of keys" },
            SizeSpec { name: "head_dim", default: 128, doc: "elements of a head" },
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
        let heads = (p.num_tokens * p.heads()) as f64;
        let elements = heads * p.head_dim as f64;
        let positions = (p.num_tokens * p.position_dtype.size()) as f64;
        let tables = p.rotation.table_bytes(p.num_tokens) as f64;
        let weights = (2 * p.head_dim * p.weight_dtype.size()) as f64;
        let bytes = 2.0 * elements * p.dtype.size() as f64 + positions + tables + weights;
        Cost::moving(bytes, 4.0 * elements + 6.0 * heads * p.rotation.pairs() as f64)
    }
}

static KERNELS: &[Kernel<Problem>] = &[
    #[cfg(feature = "cuda")]
    cuda::KERNEL,
    Kernel::cpu("qk_norm_rope_avx512", Tier::Avx512, cpu::run),
    Kernel::cpu("qk_norm_rope_avx2", Tier::Avx2, cpu::run),
    Kernel::cpu("qk_norm_rope_portable", Tier::Portable, cpu::run),
];

/// A call of `qk_norm_rope`.
///
/// ```
/// use warpsmith::{ops::QkNormRope, DType, Device, Tensor};
/// let q = Tensor::randn(&[3, 8, 64], DType::BF16, Device::Cpu, 0)?;
/// let k = Tensor::randn(&[3, 2, 64], DType::BF16, Device::Cpu, 1)?;
/// let weight = Tensor::randn(&[64], DType::BF16, Device::Cpu, 2)?;
/// let positions = Tensor::from_slice(&[0i64, 1, 2], &[3], Device::Cpu)?;
/// let (q, k) = QkNormRope::new(&q, &k, &weight, &weight, &positions).theta(1e6).run()?;
/// assert_eq!((q.shape(), k.shape()), (&[3, 8, 64][..], &[3, 2, 64][..]));
/// # Ok::<(), warpsmith::Error>(())
/// ```
pub type QkNormRope<'a> = Call<'a, Forward>;

rope::options!(Forward, scale, [COS, SIN]);

impl<'a> Call<'a, Forward> {
    /// Normalises and rotates the heads of `q` and `k`.
    pub fn new(
        q: impl Into<TensorView<'a>>,
        k: impl Into<TensorView<'a>>,
        q_weight: impl Into<TensorView<'a>>,
        k_weight: impl Into<TensorView<'a>>,
        positions: impl Into<TensorView<'a>>,
    ) -> Self {
        let call = Call::start().input(Q, q).input(K, k).input(Q_WEIGHT, q_weight).input(K_WEIGHT, k_weight);
        call.input(POSITIONS, positions)
    }

    /// What is added to the mean square (1e-6 unless set).
    pub fn eps(self, eps: f32) -> Self {
        self.float(EPS, eps)
    }

    /// Runs on the device's default stream and returns new tensors: queries and keys.
    pub fn run(self) -> Result<(Tensor, Tensor)> {
        Ok(self.run_for([Q_OUT, K_OUT])?.into())
    }
}
