//! `cross_entropy` and its gradient on CUDA devices: host half.

use super::backward::{self, DLOGITS, DLOSS};
use super::{COUNT, LOGITS, LOSS, LSE, Problem, Reduction, TARGETS};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads of a block, as in the device code.
const THREADS: u32 = 512;

kernel_params! {
    struct CrossEntropyParams {
        logits: u64, targets: u64,
        /// Of rows: where they are wanted, or in the workspace.
        losses: u64,
        /// Zero where they are not wanted.
        lse: u64, loss: u64, count: u64,
        vocab: i64, num_rows: i64, step: i64, ignore_index: i64,
        softcap: f32, smoothing: f32, z_loss: f32,
        wide_targets: i32,
        by_row: i32, is_mean: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct CrossEntropyBackwardParams {
        logits: u64, targets: u64, lse: u64, count: u64, dloss: u64, dlogits: u64,
        vocab: i64, step: i64, out_step: i64, ignore_index: i64,
        softcap: f32, smoothing: f32, z_loss: f32,
        wide_targets: i32,
        by_row: i32, is_mean: i32,
        rows: Rows,
        dloss_rows: Rows,
    }
}

const SOURCE: Source = Source { name: "cross_entropy", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source = Source { name: "cross_entropy_backward", code: include_str!("backward.cu") };

static LOSSES: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: CrossEntropyParams::prelude,
    function: "cross_entropy",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [[false, false], [false, true], [true, false], [true, true]];
        let of = |dtype| {
            flags.into_iter().flat_map(move |flags| [false, true].map(|vector| defines(dtype, vector, flags)))
        };
        FLOATS.into_iter().flat_map(of).collect()
    },
};

static SUM: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: CrossEntropyParams::prelude,
    function: "cross_entropy_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![defines(DType::F32, true, [false; 2])],
};

static GRADIENTS: CudaKernel = CudaKernel {
    source: BACKWARD_SOURCE,
    prelude: CrossEntropyBackwardParams::prelude,
    function: "cross_entropy_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [[false, false], [false, true], [true, false], [true, true]];
        let of = |dtype| flags.map(|[vector, capped]| backward_defines(dtype, vector, capped));
        FLOATS.into_iter().flat_map(of).collect()
    },
};

fn defines(dtype: DType, vector: bool, [capped, smooth]: [bool; 2]) -> Defines {
    vec![element(dtype), flag("VECTOR", vector), flag("CAPPED", capped), flag("SMOOTH", smooth)]
}

fn backward_defines(dtype: DType, vector: bool, capped: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector), flag("CAPPED", capped)]
}

pub(super) const FORWARD: Kernel<Problem> = Kernel::cuda("cross_entropy_generic", &LOSSES, run)
    .and(&SUM)
    .configured(|_, _| format!("a row a block of {THREADS} threads"))
    .with_workspace(
        |p, _| if p.options.reduction == Reduction::None { 0 } else { p.num_rows * size_of::<f32>() },
    )
    .when(|p, _| few_enough(p.num_rows));

pub(super) const BACKWARD: Kernel<backward::Problem> =
    Kernel::cuda("cross_entropy_backward_generic", &GRADIENTS, run_backward)
        .configured(|_, _| format!("a row a block of {THREADS} threads"))
        .when(|p, _| few_enough(p.num_rows));

fn few_enough(rows: usize) -> std::result::Result<(), String> {
    match rows > i32::MAX as usize {
        true => Err("more rows than a grid can have".into()),
        false => Ok(()),
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let by_row = p.options.reduction == Reduction::None;
    let at = |index: usize| launch.args.address(index) as u64;
    let params = CrossEntropyParams {
        logits: at(LOGITS),
        targets: at(TARGETS),
        losses: if by_row { at(LOSS) } else { launch.workspace as u64 },
        lse: at(LSE),
        loss: if by_row { 0 } else { at(LOSS) },
        count: at(COUNT),
        vocab: p.vocab as i64,
        num_rows: p.num_rows as i64,
        step: p.step as i64,
        ignore_index: p.options.ignore_index,
        softcap: p.options.softcap(),
        smoothing: p.options.label_smoothing(),
        z_loss: p.options.z_loss(),
        wide_targets: (p.target_dtype == DType::I64) as i32,
        by_row: by_row as i32,
        is_mean: (p.options.reduction == Reduction::Mean) as i32,
        rows: Rows::new(&p.rows),
    };
    if p.num_rows > 0 {
        let config = LaunchConfig::new([grid_blocks("cross_entropy", p.num_rows)?, 1, 1], [THREADS, 1, 1], 0);
        let flags = [p.options.softcap() != 0.0, p.options.label_smoothing() != 0.0];
        // SAFETY: `check` bound rows to the tensors, and the workspace has room for their losses; targets that are no columns
        // are not used as such.
        unsafe { launch.record(&defines(p.dtype, p.vector_rows, flags), &config, &params)? };
    }
    if by_row && !p.has_count {
        return Ok(());
    }
    let config = LaunchConfig::new([1, 1, 1], [THREADS, 1, 1], 0);
    // SAFETY: the first launch wrote the losses that this one reads.
    unsafe { launch.record_part(&SUM, &defines(DType::F32, true, [false; 2]), &config, &params) }
}

fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index: usize| launch.args.address(index) as u64;
    let params = CrossEntropyBackwardParams {
        logits: at(backward::LOGITS),
        targets: at(backward::TARGETS),
        lse: at(backward::LSE),
        count: at(backward::COUNT),
        dloss: at(DLOSS),
        dlogits: at(DLOGITS),
        vocab: p.vocab as i64,
        step: p.steps[0] as i64,
        out_step: p.steps[1] as i64,
        ignore_index: p.options.ignore_index,
        softcap: p.options.softcap(),
        smoothing: p.options.label_smoothing(),
        z_loss: p.options.z_loss(),
        wide_targets: (p.target_dtype == DType::I64) as i32,
        by_row: (p.options.reduction == Reduction::None) as i32,
        is_mean: (p.options.reduction == Reduction::Mean) as i32,
        rows: Rows::new(&p.rows),
        dloss_rows: Rows::new(&p.dloss),
    };
    let config =
        LaunchConfig::new([grid_blocks("cross_entropy_backward", p.num_rows)?, 1, 1], [THREADS, 1, 1], 0);
    let defines = backward_defines(p.dtype, p.vector_rows, p.options.softcap() != 0.0);
    // SAFETY: `check` bound rows to the tensors; each element is read by the thread that writes its gradient, before it does.
    unsafe { launch.record(&defines, &config, &params) }
}
