//! `attention` on Hopper: host half. The device half is `sm90.cu`.

pub(in crate::ops) mod deal;
#[cfg(test)]
mod tests;

use super::cuda::{AttentionParams, addressable};
use super::problem::{HEAD_DIMS, Heads, Problem};
use super::{K, OUT, Q, V};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};
use deal::{Deal, plan};
use std::f32::consts::LOG2_E;

/// Queries of a warpgroup, and its threads.
const ROWS: usize = 64;
const WARPGROUP: usize = 128;
/// Results of a warp.
pub(in crate::ops) const WARP_ROWS: usize = 16;
/// Elements of a head in the 128 bytes that the copy engine swizzles.
pub(in crate::ops) const CHUNK: usize = 64;
/// Elements of the heads for which three consumers can share the registers of a block, with as many keys as two; and of those for
/// which they can with [`THIRD_KEYS`].
const SHORT_HEAD: usize = 64;
const LONG_HEAD: usize = 128;
const THIRD_KEYS: usize = 80;
/// Keys of a call up to which larger blocks are better for a long head, if all its rows see all of them.
const FEW_KEYS: usize = 1024;
/// Keys of a block, where the caller wants few.
const LEAST_KEYS: usize = 64;
/// Limits beyond this lose digits on the way through the exponential.
const MOST_SOFTCAP: f32 = 1000.0;

kernel_params! {
    struct Sm90Params {
        q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, out_map: TensorMap,
        attention: AttentionParams,
        tiles: u32, m_tiles: u32, head_group: u32,
        /// What scores are multiplied with on the way into a power of two, and on the way into the softcap.
        scale_log2: f32, softcap_in: f32,
    }
}

/// How a block works on heads of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::ops) struct Tile {
    pub consumers: usize,
    pub keys: usize,
    stages: usize,
    q_stages: usize,
    out_whole: bool,
}

impl Tile {
    /// For keys and values one after the other, or in pages.
    pub fn of(head_dim: usize, paged: bool) -> Tile {
        let tile = Tile { consumers: 2, keys: 128, stages: 2, q_stages: 2, out_whole: true };
        match head_dim {
            // How many keys there are is not known here, so nothing may depend on it.
            LONG_HEAD if paged => tile.with_keys(THIRD_KEYS),
            ..=128 => tile,
            // Sizes of pages divide 64, or 64 divides them.
            ..=192 if !paged => Tile { keys: 96, q_stages: 1, out_whole: false, ..tile },
            _ => Tile { keys: 64, q_stages: 1, out_whole: false, ..tile },
        }
    }

    /// For a call, of what it may want.
    fn of_call(p: &Problem, units: usize) -> Tile {
        let tile = Tile::of(p.head_dim, false).with_keys(Tile::keys_of(p));
        let Some(cost) = tile.wide_cost(p.head_dim, p.softcap_bits != 0) else { return tile };
        match (p.block_q, p.packed) {
            (0, None) => tile.wide_if(cost, |tile| plan(&Deal::of(p, tile, units)).longest),
            (0, Some(packed)) => {
                tile.wide_if(cost, |tile| tile.rounds([packed.requests, p.q_len], p.num_heads, units))
            }
            (rows, _) if rows == tile.wide().rows() => tile.wide(),
            _ => tile,
        }
    }

    /// With three warpgroups, if the `work` of the block that gets most of it is not too much more for their larger tiles. They
    /// take `cost` times as long for a block of keys, hide more of the exponentials and load keys for more queries.
    pub fn wide_if(self, cost: f64, work: impl Fn(&Tile) -> usize) -> Tile {
        let wide = self.wide();
        if work(&wide) as f64 * cost < work(&self) as f64 { wide } else { self }
    }

    /// Tiles of the block that gets most of them, if requests of packed tokens are equally long.
    pub fn rounds(&self, [requests, tokens]: [usize; 2], heads: usize, units: usize) -> usize {
        let each = tokens.div_ceil(requests.max(1)).div_ceil(self.rows());
        (each * requests * heads).div_ceil(units)
    }

