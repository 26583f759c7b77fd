//! `attention` on CUDA devices: what its kernels share on the host, and those that are not for one architecture alone:
//! `generic`, `sm80` and `sm80_f32`.

use super::problem::{Grid, HEAD_DIMS, Heads, Problem, Rows};
use super::{BIAS, K, KV_STARTS, LSE, MASK, OUT, Q, Q_STARTS, SINKS, V};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::flag;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Args, Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

kernel_params! {
    /// Strides in elements of q, k, v or out.
    pub(in crate::ops) struct HeadStrides { batch: i64, token: i64, head: i64, dim: i64 }
}

kernel_params! {
    /// Strides in elements of mask or bias; zero along what is shared.
    pub(in crate::ops) struct GridStrides { batch: i64, head: i64, query: i64, key: i64 }
}

kernel_params! {
    /// The parameters of the kernels of `attention`; what is absent is zero.
    pub(in crate::ops) struct AttentionParams {
        q: u64, k: u64, v: u64, q_starts: u64, kv_starts: u64, mask: u64, bias: u64, sinks: u64, out: u64, lse: u64,
        q_at: HeadStrides, k_at: HeadStrides, v_at: HeadStrides, out_at: HeadStrides,
        mask_at: GridStrides, bias_at: GridStrides, lse_at: GridStrides,
        q_starts_step: i64, kv_starts_step: i64, sinks_step: i64,
        requests: i32, q_len: i32, kv_len: i32, num_kv_heads: i32, group: i32,
        /// Tiles of rows of a request, where all are equally long.
        tiles: i32,
        causal: i32,
        /// Keys before its own that a query sees; zero for all.
        window: i32,
        scale: f32, softcap: f32,
    }
}

kernel_params! {
    /// What kernels with dropout know of it.
    pub(in crate::ops) struct DropoutParams {
        /// Where the stream of random bits starts; not an address, so not unsigned.
        start: i64,
        /// Weights whose 16 random bits are below are dropped.
        below: u32,
        /// The factor of the others.
        factor: f32,
    }
}

kernel_params! {
    /// The parameters of kernels that may have dropout.
    pub(super) struct AttentionDropoutParams { attention: AttentionParams, dropout: DropoutParams }
}

impl DropoutParams {
    pub(super) fn of(p: &Problem) -> Self {
        let (start, below) = p.dropout.map_or((0, 0), |dropout| dropout.parts());
        DropoutParams {
            start: start as i64,
            below,
            factor: p.dropout.map_or(1.0, |dropout| dropout.factor()),
        }
    }
}

impl AttentionDropoutParams {
    fn new(p: &Problem, args: &Args<'_>, tile_rows: usize) -> Self {
        AttentionDropoutParams {
            attention: AttentionParams::new(p, args, tile_rows),
            dropout: DropoutParams::of(p),
        }
    }
}

impl From<Heads> for HeadStrides {
    fn from(h: Heads) -> Self {
        HeadStrides { batch: h.batch as i64, token: h.token as i64, head: h.head as i64, dim: h.dim as i64 }
    }
}

impl From<Option<Grid>> for GridStrides {
    fn from(grid: Option<Grid>) -> Self {
        let [batch, head, query, key] =
            grid.map_or([0; 4], |g| [g.batch, g.head, g.query, g.key].map(|n| n as i64));
        GridStrides { batch, head, query, key }
    }
}

impl From<Rows> for GridStrides {
    fn from(rows: Rows) -> Self {
        let [batch, head, query] = [rows.batch, rows.head, rows.query].map(|n| n as i64);
        GridStrides { batch, head, query, key: 0 }
    }
}

impl AttentionParams {
    /// The parameters of a call, whose rows are cut into tiles of `tile_rows`.
    pub(in crate::ops) fn new(p: &Problem, args: &Args<'_>, tile_rows: usize) -> Self {
        let addresses = [Q, K, V, Q_STARTS, KV_STARTS, MASK, BIAS, SINKS, OUT, LSE];
        let tiles = (p.q_len * p.group()).div_ceil(tile_rows);
        Self::at(p, addresses.map(|index| args.address(index) as u64), tiles)
    }

