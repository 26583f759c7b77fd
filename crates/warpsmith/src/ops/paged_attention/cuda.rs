//! `paged_attention` on CUDA devices: host half.
//!
//! Everything here follows from shapes; lengths and tables are read by the kernels alone.

use super::problem::{HEAD_DIMS, NARROW};
use super::{K_PAGES, K_SCALE, KV_LENS, LSE, OUT, PAGE_TABLE, Problem, Q, Q_STARTS, SINKS, V_PAGES, V_SCALE};
use crate::cuda::rows::{element, flag};
use crate::cuda::{LaunchConfig, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::Result;
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::ops::FLOATS;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};
use std::fmt;

/// Keys whose states are folded first, keys of a span, and keys a block takes in at once, as in the device code.
const SEGMENT: usize = 128;
const SPAN: usize = 2048;
const ROUND: usize = 512;
/// Rows from which on a request's keys are not shared out over the warps of a block.
pub(super) const FEW_ROWS: usize = 32;
/// Blocks for each that runs at once: more than one evens out their lengths, too many have nothing to do.
const WAVES: usize = 4;
/// Threads of a block of the kernels that work on one row.
const ROW_THREADS: u32 = 128;
/// States of a row that are merged at once.
const MERGE_BATCH: usize = 64;
/// Shared memory that every block has besides: numbers of pages and pieces.
const STATIC_SHARED: usize = 4 << 10;
/// More scratch memory than this is not asked for.
const MOST_WORKSPACE: usize = 256 << 20;

kernel_params! {
    struct PagedParams {
        q: u64, k: u64, v: u64, page_table: u64, kv_lens: u64, q_starts: u64, k_scale: u64, v_scale: u64, sinks: u64,
        out: u64, lse: u64,
        /// States of rows over ranges of keys.
        partial: u64,
        q_token: i64, q_head: i64, q_dim: i64,
        k_page: i64, k_slot: i64, k_head: i64, k_dim: i64,
        v_page: i64, v_slot: i64, v_head: i64, v_dim: i64,
        out_token: i64, out_head: i64, out_dim: i64, lse_token: i64, lse_head: i64,
        table_row: i64, table_col: i64,
        kv_lens_step: i64, q_starts_step: i64, k_scale_step: i64, v_scale_step: i64, sinks_step: i64,
        /// `key * page_magic >> page_shift` is the page of a key.
        page_magic: u32, page_shift: i32,
        page_size: i32, num_pages: i32,
        /// Keys that the table can hold.
        max_keys: i32,
        requests: i32, num_tokens: i32, num_heads: i32, num_kv_heads: i32, group: i32,
        /// Of every request; negative where `q_starts` says it.
        queries: i32,
        /// Requests with fewer or more queries are the work of another launch.
        min_queries: i32, max_queries: i32,
        /// Ranges of keys whose states are kept for the merge; zero where a block has all keys of its rows.
        ranges: i32,
        /// Keys of such a range, and keys that a block takes at once.
        range_keys: i32, piece_keys: i32,
        causal: i32, window: i32,
        scale: f32, softcap: f32,
    }
}

pub(super) static SM80_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_sm80", code: include_str!("sm80.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_sm80",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    variants: sm80_variants,
};

pub(super) static MERGE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_merge", code: include_str!("merge.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_merge",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    variants: || {
        let each = |dtype| HEAD_DIMS.map(|head_dim| merge_defines(dtype, head_dim));
        [DType::F16, DType::BF16].into_iter().flat_map(each).collect()
    },
};

static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_generic", code: include_str!("generic.cu") },
    prelude: PagedParams::prelude,
    function: "paged_attention_generic",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    variants: || {
        let types = types(&FLOATS);
        let dims = types.flat_map(|(dtype, cache)| HEAD_DIMS.map(|head_dim| (dtype, cache, head_dim)));
        dims.flat_map(|(dtype, cache, head_dim)| {
            [false, true].map(|softcap| generic_defines(dtype, cache, head_dim, softcap))
        })
        .collect()
    },
};

