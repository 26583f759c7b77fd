//! `paged_attention` on CUDA devices: host half. Everything follows from shapes; lengths and tables are read by the kernels
//! alone.

use super::plan::{
    Load, MOST_WORKSPACE, Part, Plan, ROUND, SEGMENT, SEGMENTS, SPAN, Shape, UNIT_KEYS, states,
};
use super::problem::{HEAD_DIMS, NARROW};
use super::{
    GROUP_STARTS, K_PAGES, K_SCALE, KV_LENS, LSE, OUT, PAGE_TABLE, PREFIX_LENS, Problem, Q, Q_STARTS, SINKS,
    V_PAGES, V_SCALE,
};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads of a block of the generic kernel.
const GENERIC_THREADS: u32 = 128;
/// Rows for each multiprocessor up to which they are few: keys are divided, and a block merges one row.
const FEW_BLOCKS: usize = 8;

/// Where the keys of a request are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Keys {
    /// In pages.
    Pages,
    /// In pages of multiples of 16.
    WholePages,
    /// Side by side.
    Dense,
}

kernel_params! {
    pub(in crate::ops) struct PagedParams {
        q: u64, k: u64, v: u64, page_table: u64, kv_lens: u64, q_starts: u64, k_scale: u64, v_scale: u64, sinks: u64,
        out: u64, lse: u64,
        /// States of rows over ranges of keys.
        partial: u64,
        group_starts: u64, prefix_lens: u64,
        /// Where the kernel tells the merge whether all requests stayed whole, so that there is nothing to merge.
        is_whole: u64,
        q_token: i64, q_head: i64, q_dim: i64,
        k_page: i64, k_slot: i64, k_head: i64, k_dim: i64,
        v_page: i64, v_slot: i64, v_head: i64, v_dim: i64,
        out_token: i64, out_head: i64, out_dim: i64, lse_token: i64, lse_head: i64,
        /// Between the requests of dense tensors; those of keys and values are `k_page` and `v_page`.
        q_batch: i64, out_batch: i64, lse_batch: i64,
        table_row: i64, table_col: i64,
        kv_lens_step: i64, q_starts_step: i64, k_scale_step: i64, v_scale_step: i64, sinks_step: i64,
        group_level: i64, group_step: i64, prefix_level: i64, prefix_step: i64,
        /// `key * page_magic >> page_shift` is the page of a key.
        page_magic: u32, page_shift: i32,
        page_size: i32, num_pages: i32,
        /// Keys that the table can hold.
        max_keys: i32,
        requests: i32, num_tokens: i32, num_heads: i32, num_kv_heads: i32, group: i32,
        /// Of every request; negative where `q_starts` has them.
        queries: i32,
        /// Another launch handles requests with fewer or more queries.
        min_queries: i32, max_queries: i32,
        /// Ranges of keys whose states are kept for the merge; zero where a block has all keys of its rows.
        ranges: i32,
        /// Keys of such a range, and keys that a block processes at once.
        range_keys: i32, piece_keys: i32,
        /// Blocks that run at once, if lengths are to decide whether requests are split; else zero.
        slots: i32,
        causal: i32, window: i32,
        /// Levels of shared prefixes: `requests` are the groups of level `level`, or, at the last, the requests.
        all_requests: i32, groups: i32, levels: i32, level: i32,
        scale: f32, softcap: f32,
    }
}

pub(in crate::ops) static SM80_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_sm80", code: include_str!("sm80.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_sm80",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: sm80_variants,
};

pub(in crate::ops) static MERGE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_merge", code: include_str!("merge.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_merge",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let few = HEAD_DIMS.map(|head_dim| merge_defines(DType::BF16, head_dim, head_dim % 64 == 0, true));
        let many = HEAD_DIMS.map(|head_dim| merge_defines(DType::F16, head_dim, head_dim % 64 != 0, false));
        let dense = merge_defines(DType::F32, 128, true, true);
        few.into_iter().chain(many).chain([merge_defines(DType::F32, 128, false, true), dense]).collect()
    },
};

