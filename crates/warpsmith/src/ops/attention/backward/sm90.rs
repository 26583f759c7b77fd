//! `attention_backward` on Hopper: host half.

use super::super::cuda::{Scores, addressable};
use super::super::problem::{HEAD_DIMS, Heads};
use super::cuda::{
    AttentionBackwardParams, ROWS, SINKS_DEVICE, Tiles, all_vectors, finish, prepare, stats_bytes,
};
use super::{DOUT, K, Problem, Q, V};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::tensor::DType;
use std::f32::consts::LOG2_E;

/// Threads of a block, as in the device code.
const THREADS: u32 = 384;
/// Elements of a head in the 128 bytes that the copy engine swizzles.
const CHUNK: usize = 64;
/// Softcaps beyond this lose digits in the exponential.
const MOST_SOFTCAP: f32 = 1000.0;
/// Bytes of right lines that stay in L2 while blocks go through the tiles of some heads.
const L2_BYTES: usize = 16 << 20;

kernel_params! {
    struct AttentionBackwardSm90Params {
        q_map: TensorMap, k_map: TensorMap, v_map: TensorMap, dout_map: TensorMap,
        backward: AttentionBackwardParams,
        /// Heads of requests whose tiles come together.
        head_group: i32,
        /// The factor of scores before the softcap.
        softcap_in: f32,
    }
}

/// The passes, each a device function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Tiles of keys, which queries go past. A warpgroup has the sums of both gradients of its keys.
    Keys,
    /// The same with a warpgroup for each of the gradients.
    LongKeys,
    /// Tiles of queries, which keys go past.
    Queries,
}

impl Pass {
    /// The pass over keys, for heads of this size.
    fn of_keys(head_dim: usize) -> Pass {
        if head_dim > 128 { Pass::LongKeys } else { Pass::Keys }
    }

    /// Whether it is for heads of this size.
    fn is_for(self, head_dim: usize) -> bool {
        self == Pass::Queries || self == Pass::of_keys(head_dim)
    }

    fn device(self) -> &'static CudaKernel {
        match self {
            Pass::Keys => &KEYS_DEVICE,
            Pass::LongKeys => &LONG_KEYS_DEVICE,
            Pass::Queries => &QUERIES_DEVICE,
        }
    }

    /// Lines of a tile.
    fn left(self) -> usize {
        if self == Pass::LongKeys { 64 } else { 128 }
    }

    /// Lines that go past at a time: as many as leave room for the sums in registers, and for the tiles in shared memory.
    fn lines(self, head_dim: usize) -> usize {
        match (self, head_dim) {
            (Pass::Keys, ..=64) => 96,
            (Pass::Keys, ..=96) => 80,
            (Pass::Keys, _) => 64,
            (Pass::LongKeys, ..=192) => 80,
            (Pass::LongKeys, _) => 64,
            (Pass::Queries, ..=128) => 128,
            (Pass::Queries, ..=192) => 80,
            (Pass::Queries, _) => 48,
        }
    }

    /// How many times as many are in shared memory.
    fn stages(self, head_dim: usize) -> usize {
        match (self, head_dim) {
            (Pass::Keys, 65..=96) => 3,
            (Pass::Queries, 65..) | (Pass::LongKeys, _) => 2,
            _ => 4,
        }
    }

    /// Bytes of shared memory: two operands of the left lines, two in each stage and two f32 for each of its lines, barriers
    /// and the tile.
    fn shared(self, head_dim: usize) -> usize {
        let (lines, stages) = (self.lines(head_dim), self.stages(head_dim));
        let line = head_dim.div_ceil(CHUNK) * 128;
        let common = 2 * self.left() * line + stages * (2 * lines * line + lines * 8 + 16) + 16 + 32;
        // Weights of two blocks, in f32, that one warpgroup has for the other, and their barriers.
        let weights =
            if self == Pass::LongKeys { 2 * lines * self.left() * size_of::<f32>() + 32 } else { 0 };
        common + weights
    }

    fn defines(self, config: &Config) -> Defines {
        let scores = Scores { softcap: config.softcap, mask: false, bias: None };
        let mut defines = scores.defines(config.dtype, config.head_dim);
        defines.push(("LEFT", self.left().to_string()));
        defines.push(("LINES", self.lines(config.head_dim).to_string()));
        defines.push(("STAGES", self.stages(config.head_dim).to_string()));
        defines.push(flag("VARLEN", config.packed));
        defines
    }

    fn variants(self) -> Vec<Defines> {
        let configs = Config::covering().into_iter().filter(|config| self.is_for(config.head_dim));
        configs.map(|config| self.defines(&config)).collect()
    }
}