/// Tensor cores.
pub(super) const SM80: Kernel<Problem> = Kernel::cuda("paged_attention_sm80", &SM80_DEVICE, run_sm80)
    .and(&MERGE)
    .with_workspace(|p, info| parts(p, info).iter().map(|part| part.workspace(p)).sum())
    .configured(|p, info| parts(p, info).iter().map(Part::to_string).collect::<Vec<_>>().join("; "))
    .when(|p, info| {
        if !FLOATS[1..].contains(&p.dtype) {
            return Err(format!("multiplies f16 and bf16, not {}", p.dtype));
        }
        if !p.vectors {
            return Err("heads are not dense and at multiples of 16 bytes".into());
        }
        let shared = parts(p, info).iter().map(|part| part.shared(p) + STATIC_SHARED).max().unwrap_or(0);
        if shared > info.shared_per_block {
            return Err(format!(
                "needs {shared} bytes of shared memory, the device has {}",
                info.shared_per_block
            ));
        }
        addressable(p)
    });

/// Any types, any layout, any device.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("paged_attention_generic", &GENERIC_DEVICE, run_generic)
        .configured(|_, _| "a block a row".into())
        .when(|p, _| addressable(p));

/// Rows and pieces of work are counted in 32 bits.
pub(super) fn addressable(p: &Problem) -> std::result::Result<(), String> {
    let rows = p.num_tokens.saturating_mul(p.num_heads);
    let pieces = (rows + p.requests).saturating_mul(p.max_keys().div_ceil(ROUND).max(1));
    match rows.max(pieces / p.group().max(1)).max(p.num_pages) > i32::MAX as usize {
        true => Err("more than 2^31 rows, pages or pieces of work".into()),
        false => Ok(()),
    }
}

/// The types of queries and caches.
fn types(dtypes: &'static [DType]) -> impl Iterator<Item = (DType, DType)> {
    dtypes.iter().flat_map(|&dtype| [dtype, NARROW[0], NARROW[1]].map(|cache| (dtype, cache)))
}

/// How a block is made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    /// Warps with different rows.
    row_warps: usize,
    /// Groups of warps with different keys.
    key_warps: usize,
    /// Units in a group's ring.
    ring: usize,
    /// Blocks a multiprocessor should hold.
    blocks: usize,
}

impl Shape {
    /// For requests with few rows, or many.
    fn new(head_dim: usize, cache: DType, few: bool, shared: usize) -> Shape {
        let long = head_dim > 128;
        let blocks = if long { 1 } else { 2 };
        // Enough on the way to keep the memory busy.
        let rings: &[usize] = match (few, head_dim * cache.size()) {
            (true, ..=128) => &[8],
            (true, ..=256) => &[if cache.size() == 1 { 6 } else { 5 }, 4],
            (true, _) => &[4, 3],
            (false, _) => &[3, 2],
        };
        let shape = |ring| match few {
            true => Shape { row_warps: 1, key_warps: 4, ring, blocks },
            false => Shape { row_warps: if long { 2 } else { 4 }, key_warps: 1, ring, blocks },
        };
        let fits = |ring: &&usize| shape(**ring).shared(head_dim, cache, 2) + STATIC_SHARED <= shared;
        shape(*rings.iter().find(fits).unwrap_or(&rings[rings.len() - 1]))
    }

    fn rows(&self) -> usize {
        16 * self.row_warps
    }

    fn threads(&self) -> usize {
        32 * self.row_warps * self.key_warps
    }

    /// Bytes of shared memory, with room for the sums of some levels.
    fn shared(&self, head_dim: usize, cache: DType, levels: usize) -> usize {
        let row = |bytes: usize| 16 * if bytes.is_multiple_of(128) { bytes / 16 } else { (bytes / 16) | 1 };
        let step = match head_dim {
            161.. => 16,
            128 => 32,
            _ => 64,
        };
        let unit = self.rows().min(step) * row(head_dim * cache.size());
        let queries = if head_dim > 128 { self.rows() * row(2 * head_dim) } else { 0 };
        // Of a thread's share of two rows, the sums, the largest scores and the sums of weights.
        let level = 32 * self.row_warps * (head_dim / 2 + 4) * size_of::<f32>();
        queries + self.key_warps * self.ring * unit + levels * level
    }
}

/// How keys are shared out over blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Extent {
    /// A block takes a round, and leaves the states of its segments.
    Round,
    /// A block takes a span, and leaves its state.
    Span,
    /// A block takes all keys of its rows.
    All,
}

impl Extent {
    /// Keys of a range whose state is kept; zero if none is.
    fn range_keys(self) -> usize {
        match self {
            Extent::Round => SEGMENT,
            Extent::Span => SPAN,
            Extent::All => 0,
        }
    }

    fn piece_keys(self) -> usize {
        match self {
            Extent::Round => ROUND,
            extent => extent.range_keys(),
        }
    }

    fn ranges(self, p: &Problem) -> usize {
        p.max_keys().checked_div(self.range_keys()).map_or(0, |_| p.max_keys().div_ceil(self.range_keys()))
    }
}