    /// The same for tensors at these addresses, in the order of the fields, and so many tiles.
    pub(super) fn at(p: &Problem, addresses: [u64; 10], tiles: usize) -> Self {
        let [q, k, v, q_starts, kv_starts, mask, bias, sinks, out, lse] = addresses;
        AttentionParams {
            q,
            k,
            v,
            q_starts,
            kv_starts,
            mask,
            bias,
            sinks,
            out,
            lse,
            q_at: p.q.into(),
            k_at: p.k.into(),
            v_at: p.v.into(),
            out_at: p.out.into(),
            mask_at: p.mask.into(),
            bias_at: p.bias.map(|bias| bias.grid).into(),
            lse_at: p.lse.into(),
            q_starts_step: p.packed.map_or(0, |packed| packed.q_step as i64),
            kv_starts_step: p.packed.map_or(0, |packed| packed.kv_step as i64),
            sinks_step: p.sinks.unwrap_or(0) as i64,
            requests: p.requests() as i32,
            q_len: p.q_len as i32,
            kv_len: p.kv_len as i32,
            num_kv_heads: p.num_kv_heads as i32,
            group: p.group() as i32,
            tiles: tiles as i32,
            causal: p.causal.into(),
            window: p.window.min(i32::MAX as usize / 2) as i32,
            scale: p.scale(),
            softcap: p.softcap(),
        }
    }
}

/// What `attention.cuh` is compiled for.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Scores {
    pub softcap: bool,
    pub mask: bool,
    pub bias: Option<DType>,
}

impl Scores {
    /// Those of a problem.
    pub(in crate::ops) fn of(p: &Problem) -> Self {
        Scores { softcap: p.softcap_bits != 0, mask: p.mask.is_some(), bias: p.bias.map(|bias| bias.dtype) }
    }

    pub(super) const PLAIN: Scores = Scores { softcap: false, mask: false, bias: None };

    /// A few that together have each value of each define.
    pub(super) fn covering(dtype: DType) -> [Scores; 3] {
        [
            Self::PLAIN,
            Scores { softcap: true, mask: true, bias: Some(DType::F32) },
            Scores { softcap: true, mask: false, bias: Some(dtype) },
        ]
    }

    pub(super) fn defines(&self, dtype: DType, head_dim: usize) -> Defines {
        vec![
            ("T", dtype.name().into()),
            ("HEAD_DIM", head_dim.to_string()),
            flag("SOFTCAP", self.softcap),
            flag("HAS_MASK", self.mask),
            flag("HAS_BIAS", self.bias.is_some()),
            ("BIAS_T", self.bias.unwrap_or(DType::F32).name().into()),
        ]
    }
}

/// `defines`, and dropout if there is any: what has none is compiled as if there were no such thing.
pub(super) fn with_dropout(mut defines: Defines, dropout: bool) -> Defines {
    if dropout {
        defines.push(flag("DROPOUT", true));
    }
    defines
}

/// Rows and tokens are counted in 32 bits, with headroom for a tile past the end.
pub(super) fn addressable(p: &Problem) -> std::result::Result<(), String> {
    let most = 1 << 30;
    let rows = p.q_len.saturating_mul(p.group().max(1));
    for (name, size) in [("q_len times query heads of a KV head", rows), ("kv_len", p.kv_len)] {
        if size > most {
            return Err(format!("{name} = {size} is more than 2^30"));
        }
    }
    Ok(())
}

/// Heads are copied by sixteen bytes.
pub(super) fn vectors(p: &Problem) -> std::result::Result<(), String> {
    let dense = [("q", &p.q), ("k", &p.k), ("v", &p.v), ("out", &p.out)];
    match dense.iter().find(|(_, heads)| !heads.vectors) {
        Some((name, _)) => Err(format!("heads of {name} do not begin at multiples of 16 bytes")),
        None => Ok(()),
    }
}

