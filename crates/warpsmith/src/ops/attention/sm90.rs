//! `attention` on Hopper: host half. The device half is `sm90.cu`.

pub(in crate::ops) mod deal;
#[cfg(feature = "tests")]
mod tests;
pub(in crate::ops) mod tile;

use super::cuda::{AttentionParams, addressable, vectors};
use super::problem::{HEAD_DIMS, Heads, Problem};
use super::{K, OUT, Q, V};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::tensor::DType;
use deal::{Deal, plan};
use std::f32::consts::LOG2_E;
use tile::{LEAST_KEYS, LONG_HEAD, SHORT_HEAD, THIRD_KEYS, Tile};

/// Results of a warp.
pub(in crate::ops) const WARP_ROWS: usize = 16;
/// Elements of a head in the 128 bytes that the copy engine swizzles.
pub(in crate::ops) const CHUNK: usize = 64;
/// Softcaps beyond this lose digits in the exponential.
const MOST_SOFTCAP: f32 = 1000.0;

kernel_params! {
    struct Sm90Params {
        q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, out_map: TensorMap,
        attention: AttentionParams,
        tiles: u32, m_tiles: u32, head_group: u32,
        /// The factors of scores before the power of two, and before the softcap.
        scale_log2: f32, softcap_in: f32,
    }
}

/// The compile-time part of a launch.
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
            // Further defines that `attention.cuh` needs.
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

/// Whether the kernel supports the type and the options, whatever the tensors are.
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
        return Err("its products are those of f16 and bf16".into());
    }
    if scale <= 0.0 {
        return Err("keys are hidden by a score of minus infinity before its factor".into());
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
    overlaps: true,
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
    p.without_dropout()?;
    if p.kv_len == 0 {
        return Err("there is nothing to load".into());
    }
    Tile::admits(p)?;
    vectors(p)?;
    for (name, heads, tokens, count) in [
        ("q", &p.q, p.q_len, p.num_heads),
        ("k", &p.k, p.kv_len, p.num_kv_heads),
        ("v", &p.v, p.kv_len, p.num_kv_heads),
        ("out", &p.out, p.q_len, p.num_heads),
    ] {
        let repeats = |stride: isize, n: usize| n > 1 && stride <= 0;
        if repeats(heads.token, tokens) || repeats(heads.head, count) || repeats(heads.batch, p.batch) {
            return Err(format!("`{name}` repeats elements"));
        }
    }
    addressable(p)
}

/// The map of boxes of `rows` tokens of a chunk of one head.
fn map(
    launch: &Launch<'_, Problem>,
    index: usize,
    at: &Heads,
    [tokens, heads]: [usize; 2],
    rows: usize,
) -> Result<TensorMap> {
    let p = launch.problem;
    let size = p.dtype.size();
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    launch.tensor_map(&Tiled {
        address: launch.args.address(index) as u64,
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
    // Block indices run up to one round past the end.
    let limit = i32::MAX as usize;
    if tiles > limit {
        return Err(Error::Launch {
            kernel: "attention_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: limit as u64,
        });
    }
    let [scale_log2, softcap_in] = factors(p.scale(), p.softcap());
    let params = Sm90Params {
        q_map: map(launch, Q, &p.q, [p.q_len, p.num_heads], tile.rows())?,
        k_map: map(launch, K, &p.k, [p.kv_len, p.num_kv_heads], tile.keys)?,
        v_map: map(launch, V, &p.v, [p.kv_len, p.num_kv_heads], tile.keys)?,
        out_map: map(launch, OUT, &p.out, [p.q_len, p.num_heads], WARP_ROWS)?,
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
    unsafe { launch.record(&Config::of(p, tile).defines(), &config, &params) }
}