    /// Keys of a block: a row's bits depend on them. Where a row sees only some of the keys, nothing may depend on how many there
    /// are: it has the same bits in a call with those behind it.
    fn keys_of(p: &Problem) -> usize {
        let some = p.causal || p.window > 0;
        match p.block_kv {
            0 if p.head_dim == LONG_HEAD && (some || (p.packed.is_none() && p.kv_len > FEW_KEYS)) => {
                THIRD_KEYS
            }
            0 => Tile::of(p.head_dim, false).keys,
            keys => keys,
        }
    }

    /// The time that three warpgroups take for a block of keys in terms of what two take, if they can share the registers of a
    /// block: a softcap needs those of a third.
    pub fn wide_cost(&self, head_dim: usize, softcap: bool) -> Option<f64> {
        match head_dim {
            SHORT_HEAD if !softcap => Some(1.27),
            LONG_HEAD if self.keys <= THIRD_KEYS => Some(1.33),
            _ => None,
        }
    }

    /// Whether there are tiles of the size that a call wants.
    fn admits(p: &Problem) -> std::result::Result<(), String> {
        let tile = Tile::of(p.head_dim, false);
        let third = (p.head_dim == LONG_HEAD).then_some(THIRD_KEYS);
        let keys: Vec<usize> = [tile.keys].into_iter().chain(third).chain([LEAST_KEYS]).collect();
        let rows = [tile.rows(), tile.wide().rows()];
        let can_be_wide =
            tile.with_keys(Tile::keys_of(p)).wide_cost(p.head_dim, p.softcap_bits != 0).is_some();
        p.admits(&rows[..if can_be_wide { 2 } else { 1 }], &keys)
    }

    /// With blocks of so many keys, and one more of them in memory if they are smaller.
    fn with_keys(self, keys: usize) -> Tile {
        Tile { keys, stages: if keys < self.keys { 3 } else { self.stages }, ..self }
    }

    fn wide(self) -> Tile {
        Tile { consumers: 3, stages: 2, ..self }
    }

    /// Queries of a tile.
    pub fn rows(&self) -> usize {
        ROWS * self.consumers
    }

    pub fn threads(&self) -> usize {
        (1 + self.consumers) * WARPGROUP
    }

    /// Shared memory of a block without pages.
    pub fn shared_bytes(&self, head_dim: usize) -> usize {
        let chunks = head_dim.div_ceil(CHUNK);
        let operands = (self.q_stages * self.rows() + 2 * self.stages * self.keys) * chunks * 128;
        let results = self.rows() * 128 * if self.out_whole { chunks } else { 1 };
        let barriers = 16 * (self.q_stages + 2 * self.stages) + 32;
        operands + results + barriers + 32 * self.q_stages
    }

    /// Keys that blocks and pages of some size are both made of: the copy engine brings as many at once.
    pub fn page_rows(&self, page_size: usize) -> usize {
        page_size.min(1 << self.keys.trailing_zeros())
    }

    /// What numbers of pages that do not exist take besides.
    pub fn paged_bytes(&self) -> usize {
        4 * self.stages
    }
}

/// Everything about a launch that is compiled in.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Config {
    pub dtype: DType,
    pub head_dim: usize,
    pub causal: bool,
    pub window: bool,
    pub softcap: bool,
    pub sinks: bool,
    pub lse: bool,
    pub packed: bool,
    /// Tokens of a page, where keys and values lie in pages.
    pub page_size: Option<usize>,
    pub tile: Tile,
}

impl Config {
    fn of(p: &Problem, tile: Tile) -> Config {
        Config {
            dtype: p.dtype,
            head_dim: p.head_dim,
            causal: p.causal,
            window: p.window > 0,
            softcap: p.softcap_bits != 0,
            sinks: p.sinks.is_some(),
            lse: p.has_lse,
            packed: p.packed.is_some(),
            page_size: None,
            tile,
        }
    }

