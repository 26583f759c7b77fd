//! `kv_copy` on CUDA devices: host half.

use super::{CACHE, PAIRS, Problem, WIDEST};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, blocks_ahead, grid_blocks, is_large};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "kv_copy", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Accesses a thread has in flight where there is enough work for all multiprocessors.
const ITEMS: usize = 2;
/// Blocks per multiprocessor that count as enough.
const FULL_BLOCKS: usize = 4;
/// Fewest threads for a run, so that neighbouring threads touch whole sectors.
const MIN_LANES: usize = 8;

kernel_params! {
    struct KvCopyParams {
        cache: u64, pairs: u64,
        num_pages: i64,
        /// Of pairs, and of the two pages of a pair.
        pair_strides: [i64; 2],
        /// In bytes.
        page_stride: i64,
        /// Accesses a run takes.
        units: i64,
        num_pairs: u32, num_jobs: u32, tiles: u32,
        /// Bytes of an element.
        size: i32,
        lane_bits: i32, wide_pairs: i32,
        /// Whether the copied pages exceed L2, and how many blocks prefetch theirs: see `l2.cuh`.
        is_large: i32, blocks_ahead: i32,
        runs: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: KvCopyParams::prelude,
    function: "kv_copy",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

fn defines(width: usize, items: usize) -> Defines {
    vec![("WIDTH", width.to_string()), ("ITEMS", items.to_string())]
}

fn variants() -> Vec<Defines> {
    let widths = (0..=WIDEST.trailing_zeros()).map(|bits| 1 << bits);
    widths.flat_map(|width| [1, ITEMS].map(|items| defines(width, items))).collect()
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, info| Tiling::new(p, info).to_string()).when(|p, _| {
        match p.runs.len().saturating_mul(p.num_pairs) > i32::MAX as usize {
            true => Err(format!("more than {} runs of neighbouring elements to copy", i32::MAX)),
            false => Ok(()),
        }
    })
}

/// How the work is divided among threads.
struct Tiling {
    lanes: usize,
    items: usize,
    /// Blocks a run is divided among.
    tiles: usize,
    blocks: usize,
}

impl Tiling {
    fn new(p: &Problem, info: &DeviceInfo) -> Tiling {
        let units = (p.run_bytes() / p.width).max(1);
        let with = |items: usize| {
            let least = units.next_power_of_two().min(MIN_LANES);
            let lanes = units.div_ceil(items).next_power_of_two().clamp(least, THREADS);
            let tiles = units.div_ceil(lanes * items);
            let blocks = (p.runs.len() * p.num_pairs).div_ceil(THREADS / lanes) * tiles;
            Tiling { lanes, items, tiles, blocks }
        };
        let many = with(ITEMS);
        if many.blocks >= FULL_BLOCKS * info.units { many } else { with(1) }
    }
}

impl std::fmt::Display for Tiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tiling { lanes, items, blocks, .. } = self;
        write!(f, "{lanes} threads a run, {items} accesses a thread, {blocks} blocks")
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    if p.num_pairs == 0 {
        return Ok(());
    }
    let tiling = Tiling::new(p, launch.info);
    let blocks = grid_blocks("kv_copy", tiling.blocks)?;
    let large = is_large(launch.info, p.runs.len() * p.num_pairs * p.run_bytes(), DType::U8);
    let params = KvCopyParams {
        cache: launch.args.address(CACHE) as u64,
        pairs: launch.args.address(PAIRS) as u64,
        num_pages: p.num_pages as i64,
        pair_strides: p.pair_strides.map(|stride| stride as i64),
        page_stride: p.page_stride as i64 * p.size as i64,
        units: (p.run_bytes() / p.width) as i64,
        num_pairs: p.num_pairs as u32,
        num_jobs: (p.runs.len() * p.num_pairs) as u32,
        tiles: tiling.tiles as u32,
        size: p.size as i32,
        lane_bits: tiling.lanes.trailing_zeros() as i32,
        wide_pairs: (p.pair_dtype == DType::I64) as i32,
        is_large: large,
        // Few, as for a large tensor, even if all pages fit in L2: each prefetches its pair as well.
        blocks_ahead: blocks_ahead(launch.info, 1, THREADS * tiling.items * p.width),
        runs: Rows::new(&p.runs),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound the runs to the cache and found their places multiples of the width; `supports` bound the
    // numbers that are narrowed here; the kernel skips pages out of range.
    unsafe { launch.record(&defines(p.width, tiling.items), &config, &params) }
}
