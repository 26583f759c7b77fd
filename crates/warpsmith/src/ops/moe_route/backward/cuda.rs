//! `moe_route_backward` on CUDA devices: host half. A warp has a token.

use super::{DLOGITS, DWEIGHTS, IDS, LOGITS, Problem, RouteScore, WEIGHTS};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::moe_route::MOST_EXPERTS;
use crate::tensor::{DType, Space};

/// Threads of a block, as in the device code.
const THREADS: usize = 128;

kernel_params! {
    struct MoeRouteBackwardParams {
        logits: u64, ids: u64, weights: u64, dweights: u64, dlogits: u64,
        num_tokens: i64,
        /// Along rows of logits, ids, weights and dweights.
        steps: [i64; 4],
        out_step: i64,
        scale: f32,
        experts: i32, top_k: i32, is_sigmoid: i32, normalize: i32, unused: i32,
        rows: Rows,
        out_rows: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route_backward", code: include_str!("kernel.cu") },
    prelude: MoeRouteBackwardParams::prelude,
    function: "moe_route_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let sizes = (5..=MOST_EXPERTS.trailing_zeros()).map(|bits| 1 << bits);
        sizes.flat_map(|experts| FLOATS.map(|dtype| defines(dtype, experts))).collect()
    },
};

fn defines(dtype: DType, experts: usize) -> Defines {
    vec![element(dtype), ("EXPERTS", experts.next_power_of_two().max(32).to_string())]
}

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("moe_route_backward_cuda", &DEVICE, run)
    .configured(|_, _| format!("a warp a token, {} a block", THREADS / 32));

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index: usize| launch.args.address(index) as u64;
    let out = Space { rank: p.out.rank, sizes: p.out.sizes, strides: [p.out.strides[0]; 4] };
    let params = MoeRouteBackwardParams {
        logits: at(LOGITS),
        ids: at(IDS),
        weights: at(WEIGHTS),
        dweights: at(DWEIGHTS),
        dlogits: at(DLOGITS),
        num_tokens: p.num_tokens as i64,
        steps: p.steps.map(|step| step as i64),
        out_step: p.out_step as i64,
        scale: p.scale(),
        experts: p.experts as i32,
        top_k: p.top_k as i32,
        is_sigmoid: (p.score == RouteScore::Sigmoid) as i32,
        normalize: p.normalize as i32,
        unused: 0,
        rows: Rows::new(&p.rows),
        out_rows: Rows::new(&out),
    };
    let blocks = grid_blocks("moe_route_backward", p.num_tokens.div_ceil(THREADS / 32))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound all arguments to tokens, experts and `top_k`; ids that are no experts index nothing.
    unsafe { launch.record(&defines(p.dtype, p.experts), &config, &params) }
}
