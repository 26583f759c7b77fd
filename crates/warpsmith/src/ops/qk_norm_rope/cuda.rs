//! `qk_norm_rope` on CUDA devices: host half.

use super::{COS, K, K_OUT, K_WEIGHT, POSITIONS, Problem, Q, Q_OUT, Q_WEIGHT, SIN};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::rope::cuda::{Heads, MAX_PAIRS, Rotary, Shape};
use crate::tensor::{DType, Space};

/// Threads of a block, and the heads they work on at once, as in the device code.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Blocks on a multiprocessor that count as enough: with more tokens than that, a block has all heads of its own.
const FULL_BLOCKS: usize = 8;
/// The longest head whose warps all have room in shared memory.
const MAX_HEAD_DIM: usize = 1024;

kernel_params! {
    /// Queries or keys; distances are in elements.
    struct HeadsOfKind {
        from: u64, to: u64, weight: u64,
        from_head_stride: i64, to_head_stride: i64, from_step: i64, to_step: i64, weight_step: i64,
    }
}

kernel_params! {
    struct QkNormRopeParams {
        /// Queries, then keys.
        kinds: [HeadsOfKind; 2],
        positions: u64,
        head_blocks: u32,
        heads: u32, num_heads: u32, head_dim: u32,
        wide_positions: i32,
        eps: f32,
        /// Of q, k, q_out and k_out.
        tokens: Rows,
        /// Of positions.
        places: Rows,
        rotary: Rotary,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "qk_norm_rope", code: include_str!("kernel.cu") },
    prelude: QkNormRopeParams::prelude,
    function: "qk_norm_rope",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

/// What a kernel is compiled for.
#[derive(Clone, Copy)]
struct Variant {
    dtype: DType,
    weight: DType,
    /// Elements of a head that a lane holds; 0 where heads go through shared memory.
    per_lane: usize,
    tables: bool,
    interleaved: bool,
}

impl Variant {
    fn of(p: &Problem) -> Variant {
        let per_lane = p.head_dim / 32;
        let whole = p.head_dim == 32 * per_lane && [2, 4, 8].contains(&per_lane) && p.piece >= per_lane;
        Variant {
            dtype: p.dtype,
            weight: p.weight_dtype,
            per_lane: if whole && p.rotation.rotary_dim == p.head_dim { per_lane } else { 0 },
            tables: p.rotation.tables.is_some(),
            interleaved: p.rotation.interleaved,
        }
    }

    fn defines(self) -> Defines {
        vec![
            element(self.dtype),
            ("WEIGHT", self.weight.name().into()),
            ("PER_LANE", self.per_lane.to_string()),
            flag("HAS_TABLES", self.tables),
            flag("INTERLEAVED", self.interleaved),
        ]
    }
}

fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let weights = if dtype == DType::F32 { &[DType::F32][..] } else { &[dtype, DType::F32] };
        for &weight in weights {
            for per_lane in [0, 2, 4, 8] {
                for [tables, interleaved] in [[false, false], [false, true], [true, false], [true, true]] {
                    all.push(Variant { dtype, weight, per_lane, tables, interleaved }.defines());
                }
            }
        }
    }
    all
}

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("qk_norm_rope_cuda", &DEVICE, run)
    .configured(|p, info| {
        let blocks = head_blocks(p, info);
        match Variant::of(p).per_lane {
            0 => format!("a warp a head, {blocks} blocks a token, through shared memory"),
            each => format!("a warp a head, {blocks} blocks a token, {each} elements a lane"),
        }
    })
    .when(|p, _| {
        let most = i32::MAX as usize;
        if p.num_tokens > most || p.heads[0].max(p.heads[1]) > most / 2 {
            return Err(format!("more than {most} tokens or {} heads", most / 2));
        }
        if p.head_dim > MAX_HEAD_DIM {
            return Err(format!("a head has more than {MAX_HEAD_DIM} elements"));
        }
        match p.rotation.pairs() > MAX_PAIRS {
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
    let blocks = grid_blocks("qk_norm_rope", p.num_tokens.saturating_mul(head_blocks))?;
    let variant = Variant::of(p);
    let kind = |side: usize, [from, to, weight]: [usize; 3]| HeadsOfKind {
        from: at(from),
        to: at(to),
        weight: at(weight),
        from_head_stride: p.head_strides[side] as i64,
        to_head_stride: p.head_strides[side + 2] as i64,
        from_step: p.steps[side] as i64,
        to_step: p.steps[side + 2] as i64,
        weight_step: p.weight_steps[side] as i64,
    };
    let rotary = {
        let Problem { rotation, num_tokens, head_dim, .. } = *p;
        let strides = [p.head_strides[0], p.steps[0]];
        let num_heads = p.heads[0];
        let heads = Heads { rotation, num_tokens, num_heads, head_dim, piece: 1, strides, in_place: true };
        Shape::new(heads, launch.info).rotary([COS, SIN].map(|index| launch.args.address(index)), 0)
    };
    let staged = if variant.per_lane == 0 { WARPS * p.head_dim } else { 0 };
    let positions =
        Space { rank: p.positions.rank, sizes: p.positions.sizes, strides: [p.positions.strides[0]; 4] };
    let params = QkNormRopeParams {
        kinds: [kind(0, [Q, Q_OUT, Q_WEIGHT]), kind(1, [K, K_OUT, K_WEIGHT])],
        positions: at(POSITIONS),
        head_blocks: head_blocks as u32,
        heads: p.heads() as u32,
        num_heads: p.heads[0] as u32,
        head_dim: p.head_dim as u32,
        wide_positions: (p.position_dtype == DType::I64) as i32,
        eps: p.eps(),
        tokens: Rows::new(&p.tokens),
        places: Rows::new(&positions),
        rotary,
    };
    let shared = ((2 * p.rotation.pairs() + staged) * size_of::<f32>()) as u32;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], shared);
    // SAFETY: `check` bound shapes and strides to the parameters, `when` the numbers that are narrowed here; shared memory
    // holds the factors of a token and a head of every warp.
    unsafe { launch.record(&variant.defines(), &config, &params) }
}
