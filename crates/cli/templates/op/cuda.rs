//! `new_op` on CUDA devices: host half.

use super::{OUT, Problem, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag};
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads per block.
const THREADS: usize = 256;
/// 16-byte chunks per thread, all of which are in flight at once.
const ITEMS: usize = 4;

kernel_params! {
    struct NewOpParams { x: u64, out: u64, count: i64, alpha: f32, elements: Rows }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "new_op", code: include_str!("kernel.cu") },
    prelude: NewOpParams::prelude,
    function: "new_op",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().flat_map(|&dtype| [false, true].map(|v| defines(dtype, v))).collect(),
};

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, _| {
        let accesses = if p.vector { "16-byte accesses" } else { "one element at a time" };
        format!("{THREADS} threads x {ITEMS} chunks a block, {accesses}")
    })
}

fn defines(dtype: DType, vector: bool) -> Defines {
    let sizes = [("THREADS", THREADS.to_string()), ("ITEMS", ITEMS.to_string())];
    sizes.into_iter().chain([element(dtype), flag("VECTOR", vector)]).collect()
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let blocks = (p.count * p.dtype.size()).div_ceil(16 * ITEMS * THREADS);
    let blocks = u32::try_from(blocks).map_err(|_| Error::Launch {
        kernel: "new_op".into(),
        what: "number of blocks",
        got: blocks as u64,
        limit: u32::MAX as u64,
    })?;
    let params = NewOpParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        count: p.count as i64,
        alpha: f32::from_bits(p.alpha_bits),
        elements: Rows::new(&p.elements),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound shapes and strides to the parameters, and the grid covers the elements.
    unsafe { launch.record(&defines(p.dtype, p.vector), &config, &params) }
}
