//! `attention` on the CPU: translates the call for [`crate::cpu::attention`], which does the work.

use super::problem::{self, BLOCKS_Q, Problem};
use super::{BIAS, K, KV_STARTS, LSE, MASK, OUT, Q, Q_STARTS, SINKS, V};
use crate::cpu::attention::{self, Cache, Call, Grid, Heads, PerHead, Request};
use crate::cpu::scratch::{self, List, Need};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::op::{Args, Launch};

/// Keys of a block: whole panels.
const BLOCKS_KV: [usize; 4] = [32, 64, 96, attention::KEYS];

pub(super) fn supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    p.admits(&BLOCKS_Q, &BLOCKS_KV)?;
    if p.block_q != 0 && p.num_heads > 0 && p.group() > p.block_q {
        return Err(format!("a query of {} heads to a KV head is more than {} rows", p.group(), p.block_q));
    }
    Ok(())
}

pub(super) fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let count = p.packed.map_or(p.batch, |packed| packed.requests);
    scratch::with(Need::of::<Request>(count), |mut region| {
        let mut requests = region.list(count);
        add_requests(p, launch.args, [Q_STARTS, KV_STARTS], &mut requests)?;
        // SAFETY: the requests are those of the call.
        unsafe { attend(launch, &requests) };
        Ok(())
    })
}

/// # Safety
/// The requests must lie in the tensors.
unsafe fn attend(launch: &Launch<'_, Problem>, requests: &[Request]) {
    let p = launch.problem;
    let address = |index: usize| launch.args.address(index);
    let heads = |index: usize, h: &problem::Heads| Heads {
        data: address(index),
        batch: h.batch,
        token: h.token,
        head: h.head,
        dim: h.dim,
    };
    let grid = |index: usize, g: &problem::Grid| Grid {
        data: address(index),
        batch: g.batch,
        head: g.head,
        query: g.query,
        key: g.key,
    };
    let lse = Heads { data: address(LSE), batch: p.lse.batch, token: p.lse.query, head: p.lse.head, dim: 1 };
    let call = Call {
        tier: launch.tier,
        dtype: p.dtype,
        num_kv_heads: p.num_kv_heads,
        group: p.group(),
        head_dim: p.head_dim,
        q: heads(Q, &p.q),
        cache: Cache {
            dtype: p.dtype,
            k: heads(K, &p.k),
            v: heads(V, &p.v),
            pages: None,
            k_scale: None,
            v_scale: None,
        },
        out: heads(OUT, &p.out),
        lse: p.has_lse.then_some(lse),
        sinks: p.sinks.map(|step| PerHead { data: address(SINKS), step }),
        mask: p.mask.as_ref().map(|mask| grid(MASK, mask)),
        bias: p.bias.as_ref().map(|bias| (grid(BIAS, &bias.grid), bias.dtype)),
        softcap: p.softcap(),
        scale: p.scale(),
        dropout: p.dropout,
        block_rows: p.block_q,
        block_keys: if p.block_kv == 0 { attention::KEYS } else { p.block_kv },
        keys: &|i, request| p.keys(i, request.q_len, request.kv_len),
    };
    // SAFETY: the problem has been checked against these tensors, and the requests lie in them.
    unsafe { attention::run(&call, requests) };
}

/// Adds the requests, found to be in bounds. `starts` are the positions of the starts of queries and of keys.
pub(super) fn add_requests(
    p: &Problem,
    args: &Args<'_>,
    starts: [usize; 2],
    requests: &mut List<'_, Request>,
) -> Result<()> {
    let Some(packed) = p.packed else {
        let request = |batch| Request {
            number: batch,
            batch,
            first_query: 0,
            q_len: p.q_len,
            first_key: 0,
            kv_len: p.kv_len,
        };
        requests.extend((0..p.batch).map(request));
        return Ok(());
    };
    // Start `r` of the queries or keys, from `least` to `len`.
    let start = |index: usize, step: isize, r: usize, least: usize, len: usize| -> Result<usize> {
        // SAFETY: `check` required one more start than there are requests, this far apart.
        let start = unsafe { *(args.address(index) as *const i32).offset(r as isize * step) };
        usize::try_from(start).ok().filter(|start| (least..=len).contains(start)).ok_or_else(|| {
            let spec = args.spec();
            let expected = format!("starts that ascend from 0 to {len} at most");
            Error::argument(spec.name, spec.args[index].name, expected, format!("{start} at index {r}"))
        })
    };
    let [q_starts, kv_starts] = starts;
    let mut first_query = start(q_starts, packed.q_step, 0, 0, p.q_len)?;
    for r in 1..=packed.requests {
        let end = start(q_starts, packed.q_step, r, first_query, p.q_len)?;
        let (number, q_len) = (r - 1, end - first_query);
        requests.push(Request { number, batch: 0, first_query, q_len, first_key: 0, kv_len: 0 });
        first_query = end;
    }
    let mut first_key = start(kv_starts, packed.kv_step, 0, 0, p.kv_len)?;
    for (r, request) in requests.iter_mut().enumerate() {
        let end = start(kv_starts, packed.kv_step, r + 1, first_key, p.kv_len)?;
        (request.first_key, request.kv_len) = (first_key, end - first_key);
        first_key = end;
    }
    Ok(())
}
