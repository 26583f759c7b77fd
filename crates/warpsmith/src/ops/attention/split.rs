//! `attention` of few queries over many keys, on CUDA devices: host half.
//!
//! A block for each row would leave most of the device idle. The kernel of `paged_attention` splits the keys of a
//! request over all blocks and merges the results; here it is told that keys are not in pages.

use super::cuda::{addressable, vectors};
use super::problem::{Heads, Problem};
use super::{K, LSE, OUT, Q, SINKS, V};
use crate::device::DeviceInfo;
use crate::op::{Kernel, Launch};
use crate::ops::paged_attention::Problem as Paged;
use crate::ops::paged_attention::cuda::{self, GENERIC_DEVICE, Keys, MERGE, PagedParams, SM80_DEVICE};
use crate::ops::paged_attention::plan::{FEW_ROWS, Plan};
use crate::ops::paged_attention::problem::MOST_KEYS;
use crate::tensor::DType;

/// The planner treats keys as if they were in pages of this size.
const PAGE: usize = 16;

/// Tensor cores, with keys split over blocks. Chosen by the sizes of one request, so that the bits of a row do not
/// depend on the number of requests.
pub(super) const SPLIT: Kernel<Problem> =
    Kernel::cuda("attention_split", &SM80_DEVICE, |launch: &Launch<'_, Problem>| {
        let paged = paged(launch.problem);
        let plan = Plan::new(&paged, launch.info);
        // SAFETY: the addresses are those of the checked tensors, whose sizes and strides the problem has.
        unsafe { cuda::run(launch, &paged, &plan, Keys::Dense, &params(launch)) }
    })
    .and(&MERGE)
    .with_workspace(|p, info| {
        let paged = paged(p);
        Plan::new(&paged, info).workspace(&paged)
    })
    .when(supports)
    .configured(|p, info| Plan::new(&paged(p), info).to_string());

/// No tensor cores, any type and strides, with keys split over blocks.
pub(super) const SPLIT_GENERIC: Kernel<Problem> =
    Kernel::cuda("attention_split_generic", &GENERIC_DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the addresses are those of the checked tensors, whose sizes and strides the problem has.
        unsafe { cuda::run_generic(launch, &paged(launch.problem), Keys::Dense, &params(launch)) }
    })
    .and(&MERGE)
    .with_workspace(|p, info| cuda::generic_workspace(&paged(p), info))
    .when(|p, _| supports_rows(p, ROWS_ALONE))
    .configured(|p, info| cuda::generic_config(&paged(p), info));

/// The most rows of a KV head for which a block per row beats tiles of 16 that are partly empty.
const ROWS_ALONE: usize = 8;

fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if p.dtype == DType::F32 {
        return Err("its products are those of f16 and bf16".into());
    }
    supports_rows(p, FEW_ROWS)?;
    vectors(p)?;
    let paged = paged(p);
    Plan::new(&paged, info).fits(&paged, info)
}

/// Whether a request has at most this many rows per KV head, and uses no option that split keys do not support.
fn supports_rows(p: &Problem, most: usize) -> std::result::Result<(), String> {
    if p.mask.is_some() || p.bias.is_some() {
        return Err("it knows no mask and no bias".into());
    }
    p.without_dropout()?;
    if p.packed.is_some() {
        return Err("packed requests may have many queries".into());
    }
    let rows = p.q_len.saturating_mul(p.group());
    if rows > most {
        return Err(format!("{rows} rows of a KV head are more than {most}"));
    }
    if p.block_q != 0 || p.block_kv != 0 {
        return Err("its blocks follow from the lengths".into());
    }
    addressable(p)?;
    cuda::addressable(&paged(p))
}

fn params(launch: &Launch<'_, Problem>) -> PagedParams {
    let p = launch.problem;
    let at = |index: usize| launch.args.address(index) as u64;
    PagedParams {
        q: at(Q),
        k: at(K),
        v: at(V),
        sinks: at(SINKS),
        out: at(OUT),
        lse: at(LSE),
        q_batch: p.q.batch as i64,
        out_batch: p.out.batch as i64,
        lse_batch: p.lse.batch as i64,
        max_keys: p.kv_len as i32,
        ..PagedParams::of(&paged(p))
    }
}

/// The same problem with keys in pages.
fn paged(p: &Problem) -> Paged {
    let tokens = |heads: &Heads| [heads.token, heads.head, heads.dim];
    let keys = |heads: &Heads| [heads.batch, heads.token, heads.head, heads.dim];
    Paged {
        dtype: p.dtype,
        cache_dtype: p.dtype,
        requests: p.batch,
        num_tokens: p.batch * p.q_len,
        queries: Some(p.q_len),
        full: true,
        num_heads: p.num_heads,
        num_kv_heads: p.num_kv_heads,
        head_dim: p.head_dim,
        num_pages: 0,
        page_size: PAGE,
        max_pages: p.kv_len.div_ceil(PAGE),
        q: tokens(&p.q),
        k: keys(&p.k),
        v: keys(&p.v),
        out: tokens(&p.out),
        lse: p.has_lse.then_some([p.lse.query, p.lse.head]),
        page_table: [0; 2],
        kv_lens_step: 0,
        q_starts_step: 0,
        k_scale_step: 0,
        v_scale_step: 0,
        sinks_step: p.sinks.unwrap_or(0),
        shared: None,
        always_share: false,
        causal: p.causal,
        window: p.window.min(MOST_KEYS),
        softcap_bits: p.softcap_bits,
        scale_bits: p.scale_bits,
        vectors: true,
    }
}
