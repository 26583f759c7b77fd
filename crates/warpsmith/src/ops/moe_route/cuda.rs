//! `moe_route` on CUDA devices: host half. Few tokens, or a call that needs no places, take one launch; others two, of the same
//! blocks. Where the order of the logits decides alone, up to 256 tokens are the work of one cluster (`small.cu`), and up to
//! 8192 that of blocks of 32 tokens (`blocks.cu`).

use super::options::{GroupScore, RouteScore};
use super::{BIAS, COUNTS, DROPPED, IDS, LOGITS, MOST_EXPERTS, ORDER, POSITIONS, Problem, WEIGHTS};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::{DType, Space};

/// Tokens of each warp up to which one block has all of them.
const ALONE: usize = 4;
/// The most blocks where each adds up the counts of those before it.
const MOST_BLOCKS: usize = 256;

kernel_params! {
    /// Addresses are zero for what is left out; distances are in elements.
    struct MoeRouteParams {
        logits: u64, bias: u64, weights: u64, ids: u64, counts: u64, order: u64, positions: u64, dropped: u64,
        /// Of slots, by block and expert: in the workspace.
        block_counts: u64,
        num_tokens: i64, block_tokens: i64, seed: i64,
        /// Along rows of logits, weights, ids and positions.
        steps: [i64; 4],
        order_step: i64, bias_step: i64, counts_step: i64, dropped_step: i64,
        scale: f32, noise: f32,
        experts: i32, top_k: i32, groups: i32, top_groups: i32, capacity: i32,
        is_sigmoid: i32, normalize: i32, largest_of_group: i32, compares_scores: i32, has_places: i32,
        rows: Rows,
        order_rows: Rows,
    }
}

static ROUTE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route", code: include_str!("kernel.cu") },
    prelude: MoeRouteParams::prelude,
    function: "moe_route",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let sizes = || Size::all().flat_map(|size| [false, true].map(|plain| (size, plain)));
        FLOATS.iter().flat_map(|&dtype| sizes().map(move |(size, plain)| size.route(dtype, plain))).collect()
    },
};

static PLACE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route_place", code: include_str!("place.cu") },
    prelude: MoeRouteParams::prelude,
    function: "moe_route_place",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || Size::all().map(|size| size.defines()).collect(),
};

/// What blocks are made for.
#[derive(Clone, Copy)]
struct Size {
    experts: usize,
    /// Of a block: as many as registers for a lane's experts allow.
    threads: usize,
}

impl Size {
    /// The smallest with room for these experts.
    fn of(experts: usize) -> Size {
        let experts = experts.next_power_of_two().max(32);
        let threads = match experts {
            ..=128 => 1024,
            256 => 512,
            _ => 256,
        };
        Size { experts, threads }
    }

    fn all() -> impl Iterator<Item = Size> {
        Size::each(Size::of)
    }

    /// For a cluster, whose blocks have fewer warps than tokens.
    fn of_cluster(experts: usize) -> Size {
        let size = Size::of(experts);
        Size { threads: size.threads.min(512), ..size }
    }

    fn each(of: fn(usize) -> Size) -> impl Iterator<Item = Size> {
        (5..=MOST_EXPERTS.trailing_zeros()).map(move |bits| of(1 << bits))
    }

    fn defines(&self) -> Defines {
        vec![("EXPERTS", self.experts.to_string()), ("THREADS", self.threads.to_string())]
    }

    fn route(&self, dtype: DType, plain: bool) -> Defines {
        [vec![element(dtype), flag("PLAIN", plain)], self.defines()].concat()
    }
}

/// How tokens are divided among blocks.
struct Blocks {
    count: usize,
    tokens: usize,
}

impl Blocks {
    fn of(p: &Problem) -> Blocks {
        let warps = Size::of(p.experts).threads / 32;
        let tokens = match p.has_places() {
            true if p.num_tokens <= ALONE * warps => p.num_tokens,
            true => p.num_tokens.div_ceil(MOST_BLOCKS).next_multiple_of(warps),
            false => warps,
        };
        Blocks { count: p.num_tokens.div_ceil(tokens.max(1)).max(p.has_places() as usize), tokens }
    }
}

