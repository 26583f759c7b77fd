//! `paged_attention` on the CPU: translates the call for [`crate::cpu::attention`], which does the work.
//!
//! Prefixes that requests share are read as part of each.

use super::numbers::add_requests;
use super::{K_PAGES, K_SCALE, LSE, OUT, PAGE_TABLE, Problem, Q, SINKS, V_PAGES, V_SCALE};
use crate::cpu::attention::{self, Cache, Call, Heads, Pages, PerHead, Request};
use crate::cpu::scratch::{self, Need};
use crate::error::Result;
use crate::op::Launch;

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let count = launch.problem.requests;
    scratch::with(Need::of::<Request>(count), |mut region| {
        let mut requests = region.list(count);
        add_requests(launch, &mut requests)?;
        // SAFETY: all numbers have been checked.
        unsafe { attend(launch, &requests) };
        Ok(())
    })
}

/// # Safety
/// The requests and their pages must lie in the tensors.
unsafe fn attend(launch: &Launch<'_, Problem>, requests: &[Request]) {
    let p = launch.problem;
    let address = |index: usize| launch.args.address(index);
    let tokens = |index: usize, [token, head, dim]: [isize; 3]| Heads {
        data: address(index),
        batch: 0,
        token,
        head,
        dim,
    };
    let slots = |index: usize, [page, slot, head, dim]: [isize; 4]| Heads {
        data: address(index),
        batch: page,
        token: slot,
        head,
        dim,
    };
    let per_head = |index: usize, step: isize| {
        Some(PerHead { data: address(index), step }).filter(|floats| floats.data != 0)
    };
    let [row, step] = p.page_table;
    let call = Call {
        tier: launch.tier,
        dtype: p.dtype,
        num_kv_heads: p.num_kv_heads,
        group: p.group(),
        head_dim: p.head_dim,
        q: tokens(Q, p.q),
        cache: Cache {
            dtype: p.cache_dtype,
            k: slots(K_PAGES, p.k),
            v: slots(V_PAGES, p.v),
            pages: Some(Pages { table: address(PAGE_TABLE), row, step, size: p.page_size }),
            k_scale: per_head(K_SCALE, p.k_scale_step),
            v_scale: per_head(V_SCALE, p.v_scale_step),
        },
        out: tokens(OUT, p.out),
        lse: p.lse.map(|[token, head]| tokens(LSE, [token, head, 1])),
        sinks: per_head(SINKS, p.sinks_step),
        mask: None,
        bias: None,
        softcap: p.softcap(),
        scale: p.scale(),
        dropout: None,
        block_rows: 0,
        block_keys: attention::KEYS,
        keys: &|i, request| p.keys(i, request.q_len, request.kv_len),
    };
    // SAFETY: the problem has been checked against these tensors; the caller promised the rest.
    unsafe { attention::run(&call, requests) };
}
