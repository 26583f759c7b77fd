//! `penalize` on CUDA devices: host half. A thread has a slot.

use super::{BIAS, COUNTS, FREQUENCY, IDS, LOGITS, PRESENCE, Problem, REPETITION};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;

/// Threads of a block, as in the device code.
const THREADS: usize = 256;

kernel_params! {
    /// Addresses are zero for what is left out; distances are in elements.
    struct PenalizeParams {
        ids: u64, counts: u64, bias: u64, repetition: u64, presence: u64, frequency: u64, logits: u64,
        ids_row: i64, ids_step: i64, counts_row: i64, counts_step: i64, bias_row: i64, bias_step: i64,
        repetition_step: i64, presence_step: i64, frequency_step: i64, logits_row: i64, logits_step: i64,
        columns: i64, slots: i64,
        row_blocks: u32, unused: u32,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "penalize", code: include_str!("kernel.cu") },
    prelude: PenalizeParams::prelude,
    function: "penalize",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().map(|&dtype| vec![element(dtype)]).collect(),
};

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("penalize_cuda", &DEVICE, run)
    .configured(|_, _| format!("a thread a slot, blocks of {THREADS}"))
    .when(|p, _| match p.num_rows.saturating_mul(p.slots.div_ceil(THREADS)) > i32::MAX as usize {
        true => Err("more slots than a grid can have".into()),
        false => Ok(()),
    });

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let row_blocks = p.slots.div_ceil(THREADS);
    if p.num_rows * row_blocks == 0 {
        return Ok(());
    }
    let at = |arg| launch.args.address(arg) as u64;
    let row = |arg: usize| p.strides[arg].map_or(0, |strides| strides[0] as i64);
    let step = |arg: usize| p.strides[arg].map_or(0, |strides| strides[1] as i64);
    let params = PenalizeParams {
        ids: at(IDS),
        counts: at(COUNTS),
        bias: at(BIAS),
        repetition: at(REPETITION),
        presence: at(PRESENCE),
        frequency: at(FREQUENCY),
        logits: at(LOGITS),
        ids_row: row(IDS),
        ids_step: step(IDS),
        counts_row: row(COUNTS),
        counts_step: step(COUNTS),
        bias_row: row(BIAS),
        bias_step: step(BIAS),
        repetition_step: row(REPETITION),
        presence_step: row(PRESENCE),
        frequency_step: row(FREQUENCY),
        logits_row: row(LOGITS),
        logits_step: step(LOGITS),
        columns: p.columns as i64,
        slots: p.slots as i64,
        row_blocks: row_blocks as u32,
        unused: 0,
    };
    let blocks = grid_blocks("penalize", p.num_rows * row_blocks)?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound all arguments to these rows, slots and columns; the kernel touches no logit for other ids.
    unsafe { launch.record(&vec![element(p.dtype)], &config, &params) }
}
