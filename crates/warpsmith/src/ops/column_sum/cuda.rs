//! Adding partial sums on CUDA devices: host half.

use super::Target;
use crate::cuda::LaunchConfig;
use crate::cuda::rows::element;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Most gradients of one launch.
const MAX_SUMS: usize = 2;
/// Threads that share a column. Few threads suffice for few groups, and small blocks start sooner.
const ROWS: [usize; 2] = [8, 32];
const FEW_GROUPS: usize = 64;

kernel_params! {
    struct ColumnSumParams {
        partial: u64, out: [u64; MAX_SUMS], step: [i64; MAX_SUMS], num_groups: i64, hidden: i64,
    }
}

/// The device function; kernels that use it name it with `Kernel::and`.
pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "column_sum", code: include_str!("kernel.cu") },
    prelude: ColumnSumParams::prelude,
    function: "column_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().flat_map(|&dtype| ROWS.map(|rows| defines(dtype, rows))).collect(),
};

fn defines(dtype: DType, rows: usize) -> Defines {
    vec![element(dtype), ("ROWS", rows.to_string())]
}

/// Adds the partial sums that the call's scratch memory holds, at most two gradients. With no groups at all, the
/// gradients are zero.
///
/// # Safety
/// The scratch memory must hold `num_groups` rows of `hidden` sums for each target, and each target `hidden` elements
/// of `dtype`, until the work on the stream is done.
pub(in crate::ops) unsafe fn add<P>(
    launch: &Launch<'_, P>,
    num_groups: usize,
    hidden: usize,
    dtype: DType,
    targets: &[Target],
) -> Result<()> {
    if targets.is_empty() {
        return Ok(());
    }
    let target = |i: usize| targets.get(i).copied().unwrap_or_default();
    let params = ColumnSumParams {
        partial: launch.workspace as u64,
        out: std::array::from_fn(|i| target(i).0 as u64),
        step: std::array::from_fn(|i| target(i).1 as i64),
        num_groups: num_groups as i64,
        hidden: hidden as i64,
    };
    let rows = if num_groups <= FEW_GROUPS { ROWS[0] } else { ROWS[1] };
    let blocks = [hidden.div_ceil(32) as u32, targets.len() as u32, 1];
    let config = LaunchConfig::new(blocks, [32 * rows as u32, 1, 1], 0);
    // SAFETY: passed on; each block writes its own columns of one gradient.
    unsafe { launch.record_part(&DEVICE, &defines(dtype, rows), &config, &params) }
}
