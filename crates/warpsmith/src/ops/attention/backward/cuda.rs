//! `attention_backward` on CUDA devices: what its kernels share on the host, and the one without tensor cores.
//!
//! Every kernel begins with a pass over the rows of queries ([`ROWS`]), has one pass over tiles of keys and one over tiles of
//! queries, each of which computes the weights anew, and ends with the gradients of sinks and bias if they are asked for. So
//! no two blocks add to the same element.

use super::super::cuda::{
    AttentionParams, DropoutParams, GridStrides, HeadStrides, Scores, addressable, vectors, with_dropout,
};
use super::super::problem::{HEAD_DIMS, Problem as Forward};
use super::{
    BIAS, DBIAS, DK, DLSE, DOUT, DQ, DSINKS, DV, K, KV_STARTS, LSE, MASK, OUT, Problem, Q, Q_STARTS, SINKS, V,
};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::flag;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

kernel_params! {
    /// The parameters of the kernels of `attention_backward`; what is absent is zero.
    pub(super) struct AttentionBackwardParams {
        /// Those of the forward call.
        attention: AttentionParams,
        dout: u64, dlse: u64, dq: u64, dk: u64, dv: u64, dbias: u64, dsinks: u64,
        /// Two f32 for each row of queries, `[batch, num_heads, q_len]`.
        stats: u64,
        dout_at: HeadStrides, dq_at: HeadStrides, dk_at: HeadStrides, dv_at: HeadStrides,
        dlse_at: GridStrides, dbias_at: GridStrides,
        dsinks_step: i64,
        /// Sizes of the bias.
        bias_batch: i32, bias_heads: i32,
        dropout: DropoutParams,
    }
}

impl AttentionBackwardParams {
    /// The parameters of a call, where the tiles of a head are so many.
    pub(super) fn new(launch: &Launch<'_, Problem>, tiles: usize) -> Self {
        let p = launch.problem;
        let at = |index: usize| launch.args.address(index) as u64;
        let addresses = [Q, K, V, Q_STARTS, KV_STARTS, MASK, BIAS, SINKS, OUT, LSE];
        AttentionBackwardParams {
            attention: AttentionParams::at(&p.forward, addresses.map(at), tiles),
            dout: at(DOUT),
            dlse: at(DLSE),
            dq: at(DQ),
            dk: at(DK),
            dv: at(DV),
            dbias: at(DBIAS),
            dsinks: at(DSINKS),
            stats: launch.workspace as u64,
            dout_at: p.dout.into(),
            dq_at: p.dq.into(),
            dk_at: p.dk.into(),
            dv_at: p.dv.into(),
            dlse_at: p.dlse.unwrap_or_default().into(),
            dbias_at: p.dbias.into(),
            dsinks_step: p.dsinks.unwrap_or(0) as i64,
            bias_batch: p.bias_batch as i32,
            bias_heads: p.bias_heads as i32,
            dropout: DropoutParams::of(&p.forward),
        }
    }
}

/// Bytes of what is kept of the rows of queries.
pub(super) fn stats_bytes(p: &Problem) -> usize {
    let f = &p.forward;
    f.batch * f.num_heads * f.q_len * 2 * size_of::<f32>()
}

/// Heads are copied by sixteen bytes.
pub(super) fn all_vectors(p: &Problem) -> std::result::Result<(), String> {
    vectors(&p.forward)?;
    let dense = [("dout", &p.dout), ("dq", &p.dq), ("dk", &p.dk), ("dv", &p.dv)];
    match dense.iter().find(|(_, heads)| !heads.vectors) {
        Some((name, _)) => Err(format!("heads of {name} do not begin at multiples of 16 bytes")),
        None => Ok(()),
    }
}

/// The tiles of all requests and heads along one side.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    /// Of a request, where all are equally long.
    pub of_request: usize,
    /// Of all; where requests are packed, as many as there may be.
    pub blocks: u32,
}

impl Tiles {
    /// Those of queries, of each query head.
    pub fn of_queries(f: &Forward, size: usize) -> Result<Tiles> {
        Self::new(f, f.q_len, f.num_heads, size)
    }

    /// Those of keys, of each KV head.
    pub fn of_keys(f: &Forward, size: usize) -> Result<Tiles> {
        Self::new(f, f.kv_len, f.num_kv_heads, size)
    }

    fn new(f: &Forward, len: usize, heads: usize, size: usize) -> Result<Tiles> {
        let of_request = len.div_ceil(size);
        let of_head = match f.packed {
            Some(packed) => len / size + packed.requests,
            None => of_request * f.batch,
        };
        Ok(Tiles { of_request, blocks: block_count(of_head.saturating_mul(heads))? })
    }
}

