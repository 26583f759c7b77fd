//! `kl_div` and its gradient on CUDA devices: host half.

use super::backward::{self, DLOSS, DSTUDENT};
use super::{COUNT, LOSS, Problem, ROW_LOSSES, Reduction, TARGETS, logits_of, lse_of};
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
    struct KlDivParams {
        /// Of the distribution that weighs, and of the other.
        first: u64, second: u64,
        /// Zero without them.
        targets: u64,
        /// Of rows: where they are wanted, or in the workspace.
        losses: u64,
        /// Zero where they are not wanted.
        first_lse: u64, second_lse: u64, row_losses: u64, loss: u64, count: u64,
        vocab: i64, num_rows: i64, first_step: i64, second_step: i64, ignore_index: i64,
        temperature: f32, inverse: f32,
        wide_targets: i32,
        by_row: i32, is_mean: i32,
        /// Of first and second logits, targets, and losses that are wanted.
        rows: Rows,
        /// Of both lse and of row_losses.
        values: Rows,
    }
}

kernel_params! {
    struct KlDivBackwardParams {
        student: u64, teacher: u64, dstudent: u64,
        /// Zero without them.
        targets: u64,
        lse: u64, teacher_lse: u64, row_losses: u64, count: u64, dloss: u64,
        vocab: i64, step: i64, teacher_step: i64, out_step: i64, ignore_index: i64,
        inverse: f32,
        wide_targets: i32,
        by_row: i32, is_mean: i32,
        /// Of student, teacher, dstudent and targets.
        rows: Rows,
        /// Of both lse, of row_losses and of dloss.
        values: Rows,
    }
}

const SOURCE: Source = Source { name: "kl_div", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source = Source { name: "kl_div_backward", code: include_str!("backward.cu") };

static LOSSES: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: KlDivParams::prelude,
    function: "kl_div",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        FLOATS.into_iter().flat_map(|dtype| [false, true].map(|vector| defines(dtype, vector))).collect()
    },
};

static SUM: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: KlDivParams::prelude,
    function: "kl_div_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![defines(DType::F32, true)],
};

static GRADIENTS: CudaKernel = CudaKernel {
    source: BACKWARD_SOURCE,
    prelude: KlDivBackwardParams::prelude,
    function: "kl_div_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [[false, false], [false, true], [true, false], [true, true]];
        let of = |dtype| flags.map(|[vector, reverse]| backward_defines(dtype, vector, reverse));
        FLOATS.into_iter().flat_map(of).collect()
    },
};

fn defines(dtype: DType, vector: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector)]
}

fn backward_defines(dtype: DType, vector: bool, reverse: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector), flag("REVERSE", reverse)]
}

pub(super) const FORWARD: Kernel<Problem> = Kernel::cuda("kl_div_generic", &LOSSES, run)
    .and(&SUM)
    .configured(|_, _| format!("a row a block of {THREADS} threads"))
    .with_workspace(
        |p, _| if p.options.reduction == Reduction::None { 0 } else { p.num_rows * size_of::<f32>() },
    )
    .when(|p, _| few_enough(p.num_rows));

pub(super) const BACKWARD: Kernel<backward::Problem> =
    Kernel::cuda("kl_div_backward_generic", &GRADIENTS, run_backward)
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
    let ([first, second], [first_lse, second_lse]) = (logits_of(&p.options), lse_of(&p.options));
    let params = KlDivParams {
        first: at(first),
        second: at(second),
        targets: at(TARGETS),
        losses: if by_row { at(LOSS) } else { launch.workspace as u64 },
        first_lse: at(first_lse),
        second_lse: at(second_lse),
        row_losses: at(ROW_LOSSES),
        loss: if by_row { 0 } else { at(LOSS) },
        count: at(COUNT),
        vocab: p.vocab as i64,
        num_rows: p.num_rows as i64,
        first_step: p.steps[0] as i64,
        second_step: p.steps[1] as i64,
        ignore_index: p.options.ignore_index,
        temperature: p.options.temperature(),
        inverse: p.options.inverse(),
        wide_targets: (p.target_dtype == Some(DType::I64)) as i32,
        by_row: by_row as i32,
        is_mean: (p.options.reduction == Reduction::Mean) as i32,
        rows: Rows::new(&p.rows),
        values: Rows::new(&p.values),
    };
    if p.num_rows > 0 {
        let config = LaunchConfig::new([grid_blocks("kl_div", p.num_rows)?, 1, 1], [THREADS, 1, 1], 0);
        // SAFETY: `check` bound rows to the tensors, and the workspace has room for their losses.
        unsafe { launch.record(&defines(p.dtype, p.vector_rows), &config, &params)? };
    }
    if by_row && !p.has_count {
        return Ok(());
    }
    let config = LaunchConfig::new([1, 1, 1], [THREADS, 1, 1], 0);
    // SAFETY: the first launch wrote the losses that this one reads.
    unsafe { launch.record_part(&SUM, &defines(DType::F32, true), &config, &params) }
}

fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index: usize| launch.args.address(index) as u64;
    let params = KlDivBackwardParams {
        student: at(backward::STUDENT),
        teacher: at(backward::TEACHER),
        dstudent: at(DSTUDENT),
        targets: at(backward::TARGETS),
        lse: at(backward::LSE),
        teacher_lse: at(backward::TEACHER_LSE),
        row_losses: at(backward::ROW_LOSSES),
        count: at(backward::COUNT),
        dloss: at(DLOSS),
        vocab: p.vocab as i64,
        step: p.steps[0] as i64,
        teacher_step: p.steps[1] as i64,
        out_step: p.steps[2] as i64,
        ignore_index: p.options.ignore_index,
        inverse: p.options.inverse(),
        wide_targets: (p.target_dtype == Some(DType::I64)) as i32,
        by_row: (p.options.reduction == Reduction::None) as i32,
        is_mean: (p.options.reduction == Reduction::Mean) as i32,
        rows: Rows::new(&p.rows),
        values: Rows::new(&p.values),
    };
    let config = LaunchConfig::new([grid_blocks("kl_div_backward", p.num_rows)?, 1, 1], [THREADS, 1, 1], 0);
    let defines = backward_defines(p.dtype, p.vector_rows, p.options.is_reverse());
    // SAFETY: `check` bound rows to the tensors; each element is read by the thread that writes its gradient, before it does.
    unsafe { launch.record(&defines, &config, &params) }
}