pub(in crate::ops) static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_generic", code: include_str!("generic.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_generic",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let types = types(&FLOATS);
        let dims = types.flat_map(|(dtype, cache)| HEAD_DIMS.map(|head_dim| (dtype, cache, head_dim)));
        let pages = dims.flat_map(|(dtype, cache, head_dim)| {
            [false, true].map(|softcap| generic_defines([dtype, cache], head_dim, softcap, Keys::Pages))
        });
        let dense = HEAD_DIMS
            .map(|head_dim| generic_defines([DType::F32; 2], head_dim, head_dim % 64 == 0, Keys::Dense));
        pages.chain(dense).collect()
    },
};

/// Tensor cores.
pub(super) const SM80: Kernel<Problem> = Kernel::cuda("paged_attention_sm80", &SM80_DEVICE, run_sm80)
    .and(&MERGE)
    .with_workspace(|p, info| Plan::new(p, info).workspace(p))
    .configured(|p, info| Plan::new(p, info).to_string())
    .when(|p, info| {
        if !FLOATS[1..].contains(&p.dtype) {
            return Err(format!("multiplies f16 and bf16, not {}", p.dtype));
        }
        if !p.vectors {
            return Err("heads are not dense and at multiples of 16 bytes".into());
        }
        Plan::new(p, info).fits(p, info)?;
        small_pages_in_reach(p)?;
        addressable(p)
    });

/// Any types, any layout, any device.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("paged_attention_generic", &GENERIC_DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: `check` bound shapes and strides to the parameters, and the kernel moves all numbers into them.
        unsafe { run_generic(launch, launch.problem, Keys::Pages, &params(launch)) }
    })
    .and(&MERGE)
    .or_without()
    .with_workspace(generic_workspace)
    .configured(generic_config)
    .when(|p, _| addressable(p));

pub(in crate::ops) fn generic_workspace(p: &Problem, info: &DeviceInfo) -> usize {
    generic_ranges(p, info).map_or(0, |(ranges, _)| states(p, ranges))
}

pub(in crate::ops) fn generic_config(p: &Problem, info: &DeviceInfo) -> String {
    match generic_ranges(p, info) {
        Some((_, keys)) => format!("a block a row and {keys} keys"),
        None => "a block a row".into(),
    }
}

/// Rows and pieces of work are counted in 32 bits.
pub(in crate::ops) fn addressable(p: &Problem) -> std::result::Result<(), String> {
    let rows = p.num_tokens.saturating_mul(p.num_heads);
    let pieces = (rows + p.requests).saturating_mul(p.max_keys().div_ceil(ROUND).max(1));
    match rows.max(pieces / p.group().max(1)).max(p.num_pages) > i32::MAX as usize {
        true => Err("more than 2^31 rows, pages or pieces of work".into()),
        false => Ok(()),
    }
}

/// Keys of pages that are not multiples of 16 are found by offsets of 32 bits, in vectors of 16 bytes.
pub(super) fn small_pages_in_reach(p: &Problem) -> std::result::Result<(), String> {
    let reaches = |&[page, slot, ..]: &[isize; 4]| {
        let last = |count: usize, stride: isize| {
            usize::try_from(stride).ok().and_then(|stride| count.saturating_sub(1).checked_mul(stride))
        };
        let end = last(p.num_pages, page).zip(last(p.page_size, slot)).and_then(|(a, b)| a.checked_add(b));
        end.is_some_and(|end| end / (16 / p.cache_dtype.size()) < u32::MAX as usize)
    };
    match p.page_size.is_multiple_of(UNIT_KEYS) || [p.k, p.v].iter().all(reaches) {
        true => Ok(()),
        false => Err("pages that are not multiples of 16 keys lie more than 64 GiB apart".into()),
    }
}

