//! `sample` on CUDA devices: host half. A block has a row.

use super::{LOGITS, LOGPROB, MIN_P, POSITION, Problem, RAW, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;

/// Threads of a block, as in the device code.
const THREADS: usize = 1024;

kernel_params! {
    /// Addresses are zero for what is left out; distances are in elements.
    struct SampleParams {
        logits: u64, raw: u64, seed: u64, position: u64, temperature: u64, top_k: u64, top_p: u64, min_p: u64,
        token: u64, logprob: u64,
        logits_row: i64, logits_step: i64, raw_row: i64, raw_step: i64,
        seed_step: i64, position_step: i64, temperature_step: i64, top_k_step: i64, top_p_step: i64,
        min_p_step: i64, token_step: i64, logprob_step: i64,
        vocab: i32, unused: i32,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "sample", code: include_str!("kernel.cu") },
    prelude: SampleParams::prelude,
    function: "sample",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().map(|&dtype| vec![element(dtype)]).collect(),
};

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("sample_cuda", &DEVICE, run)
    .configured(|_, _| format!("a block of {THREADS} threads a row"))
    .when(|p, _| match p.num_rows > i32::MAX as usize {
        true => Err("more rows than a grid can have".into()),
        false => Ok(()),
    });

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |arg| launch.args.address(arg) as u64;
    let step = |arg| p.step(arg).unwrap_or(0) as i64;
    let raw = p.raw.unwrap_or(p.logits);
    let params = SampleParams {
        logits: at(LOGITS),
        raw: if p.raw.is_some() { at(RAW) } else { at(LOGITS) },
        seed: at(SEED),
        position: at(POSITION),
        temperature: at(TEMPERATURE),
        top_k: at(TOP_K),
        top_p: at(TOP_P),
        min_p: at(MIN_P),
        token: at(TOKEN),
        logprob: at(LOGPROB),
        logits_row: p.logits[0] as i64,
        logits_step: p.logits[1] as i64,
        raw_row: raw[0] as i64,
        raw_step: raw[1] as i64,
        seed_step: step(SEED),
        position_step: step(POSITION),
        temperature_step: step(TEMPERATURE),
        top_k_step: step(TOP_K),
        top_p_step: step(TOP_P),
        min_p_step: step(MIN_P),
        token_step: step(TOKEN),
        logprob_step: step(LOGPROB),
        vocab: p.vocab as i32,
        unused: 0,
    };
    let blocks = grid_blocks("sample", p.num_rows)?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound all arguments to the rows, and rows to the columns; a block has each row.
    unsafe { launch.record(&vec![element(p.dtype)], &config, &params) }
}
