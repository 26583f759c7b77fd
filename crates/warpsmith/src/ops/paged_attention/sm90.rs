//! `paged_attention` on Hopper: host half. The device half is `sm90.cu`.
//!
//! This kernel takes requests with many queries; those with few, which are limited by bandwidth, are left to the kernel
//! of `cuda.rs`. With many queries the products of a prefix take longer than reading it, so a prefix is not read once
//! per group unless the caller insists; then all requests are left to that kernel.

use super::cuda::{self, MERGE, SM80_DEVICE, addressable};
use super::plan::{FEW_ROWS, Plan};
use super::{K_PAGES, KV_LENS, LSE, OUT, PAGE_TABLE, Problem, Q, Q_STARTS, SINKS, V_PAGES};
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::CudaKernel;
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::attention::cuda::{AttentionParams, GridStrides, HeadStrides};
use crate::ops::attention::sm90::deal::{Deal, plan};
use crate::ops::attention::sm90::tile::{Kind, Tile};
use crate::ops::attention::sm90::{CHUNK, Config, WARP_ROWS, factors, supports_options};

kernel_params! {
    /// Where the keys of requests are.
    struct PagedKeys {
        page_table: u64, kv_lens: u64,
        table_row: i64, table_col: i64, kv_lens_step: i64,
        num_pages: i32,
        /// Keys that the table can hold.
        max_keys: i32,
        /// Of every request; negative where `q_starts` has them.
        queries: i32,
        /// Another launch handles requests with fewer.
        min_queries: i32,
    }
}

kernel_params! {
    struct Sm90Params {
        q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, out_map: TensorMap,
        attention: AttentionParams,
        paged: PagedKeys,
        tiles: u32, m_tiles: u32, head_group: u32,
        scale_log2: f32, softcap_in: f32,
    }
}

/// Tokens of the pages that blocks of keys are made of, or part of.
const PAGE_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "paged_attention_sm90", code: include_str!("sm90.cu") },
    prelude: Sm90Params::prelude,
    function: "paged_attention_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Config::covering(Some(PAGE_SIZES[0]));
        let plain = all[0];
        all.extend(PAGE_SIZES[1..].iter().map(|&size| Config { page_size: Some(size), ..plain }));
        let mut all: Vec<_> = all.iter().map(Config::defines).collect();
        all.sort();
        all.dedup();
        all
    },
};

/// Most queries of a request that is left to the kernel for few.
fn few(p: &Problem) -> usize {
    FEW_ROWS / p.group().max(1)
}

/// Tensor cores through `wgmma`, fed by the copy engine page by page.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("paged_attention_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        cuda::run_plan(launch, &Plan::few(launch.problem, launch.info))?;
        // SAFETY: the tensors are the call's own.
        unsafe { run_many(launch) }
    })
    .and(&SM80_DEVICE)
    .and(&MERGE)
    .with_workspace(|p, info| Plan::few(p, info).workspace(p))
    .when(supports)
    .configured(|p, info| {
        let tile = tile_of(p, info.units);
        let many = format!("{} rows by {} keys, {} consumers", tile.rows(), tile.keys, tile.consumers);
        Plan::few(p, info).parts.first().map_or(many.clone(), |part| format!("{part}; {many}"))
    });

fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    supports_options(info, p.dtype, p.scale(), p.softcap())?;
    if p.queries.unwrap_or(p.num_tokens) <= few(p) {
        return Err("no request has queries enough for it".into());
    }
    // Whether sharing pays depends on the other requests, and so must not decide which kernel adds up a row.
    if p.always_share && Plan::new(p, info).levels > 0 {
        return Err("reads prefixes that requests share once for each".into());
    }
    if p.cache_dtype != p.dtype {
        return Err(format!("a cache of {} would have to be converted", p.cache_dtype));
    }
    if !PAGE_SIZES.contains(&p.page_size) {
        let sizes = PAGE_SIZES.map(|size| size.to_string()).join(", ");
        return Err(format!("pages of {} tokens are not of {sizes}", p.page_size));
    }
    if p.max_keys() == 0 || p.num_pages == 0 {
        return Err("there is nothing to load".into());
    }
    if !p.vectors {
        return Err("heads are not dense and at multiples of 16 bytes".into());
    }
    let caches = [p.num_pages, p.page_size, p.num_kv_heads];
    for (name, strides, sizes) in [
        ("q", &p.q[..2], &[p.num_tokens, p.num_heads][..]),
        ("out", &p.out[..2], &[p.num_tokens, p.num_heads]),
        ("k_pages", &p.k[..3], &caches),
        ("v_pages", &p.v[..3], &caches),
    ] {
        if strides.iter().zip(sizes).any(|(&stride, &n)| n > 1 && stride <= 0) {
            return Err(format!("`{name}` repeats elements"));
        }
    }
    addressable(p)
}