/// The number of blocks for tiles of `tile_rows` rows; for packed requests, the most they may need.
fn blocks(p: &Problem, tile_rows: usize) -> Result<u32> {
    let rows = p.q_len * p.group();
    let tiles = match p.packed {
        Some(packed) => rows / tile_rows + packed.requests,
        None => rows.div_ceil(tile_rows) * p.batch,
    };
    let count = tiles.saturating_mul(p.num_kv_heads);
    u32::try_from(count).ok().filter(|&n| n <= i32::MAX as u32).ok_or(Error::Launch {
        kernel: "attention".into(),
        what: "number of blocks",
        got: count as u64,
        limit: i32::MAX as u64,
    })
}

const GENERIC_SOURCE: Source = Source { name: "attention_generic", code: include_str!("generic.cu") };
const SM80_SOURCE: Source = Source { name: "attention_sm80", code: include_str!("sm80.cu") };
const GENERIC_THREADS: u32 = 256;
/// Keys of a block, as in the device code.
const GENERIC_KEYS: usize = 64;
const SM80_THREADS: u32 = 128;
/// Rows of a block of `sm80`.
const SM80_ROWS: usize = 64;

static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: GENERIC_SOURCE,
    prelude: AttentionDropoutParams::prelude,
    function: "attention_generic",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            all.extend(HEAD_DIMS.map(|head_dim| generic_defines(&Scores::PLAIN, dtype, head_dim, 64)));
            all.extend(Scores::covering(dtype).map(|scores| generic_defines(&scores, dtype, 128, 16)));
            for (scores, tile) in [(Scores::PLAIN, 64), (Scores::covering(dtype)[1], 16)] {
                all.push(with_dropout(generic_defines(&scores, dtype, 128, tile), true));
            }
        }
        all
    },
};

fn generic_defines(scores: &Scores, dtype: DType, head_dim: usize, tile: usize) -> Defines {
    let mut defines = scores.defines(dtype, head_dim);
    defines.push(("TILE_M", tile.to_string()));
    defines
}

/// The numbers of rows of a block. Each row has the same bits in tiles of either size.
const GENERIC_ROWS: [usize; 2] = [16, 64];

fn generic_tile(p: &Problem) -> usize {
    match p.block_q {
        0 => GENERIC_ROWS[usize::from(p.q_len * p.group() > 32)],
        rows => rows,
    }
}

/// Any type and layout, on any device, without tensor cores.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("attention_generic", &GENERIC_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let tile = generic_tile(p);
        let defines =
            with_dropout(generic_defines(&Scores::of(p), p.dtype, p.head_dim, tile), p.dropout.is_some());
        let config = LaunchConfig::new([blocks(p, tile)?, 1, 1], [GENERIC_THREADS, 1, 1], 0);
        // SAFETY: the addresses are those of the checked tensors; the blocks cover every row.
        unsafe { launch.record(&defines, &config, &AttentionDropoutParams::new(p, launch.args, tile)) }
    })
    .when(|p, _| {
        p.admits(&GENERIC_ROWS, &[GENERIC_KEYS])?;
        addressable(p)
    })
    .configured(|p, _| format!("{} rows by {GENERIC_KEYS} keys", generic_tile(p)));

static SM80_DEVICE: CudaKernel = CudaKernel {
    source: SM80_SOURCE,
    prelude: AttentionDropoutParams::prelude,
    function: "attention_sm80",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in [DType::F16, DType::BF16] {
            let plain = |head_dim| sm80_defines(&Scores::PLAIN, dtype, head_dim, sm80_keys(head_dim)[0]);
            all.extend(HEAD_DIMS.map(plain));
            all.extend(
                Scores::covering(dtype)[1..].iter().map(|scores| sm80_defines(scores, dtype, 128, 64)),
            );
            all.push(sm80_defines(&Scores::PLAIN, dtype, 128, 32));
            all.extend(HEAD_DIMS.map(|head_dim| with_dropout(plain(head_dim), true)));
            all.push(with_dropout(sm80_defines(&Scores::covering(dtype)[1], dtype, 128, 64), true));
        }
        all
    },
};

fn sm80_defines(scores: &Scores, dtype: DType, head_dim: usize, keys: usize) -> Defines {
    let mut defines = scores.defines(dtype, head_dim);
    defines.push(("KEYS", keys.to_string()));
    defines
}

/// The numbers of keys of a block for heads of one size, the best first. Larger heads leave no registers for more.
fn sm80_keys(head_dim: usize) -> &'static [usize] {
    if head_dim > 128 { &[32] } else { &[64, 32] }
}

