//! `attention` on Hopper: host half. The device half is `sm90.cu`.

use super::cuda::{AttentionParams, addressable};
use super::problem::{HEAD_DIMS, Heads, Problem};
use super::{K, Q, V};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};
use std::collections::HashMap;
use std::f32::consts::LOG2_E;
use std::sync::{LazyLock, Mutex};

/// Queries of a warpgroup, and its threads.
const ROWS: usize = 64;
const WARPGROUP: usize = 128;
/// Elements of a head in the 128 bytes that the copy engine swizzles.
const CHUNK: usize = 64;
/// Limits beyond this lose digits on the way through the exponential.
const MOST_SOFTCAP: f32 = 1000.0;

kernel_params! {
    struct Sm90Params {
        q_map: TensorMap, k_map: TensorMap, v_map: TensorMap,
        attention: AttentionParams,
        tiles: u32, m_tiles: u32, head_group: u32,
        /// What scores are multiplied with on the way into a power of two, and on the way into the softcap.
        scale_log2: f32, softcap_in: f32,
    }
}

/// How a block works on heads of one size. None of it depends on lengths: a row's bits would too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Tile {
    consumers: usize,
    keys: usize,
    stages: usize,
    q_stages: usize,
    out_whole: bool,
}

impl Tile {
    fn of(head_dim: usize) -> Tile {
        let tile = Tile { consumers: 2, keys: 128, stages: 2, q_stages: 2, out_whole: true };
        match head_dim {
            // Short heads keep the tensor cores busy for less time than the exponentials take: three warpgroups hide
            // more of them.
            64 => Tile { consumers: 3, out_whole: false, ..tile },
            ..=128 => tile,
            ..=192 => Tile { keys: 96, q_stages: 1, out_whole: false, ..tile },
            _ => Tile { keys: 64, q_stages: 1, out_whole: false, ..tile },
        }
    }

    fn rows(&self) -> usize {
        ROWS * self.consumers
    }

    fn shared_bytes(&self, head_dim: usize) -> usize {
        let chunks = head_dim.div_ceil(CHUNK);
        let operands = (self.q_stages * self.rows() + 2 * self.stages * self.keys) * chunks * 128;
        let results = self.rows() * 128 * if self.out_whole { chunks } else { 1 };
        let barriers = 16 * (self.q_stages + 2 * self.stages) + 16;
        operands + results + barriers + 32 * self.q_stages
    }
}

/// Everything about a launch that is compiled in.
#[derive(Clone, Copy)]
struct Config {
    dtype: DType,
    head_dim: usize,
    causal: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    lse: bool,
    packed: bool,
}

impl Config {
    fn of(p: &Problem) -> Config {
        Config {
            dtype: p.dtype,
            head_dim: p.head_dim,
            causal: p.causal,
            window: p.window > 0,
            softcap: p.softcap_bits != 0,
            sinks: p.sinks.is_some(),
            lse: p.has_lse,
            packed: p.packed.is_some(),
        }
    }

    fn defines(&self) -> Defines {
        let tile = Tile::of(self.head_dim);
        vec![
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
        ]
    }
}

const SOURCE: Source = Source { name: "attention_sm90", code: include_str!("sm90.cu") };

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: Sm90Params::prelude,
    function: "attention_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    variants,
};

/// Each size of head with and without a causal mask, and each option with one size.
fn variants() -> Vec<Defines> {
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
            packed: false,
        };
        for head_dim in HEAD_DIMS {
            all.extend([false, true].map(|causal| plain(head_dim, causal)));
        }
        for causal in [false, true] {
            let plain = plain(128, causal);
            all.push(Config { window: true, softcap: true, ..plain });
            all.push(Config { sinks: true, lse: true, ..plain });
            all.push(Config { packed: true, ..plain });
        }
    }
    all.iter().map(Config::defines).collect()
}

/// Tensor cores through `wgmma`, fed by the copy engine.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("attention_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own.
        unsafe { run(launch) }
    })
    .when(supports)
    .configured(|p, _| {
        let tile = Tile::of(p.head_dim);
        format!("{} rows by {} keys, {} consumers", tile.rows(), tile.keys, tile.consumers)
    });

fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if p.dtype == DType::F32 {
        return Err("f32 needs no tensor cores".into());
    }
    if p.mask.is_some() || p.bias.is_some() {
        return Err("it knows no mask and no bias".into());
    }
    if p.kv_len == 0 {
        return Err("there is nothing to load".into());
    }
    if p.scale() <= 0.0 {
        return Err("the largest of scores with a negative factor is the smallest of the products".into());
    }
    if p.softcap() > MOST_SOFTCAP {
        return Err(format!("a softcap above {MOST_SOFTCAP} needs more digits"));
    }
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
fn map(address: usize, p: &Problem, at: &Heads, [tokens, heads]: [usize; 2], rows: usize) -> Result<TensorMap> {
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
    let tile = Tile::of(p.head_dim);
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
    let (scale_log2, softcap_in) = match p.softcap() {
        0.0 => (p.scale() * LOG2_E, 0.0),
        cap => (cap * LOG2_E, 2.0 * LOG2_E * (p.scale() / cap)),
    };
    let units = launch.info.units;
    let params = Sm90Params {
        q_map: map(Q, &p.q, [p.q_len, p.num_heads], tile.rows())?,
        k_map: map(K, &p.k, [p.kv_len, p.num_kv_heads], tile.keys)?,
        v_map: map(V, &p.v, [p.kv_len, p.num_kv_heads], tile.keys)?,
        attention: AttentionParams::new(p, launch.args, tile.rows()),
        tiles: tiles as u32,
        m_tiles: m_tiles as u32,
        head_group: if p.packed.is_some() { 1 } else { head_group(&Deal::of(p, units)) as u32 },
        scale_log2,
        softcap_in,
    };
    let threads = ((1 + tile.consumers) * WARPGROUP) as u32;
    let shared = tile.shared_bytes(p.head_dim) as u32;
    let config = LaunchConfig::new([tiles.min(units) as u32, 1, 1], [threads, 1, 1], shared);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them, and the blocks share
    // all tiles among them.
    unsafe { kernel::run(launch, &Config::of(p).defines(), &config, &params) }
}