/// # Safety
/// The tensors of the call must live until the work on the stream is done.
unsafe fn run_many(launch: &Launch<'_, Problem>) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    let tile = tile_of(p, launch.info.units);
    let m_tiles = p.queries.unwrap_or(0).div_ceil(tile.rows());
    let tiles = p.num_heads
        * match p.queries {
            Some(_) => m_tiles * p.requests,
            None => p.num_tokens / tile.rows() + p.requests,
        };
    let limit = i32::MAX as usize;
    if tiles > limit {
        return Err(Error::Launch {
            kernel: "paged_attention_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: limit as u64,
        });
    }
    let [scale_log2, softcap_in] = factors(p.scale(), p.softcap());
    let size = p.dtype.size();
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    let pages = |index: usize, [page, slot, head, _]: [isize; 4]| {
        launch.tensor_map(&Tiled {
            address: args.address(index) as u64,
            dtype: p.dtype,
            sizes: &[p.head_dim, p.page_size, p.num_kv_heads, p.num_pages].map(|n| n as u64),
            strides: &[bytes(slot, p.page_size), bytes(head, p.num_kv_heads), bytes(page, p.num_pages)],
            extents: &[CHUNK as u32, tile.page_rows(p.page_size) as u32, 1, 1],
            swizzle: Swizzle::B128,
        })
    };
    let tokens = |index: usize, [token, head]: [isize; 2], rows: usize| {
        launch.tensor_map(&Tiled {
            address: args.address(index) as u64,
            dtype: p.dtype,
            sizes: &[p.head_dim, p.num_tokens, p.num_heads, 1].map(|n| n as u64),
            strides: &[bytes(token, p.num_tokens), bytes(head, p.num_heads), 16],
            extents: &[CHUNK as u32, rows as u32, 1, 1],
            swizzle: Swizzle::B128,
        })
    };
    let params = Sm90Params {
        q_map: tokens(Q, [p.q[0], p.q[1]], tile.rows())?,
        k_map: pages(K_PAGES, p.k)?,
        v_map: pages(V_PAGES, p.v)?,
        out_map: tokens(OUT, [p.out[0], p.out[1]], WARP_ROWS)?,
        attention: attention_params(launch),
        paged: PagedKeys {
            page_table: args.address(PAGE_TABLE) as u64,
            kv_lens: args.address(KV_LENS) as u64,
            table_row: p.page_table[0] as i64,
            table_col: p.page_table[1] as i64,
            kv_lens_step: p.kv_lens_step as i64,
            num_pages: p.num_pages as i32,
            max_keys: p.max_keys() as i32,
            queries: p.queries.map_or(-1, |count| count as i32),
            min_queries: few(p) as i32 + 1,
        },
        tiles: tiles as u32,
        m_tiles: m_tiles as u32,
        head_group: p
            .queries
            .map_or(1, |queries| plan(&deal(p, queries, p.requests, &tile, launch.info.units)).head_group)
            as u32,
        scale_log2,
        softcap_in,
    };
    let config = Config {
        dtype: p.dtype,
        head_dim: p.head_dim,
        causal: p.causal,
        window: p.window > 0,
        softcap: p.softcap_bits != 0,
        sinks: args.get(SINKS).is_some(),
        lse: p.lse.is_some(),
        packed: true,
        page_size: Some(p.page_size),
        tile,
    };
    let shared = (tile.shared_bytes(p.head_dim) + tile.paged_bytes()) as u32;
    let blocks = tiles.min(launch.info.units) as u32;
    let launch_config = LaunchConfig::new([blocks, 1, 1], [tile.threads() as u32, 1, 1], shared);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them, and the blocks share all
    // tiles among them.
    unsafe { launch.record(&config.defines(), &launch_config, &params) }
}

/// The tile of a call.
fn tile_of(p: &Problem, units: usize) -> Tile {
    let kind = Kind { dtype: p.dtype, head_dim: p.head_dim, softcap: p.softcap_bits != 0, paged: true };
    kind.over_pages(|tile| match p.queries {
        Some(queries) => plan(&deal(p, queries, p.requests, tile, units)).longest as f64,
        None => {
            // Where most requests have few queries, which are not for this kernel, the estimate assumes one other
            // request.
            let requests = if p.num_tokens > few(p) * p.requests { p.requests } else { 1 };
            deal(p, p.num_tokens.div_ceil(requests.max(1)), requests, tile, units).rounds()
        }
    })
}