pub(super) const FORWARD: Kernel<Problem> = Kernel::cuda("moe_route_cuda", &ROUTE, run)
    .and(&PLACE)
    .with_workspace(|p, _| match Blocks::of(p).count {
        count if p.has_places() && count > 1 => count * p.experts * size_of::<i32>(),
        _ => 0,
    })
    .configured(|p, _| {
        let Blocks { count, tokens } = Blocks::of(p);
        format!(
            "a warp a token, {count} blocks of {tokens} tokens and {} threads",
            Size::of(p.experts).threads
        )
    });

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let (size, blocks) = (Size::of(p.experts), Blocks::of(p));
    let params = params(launch, blocks.tokens);
    let config =
        LaunchConfig::new([grid_blocks("moe_route", blocks.count)?, 1, 1], [size.threads as u32, 1, 1], 0);
    // SAFETY: `check` bound all arguments to tokens, experts and `top_k`, and groups have enough experts for it; the workspace has
    // room for the counts of all blocks.
    unsafe { launch.record(&size.route(p.dtype, is_plain(p)), &config, &params)? };
    if !p.has_places() || blocks.count == 1 {
        return Ok(());
    }
    // SAFETY: as above; the first launch wrote the ids and the counts that this one reads.
    unsafe { launch.record_part(&PLACE, &size.defines(), &config, &params) }
}

/// Whether the order of the logits decides alone.
fn is_plain(p: &Problem) -> bool {
    !p.compares_scores() && !p.options.has_groups() && p.options.noise() == 0.0
}

fn params(launch: &Launch<'_, Problem>, block_tokens: usize) -> MoeRouteParams {
    let p = launch.problem;
    let options = &p.options;
    let at = |index: usize| if p.gives(index) { launch.args.address(index) as u64 } else { 0 };
    let order = Space { rank: p.order.rank, sizes: p.order.sizes, strides: [p.order.strides[0]; 4] };
    MoeRouteParams {
        logits: at(LOGITS),
        bias: at(BIAS),
        weights: at(WEIGHTS),
        ids: at(IDS),
        counts: at(COUNTS),
        order: at(ORDER),
        positions: at(POSITIONS),
        dropped: at(DROPPED),
        block_counts: launch.workspace as u64,
        num_tokens: p.num_tokens as i64,
        block_tokens: block_tokens as i64,
        seed: options.seed,
        steps: p.steps.map(|step| step as i64),
        order_step: p.order_step as i64,
        bias_step: p.by_expert[0] as i64,
        counts_step: p.by_expert[1] as i64,
        dropped_step: p.by_expert[2] as i64,
        scale: options.scale(),
        noise: options.noise(),
        experts: p.experts as i32,
        top_k: options.top_k as i32,
        groups: options.groups as i32,
        top_groups: options.top_groups as i32,
        capacity: options.capacity as i32,
        is_sigmoid: (options.score == RouteScore::Sigmoid) as i32,
        normalize: options.normalize as i32,
        largest_of_group: (options.group_score == GroupScore::Max) as i32,
        compares_scores: p.compares_scores() as i32,
        has_places: p.has_places() as i32,
        rows: Rows::new(&p.rows),
        order_rows: Rows::new(&order),
    }
}

/// Tokens of a block of the kernels below, and slots of a token, at most.
const BLOCK_TOKENS: usize = 32;
const MOST_SLOTS: usize = 32;
/// Blocks of a cluster.
const CLUSTER: usize = 8;
/// The most blocks that count for each other.
const COUNTING_BLOCKS: usize = 256;

static SMALL_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route_small", code: include_str!("small.cu") },
    prelude: MoeRouteParams::prelude,
    function: "moe_route_small",
    min_arch: Arch::new(9, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || plain_variants(Size::of_cluster),
};

static BLOCKS_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route_blocks", code: include_str!("blocks.cu") },
    prelude: MoeRouteParams::prelude,
    function: "moe_route_blocks",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || plain_variants(Size::of),
};

