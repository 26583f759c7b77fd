//! `qkv_store` on CUDA devices: host half.

use super::{
    COS, K_CACHE, K_SCALE, K_WEIGHT, POSITIONS, Problem, Q_WEIGHT, QKV, SIN, SLOTS, V_CACHE, V_SCALE,
};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::kv_store::cuda::KvSlots;
use crate::ops::rope::cuda::{Heads, MAX_PAIRS, Rotary, Shape};
use crate::tensor::DType;

/// Threads of a block, and the heads they work on at once, as in the device code.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Blocks on a multiprocessor that count as enough: with more tokens than that, a block has all heads of its own.
const FULL_BLOCKS: usize = 8;
/// The longest head whose warps all have room in shared memory.
const MAX_HEAD_DIM: usize = 1024;

kernel_params! {
    /// Keys or values; distances are in elements.
    struct QkvCache {
        at: u64, scale: u64,
        page_stride: i64, place_stride: i64, head_stride: i64, step: i64,
        scale_stride: i64,
    }
}

kernel_params! {
    /// Addresses are zero for what is left out; distances are in elements.
    struct QkvStoreParams {
        qkv: u64, positions: u64, q_weight: u64, k_weight: u64,
        slots: KvSlots,
        token_stride: i64, head_stride: i64, step: i64,
        position_stride: i64,
        q_weight_step: i64, k_weight_step: i64,
        /// Keys, then values.
        caches: [QkvCache; 2],
        head_blocks: u32,
        heads: u32, num_heads: u32, num_kv_heads: u32, head_dim: u32,
        wide_positions: i32,
        eps: f32, unused: u32,
        rotary: Rotary,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "qkv_store", code: include_str!("kernel.cu") },
    prelude: QkvStoreParams::prelude,
    function: "qkv_store",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

/// What a kernel is compiled for.
#[derive(Clone, Copy)]
struct Variant {
    dtype: DType,
    /// The type of the caches.
    to: DType,
    /// Elements of a head that a lane holds; 0 where heads go through shared memory.
    per_lane: usize,
    /// 0: none, 1: angles, 2: tables.
    rope: u8,
    interleaved: bool,
    norm: bool,
}

impl Variant {
    fn of(p: &Problem) -> Variant {
        let per_lane = p.head_dim / 32;
        let whole = p.head_dim == 32 * per_lane && [2, 4, 8].contains(&per_lane) && p.piece >= per_lane;
        let all_rotated = p.rotation.is_none_or(|rotation| rotation.rotary_dim == p.head_dim);
        Variant {
            dtype: p.dtype,
            to: p.to,
            per_lane: if whole && all_rotated { per_lane } else { 0 },
            rope: p.rotation.map_or(0, |rotation| 1 + rotation.tables.is_some() as u8),
            interleaved: p.rotation.is_some_and(|rotation| rotation.interleaved),
            norm: p.weights.is_some(),
        }
    }

    fn defines(self) -> Defines {
        vec![
            element(self.dtype),
            ("CACHE", self.to.name().into()),
            ("PER_LANE", self.per_lane.to_string()),
            ("ROPE", self.rope.to_string()),
            flag("INTERLEAVED", self.interleaved),
            flag("NORM", self.norm),
        ]
    }
}

fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for to in [dtype, DType::F8E4M3, DType::F8E5M2] {
            for per_lane in [0, 2, 4, 8] {
                for (rope, interleaved) in [(0, false), (1, false), (1, true), (2, false), (2, true)] {
                    for norm in [false, true] {
                        all.push(Variant { dtype, to, per_lane, rope, interleaved, norm }.defines());
                    }
                }
            }
        }
    }
    all
}

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("qkv_store_cuda", &DEVICE, run)
    .configured(|p, info| {
        let blocks = head_blocks(p, info);
        match Variant::of(p).per_lane {
            0 => format!("a warp a head, {blocks} blocks a token, through shared memory"),
            each => format!("a warp a head, {blocks} blocks a token, {each} elements a lane"),
        }
    })
    .when(|p, _| {
        let most = i32::MAX as usize;
        if p.slots.count() > most || p.heads() > most / 2 {
            return Err(format!("more than {most} slots or {} heads", most / 2));
        }
        if p.head_dim > MAX_HEAD_DIM {
            return Err(format!("a head has more than {MAX_HEAD_DIM} elements"));
        }
        match p.rotation.is_some_and(|rotation| rotation.pairs() > MAX_PAIRS) {
            true => Err(format!("more than {} elements of a head are rotated", 2 * MAX_PAIRS)),
            false => Ok(()),
        }
    });