/// The types of queries and caches.
fn types(dtypes: &'static [DType]) -> impl Iterator<Item = (DType, DType)> {
    dtypes.iter().flat_map(|&dtype| [dtype, NARROW[0], NARROW[1]].map(|cache| (dtype, cache)))
}

/// Whether no two blocks read the same keys: the rows of a KV head are one tile, and no other request has its pages.
fn reads_once(p: &Problem, shape: &Shape, keys: Keys) -> bool {
    let one_tile = p.queries.is_some_and(|count| count * p.group() <= shape.warp_rows);
    one_tile && (keys == Keys::Dense || p.requests == 1)
}

fn sm80_defines(
    [dtype, cache]: [DType; 2],
    head_dim: usize,
    shape: Shape,
    softcap: bool,
    keys: Keys,
    once: bool,
) -> Defines {
    vec![
        element(dtype),
        ("KV", cache.name().into()),
        ("HEAD_DIM", head_dim.to_string()),
        ("ROWS", shape.warp_rows.to_string()),
        ("ROW_WARPS", shape.row_warps.to_string()),
        ("KEY_WARPS", shape.key_warps.to_string()),
        ("RING", shape.ring.to_string()),
        ("STEP", shape.step.to_string()),
        ("BLOCKS", shape.blocks.to_string()),
        flag("SOFTCAP", softcap),
        flag("WHOLE_PAGES", keys != Keys::Pages),
        flag("DENSE", keys == Keys::Dense),
        flag("ONCE", once),
    ]
}

