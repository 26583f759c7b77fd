//! `moe_losses` and its gradient on CUDA devices: host half. A warp has a token.

use super::backward::{self, DIMPORTANCE, DLOAD_BALANCE, DLOGITS, DZ_LOSS};
use super::{ENTROPY, IDS, IMPORTANCE, LOAD, LOAD_BALANCE, LOGITS, PROBABILITY, Problem, RouteScore, Z_LOSS};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::moe_route::MOST_EXPERTS;
use crate::tensor::DType;

/// Threads of a block, and of the one that adds the sums of all, as in the device code.
const THREADS: usize = 256;
const SUM_THREADS: usize = 1024;
/// The most blocks whose sums are added.
const MOST_BLOCKS: usize = 256;
/// Tokens of each warp of a block of the gradient, which first computes what arrives at all of them.
const TOKENS_OF_WARP: usize = 4;

kernel_params! {
    /// Addresses are zero for what is left out; distances are in elements.
    struct MoeLossesParams {
        logits: u64, ids: u64, load_balance: u64, z_loss: u64, importance: u64, load: u64, probability: u64, entropy: u64,
        /// By block: in the workspace.
        sums: u64, block_counts: u64,
        num_tokens: i64, block_tokens: i64,
        /// Along rows of logits and ids.
        steps: [i64; 2],
        load_step: i64, probability_step: i64,
        blocks: i32, experts: i32, top_k: i32, is_sigmoid: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct MoeLossesBackwardParams {
        logits: u64, load: u64, probability: u64, dload_balance: u64, dz_loss: u64, dimportance: u64, dlogits: u64,
        num_tokens: i64, block_tokens: i64,
        /// Along rows of logits and dlogits.
        steps: [i64; 2],
        load_step: i64, probability_step: i64,
        experts: i32, is_sigmoid: i32,
        rows: Rows,
    }
}

static TOKENS: CudaKernel = CudaKernel {
    source: Source { name: "moe_losses", code: include_str!("kernel.cu") },
    prelude: MoeLossesParams::prelude,
    function: "moe_losses",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

static SUM: CudaKernel = CudaKernel {
    source: Source { name: "moe_losses_sum", code: include_str!("sum.cu") },
    prelude: MoeLossesParams::prelude,
    function: "moe_losses_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![vec![]],
};

static GRADIENTS: CudaKernel = CudaKernel {
    source: Source { name: "moe_losses_backward", code: include_str!("backward.cu") },
    prelude: MoeLossesBackwardParams::prelude,
    function: "moe_losses_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

fn variants() -> Vec<Defines> {
    let sizes = (5..=MOST_EXPERTS.trailing_zeros()).map(|bits| 1 << bits);
    sizes.flat_map(|experts| FLOATS.map(|dtype| defines(dtype, experts))).collect()
}

fn defines(dtype: DType, experts: usize) -> Defines {
    vec![element(dtype), ("EXPERTS", experts.next_power_of_two().max(32).to_string())]
}

/// Blocks, and tokens of each: a function of the number of tokens alone, because sums depend on it.
fn blocks(p: &Problem) -> (usize, usize) {
    let tokens = p.num_tokens.div_ceil(MOST_BLOCKS).next_multiple_of(THREADS / 32);
    (p.num_tokens.div_ceil(tokens.max(1)), tokens)
}

pub(super) const FORWARD: Kernel<Problem> = Kernel::cuda("moe_losses_cuda", &TOKENS, run)
    .and(&SUM)
    .with_workspace(|p, _| blocks(p).0 * (2 * p.experts + 2) * size_of::<f32>())
    .configured(|p, _| {
        let (count, tokens) = blocks(p);
        format!("a warp a token, {count} blocks of {tokens} tokens")
    });

pub(super) const BACKWARD: Kernel<backward::Problem> =
    Kernel::cuda("moe_losses_backward_cuda", &GRADIENTS, run_backward)
        .configured(|_, _| format!("a warp a token, {} a block", THREADS / 32 * TOKENS_OF_WARP));

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let (count, tokens) = blocks(p);
    let at = |index: usize| launch.args.address(index) as u64;
    let [load, probability] = p.by_expert;
    let sums = launch.workspace;
    let params = MoeLossesParams {
        logits: at(LOGITS),
        ids: at(IDS),
        load_balance: at(LOAD_BALANCE),
        z_loss: at(Z_LOSS),
        importance: at(IMPORTANCE),
        load: if load.is_some() { at(LOAD) } else { 0 },
        probability: if probability.is_some() { at(PROBABILITY) } else { 0 },
        entropy: if p.has_entropy { at(ENTROPY) } else { 0 },
        sums: sums as u64,
        block_counts: (sums + count * (p.experts + 2) * size_of::<f32>()) as u64,
        num_tokens: p.num_tokens as i64,
        block_tokens: tokens as i64,
        steps: p.steps.map(|step| step as i64),
        load_step: load.unwrap_or(0) as i64,
        probability_step: probability.unwrap_or(0) as i64,
        blocks: count as i32,
        experts: p.experts as i32,
        top_k: p.top_k as i32,
        is_sigmoid: (p.score == RouteScore::Sigmoid) as i32,
        rows: Rows::new(&p.rows),
    };
    if count > 0 {
        let config = LaunchConfig::new([grid_blocks("moe_losses", count)?, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: `check` bound rows to the tensors, and the workspace has room for the sums of all blocks; ids that are no
        // experts are not counted.
        unsafe { launch.record(&defines(p.dtype, p.experts), &config, &params)? };
    }
    let config = LaunchConfig::new([1, 1, 1], [SUM_THREADS as u32, 1, 1], 0);
    // SAFETY: the first launch wrote the sums that this one reads.
    unsafe { launch.record_part(&SUM, &vec![], &config, &params) }
}

fn run_backward(launch: &Launch<'_, backward::Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index: usize| launch.args.address(index) as u64;
    let tokens = THREADS / 32 * TOKENS_OF_WARP;
    let params = MoeLossesBackwardParams {
        logits: at(backward::LOGITS),
        load: at(backward::LOAD),
        probability: at(backward::PROBABILITY),
        dload_balance: at(DLOAD_BALANCE),
        dz_loss: at(DZ_LOSS),
        dimportance: at(DIMPORTANCE),
        dlogits: at(DLOGITS),
        num_tokens: p.num_tokens as i64,
        block_tokens: tokens as i64,
        steps: p.steps.map(|step| step as i64),
        load_step: p.by_expert[0] as i64,
        probability_step: p.by_expert[1] as i64,
        experts: p.experts as i32,
        is_sigmoid: (p.score == RouteScore::Sigmoid) as i32,
        rows: Rows::new(&p.rows),
    };
    let blocks = grid_blocks("moe_losses_backward", p.num_tokens.div_ceil(tokens))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound all arguments to tokens and experts; each element is read by the thread that writes its gradient,
    // before it does.
    unsafe { launch.record(&defines(p.dtype, p.experts), &config, &params) }
}