/// The compile-time part of a launch.
struct Config {
    dtype: DType,
    head_dim: usize,
    softcap: bool,
    packed: bool,
}

impl Config {
    fn of(p: &Problem) -> Config {
        let f = &p.forward;
        Config {
            dtype: f.dtype,
            head_dim: f.head_dim,
            softcap: f.softcap_bits != 0,
            packed: f.packed.is_some(),
        }
    }

    /// Each size of head, plain and packed, and the options together.
    fn covering() -> Vec<Config> {
        let dtype = DType::BF16;
        let mut all = Vec::new();
        for head_dim in HEAD_DIMS {
            all.extend([false, true].map(|packed| Config { dtype, head_dim, softcap: false, packed }));
        }
        all.extend([64, 128, 256].map(|head_dim| Config { dtype, head_dim, softcap: true, packed: true }));
        all
    }
}

macro_rules! device {
    ($name:ident, $file:literal, $function:literal, $pass:expr) => {
        static $name: CudaKernel = CudaKernel {
            source: Source { name: $function, code: include_str!($file) },
            prelude: AttentionBackwardSm90Params::prelude,
            function: $function,
            min_arch: Arch::new(9, 0, true),
            fast_math: false,
            overlaps: true,
            variants: || $pass.variants(),
        };
    };
}
device!(KEYS_DEVICE, "sm90_keys.cu", "attention_backward_sm90_keys", Pass::Keys);
device!(LONG_KEYS_DEVICE, "sm90_long_keys.cu", "attention_backward_sm90_long_keys", Pass::LongKeys);
device!(QUERIES_DEVICE, "sm90_queries.cu", "attention_backward_sm90_queries", Pass::Queries);

/// Tensor cores through `wgmma`, fed by the copy engine.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("attention_backward_sm90", &KEYS_DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own, and the workspace has the size that was asked for.
        unsafe {
            prepare(launch)?;
            record(launch, Pass::of_keys(launch.problem.forward.head_dim))?;
            record(launch, Pass::Queries)?;
            finish(launch)
        }
    })
    .and(&ROWS)
    .and(&LONG_KEYS_DEVICE)
    .and(&QUERIES_DEVICE)
    .and(&SINKS_DEVICE)
    .with_workspace(|p, _| stats_bytes(p))
    .when(supports)
    .configured(|p, _| {
        let head_dim = p.forward.head_dim;
        let tile = |pass: Pass| (pass.left(), pass.lines(head_dim));
        let ((keys, queries), (own, others)) = (tile(Pass::of_keys(head_dim)), tile(Pass::Queries));
        format!("{keys} keys by {queries} queries, {own} queries by {others} keys")
    });

fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    let f = &p.forward;
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if f.dtype != DType::BF16 {
        // f16 has no room for large derivatives of scores: a gradient came as infinity of the other sign.
        return Err("its products are those of bf16".into());
    }
    if f.mask.is_some() || f.bias.is_some() {
        return Err("it knows no mask and no bias".into());
    }
    f.without_dropout()?;
    if f.softcap() > MOST_SOFTCAP {
        return Err(format!("a softcap above {MOST_SOFTCAP} needs more digits"));
    }
    if [f.batch, f.q_len, f.kv_len, f.num_heads].contains(&0) {
        return Err("there is nothing to load".into());
    }
    all_vectors(p)?;
    for (name, heads, tokens, count) in [
        ("q", &f.q, f.q_len, f.num_heads),
        ("k", &f.k, f.kv_len, f.num_kv_heads),
        ("v", &f.v, f.kv_len, f.num_kv_heads),
        ("dout", &p.dout, f.q_len, f.num_heads),
    ] {
        let repeats = |stride: isize, n: usize| n > 1 && stride <= 0;
        if repeats(heads.token, tokens) || repeats(heads.head, count) || repeats(heads.batch, f.batch) {
            return Err(format!("`{name}` repeats elements"));
        }
    }
    addressable(f)
}