    pub fn defines(&self) -> Defines {
        let tile = &self.tile;
        let mut defines = vec![
            ("T", self.dtype.name().into()),
            ("HEAD_DIM", self.head_dim.to_string()),
            ("BLOCK_N", tile.keys.to_string()),
            ("CONSUMERS", tile.consumers.to_string()),
            ("STAGES", tile.stages.to_string()),
            ("Q_STAGES", tile.q_stages.to_string()),
            flag("OUT_WHOLE", tile.out_whole),
            flag("CAUSAL", self.causal),
            flag("WINDOW", self.window),
            flag("SOFTCAP", self.softcap),
            flag("HAS_SINKS", self.sinks),
            flag("HAS_LSE", self.lse),
            flag("VARLEN", self.packed),
            // What `attention.cuh` asks for besides.
            flag("HAS_MASK", false),
            flag("HAS_BIAS", false),
        ];
        defines.extend(self.page_size.map(|size| ("PAGE_SIZE", size.to_string())));
        defines
    }

    /// Of both types, each size of head with and without a causal mask, each option with one size, and each tile.
    pub fn covering(page_size: Option<usize>) -> Vec<Config> {
        let packed = page_size.is_some();
        let mut all = Vec::new();
        for dtype in [DType::BF16, DType::F16] {
            let plain = |head_dim, causal| Config {
                dtype,
                head_dim,
                causal,
                window: false,
                softcap: false,
                sinks: false,
                lse: false,
                packed,
                page_size,
                tile: Tile::of(head_dim, page_size.is_some()),
            };
            for head_dim in HEAD_DIMS {
                all.extend([false, true].map(|causal| plain(head_dim, causal)));
            }
            for causal in [false, true] {
                let (short, long) = (plain(SHORT_HEAD, causal), plain(LONG_HEAD, causal));
                let third = long.tile.with_keys(THIRD_KEYS);
                for (plain, tile) in [(short, short.tile.wide()), (long, third.wide())] {
                    all.push(Config { sinks: true, lse: true, window: true, tile, ..plain });
                }
                all.push(Config { tile: third.wide(), ..long });
                if page_size.is_none() {
                    all.push(Config { tile: third, ..long });
                    all.push(Config { softcap: true, tile: third.wide(), ..long });
                    all.extend([third, third.wide()].map(|tile| Config { packed: true, tile, ..long }));
                    all.push(Config { tile: long.tile.with_keys(LEAST_KEYS), ..long });
                }
                all.push(Config { window: true, softcap: true, ..long });
                all.push(Config { sinks: true, lse: true, ..long });
                all.push(Config { packed: true, ..long });
            }
        }
        all
    }
}

/// What scores are multiplied with on the way into a power of two, and on the way into the softcap.
pub(in crate::ops) fn factors(scale: f32, softcap: f32) -> [f32; 2] {
    match softcap {
        0.0 => [scale * LOG2_E, 0.0],
        cap => [cap * LOG2_E, 2.0 * LOG2_E * (scale / cap)],
    }
}

/// Whether the kernel can work with the type and the options, whatever the tensors are.
pub(in crate::ops) fn supports_options(
    info: &DeviceInfo,
    dtype: DType,
    scale: f32,
    softcap: f32,
) -> std::result::Result<(), String> {
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if dtype == DType::F32 {
        return Err("f32 needs no tensor cores".into());
    }
    if scale <= 0.0 {
        return Err("the largest of scores with a negative factor is the smallest of the products".into());
    }
    if softcap > MOST_SOFTCAP {
        return Err(format!("a softcap above {MOST_SOFTCAP} needs more digits"));
    }
    Ok(())
}

const SOURCE: Source = Source { name: "attention_sm90", code: include_str!("sm90.cu") };

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: Sm90Params::prelude,
    function: "attention_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    variants: || Config::covering(None).iter().map(Config::defines).collect(),
};