/// Every type and size of head, for few rows and many; and, with one size, the options and the shared memory of the
/// smallest devices. Other combinations are compiled when they are first asked for.
fn sm80_variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for (dtype, cache) in types(&FLOATS[1..]) {
        for load in Load::ALL {
            let variant = |head_dim, shared, softcap: bool, keys| {
                let shape = Shape::new(head_dim, cache, load, shared);
                let once = keys == Keys::Dense && !softcap;
                sm80_defines([dtype, cache], head_dim, shape, softcap, keys, once)
            };
            let plain = |head_dim| variant(head_dim, usize::MAX, false, Keys::WholePages);
            let dense = [false, true].map(|softcap| variant(128, usize::MAX, softcap, Keys::Dense));
            // Few keys: less than a segment, one or two.
            let few_keys = |head_dim: usize| {
                let short = if head_dim.is_multiple_of(64) { UNIT_KEYS } else { SEGMENT };
                let kinds = [(short, Keys::Dense), (2 * SEGMENT, Keys::WholePages), (SEGMENT, Keys::Pages)];
                kinds.map(|(keys, kind)| {
                    let shape = Shape::new(head_dim, cache, load, usize::MAX).of_few_keys(keys);
                    sm80_defines([dtype, cache], head_dim, shape, false, kind, kind == Keys::Dense)
                })
            };
            if dtype == cache && matches!(load, Load::Few | Load::Eight) {
                all.extend(HEAD_DIMS.map(few_keys).into_iter().flatten());
                all.extend(HEAD_DIMS.map(|head_dim| variant(head_dim, usize::MAX, false, Keys::Pages)));
            }
            match load {
                Load::Eight => {
                    let shape = Shape::new(128, cache, load, usize::MAX);
                    all.push(sm80_defines([dtype, cache], 128, shape, false, Keys::WholePages, true));
                    all.push(plain(128));
                    if dtype == cache {
                        all.extend(HEAD_DIMS.map(plain).into_iter().chain(dense));
                    }
                }
                Load::EightAlone if dtype == cache => all.extend(dense.into_iter().chain([plain(128)])),
                Load::EightAlone => {}
                _ => {
                    all.extend(HEAD_DIMS.map(plain));
                    all.push(variant(128, 0, false, Keys::WholePages));
                    all.extend(
                        [Keys::Pages, Keys::WholePages].map(|keys| variant(128, usize::MAX, true, keys)),
                    );
                }
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Whether the blocks of the merge have one row each: the best for few rows, and the only way for any layout.
fn merges_rows(p: &Problem, info: &DeviceInfo, levels: usize) -> bool {
    levels == 0 && p.num_tokens * p.num_heads <= FEW_BLOCKS * info.units
}

/// The launch of the merge, with the states of some ranges of each row in shared memory.
fn merge_config(p: &Problem, info: &DeviceInfo, one_row: bool, ranges: usize) -> LaunchConfig {
    let rows = p.num_tokens * p.num_heads;
    let row = p.head_dim * size_of::<f32>();
    let (blocks, threads, shared) = if one_row {
        const THREADS: usize = 256;
        // With so much shared memory no multiprocessor holds two blocks: otherwise the blocks, which start while the
        // kernel before still runs, would pile up where there is room.
        let most = info.shared_per_block / 2 + 1024;
        let states = ranges.next_multiple_of(SEGMENTS).min(THREADS) * (row + 16) + THREADS / SEGMENTS * 20;
        (rows, THREADS, if rows <= info.units { most } else { states.min(most) })
    } else {
        const ROWS: usize = 4;
        // As many whole spans as every device has room for, as in the device code.
        let fits = 32.min(3072 / p.head_dim / SEGMENTS * SEGMENTS);
        (rows.div_ceil(ROWS), 32 * ROWS, ROWS * ranges.min(fits) * row)
    };
    LaunchConfig::new([blocks as u32, 1, 1], [threads as u32, 1, 1], shared as u32)
}

fn merge_defines(dtype: DType, head_dim: usize, dense: bool, one_row: bool) -> Defines {
    vec![element(dtype), ("HEAD_DIM", head_dim.to_string()), flag("DENSE", dense), flag("ONE_ROW", one_row)]
}

fn generic_defines([dtype, cache]: [DType; 2], head_dim: usize, softcap: bool, keys: Keys) -> Defines {
    vec![
        element(dtype),
        ("KV", cache.name().into()),
        ("HEAD_DIM", head_dim.to_string()),
        flag("SOFTCAP", softcap),
        flag("DENSE", keys == Keys::Dense),
    ]
}

/// Factor and shift with which keys below 2^31 are divided by `size`.
fn magic(size: usize) -> (u32, i32) {
    let bits = size.next_power_of_two().trailing_zeros();
    (((1u64 << (31 + bits)).div_ceil(size as u64)) as u32, 31 + bits as i32)
}

impl PagedParams {
    /// What the sizes and strides of a problem say, without any tensor.
    pub(in crate::ops) fn of(p: &Problem) -> PagedParams {
        let (page_magic, page_shift) = magic(p.page_size);
        let [q_token, q_head, q_dim] = p.q.map(|s| s as i64);
        let [k_page, k_slot, k_head, k_dim] = p.k.map(|s| s as i64);
        let [v_page, v_slot, v_head, v_dim] = p.v.map(|s| s as i64);
        let [out_token, out_head, out_dim] = p.out.map(|s| s as i64);
        let [lse_token, lse_head] = p.lse.unwrap_or_default().map(|s| s as i64);
        let [[group_level, group_step], [prefix_level, prefix_step]] =
            p.shared.map_or([[0; 2]; 2], |shared| [shared.starts, shared.lens]).map(|s| s.map(|n| n as i64));
        PagedParams {
            q: 0,
            k: 0,
            v: 0,
            page_table: 0,
            kv_lens: 0,
            q_starts: 0,
            k_scale: 0,
            v_scale: 0,
            sinks: 0,
            out: 0,
            lse: 0,
            partial: 0,
            group_starts: 0,
            prefix_lens: 0,
            is_whole: 0,
            q_token,
            q_head,
            q_dim,
            k_page,
            k_slot,
            k_head,
            k_dim,
            v_page,
            v_slot,
            v_head,
            v_dim,
            out_token,
            out_head,
            out_dim,
            lse_token,
            lse_head,
            q_batch: 0,
            out_batch: 0,
            lse_batch: 0,
            table_row: p.page_table[0] as i64,
            table_col: p.page_table[1] as i64,
            kv_lens_step: p.kv_lens_step as i64,
            q_starts_step: p.q_starts_step as i64,
            k_scale_step: p.k_scale_step as i64,
            v_scale_step: p.v_scale_step as i64,
            sinks_step: p.sinks_step as i64,
            group_level,
            group_step,
            prefix_level,
            prefix_step,
            page_magic,
            page_shift,
            page_size: p.page_size as i32,
            num_pages: p.num_pages as i32,
            max_keys: p.max_keys() as i32,
            requests: p.requests as i32,
            num_tokens: p.num_tokens as i32,
            num_heads: p.num_heads as i32,
            num_kv_heads: p.num_kv_heads as i32,
            group: p.group() as i32,
            queries: p.queries.map_or(-1, |count| count as i32),
            min_queries: 0,
            max_queries: i32::MAX,
            ranges: 0,
            range_keys: 0,
            piece_keys: 0,
            slots: 0,
            causal: p.causal as i32,
            window: p.window as i32,
            all_requests: p.requests as i32,
            groups: p.shared.map_or(0, |shared| shared.groups as i32),
            levels: 0,
            level: 0,
            scale: p.scale(),
            softcap: p.softcap(),
        }
    }
}

/// Those of a call.
fn params(launch: &Launch<'_, Problem>) -> PagedParams {
    let at = |index| launch.args.address(index) as u64;
    PagedParams {
        q: at(Q),
        k: at(K_PAGES),
        v: at(V_PAGES),
        page_table: at(PAGE_TABLE),
        kv_lens: at(KV_LENS),
        q_starts: at(Q_STARTS),
        k_scale: at(K_SCALE),
        v_scale: at(V_SCALE),
        sinks: at(SINKS),
        out: at(OUT),
        lse: at(LSE),
        group_starts: at(GROUP_STARTS),
        prefix_lens: at(PREFIX_LENS),
        ..PagedParams::of(launch.problem)
    }
}

fn run_sm80(launch: &Launch<'_, Problem>) -> Result<()> {
    run_plan(launch, &Plan::new(launch.problem, launch.info))
}

/// Launches the kernel for the requests of each part, on the workspace of the plan.
pub(super) fn run_plan(launch: &Launch<'_, Problem>, plan: &Plan) -> Result<()> {
    let whole_pages = launch.problem.page_size.is_multiple_of(16);
    let keys = if whole_pages { Keys::WholePages } else { Keys::Pages };
    // SAFETY: `check` bound shapes and strides to the parameters, and the kernel moves all numbers into them.
    unsafe { run(launch, launch.problem, plan, keys, &params(launch)) }
}

/// Launches the kernel for each part of a plan, on the workspace of the call.
///
/// # Safety
/// The tensors of `of_all` must be as `p` says, and the workspace as large as the plan asks for.
pub(in crate::ops) unsafe fn run<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    plan: &Plan,
    keys: Keys,
    of_all: &PagedParams,
) -> Result<()> {
    let levels = plan.levels;
    let mut partial = launch.workspace as u64;
    for (i, part) in plan.parts.iter().enumerate() {
        let Part { shape, extent, .. } = *part;
        let ranges = part.ranges(p, levels);
        let params = PagedParams {
            partial,
            requests: part.requests as i32,
            min_queries: part.min_queries as i32,
            max_queries: part.max_queries as i32,
            ranges: ranges as i32,
            range_keys: extent.range_keys() as i32,
            piece_keys: extent.piece_keys() as i32,
            slots: if part.lengths_decide { part.slots as i32 } else { 0 },
            is_whole: partial + states(p, ranges) as u64,
            // All shared keys come before all queries.
            causal: (p.causal && part.level == levels) as i32,
            levels: levels as i32,
            level: part.level as i32,
            ..*of_all
        };
        let types = [p.dtype, p.cache_dtype];
        let once = reads_once(p, &shape, keys);
        let defines = sm80_defines(types, p.head_dim, shape, p.softcap() != 0.0, keys, once);
        let [blocks, threads] = [part.blocks(), shape.threads()].map(|count| count as u32);
        let config = LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], part.shared(p) as u32);
        // SAFETY: the caller vouches for the tensors; the workspace holds the states of every range.
        unsafe { launch.record_part(&SM80_DEVICE, &defines, &config, &params)? };
        // The states of all levels are merged at once, after the last.
        let merges = if levels == 0 { ranges > 0 } else { i + 1 == plan.parts.len() };
        if merges {
            let params = match levels {
                0 => params,
                _ => PagedParams { min_queries: 0, max_queries: i32::MAX, ..params },
            };
            // SAFETY: as above.
            unsafe { run_merge(launch, p, &params, keys)? };
        }
        if levels == 0 {
            partial += part.workspace(p, 0) as u64;
        }
    }
    Ok(())
}