impl Tiles {
    /// The blocks, where so many share a tile.
    pub fn times(&self, parts: usize) -> Result<u32> {
        block_count(self.blocks as usize * parts)
    }
}

fn block_count(count: usize) -> Result<u32> {
    u32::try_from(count).ok().filter(|&n| n <= i32::MAX as u32).ok_or(Error::Launch {
        kernel: "attention_backward".into(),
        what: "number of blocks",
        got: count as u64,
        limit: i32::MAX as u64,
    })
}

macro_rules! device {
    ($name:ident, $file:literal, $function:literal, $arch:expr, $variants:expr) => {
        pub(super) static $name: CudaKernel = CudaKernel {
            source: Source { name: $function, code: include_str!($file) },
            prelude: AttentionBackwardParams::prelude,
            function: $function,
            min_arch: $arch,
            fast_math: false,
            overlaps: true,
            variants: $variants,
        };
    };
}

const ANY: Arch = Arch::new(6, 0, false);
device!(ROWS, "rows.cu", "attention_backward_rows", ANY, || {
    let heads = FLOATS.into_iter().flat_map(|dtype| HEAD_DIMS.map(|head_dim| (dtype, head_dim)));
    heads
        .flat_map(|(dtype, head_dim)| [true, false].map(|vector| rows_defines(dtype, head_dim, vector)))
        .collect()
});
device!(SINKS_DEVICE, "sinks.cu", "attention_backward_sinks", ANY, || vec![sinks_defines()]);
device!(BIAS_DEVICE, "bias.cu", "attention_backward_bias", ANY, || {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let plain = Scores { bias: Some(dtype), ..Scores::PLAIN };
        all.extend(HEAD_DIMS.map(|head_dim| plain.defines(dtype, head_dim)));
        let most = Scores { softcap: true, mask: true, bias: Some(DType::F32) };
        all.extend([false, true].map(|dropout| with_dropout(most.defines(dtype, 64), dropout)));
    }
    all
});
device!(KEYS_DEVICE, "generic_keys.cu", "attention_backward_generic_keys", ANY, || {
    with_and_without_dropout(keys_defines)
});
device!(QUERIES_DEVICE, "generic_queries.cu", "attention_backward_generic_queries", ANY, || {
    with_and_without_dropout(|scores, dtype, head_dim| scores.defines(dtype, head_dim))
});

/// A few calls that together have each value of each define.
fn covering() -> impl Iterator<Item = (Scores, DType, usize)> {
    FLOATS.into_iter().flat_map(|dtype| {
        let plain = HEAD_DIMS.map(|head_dim| (Scores::PLAIN, dtype, head_dim));
        plain.into_iter().chain(Scores::covering(dtype).map(|scores| (scores, dtype, 64)))
    })
}

/// The defines of those calls, and of some of them with dropout.
fn with_and_without_dropout(defines: impl Fn(&Scores, DType, usize) -> Defines) -> Vec<Defines> {
    let mut all: Vec<Defines> =
        covering().map(|(scores, dtype, head_dim)| defines(&scores, dtype, head_dim)).collect();
    for dtype in FLOATS {
        for (scores, head_dim) in
            [(Scores::PLAIN, 128), (Scores::PLAIN, 256), (Scores::covering(dtype)[1], 64)]
        {
            all.push(with_dropout(defines(&scores, dtype, head_dim), true));
        }
    }
    all
}

fn rows_defines(dtype: DType, head_dim: usize, vector: bool) -> Defines {
    let mut defines = Scores::PLAIN.defines(dtype, head_dim);
    defines.push(flag("VECTOR", vector));
    defines
}

/// It only looks at what is kept of rows, whatever the type.
fn sinks_defines() -> Defines {
    Scores::PLAIN.defines(DType::F32, 64)
}

/// Keys of a block. Larger heads leave no registers for more.
fn generic_keys(head_dim: usize) -> usize {
    if head_dim > 128 { 32 } else { 64 }
}
/// Queries of a block, as in the device code, and keys of a block of the gradient of the bias.
const GENERIC_QUERIES: usize = 64;
const BIAS_KEYS: usize = 64;
const GENERIC_THREADS: u32 = 256;

fn keys_defines(scores: &Scores, dtype: DType, head_dim: usize) -> Defines {
    let mut defines = scores.defines(dtype, head_dim);
    defines.push(("KEYS", generic_keys(head_dim).to_string()));
    defines
}

