//! `prefix_match` on CUDA devices: host half.

use super::{EDGE_PAGES, EDGE_TOKENS, MATCHED, Memory, NODES, PAGES, Problem, STARTS, TABLE, TOKENS};
use crate::cuda::LaunchConfig;
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::radix::flat::MAX_PROBES;

const SOURCE: Source = Source { name: "prefix_match", code: include_str!("kernel.cu") };
/// Threads that search for one sequence together, when sequences are few and long.
const BLOCK: usize = 256;
const WARP: usize = 32;
/// Sequences of a block whose warps search for one each.
const WARPS: usize = 4;
/// Sequences shorter than this keep a warp busy, but not a block.
const LONG: usize = 1024;
/// Blocks of [`BLOCK`] threads that a multiprocessor holds: more sequences keep it busy with a warp each.
const RESIDENT: usize = 8;

kernel_params! {
    struct PrefixMatchParams {
        table: u64, edge_tokens: u64, edge_pages: u64, tokens: u64, starts: u64,
        matched: u64, nodes: u64, pages: u64,
        batch: i64, total: i64, num_pages: i64,
        /// Rows and columns of each argument, in the order above.
        strides: [[i64; 2]; 8],
        page_size: i32, max_pages: u32, slot_mask: u32, seed: u32,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: PrefixMatchParams::prelude,
    function: "prefix_match",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("prefix_match_cuda", &DEVICE, run)
    .configured(|p, info| match group(p, info) {
        WARP => "a warp for each sequence".into(),
        threads => format!("{threads} threads for each sequence"),
    })
    .when(|p, _| match p.batch > i32::MAX as usize {
        true => Err("more than 2^31 sequences".into()),
        false => Ok(()),
    });

fn defines(memory: Memory, group: usize) -> Defines {
    vec![
        ("MEMORY", (memory as usize).to_string()),
        ("GROUP", group.to_string()),
        ("WARPS", WARPS.to_string()),
        ("MAX_PROBES", MAX_PROBES.to_string()),
    ]
}

fn variants() -> Vec<Defines> {
    let memories = [Memory::Strided, Memory::Dense, Memory::Vector];
    memories.into_iter().flat_map(|memory| [WARP, BLOCK].map(|group| defines(memory, group))).collect()
}

/// Threads for each sequence. Nothing of this shows in the results.
fn group(p: &Problem, info: &DeviceInfo) -> usize {
    let long = p.total / p.batch.max(1) >= LONG;
    if long && p.batch <= RESIDENT * info.units { BLOCK } else { WARP }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let group = group(p, launch.info);
    let (sequences, threads) = if group == WARP { (WARPS, WARPS * WARP) } else { (1, group) };
    let params = PrefixMatchParams {
        table: at(TABLE),
        edge_tokens: at(EDGE_TOKENS),
        edge_pages: at(EDGE_PAGES),
        tokens: at(TOKENS),
        starts: at(STARTS),
        matched: at(MATCHED),
        nodes: at(NODES),
        pages: at(PAGES),
        batch: p.batch as i64,
        total: p.total as i64,
        num_pages: p.num_pages as i64,
        strides: p.strides.map(|strides| strides.map(|stride| stride as i64)),
        page_size: p.page_size as i32,
        max_pages: p.max_pages as u32,
        slot_mask: (p.num_slots - 1) as u32,
        seed: p.seed,
    };
    let config = LaunchConfig::new([p.batch.div_ceil(sequences) as u32, 1, 1], [threads as u32, 1, 1], 0);
    // SAFETY: `check` bound shapes and strides to the parameters; the kernel stays inside them whatever the arrays hold.
    unsafe { launch.record(&defines(p.memory, group), &config, &params) }
}