/// Tensor cores through `wgmma`, fed by the copy engine.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("attention_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own.
        unsafe { run(launch) }
    })
    .when(supports)
    .configured(|p, info| {
        let tile = Tile::of_call(p, info.units);
        format!("{} rows by {} keys, {} consumers", tile.rows(), tile.keys, tile.consumers)
    });

fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    supports_options(info, p.dtype, p.scale(), p.softcap())?;
    if p.mask.is_some() || p.bias.is_some() {
        return Err("it knows no mask and no bias".into());
    }
    if p.kv_len == 0 {
        return Err("there is nothing to load".into());
    }
    Tile::admits(p)?;
    for (name, heads, tokens, count) in [
        ("q", &p.q, p.q_len, p.num_heads),
        ("k", &p.k, p.kv_len, p.num_kv_heads),
        ("v", &p.v, p.kv_len, p.num_kv_heads),
        ("out", &p.out, p.q_len, p.num_heads),
    ] {
        if !heads.vectors {
            return Err(format!("heads of {name} do not begin at multiples of 16 bytes"));
        }
        let repeats = |stride: isize, n: usize| n > 1 && stride <= 0;
        if repeats(heads.token, tokens) || repeats(heads.head, count) || repeats(heads.batch, p.batch) {
            return Err(format!("`{name}` repeats elements"));
        }
    }
    addressable(p)
}

/// The map of boxes of `rows` tokens of a chunk of one head.
fn map(
    address: usize,
    p: &Problem,
    at: &Heads,
    [tokens, heads]: [usize; 2],
    rows: usize,
) -> Result<TensorMap> {
    let size = p.dtype.size();
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    TensorMap::encode(&Tiled {
        address: address as u64,
        dtype: p.dtype,
        sizes: &[p.head_dim, tokens, heads, p.batch].map(|n| n as u64),
        strides: &[bytes(at.token, tokens), bytes(at.head, heads), bytes(at.batch, p.batch)],
        extents: &[CHUNK as u32, rows as u32, 1, 1],
        swizzle: Swizzle::B128,
    })
}

/// # Safety
/// The tensors of the call must live until the work on the stream is done.
unsafe fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let units = launch.info.units;
    let tile = Tile::of_call(p, units);
    let m_tiles = p.q_len.div_ceil(tile.rows());
    let tiles = p.num_heads
        * match p.packed {
            Some(packed) => p.q_len / tile.rows() + packed.requests,
            None => m_tiles * p.batch,
        };
    // Blocks count a round ahead.
    let limit = i32::MAX as usize;
    if tiles > limit {
        return Err(Error::Launch {
            kernel: "attention_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: limit as u64,
        });
    }
    let map = |index: usize, at: &Heads, sizes: [usize; 2], rows: usize| {
        map(launch.args.address(index), p, at, sizes, rows)
    };
    let [scale_log2, softcap_in] = factors(p.scale(), p.softcap());
    let params = Sm90Params {
        q_map: map(Q, &p.q, [p.q_len, p.num_heads], tile.rows())?,
        k_map: map(K, &p.k, [p.kv_len, p.num_kv_heads], tile.keys)?,
        v_map: map(V, &p.v, [p.kv_len, p.num_kv_heads], tile.keys)?,
        out_map: map(OUT, &p.out, [p.q_len, p.num_heads], WARP_ROWS)?,
        attention: AttentionParams::new(p, launch.args, tile.rows()),
        tiles: tiles as u32,
        m_tiles: m_tiles as u32,
        head_group: if p.packed.is_some() { 1 } else { plan(&Deal::of(p, &tile, units)).head_group as u32 },
        scale_log2,
        softcap_in,
    };
    let threads = tile.threads() as u32;
    let shared = tile.shared_bytes(p.head_dim) as u32;
    let config = LaunchConfig::new([tiles.min(units) as u32, 1, 1], [threads, 1, 1], shared);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them, and the blocks share
    // all tiles among them.
    unsafe { kernel::run(launch, &Config::of(p, tile).defines(), &config, &params) }
}
