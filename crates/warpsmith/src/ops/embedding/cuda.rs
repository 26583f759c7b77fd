//! `embedding` and its gradient on CUDA devices: host half.

use super::backward::{self, DOUT, DWEIGHT};
use super::{IDS, OUT, Problem, WEIGHT, WIDEST};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Accesses a thread has in flight where there is enough work for all multiprocessors.
const ITEMS: usize = 2;
/// Blocks per multiprocessor that count as enough.
const FULL_BLOCKS: usize = 4;
/// Fewest threads for a row, so that neighbouring threads touch whole sectors.
const MIN_LANES: usize = 8;
/// Rows and columns of dweight that a block has, as in the device code.
const BLOCK_ROWS: usize = 32;
const BLOCK_COLUMNS: usize = 4 * THREADS;

kernel_params! {
    struct EmbeddingParams {
        weight: u64, ids: u64, out: u64,
        vocab: i64, num_ids: i64,
        /// Accesses of a row.
        units: i64,
        /// Bytes from one row of weight to the next, and from one access to the next.
        weight_pitch: i64, weight_step: i64, out_step: i64,
        tiles: u32,
        /// Bytes of an element.
        size: i32,
        lane_bits: i32, wide_ids: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct EmbeddingBackwardParams {
        ids: u64, dout: u64, dweight: u64,
        vocab: i64, num_ids: i64, hidden: i64,
        /// In elements: of rows of dweight, and of neighbours in rows of both.
        weight_pitch: i64, dout_step: i64, weight_step: i64,
        wide_ids: i32,
        rows: Rows,
    }
}

static FORWARD: CudaKernel = CudaKernel {
    source: Source { name: "embedding", code: include_str!("kernel.cu") },
    prelude: EmbeddingParams::prelude,
    function: "embedding",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: forward_variants,
};

static BACKWARD: CudaKernel = CudaKernel {
    source: Source { name: "embedding_backward", code: include_str!("backward.cu") },
    prelude: EmbeddingBackwardParams::prelude,
    function: "embedding_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.map(backward_defines).to_vec(),
};

fn forward_defines(width: usize, items: usize) -> Defines {
    vec![("WIDTH", width.to_string()), ("ITEMS", items.to_string())]
}

/// Elements have two bytes or more.
fn forward_variants() -> Vec<Defines> {
    let widths = (1..=WIDEST.trailing_zeros()).map(|bits| 1 << bits);
    widths.flat_map(|width| [1, ITEMS].map(|items| forward_defines(width, items))).collect()
}

fn backward_defines(dtype: DType) -> Defines {
    vec![("IN", dtype.name().into())]
}

pub(super) const fn forward(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &FORWARD, run_forward)
        .configured(|p, info| Tiling::new(p, info).to_string())
        .when(|p, info| few_enough(p.num_ids.max(Tiling::new(p, info).blocks)))
}

pub(super) const fn backward(name: &'static str) -> Kernel<backward::Problem> {
    Kernel::cuda(name, &BACKWARD, run_backward)
        .configured(|p, _| {
            let [across, down] = backward_grid(p);
            format!("{BLOCK_ROWS} rows of {BLOCK_COLUMNS} columns a block, {across} x {down} blocks")
        })
        .when(|p, _| {
            let [_, down] = backward_grid(p);
            if down > u16::MAX as usize {
                return Err(format!("rows longer than {}", u16::MAX as usize * BLOCK_COLUMNS));
            }
            few_enough(p.num_ids)
        })
}

fn few_enough(count: usize) -> std::result::Result<(), String> {
    match count > i32::MAX as usize {
        true => Err(format!("more than {} ids or blocks", i32::MAX)),
        false => Ok(()),
    }
}

/// Blocks over the rows of dweight, and over its columns.
fn backward_grid(p: &backward::Problem) -> [usize; 2] {
    [p.vocab.div_ceil(BLOCK_ROWS), p.hidden.div_ceil(BLOCK_COLUMNS)]
}

/// How the rows of the result are divided among threads.
struct Tiling {
    lanes: usize,
    items: usize,
    /// Blocks a row is divided among.
    tiles: usize,
    blocks: usize,
}

impl Tiling {
    fn new(p: &Problem, info: &DeviceInfo) -> Tiling {
        let units = units(p).max(1);
        let with = |items: usize| {
            let least = units.next_power_of_two().min(MIN_LANES);
            let lanes = units.div_ceil(items).next_power_of_two().clamp(least, THREADS);
            let tiles = units.div_ceil(lanes * items);
            let blocks = p.num_ids.div_ceil(THREADS / lanes).saturating_mul(tiles);
            Tiling { lanes, items, tiles, blocks }
        };
        let many = with(ITEMS);
        if many.blocks >= FULL_BLOCKS * info.units { many } else { with(1) }
    }
}

impl std::fmt::Display for Tiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tiling { lanes, items, blocks, .. } = self;
        write!(f, "{lanes} threads a row, {items} accesses a thread, {blocks} blocks")
    }
}

/// Accesses of a row.
fn units(p: &Problem) -> usize {
    p.hidden * p.dtype.size() / p.width
}

fn run_forward(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = Tiling::new(p, launch.info);
    let blocks = grid_blocks("embedding", tiling.blocks)?;
    let at = |index| launch.args.address(index) as u64;
    let size = p.dtype.size();
    let step = |step: isize| if p.steps == [1, 1] { p.width as i64 } else { step as i64 * size as i64 };
    let params = EmbeddingParams {
        weight: at(WEIGHT),
        ids: at(IDS),
        out: at(OUT),
        vocab: p.vocab as i64,
        num_ids: p.num_ids as i64,
        units: units(p) as i64,
        weight_pitch: p.weight_pitch as i64 * size as i64,
        weight_step: step(p.steps[0]),
        out_step: step(p.steps[1]),
        tiles: tiling.tiles as u32,
        size: size as i32,
        lane_bits: tiling.lanes.trailing_zeros() as i32,
        wide_ids: (p.id_dtype == DType::I64) as i32,
        rows: Rows::new(&p.rows),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound rows to the tensors and found the places of dense ones multiples of the width; the kernel reads
    // no row for an id out of range; `supports` bound the numbers that are narrowed here.
    unsafe { launch.record(&forward_defines(p.width, tiling.items), &config, &params) }
}

fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let [across, down] = backward_grid(p);
    let blocks = grid_blocks("embedding_backward", across)?;
    let params = EmbeddingBackwardParams {
        ids: at(backward::IDS),
        dout: at(DOUT),
        dweight: at(DWEIGHT),
        vocab: p.vocab as i64,
        num_ids: p.num_ids as i64,
        hidden: p.hidden as i64,
        weight_pitch: p.weight_pitch as i64,
        dout_step: p.steps[0] as i64,
        weight_step: p.steps[1] as i64,
        wide_ids: (p.id_dtype == DType::I64) as i32,
        rows: Rows::new(&p.rows),
    };
    let config = LaunchConfig::new([blocks, down as u32, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound rows to the tensors; blocks cover dweight; ids out of range are no rows that are written.
    unsafe { launch.record(&backward_defines(p.dtype), &config, &params) }
}