/// Blocks that share the heads of a token. Every head is computed on its own, so none of this affects the bits.
fn head_blocks(p: &Problem, info: &DeviceInfo) -> usize {
    (FULL_BLOCKS * info.units).div_ceil(p.num_tokens.max(1)).clamp(1, p.heads().div_ceil(WARPS).max(1))
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    if p.num_tokens * p.heads() * p.head_dim == 0 {
        return Ok(());
    }
    let at = |index| launch.args.address(index) as u64;
    let head_blocks = head_blocks(p, launch.info);
    let blocks = grid_blocks("qkv_store", p.num_tokens.saturating_mul(head_blocks))?;
    let variant = Variant::of(p);
    let cache = |side: usize| {
        let [page_stride, place_stride, head_stride, step] = p.caches[side].map(|stride| stride as i64);
        QkvCache {
            at: at([K_CACHE, V_CACHE][side]),
            scale: at([K_SCALE, V_SCALE][side]),
            page_stride,
            place_stride,
            head_stride,
            step,
            scale_stride: p.scales[side].unwrap_or(0) as i64,
        }
    };
    let rotary = p.rotation.map_or(Rotary::NONE, |rotation| {
        let Problem { num_tokens, num_heads, head_dim, .. } = *p;
        let strides = [p.qkv[1], p.qkv[2]];
        let heads = Heads { rotation, num_tokens, num_heads, head_dim, piece: 1, strides, in_place: true };
        Shape::new(heads, launch.info).rotary([COS, SIN].map(|index| launch.args.address(index)), 0)
    });
    let factors = 2 * p.rotation.map_or(0, |rotation| rotation.pairs());
    let staged = if variant.per_lane == 0 { WARPS * p.head_dim } else { 0 };
    let [q_weight_step, k_weight_step] = p.weights.unwrap_or([0; 2]).map(|step| step as i64);
    let params = QkvStoreParams {
        qkv: at(QKV),
        positions: at(POSITIONS),
        q_weight: at(Q_WEIGHT),
        k_weight: at(K_WEIGHT),
        slots: KvSlots::new(&p.slots, at(SLOTS)),
        token_stride: p.qkv[0] as i64,
        head_stride: p.qkv[1] as i64,
        step: p.qkv[2] as i64,
        position_stride: p.positions.map_or(0, |(_, stride)| stride as i64),
        q_weight_step,
        k_weight_step,
        caches: [cache(0), cache(1)],
        head_blocks: head_blocks as u32,
        heads: p.heads() as u32,
        num_heads: p.num_heads as u32,
        num_kv_heads: p.num_kv_heads as u32,
        head_dim: p.head_dim as u32,
        wide_positions: p.positions.is_some_and(|(dtype, _)| dtype == DType::I64) as i32,
        eps: f32::from_bits(p.eps_bits),
        unused: 0,
        rotary,
    };
    let shared = ((factors + staged) * size_of::<f32>()) as u32;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], shared);
    // SAFETY: `check` bound shapes and strides to the parameters, `when` the numbers that are narrowed here; the kernel
    // stores nothing for slots out of range, and shared memory holds the factors of a token and a head of every warp.
    unsafe { launch.record(&variant.defines(), &config, &params) }
}
