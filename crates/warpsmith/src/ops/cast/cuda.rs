//! `cast` on CUDA devices: host half.

use super::{OUT, Problem, SCALE, Scaling, TYPES, X, group};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, blocks_ahead, flag, grid_blocks, is_large};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "cast", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Groups of a thread, where there are enough for all multiprocessors. Many threads with one group each are fastest if
/// inputs and results are equally wide, two groups if results are wider; otherwise more, at most 64 bytes of loads at
/// once.
fn most_items(from: DType, to: DType, scaling: Scaling) -> usize {
    match scaling {
        Scaling::None if from.size() == to.size() => 1,
        Scaling::None if from.size() < to.size() => 2,
        _ => 4.min(64 / (group(from, to) * from.size())),
    }
}
/// Fewest threads a row, so that neighbouring threads touch whole sectors.
const MIN_LANES: usize = 8;

kernel_params! {
    struct CastParams {
        x: u64, scale: u64, out: u64,
        num_rows: i64, num_cols: i64, x_step: i64, out_step: i64,
        lane_bits: i32, col_tiles: u32,
        blocks_ahead: i32,
        rows: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: CastParams::prelude,
    function: "cast",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

fn defines(from: DType, to: DType, scaling: Scaling, vector: bool, items: usize) -> Defines {
    vec![
        ("IN", from.name().into()),
        ("OUT", to.name().into()),
        ("SCALE", (scaling as u8).to_string()),
        flag("VECTOR", vector),
        ("ITEMS", items.to_string()),
    ]
}

fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for from in TYPES {
        for to in TYPES {
            for scaling in [Scaling::None, Scaling::Multiply, Scaling::Divide] {
                let mut choices = vec![(false, 1), (true, 1), (true, most_items(from, to, scaling))];
                choices.dedup();
                all.extend(
                    choices.into_iter().map(|(vector, items)| defines(from, to, scaling, vector, items)),
                );
            }
        }
    }
    all
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, info| Tiling::new(p, info).to_string())
}

/// How the work is divided among threads. Every element is computed on its own, so none of this affects the bits.
struct Tiling {
    lanes: usize,
    items: usize,
    col_tiles: usize,
    blocks: usize,
}

impl Tiling {
    fn new(p: &Problem, info: &DeviceInfo) -> Tiling {
        let groups = p.num_cols.div_ceil(group(p.from, p.to)).max(1);
        let with = |items: usize| {
            let least = groups.next_power_of_two().min(MIN_LANES);
            let lanes = groups.div_ceil(items).next_power_of_two().clamp(least, THREADS);
            let col_tiles = groups.div_ceil(lanes * items);
            let blocks = p.num_rows.div_ceil(THREADS / lanes) * col_tiles;
            Tiling { lanes, items, col_tiles, blocks }
        };
        let many = with(most_items(p.from, p.to, p.scaling));
        if p.vector_rows && many.blocks >= 2 * info.units { many } else { with(1) }
    }
}

impl std::fmt::Display for Tiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tiling { lanes, items, blocks, .. } = self;
        write!(f, "{lanes} threads a row, {items} groups a thread, {blocks} blocks")
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let tiling = Tiling::new(p, launch.info);
    let blocks = grid_blocks("cast", tiling.blocks)?;
    let large = is_large(launch.info, p.num_rows * p.num_cols, p.from);
    let block_bytes = THREADS * tiling.items * group(p.from, p.to) * p.from.size();
    let params = CastParams {
        x: at(X),
        scale: at(SCALE),
        out: at(OUT),
        num_rows: p.num_rows as i64,
        num_cols: p.num_cols as i64,
        x_step: p.steps[0] as i64,
        out_step: p.steps[1] as i64,
        lane_bits: tiling.lanes.trailing_zeros() as i32,
        // No more than the number of blocks, which was checked.
        col_tiles: tiling.col_tiles as u32,
        blocks_ahead: blocks_ahead(launch.info, large, block_bytes),
        rows: Rows::new(&p.rows),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    let defines = defines(p.from, p.to, p.scaling, p.vector_rows, tiling.items);
    // SAFETY: `check` bound shapes and strides to the parameters, and the tiling covers every row.
    unsafe { launch.record(&defines, &config, &params) }
}