/// The map of boxes of `lines` tokens of a chunk of one head.
fn map(
    launch: &Launch<'_, Problem>,
    index: usize,
    at: &Heads,
    [tokens, heads]: [usize; 2],
    lines: usize,
) -> Result<TensorMap> {
    let f = &launch.problem.forward;
    let size = f.dtype.size();
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    launch.tensor_map(&Tiled {
        address: launch.args.address(index) as u64,
        dtype: f.dtype,
        sizes: &[f.head_dim, tokens, heads, f.batch].map(|n| n as u64),
        strides: &[bytes(at.token, tokens), bytes(at.head, heads), bytes(at.batch, f.batch)],
        extents: &[CHUNK as u32, lines as u32, 1, 1],
        swizzle: Swizzle::B128,
    })
}

/// # Safety
/// The tensors of the call must live until the work on the stream is done; the workspace must begin with what [`prepare`]
/// leaves there.
unsafe fn record(launch: &Launch<'_, Problem>, pass: Pass) -> Result<()> {
    let (p, f) = (launch.problem, &launch.problem.forward);
    let (left, lines) = (pass.left(), pass.lines(f.head_dim));
    // What goes past the tiles of a head: that of all query heads of a KV head, or of the one KV head that several share.
    let (tiles, [query_lines, key_lines], heads, past) = match pass {
        Pass::Keys | Pass::LongKeys => {
            (Tiles::of_keys(f, left)?, [lines, left], f.num_kv_heads, f.q_len * f.group())
        }
        Pass::Queries => {
            (Tiles::of_queries(f, left)?, [left, lines], f.num_heads, f.kv_len.div_ceil(f.group()))
        }
    };
    let in_cache = L2_BYTES / (2 * past * f.head_dim * f.dtype.size());
    let params = AttentionBackwardSm90Params {
        q_map: map(launch, Q, &f.q, [f.q_len, f.num_heads], query_lines)?,
        k_map: map(launch, K, &f.k, [f.kv_len, f.num_kv_heads], key_lines)?,
        v_map: map(launch, V, &f.v, [f.kv_len, f.num_kv_heads], key_lines)?,
        dout_map: map(launch, DOUT, &p.dout, [f.q_len, f.num_heads], query_lines)?,
        backward: AttentionBackwardParams::new(launch, tiles.of_request),
        head_group: in_cache.clamp(1, f.batch * heads) as i32,
        softcap_in: if f.softcap() > 0.0 { 2.0 * LOG2_E * (f.scale() / f.softcap()) } else { 0.0 },
    };
    let config = LaunchConfig::new([tiles.blocks, 1, 1], [THREADS, 1, 1], pass.shared(f.head_dim) as u32);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them, and the blocks cover every key
    // or every query.
    unsafe { launch.record_part(pass.device(), &pass.defines(&Config::of(p)), &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_shared_memory_and_the_copy_engine() {
        for pass in [Pass::Keys, Pass::LongKeys, Pass::Queries] {
            for head_dim in HEAD_DIMS.into_iter().filter(|&head_dim| pass.is_for(head_dim)) {
                assert!(pass.shared(head_dim) <= 232_448, "{pass:?}, {head_dim}: {}", pass.shared(head_dim));
                assert!(pass.lines(head_dim).is_multiple_of(16) && pass.lines(head_dim) <= 256);
            }
        }
    }
}
