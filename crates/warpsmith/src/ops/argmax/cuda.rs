//! `argmax` on CUDA devices: host half.
//!
//! Each block finds the largest element of a piece of a row; where rows have several pieces, a second launch combines
//! them. A value and its index are packed into one number that orders as the results do (see `kernel.cu`), so neither
//! the pieces nor the order of comparisons affects the result.

use super::{OUT, Problem, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// The fewest bytes a block reads, where there are enough.
const PIECE_BYTES: usize = THREADS * 16 * 4;
/// Blocks per multiprocessor that keep memory busy.
const FULL_BLOCKS: usize = 4;

kernel_params! {
    struct ArgmaxParams {
        x: u64, out: u64, found: u64,
        n: i64, piece: i64, step: i64,
        num_rows: u32,
        pieces: u32,
        wide_out: i32, unused: i32,
        rows: Rows,
    }
}

const SOURCE: Source = Source { name: "argmax", code: include_str!("kernel.cu") };

static PIECES: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: ArgmaxParams::prelude,
    function: "argmax",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().flat_map(|&dtype| [false, true].map(|v| defines(dtype, v))).collect(),
};

static JOIN: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: ArgmaxParams::prelude,
    function: "argmax_join",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![defines(DType::F32, true)],
};

fn defines(dtype: DType, vector: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector)]
}

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("argmax_cuda", &PIECES, run)
    .and(&JOIN)
    .configured(|p, info| format!("{} blocks a row", pieces(p, info)))
    .with_workspace(|p, info| match pieces(p, info) {
        1 => 0,
        pieces => p.num_rows * pieces * size_of::<u64>(),
    })
    .when(|p, info| match p.num_rows.saturating_mul(pieces(p, info)) > i32::MAX as usize {
        true => Err("more rows than a grid can have".into()),
        false => Ok(()),
    });

/// Blocks that share a row: enough to fill the device, but none with less than a piece.
fn pieces(p: &Problem, info: &DeviceInfo) -> usize {
    let most = (p.n * p.dtype.size()).div_ceil(PIECE_BYTES);
    (FULL_BLOCKS * info.units).div_ceil(p.num_rows.max(1)).clamp(1, most.max(1))
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let pieces = pieces(p, launch.info);
    // Whole chunks of 16 bytes.
    let piece = p.n.div_ceil(pieces).next_multiple_of(16 / p.dtype.size());
    let params = ArgmaxParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        found: launch.workspace as u64,
        n: p.n as i64,
        piece: piece as i64,
        step: p.step as i64,
        num_rows: p.num_rows as u32,
        pieces: pieces as u32,
        wide_out: (p.out_dtype == DType::I64) as i32,
        unused: 0,
        rows: Rows::new(&p.rows),
    };
    let blocks = grid_blocks("argmax", p.num_rows * pieces)?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound rows to the tensors; blocks cover the pieces of all rows, and the workspace has a place for
    // each.
    unsafe { launch.record(&defines(p.dtype, p.vector), &config, &params)? };
    if pieces == 1 {
        return Ok(());
    }
    let blocks = grid_blocks("argmax", p.num_rows.div_ceil(THREADS / 32))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: the first launch wrote all that this one reads; a warp has a row.
    unsafe { launch.record_part(&JOIN, &defines(DType::F32, true), &config, &params) }
}