/// One launch, for the requests with some numbers of queries, and the merge after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Part {
    shape: Shape,
    extent: Extent,
    /// Most pieces of work there can be.
    pieces: usize,
    min_queries: usize,
    max_queries: usize,
    /// Blocks that run at once.
    slots: usize,
}

impl Part {
    pub fn new(p: &Problem, info: &DeviceInfo, few: bool, queries: [usize; 2]) -> Part {
        let shape = Shape::new(p.head_dim, p.cache_dtype, few, info.shared_per_block);
        let slots = info.units * shape.blocks;
        let tiles = match p.queries {
            Some(count) => p.requests * (count * p.group()).div_ceil(shape.rows()),
            None => (p.num_tokens * p.group()).div_ceil(shape.rows()) + p.requests,
        };
        let whole = tiles * p.num_kv_heads;
        let pieces = |extent: Extent| match extent.piece_keys() {
            0 => whole,
            keys => whole * p.max_keys().div_ceil(keys).max(1),
        };
        // Blocks with all keys of their rows are the best if there are enough to even out their lengths; many rows take
        // long enough to do without that.
        let enough = if few { WAVES * slots } else { slots };
        let extent = if whole >= enough || p.max_keys() <= ROUND {
            Extent::All
        } else if pieces(Extent::Span) >= 3 * slots / 4 {
            if p.max_keys() <= SPAN { Extent::All } else { Extent::Span }
        } else {
            Extent::Round
        };
        let [min_queries, max_queries] = queries;
        let part = Part { shape, extent, pieces: pieces(extent), min_queries, max_queries, slots };
        if part.workspace(p) <= MOST_WORKSPACE {
            part
        } else {
            Part { extent: Extent::All, pieces: whole, ..part }
        }
    }

    pub fn workspace(&self, p: &Problem) -> usize {
        self.extent.ranges(p) * p.num_tokens * p.num_heads * (p.head_dim + 2) * size_of::<f32>()
    }

    fn shared(&self, p: &Problem) -> usize {
        let levels = match self.extent {
            Extent::Round => 0,
            Extent::Span => 1,
            Extent::All => 2,
        };
        self.shape.shared(p.head_dim, p.cache_dtype, levels)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = match self.extent {
            Extent::Round => "512 keys",
            Extent::Span => "2048 keys",
            Extent::All => "all keys",
        };
        let Shape { row_warps, key_warps, ring, .. } = self.shape;
        write!(
            f,
            "tiles of {} rows, {keys} a block of {row_warps} x {key_warps} warps, ",
            self.shape.rows()
        )?;
        write!(f, "rings of {ring}, {} pieces", self.pieces)
    }
}

/// The launches of a call: one for requests with few rows, one for those with many, as far as there can be such.
fn parts(p: &Problem, info: &DeviceInfo) -> Vec<Part> {
    let few = FEW_ROWS / p.group().max(1);
    let most = p.queries.unwrap_or(p.num_tokens);
    match p.queries {
        Some(count) => vec![Part::new(p, info, count <= few, [0, most])],
        None if most <= few => vec![Part::new(p, info, true, [0, most])],
        None => vec![Part::new(p, info, true, [0, few]), Part::new(p, info, false, [few + 1, most])],
    }
}

fn sm80_defines(p: [DType; 2], head_dim: usize, shape: Shape, softcap: bool, whole_pages: bool) -> Defines {
    let [dtype, cache] = p;
    vec![
        element(dtype),
        ("KV", cache.name().into()),
        ("HEAD_DIM", head_dim.to_string()),
        ("ROW_WARPS", shape.row_warps.to_string()),
        ("KEY_WARPS", shape.key_warps.to_string()),
        ("RING", shape.ring.to_string()),
        ("BLOCKS", shape.blocks.to_string()),
        flag("SOFTCAP", softcap),
        flag("WHOLE_PAGES", whole_pages),
    ]
}

fn sm80_variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for (dtype, cache) in types(&FLOATS[1..]) {
        for head_dim in HEAD_DIMS {
            for few in [true, false] {
                // With the shared memory of the largest devices and of the smallest.
                let mut shapes =
                    vec![Shape::new(head_dim, cache, few, usize::MAX), Shape::new(head_dim, cache, few, 0)];
                shapes.dedup();
                for shape in shapes {
                    for bits in 0..4 {
                        let [softcap, whole_pages] = [1, 2].map(|bit| bits & bit != 0);
                        all.push(sm80_defines([dtype, cache], head_dim, shape, softcap, whole_pages));
                    }
                }
            }
        }
    }
    all
}