/// Records a launch, unless there is nothing to do.
///
/// # Safety
/// As for [`Launch::record`]; the kernel must be one of those above.
pub(super) unsafe fn record(
    launch: &Launch<'_, Problem>,
    kernel: &'static CudaKernel,
    defines: &Defines,
    config: &LaunchConfig,
    tiles: usize,
) -> Result<()> {
    if config.grid[0] == 0 {
        return Ok(());
    }
    // SAFETY: passed on.
    unsafe { launch.record_part(kernel, defines, config, &AttentionBackwardParams::new(launch, tiles)) }
}

/// What is kept of the rows of queries.
///
/// # Safety
/// The workspace must begin with room for it.
pub(super) unsafe fn prepare(launch: &Launch<'_, Problem>) -> Result<()> {
    let (p, f) = (launch.problem, &launch.problem.forward);
    let chunks = f.head_dim * f.dtype.size() / 16;
    let lanes = chunks.next_power_of_two().clamp(4, 32);
    let rows = f.batch * f.q_len * f.num_heads;
    let blocks = block_count(rows.div_ceil(GENERIC_THREADS as usize / lanes))?;
    let defines = rows_defines(f.dtype, f.head_dim, f.out.vectors && p.dout.vectors);
    // SAFETY: the addresses are those of the checked tensors and of the workspace; the blocks cover every row.
    unsafe {
        record(launch, &ROWS, &defines, &LaunchConfig::new([blocks, 1, 1], [GENERIC_THREADS, 1, 1], 0), 0)
    }
}

/// The gradients of sinks and bias, if they are asked for, after [`prepare`].
///
/// # Safety
/// The workspace must begin with what [`prepare`] left there.
pub(super) unsafe fn finish(launch: &Launch<'_, Problem>) -> Result<()> {
    let (p, f) = (launch.problem, &launch.problem.forward);
    // SAFETY: the addresses are those of the checked tensors and of the workspace; the blocks cover every head, and every
    // element of the bias.
    unsafe {
        if p.dsinks.is_some() {
            let config = LaunchConfig::new([f.num_heads as u32, 1, 1], [GENERIC_THREADS, 1, 1], 0);
            record(launch, &SINKS_DEVICE, &sinks_defines(), &config, 0)?;
        }
        if p.dbias.is_some() {
            let tiles = f.q_len.div_ceil(GENERIC_QUERIES);
            let matrices = p.bias_batch * p.bias_heads;
            let blocks = tiles.saturating_mul(f.kv_len.div_ceil(BIAS_KEYS)).saturating_mul(matrices);
            let config = LaunchConfig::new([block_count(blocks)?, 1, 1], [GENERIC_THREADS, 1, 1], 0);
            let defines = with_dropout(Scores::of(f).defines(f.dtype, f.head_dim), f.dropout.is_some());
            record(launch, &BIAS_DEVICE, &defines, &config, tiles)?;
        }
    }
    Ok(())
}

/// Any type and layout, on any device, without tensor cores.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("attention_backward_generic", &KEYS_DEVICE, |launch: &Launch<'_, Problem>| {
        let f = &launch.problem.forward;
        let scores = Scores::of(f);
        let keys = Tiles::of_keys(f, generic_keys(f.head_dim))?;
        let queries = Tiles::of_queries(f, GENERIC_QUERIES)?;
        let config = |tiles: Tiles| LaunchConfig::new([tiles.blocks, 1, 1], [GENERIC_THREADS, 1, 1], 0);
        let [keys_defines, queries_defines] =
            [keys_defines(&scores, f.dtype, f.head_dim), scores.defines(f.dtype, f.head_dim)]
                .map(|defines| with_dropout(defines, f.dropout.is_some()));
        // SAFETY: the addresses are those of the checked tensors and of the workspace, which has the size that was asked for;
        // the blocks cover every key and every query.
        unsafe {
            prepare(launch)?;
            record(launch, &KEYS_DEVICE, &keys_defines, &config(keys), keys.of_request)?;
            record(launch, &QUERIES_DEVICE, &queries_defines, &config(queries), queries.of_request)?;
            finish(launch)
        }
    })
    .and(&ROWS)
    .and(&QUERIES_DEVICE)
    .and(&SINKS_DEVICE)
    .and(&BIAS_DEVICE)
    .with_workspace(|p, _| stats_bytes(p))
    .when(|p, _| addressable(&p.forward))
    .configured(|p, _| format!("{} keys, {GENERIC_QUERIES} queries", generic_keys(p.forward.head_dim)));