/// How the tiles of `requests` with the same number of queries are distributed, if each fills its table.
fn deal(p: &Problem, queries: usize, requests: usize, tile: &Tile, units: usize) -> Deal {
    Deal {
        q_len: queries,
        kv_len: p.max_keys(),
        heads: p.num_heads * requests,
        rows: tile.rows(),
        keys: tile.keys,
        causal: p.causal,
        units,
    }
}

/// What the kernel shares with `attention`, whose batch is 1 for packed requests; what is absent is zero.
fn attention_params(launch: &Launch<'_, Problem>) -> AttentionParams {
    let (p, args) = (launch.problem, launch.args);
    let at = |index: usize| args.address(index) as u64;
    let heads =
        |token: isize, head: isize| HeadStrides { batch: 0, token: token as i64, head: head as i64, dim: 1 };
    let none = GridStrides { batch: 0, head: 0, query: 0, key: 0 };
    let [lse_token, lse_head] = p.lse.unwrap_or_default().map(|stride| stride as i64);
    AttentionParams {
        q: at(Q),
        k: at(K_PAGES),
        v: 0,
        q_starts: at(Q_STARTS),
        kv_starts: 0,
        mask: 0,
        bias: 0,
        sinks: at(SINKS),
        out: at(OUT),
        lse: at(LSE),
        q_at: heads(p.q[0], p.q[1]),
        // A page takes the place of an index of the batch.
        k_at: HeadStrides { batch: p.k[0] as i64, ..heads(p.k[1], p.k[2]) },
        v_at: heads(0, 0),
        out_at: heads(p.out[0], p.out[1]),
        mask_at: none,
        bias_at: none,
        lse_at: GridStrides { head: lse_head, query: lse_token, ..none },
        q_starts_step: p.q_starts_step as i64,
        kv_starts_step: 0,
        sinks_step: p.sinks_step as i64,
        requests: p.requests as i32,
        q_len: p.num_tokens as i32,
        kv_len: p.max_keys() as i32,
        num_kv_heads: p.num_kv_heads as i32,
        group: p.group() as i32,
        tiles: 0,
        causal: p.causal.into(),
        window: p.window.min(i32::MAX as usize / 2) as i32,
        scale: p.scale(),
        softcap: p.softcap(),
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::plan::tests::problem;
    use super::*;
    use crate::cpu::Tier;

    #[test]
    fn three_warpgroups_share_a_tile_where_there_are_many() {
        let rows = |p: &Problem| tile_of(p, 132).rows();
        let even = |sizes| problem(sizes, [0, 1], false);
        assert_eq!(rows(&even([2, 8192, 8192])), 192);
        assert_eq!(rows(&even([1, 512, 1024])), 128, "there is a block for each of the smaller tiles");
        assert_eq!(rows(&Problem { softcap_bits: 1.0f32.to_bits(), ..even([2, 8192, 8192]) }), 128);
        let packed = |sizes| Problem { queries: None, ..even(sizes) };
        assert_eq!(rows(&packed([16, 1000, 1000])), 192);
        assert_eq!(rows(&packed([64, 100, 1000])), 128, "a tile of the larger kind would be half empty");
        // One prompt among requests that decode.
        assert_eq!(rows(&Problem { num_tokens: 2000, ..packed([500, 1, 4000]) }), 192);
        // The bits of a row are the same in either.
        assert_eq!(tile_of(&even([2, 8192, 8192]), 132).keys, tile_of(&even([1, 512, 1024]), 132).keys);
    }

    #[test]
    fn other_requests_do_not_decide_whether_it_is_chosen() {
        let arch = Some(Arch::new(9, 0, true));
        let info =
            DeviceInfo { units: 132, shared_per_block: 227 << 10, arch, ..DeviceInfo::cpu(Tier::Portable) };
        let chosen = |[requests, queries]: [usize; 2], always_share: bool, even: bool| {
            let p = problem([requests, queries, 8320], [1, 1], always_share);
            supports(&Problem { queries: p.queries.filter(|_| even), ..p }, &info).is_ok()
        };
        // Of these, sharing would pay with 32 requests of nine queries alone.
        for sizes in [[8, 9], [32, 9], [32, 16]] {
            assert!(chosen(sizes, false, true) && chosen(sizes, false, false), "{sizes:?}");
            assert!(!chosen(sizes, true, true), "{sizes:?}: the caller insists");
        }
        assert!(!chosen([64, 1], false, true), "few rows");
    }
}