static BLOCKS_PLACE: CudaKernel = CudaKernel {
    source: Source { name: "moe_route_blocks_place", code: include_str!("blocks_place.cu") },
    prelude: MoeRouteParams::prelude,
    function: "moe_route_blocks_place",
    min_arch: Arch::new(7, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || Size::all().map(|size| size.defines()).collect(),
};

fn plain_defines(dtype: DType, size: Size) -> Defines {
    [vec![element(dtype)], size.defines()].concat()
}

fn plain_variants(of: fn(usize) -> Size) -> Vec<Defines> {
    FLOATS.iter().flat_map(|&dtype| Size::each(of).map(move |size| plain_defines(dtype, size))).collect()
}

/// Whether a call is one for the kernels of at most so many tokens.
fn supports_plain(p: &Problem, tokens: usize) -> std::result::Result<(), String> {
    if !is_plain(p) {
        return Err("bias, groups and noise are not in the order of the logits".into());
    }
    if !p.has_places() {
        return Err("nobody asks for places".into());
    }
    for (name, size, most) in [("num_tokens", p.num_tokens, tokens), ("top_k", p.options.top_k, MOST_SLOTS)] {
        if size > most {
            return Err(format!("{name} = {size} is more than {most}"));
        }
    }
    Ok(())
}

/// Blocks of the cluster, as many as pay with four tokens each, and their tokens. One block is no cluster: memcheck objects to what
/// it sends to itself.
fn cluster_of(p: &Problem) -> Blocks {
    let count = p.num_tokens.div_ceil(4).next_power_of_two().clamp(2, CLUSTER);
    Blocks { count, tokens: p.num_tokens.div_ceil(count) }
}

/// Few tokens, by one cluster.
pub(super) const SMALL: Kernel<Problem> = Kernel::cuda("moe_route_small", &SMALL_DEVICE, run_small)
    .when(|p, _| supports_plain(p, CLUSTER * BLOCK_TOKENS))
    .configured(|p, _| {
        let Blocks { count, tokens } = cluster_of(p);
        format!(
            "a cluster of {count} blocks of {tokens} tokens and {} threads",
            Size::of_cluster(p.experts).threads
        )
    });

fn run_small(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let (size, blocks) = (Size::of_cluster(p.experts), cluster_of(p));
    let grid = [blocks.count as u32, 1, 1];
    let config =
        LaunchConfig { cluster: Some(grid), ..LaunchConfig::new(grid, [size.threads as u32, 1, 1], 0) };
    // SAFETY: `check` bound all arguments to tokens, experts and `top_k`; a block has at most 32 tokens of at most 32 slots.
    unsafe { launch.record(&plain_defines(p.dtype, size), &config, &params(launch, blocks.tokens)) }
}

fn counting_blocks(p: &Problem) -> usize {
    p.num_tokens.div_ceil(BLOCK_TOKENS).max(1)
}

/// By blocks that count their tokens in bits.
pub(super) const BLOCKS: Kernel<Problem> = Kernel::cuda("moe_route_blocks", &BLOCKS_DEVICE, run_blocks)
    .and(&BLOCKS_PLACE)
    .when(|p, _| supports_plain(p, COUNTING_BLOCKS * BLOCK_TOKENS))
    // A byte and a word of each expert and block.
    .with_workspace(|p, _| counting_blocks(p) * Size::of(p.experts).experts * (1 + size_of::<u32>()))
    .configured(|p, _| {
        let (blocks, threads) = (counting_blocks(p), Size::of(p.experts).threads);
        format!("a warp a token, {blocks} blocks of {BLOCK_TOKENS} tokens and {threads} threads")
    });

fn run_blocks(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let size = Size::of(p.experts);
    let blocks = grid_blocks("moe_route_blocks", counting_blocks(p))?;
    let config = LaunchConfig::new([blocks, 1, 1], [size.threads as u32, 1, 1], 0);
    let params = params(launch, BLOCK_TOKENS);
    // SAFETY: `check` bound all arguments to tokens, experts and `top_k`, there are at most 32 slots of a token, and the workspace has
    // room for what all blocks count.
    unsafe { launch.record(&plain_defines(p.dtype, size), &config, &params)? };
    // SAFETY: as above; the first launch wrote the ids and the counts that this one reads.
    unsafe { launch.record_part(&BLOCKS_PLACE, &size.defines(), &config, &params) }
}