/// What decides how evenly the tiles of a call are dealt out to `units` blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Deal {
    q_len: usize,
    kv_len: usize,
    /// Heads of all the batch.
    heads: usize,
    rows: usize,
    keys: usize,
    causal: bool,
    units: usize,
}

impl Deal {
    fn of(p: &Problem, units: usize) -> Deal {
        let tile = Tile::of(p.head_dim);
        Deal {
            q_len: p.q_len,
            kv_len: p.kv_len,
            heads: p.num_heads * p.batch,
            rows: tile.rows(),
            keys: tile.keys,
            causal: p.causal,
            units,
        }
    }

    fn m_tiles(&self) -> usize {
        self.q_len.div_ceil(self.rows)
    }

    /// Blocks of keys that tile `m` sees, and one for the work that every tile is.
    fn cost(&self, m: usize) -> usize {
        let until = ((m + 1) * self.rows).min(self.q_len) + self.kv_len;
        until.saturating_sub(self.q_len).min(self.kv_len).div_ceil(self.keys) + 1
    }

    /// The share of the time in which a block has work, if heads are dealt out in groups of `group`: as the device
    /// does, the longest tiles of a group first, to the blocks forwards and backwards in turn.
    fn evenness(&self, group: usize) -> f64 {
        let mut loads = vec![0; self.units];
        let mut dealt = 0;
        for first in (0..self.heads).step_by(group) {
            let heads = group.min(self.heads - first);
            for m in (0..self.m_tiles()).rev() {
                let cost = self.cost(m);
                for _ in 0..heads {
                    let (round, at) = (dealt / self.units, dealt % self.units);
                    loads[if round % 2 == 1 { self.units - 1 - at } else { at }] += cost;
                    dealt += 1;
                }
            }
        }
        let (sum, most) = (loads.iter().sum::<usize>(), loads.into_iter().max().unwrap_or(0));
        sum as f64 / (most * self.units).max(1) as f64
    }
}

/// Tiles beyond which they are dealt out evenly enough in any order.
const MANY_TILES: usize = 1 << 14;
/// What a smaller group, whose keys and values are in L2 at the same time, is worth.
const LOCALITY: f64 = 0.02;

/// Heads whose tiles are dealt out together: few, so that the blocks that work on one head at the same time find its keys
/// and values in L2; but if tiles differ in length, enough for all blocks to get about the same.
fn head_group(deal: &Deal) -> usize {
    let (heads, units, m_tiles) = (deal.heads, deal.units, deal.m_tiles());
    let fill = units.div_ceil(m_tiles).min(heads);
    if !deal.causal || heads * m_tiles > MANY_TILES {
        return fill;
    }
    static KNOWN: LazyLock<Mutex<HashMap<Deal, usize>>> = LazyLock::new(Default::default);
    let mut known = KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(&group) = known.get(deal) {
        return group;
    }
    // Parts of the number of blocks, so that rounds and groups end together.
    let mut groups: Vec<usize> = (1..=12).map(|part| (units * part).div_ceil(12)).collect();
    groups.retain(|&group| group < heads);
    groups.push(heads.min(units));
    let evenness: Vec<f64> = groups.iter().map(|&group| deal.evenness(group)).collect();
    let best = evenness.iter().copied().fold(0.0, f64::max);
    let group = groups.into_iter().zip(&evenness).find(|&(_, &e)| e >= best - LOCALITY).map_or(fill, |(g, _)| g);
    // Calls have few shapes, but a server with chunks of all lengths has many.
    if known.len() >= 1 << 12 {
        known.clear();
    }
    known.insert(*deal, group);
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_shared_memory_and_the_copy_engine() {
        for head_dim in HEAD_DIMS {
            let tile = Tile::of(head_dim);
            assert!(tile.shared_bytes(head_dim) <= 232_448, "{head_dim}: {tile:?}");
            assert!(tile.rows() <= 256 && tile.keys <= 256, "{head_dim}: {tile:?}");
        }
    }

    #[test]
    fn long_causal_calls_are_dealt_out_evenly() {
        for (batch, q_len, kv_len, heads) in
            [(32, 512, 512, 16), (8, 2048, 2048, 16), (2, 8192, 8192, 16), (1, 16384, 16384, 16), (1, 1024, 8192, 32)]
        {
            let heads = batch * heads;
            let deal = Deal { q_len, kv_len, heads, rows: 128, keys: 128, causal: true, units: 132 };
            let group = head_group(&deal);
            assert!((1..=heads).contains(&group), "{deal:?}");
            assert!(deal.evenness(group) > 0.95, "{deal:?}: groups of {group} give {}", deal.evenness(group));
        }
    }

    #[test]
    fn a_tile_costs_the_blocks_it_sees() {
        let deal = Deal { q_len: 300, kv_len: 1000, heads: 1, rows: 128, keys: 128, causal: true, units: 132 };
        // Queries 256 to 299 end at key 1000; queries 0 to 127 at key 828.
        assert_eq!(deal.cost(2), 8 + 1);
        assert_eq!(deal.cost(0), 7 + 1);
        let beyond = Deal { q_len: 300, kv_len: 100, ..deal };
        assert_eq!(beyond.cost(0), 1);
    }
}
