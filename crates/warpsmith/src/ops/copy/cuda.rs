//! `copy` on CUDA devices: host half.

use super::{OUT, Part, Problem, WIDEST, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};

const SOURCE: Source = Source { name: "copy", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Accesses a thread has in flight where there is enough work for all multiprocessors.
const ITEMS: usize = 2;
/// Blocks per multiprocessor that count as enough.
const FULL_BLOCKS: usize = 4;
/// Fewest threads for a line, so that neighbouring threads touch whole sectors.
const MIN_LANES: usize = 8;
/// The bytes of an element, the widths of planes.
const SIZES: [usize; 4] = [1, 2, 4, 8];

kernel_params! {
    struct CopyParams {
        x: u64, out: u64,
        /// Lines of a plane, and accesses of a line.
        lines: i64, units: i64,
        /// Bytes from one line to the next, and from one access to the next.
        x_pitch: i64, out_pitch: i64, x_step: i64, out_step: i64,
        /// Lines, or planes.
        num_starts: i64,
        tiles_down: u32, tiles_across: u32,
        /// Bytes of an element.
        size: i32,
        lane_bits: i32,
        starts: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: CopyParams::prelude,
    function: "copy",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

fn defines(width: usize, planes: bool, items: usize) -> Defines {
    vec![("WIDTH", width.to_string()), flag("PLANES", planes), ("ITEMS", items.to_string())]
}

fn variants() -> Vec<Defines> {
    let widths = (0..=WIDEST.trailing_zeros()).map(|bits| 1 << bits);
    let lines = widths.flat_map(|width| [1, ITEMS].map(|items| defines(width, false, items)));
    lines.chain(SIZES.map(|size| defines(size, true, 1))).collect()
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, info| Tiling::new(p, info).to_string()).when(|p, info| {
        let tiling = Tiling::new(p, info);
        match p.starts.len().max(tiling.blocks) > i32::MAX as usize {
            true => Err(format!("more than {} lines or tiles to copy", i32::MAX)),
            false => Ok(()),
        }
    })
}

/// How the work is divided among threads.
struct Tiling {
    planes: bool,
    lanes: usize,
    items: usize,
    /// Blocks that share the lines of a plane, and those that share a line.
    down: usize,
    across: usize,
    blocks: usize,
}

impl Tiling {
    fn new(p: &Problem, info: &DeviceInfo) -> Tiling {
        if p.part == Part::Planes {
            // As in the device code.
            let tile = if p.size >= 4 { 32 } else { 128 / p.size };
            let (down, across) = (p.lines.div_ceil(tile), p.len.div_ceil(tile));
            let blocks = p.starts.len().saturating_mul(down).saturating_mul(across);
            return Tiling { planes: true, lanes: THREADS, items: 1, down, across, blocks };
        }
        let units = units(p).max(1);
        let with = |items: usize| {
            let least = units.next_power_of_two().min(MIN_LANES);
            let lanes = units.div_ceil(items).next_power_of_two().clamp(least, THREADS);
            let across = units.div_ceil(lanes * items);
            let blocks = p.starts.len().div_ceil(THREADS / lanes).saturating_mul(across);
            Tiling { planes: false, lanes, items, down: 1, across, blocks }
        };
        let many = with(ITEMS);
        if many.blocks >= FULL_BLOCKS * info.units { many } else { with(1) }
    }
}

impl std::fmt::Display for Tiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tiling { lanes, items, blocks, .. } = self;
        match self.planes {
            true => write!(f, "tiles through shared memory, {blocks} blocks"),
            false => write!(f, "{lanes} threads a line, {items} accesses a thread, {blocks} blocks"),
        }
    }
}

/// Accesses of a line.
fn units(p: &Problem) -> usize {
    p.len * p.size / p.width
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = Tiling::new(p, launch.info);
    let blocks = grid_blocks("copy", tiling.blocks)?;
    let bytes = |elements: isize| elements as i64 * p.size as i64;
    let step = |elements: isize| if p.part == Part::Runs { p.width as i64 } else { bytes(elements) };
    let params = CopyParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        lines: p.lines as i64,
        units: units(p) as i64,
        x_pitch: bytes(p.pitches[0]),
        out_pitch: bytes(p.pitches[1]),
        x_step: step(p.steps[0]),
        out_step: step(p.steps[1]),
        num_starts: p.starts.len() as i64,
        tiles_down: tiling.down as u32,
        tiles_across: tiling.across as u32,
        size: p.size as i32,
        lane_bits: tiling.lanes.trailing_zeros() as i32,
        starts: Rows::new(&p.starts),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound lines and planes to the tensors, and found the places of runs multiples of the width; the
    // tiling covers each of them, and `supports` bound the numbers that are narrowed here.
    unsafe { launch.record(&defines(p.width, tiling.planes, tiling.items), &config, &params) }
}