/// Ranges of keys that the generic kernel divides among blocks, and their length: spans, or segments, where rows are
/// too few to keep the device busy. The merge does not run on the oldest devices.
fn generic_ranges(p: &Problem, info: &DeviceInfo) -> Option<(usize, usize)> {
    let (rows, enough) = (p.num_tokens * p.num_heads, FEW_BLOCKS * info.units);
    if rows >= enough || info.arch.is_none_or(|arch| arch < MERGE.min_arch) {
        return None;
    }
    let ranges = |keys: usize| p.max_keys().div_ceil(keys);
    // Blocks of one or two waves do not finish together.
    let keys = if rows * ranges(SPAN) < 4 * enough { SEGMENT } else { SPAN };
    (ranges(keys) > 1 && states(p, ranges(keys)) <= MOST_WORKSPACE).then(|| (ranges(keys), keys))
}

/// Launches the generic kernel, and the merge if keys are divided, on the workspace of the call.
///
/// # Safety
/// The tensors of `of_all` must be as `p` says, and the workspace as large as `generic_workspace` says.
pub(in crate::ops) unsafe fn run_generic<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    keys: Keys,
    of_all: &PagedParams,
) -> Result<()> {
    let defines = generic_defines([p.dtype, p.cache_dtype], p.head_dim, p.softcap() != 0.0, keys);
    let (ranges, range_keys) = generic_ranges(p, launch.info).unwrap_or_default();
    let params = PagedParams {
        partial: launch.workspace as u64,
        ranges: ranges as i32,
        range_keys: range_keys as i32,
        ..*of_all
    };
    let blocks = p.num_tokens * p.num_heads * ranges.max(1);
    let config = LaunchConfig::new([blocks as u32, 1, 1], [GENERIC_THREADS, 1, 1], 0);
    // SAFETY: the caller vouches for the tensors; the workspace holds the states of every range.
    unsafe { launch.record(&defines, &config, &params)? };
    if ranges > 0 {
        // SAFETY: as above.
        unsafe { run_merge(launch, p, &params, keys)? };
    }
    Ok(())
}

/// Launches the merge of all states that the kernels before it have left.
///
/// # Safety
/// As [`run`].
unsafe fn run_merge<P>(launch: &Launch<'_, P>, p: &Problem, params: &PagedParams, keys: Keys) -> Result<()> {
    let one_row = merges_rows(p, launch.info, params.levels as usize);
    let defines = merge_defines(p.dtype, p.head_dim, keys == Keys::Dense, one_row);
    let config = merge_config(p, launch.info, one_row, params.ranges as usize);
    // SAFETY: passed on.
    unsafe { launch.record_part(&MERGE, &defines, &config, params) }
}