/// Keys of a block of a call.
fn sm80_block(p: &Problem) -> usize {
    if p.block_kv == 0 { sm80_keys(p.head_dim)[0] } else { p.block_kv }
}

/// Tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<Problem> =
    Kernel::cuda("attention_sm80", &SM80_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        // Queries, and two stages of keys and of values, in lines of a head and 16 bytes more.
        let keys = sm80_block(p);
        let lines = SM80_ROWS + 4 * keys;
        let shared = lines * (p.head_dim * 2 + 16);
        let config = LaunchConfig::new([blocks(p, SM80_ROWS)?, 1, 1], [SM80_THREADS, 1, 1], shared as u32);
        let defines = sm80_defines(&Scores::of(p), p.dtype, p.head_dim, keys);
        let defines = with_dropout(defines, p.dropout.is_some());
        // SAFETY: the addresses are those of the checked tensors; the blocks cover every row.
        unsafe { launch.record(&defines, &config, &AttentionDropoutParams::new(p, launch.args, SM80_ROWS)) }
    })
    .when(|p, _| {
        if p.dtype == DType::F32 {
            return Err("f32 is for attention_sm80_f32".into());
        }
        p.admits(&[SM80_ROWS], sm80_keys(p.head_dim))?;
        vectors(p)?;
        addressable(p)
    })
    .configured(|p, _| format!("{SM80_ROWS} rows by {} keys", sm80_block(p)));

static SM80_F32_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "attention_sm80_f32", code: include_str!("sm80_f32.cu") },
    prelude: AttentionParams::prelude,
    function: "attention_sm80_f32",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let plain = HEAD_DIMS.map(|head_dim| sm80_f32_defines(&Scores::PLAIN, head_dim));
        let others = Scores::covering(DType::F32).map(|scores| sm80_f32_defines(&scores, 128));
        plain.into_iter().chain(others.into_iter().skip(1)).collect()
    },
};

fn sm80_f32_defines(scores: &Scores, head_dim: usize) -> Defines {
    let mut defines = scores.defines(DType::F32, head_dim);
    defines.push(("KEYS", sm80_f32_keys(head_dim).to_string()));
    defines
}

/// Keys of a block. Larger heads leave no registers for more.
fn sm80_f32_keys(head_dim: usize) -> usize {
    if head_dim > 96 { 16 } else { 32 }
}

/// Bytes of shared memory: queries, and two stages of keys and of values, in lines of a head and 16 bytes more.
fn sm80_f32_shared(head_dim: usize) -> usize {
    (SM80_ROWS + 4 * sm80_f32_keys(head_dim)) * (head_dim * size_of::<f32>() + 16)
}

/// f32 on tensor cores, each number as two of TF32.
pub(super) const SM80_F32: Kernel<Problem> =
    Kernel::cuda("attention_sm80_f32", &SM80_F32_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let (blocks, shared) = (blocks(p, SM80_ROWS)?, sm80_f32_shared(p.head_dim) as u32);
        let config = LaunchConfig::new([blocks, 1, 1], [SM80_THREADS, 1, 1], shared);
        let defines = sm80_f32_defines(&Scores::of(p), p.head_dim);
        // SAFETY: the addresses are those of the checked tensors; the blocks cover every row.
        unsafe { launch.record(&defines, &config, &AttentionParams::new(p, launch.args, SM80_ROWS)) }
    })
    .flushing_subnormals()
    .when(|p, info| {
        if p.dtype != DType::F32 {
            return Err(format!("{} is multiplied as it is", p.dtype));
        }
        p.without_dropout()?;
        p.admits(&[SM80_ROWS], &[sm80_f32_keys(p.head_dim)])?;
        let shared = sm80_f32_shared(p.head_dim);
        if shared > info.shared_per_block {
            return Err(format!(
                "needs {shared} bytes of shared memory, the device has {}",
                info.shared_per_block
            ));
        }
        vectors(p)?;
        addressable(p)
    })
    .configured(|p, _| format!("{SM80_ROWS} rows by {} keys", sm80_f32_keys(p.head_dim)));
