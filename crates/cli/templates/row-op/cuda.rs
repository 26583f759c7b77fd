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

/// Threads per block, which has a row.
const THREADS: usize = 256;

kernel_params! {
    struct NewOpParams { x: u64, out: u64, hidden: i64, x_step: i64, out_step: i64, rows: Rows }
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
        format!("{THREADS} threads a row, {accesses}")
    })
}

fn defines(dtype: DType, vector: bool) -> Defines {
    [("THREADS", THREADS.to_string())].into_iter().chain([element(dtype), flag("VECTOR", vector)]).collect()
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let blocks = i32::try_from(p.num_rows).map_err(|_| Error::Launch {
        kernel: "new_op".into(),
        what: "number of blocks",
        got: p.num_rows as u64,
        limit: i32::MAX as u64,
    })?;
    let params = NewOpParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        hidden: p.hidden as i64,
        x_step: p.steps[0] as i64,
        out_step: p.steps[1] as i64,
        rows: Rows::new(&p.rows),
    };
    let config = LaunchConfig::new([blocks as u32, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound shapes and strides to the parameters, and each block has a row.
    unsafe { launch.record(&defines(p.dtype, p.vector), &config, &params) }
}