fn merge_defines(dtype: DType, head_dim: usize) -> Defines {
    vec![element(dtype), ("HEAD_DIM", head_dim.to_string())]
}

fn generic_defines(dtype: DType, cache: DType, head_dim: usize, softcap: bool) -> Defines {
    vec![
        element(dtype),
        ("KV", cache.name().into()),
        ("HEAD_DIM", head_dim.to_string()),
        flag("SOFTCAP", softcap),
    ]
}

/// Factor and shift with which keys below 2^31 are divided by `size`.
fn magic(size: usize) -> (u32, i32) {
    let bits = size.next_power_of_two().trailing_zeros();
    (((1u64 << (31 + bits)).div_ceil(size as u64)) as u32, 31 + bits as i32)
}

fn params(launch: &Launch<'_, Problem>) -> PagedParams {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let (page_magic, page_shift) = magic(p.page_size);
    let [q_token, q_head, q_dim] = p.q.map(|s| s as i64);
    let [k_page, k_slot, k_head, k_dim] = p.k.map(|s| s as i64);
    let [v_page, v_slot, v_head, v_dim] = p.v.map(|s| s as i64);
    let [out_token, out_head, out_dim] = p.out.map(|s| s as i64);
    let [lse_token, lse_head] = p.lse.unwrap_or_default().map(|s| s as i64);
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
        partial: 0,
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
        table_row: p.page_table[0] as i64,
        table_col: p.page_table[1] as i64,
        kv_lens_step: p.kv_lens_step as i64,
        q_starts_step: p.q_starts_step as i64,
        k_scale_step: p.k_scale_step as i64,
        v_scale_step: p.v_scale_step as i64,
        sinks_step: p.sinks_step as i64,
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
        causal: p.causal as i32,
        window: p.window as i32,
        scale: p.scale(),
        softcap: p.softcap(),
    }
}

fn run_sm80(launch: &Launch<'_, Problem>) -> Result<()> {
    run_parts(launch, &parts(launch.problem, launch.info))
}

/// Launches the kernel for the requests of each part. The workspace holds what the parts need, one after the other.
pub(super) fn run_parts(launch: &Launch<'_, Problem>, parts: &[Part]) -> Result<()> {
    let p = launch.problem;
    let mut partial = launch.workspace as u64;
    for part in parts {
        let &Part { shape, extent, .. } = part;
        let ranges = extent.ranges(p);
        let params = PagedParams {
            partial,
            min_queries: part.min_queries as i32,
            max_queries: part.max_queries as i32,
            ranges: ranges as i32,
            range_keys: extent.range_keys() as i32,
            piece_keys: extent.piece_keys() as i32,
            ..params(launch)
        };
        partial += part.workspace(p) as u64;
        let whole_pages = p.page_size.is_multiple_of(16);
        let defines =
            sm80_defines([p.dtype, p.cache_dtype], p.head_dim, shape, p.softcap() != 0.0, whole_pages);
        let blocks = part.pieces.min(WAVES * part.slots) as u32;
        let config = LaunchConfig::new([blocks, 1, 1], [shape.threads() as u32, 1, 1], part.shared(p) as u32);
        // SAFETY: `check` bound shapes and strides to the parameters, the kernel moves all numbers into them, and the
        // workspace holds the states of every range.
        unsafe { kernel::run_part(launch, &SM80_DEVICE, &defines, &config, &params)? };
        if ranges > 0 {
            let shared = ranges.min(MERGE_BATCH) * p.head_dim * size_of::<f32>();
            let rows = (p.num_tokens * p.num_heads) as u32;
            let config = LaunchConfig::new([rows, 1, 1], [ROW_THREADS, 1, 1], shared as u32);
            // SAFETY: as above.
            unsafe {
                kernel::run_part(launch, &MERGE, &merge_defines(p.dtype, p.head_dim), &config, &params)?
            };
        }
    }
    Ok(())
}

fn run_generic(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let defines = generic_defines(p.dtype, p.cache_dtype, p.head_dim, p.softcap() != 0.0);
    let rows = (p.num_tokens * p.num_heads) as u32;
    let config = LaunchConfig::new([rows, 1, 1], [ROW_THREADS, 1, 1], 0);
    // SAFETY: `check` bound shapes and strides to the parameters, and the kernel moves all numbers into them.
    unsafe { kernel::run(launch, &defines, &config, &params(launch)) }
}
