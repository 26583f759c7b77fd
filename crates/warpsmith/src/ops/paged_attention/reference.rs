//! The definition of `paged_attention`.

use super::{
    CAUSAL, K_PAGES, K_SCALE, KV_LENS, LSE, OUT, PAGE_TABLE, Q, Q_STARTS, SCALE, SINKS, SOFTCAP, V_PAGES,
    V_SCALE, WINDOW,
};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = softmax(scale q kᵀ) v for each request, over the keys that a query sees and a sink.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let q = &inputs[Q];
    let [num_tokens, num_heads, head_dim] = q.shape[..] else { unreachable!("three dimensions") };
    let requests = inputs[KV_LENS].data.len();
    let mut out = Array::zeros(&q.shape);
    let mut lse = Array::zeros(&[num_tokens, num_heads]);
    let whole = |index: usize, i: usize| inputs[index].data[i].f64() as usize;
    for r in 0..requests {
        let (first, end) = match inputs.get(Q_STARTS) {
            Some(_) => (whole(Q_STARTS, r), whole(Q_STARTS, r + 1)),
            None => (r * (num_tokens / requests), (r + 1) * (num_tokens / requests)),
        };
        let kv_len = whole(KV_LENS, r) as i64;
        for token in first..end {
            let position = kv_len - end as i64 + token as i64;
            let window = attrs.int(WINDOW);
            let seen =
                |j: &i64| (!attrs.bool(CAUSAL) || *j <= position) && (window == 0 || *j >= position - window);
            let keys: Vec<usize> = (0..kv_len).filter(seen).map(|j| j as usize).collect();
            for head in 0..num_heads {
                let row = token * num_heads + head;
                let result = &mut out.data[row * head_dim..][..head_dim];
                lse.data[row] =
                    attend(inputs, attrs, (r, head), &q.data[row * head_dim..][..head_dim], &keys, result);
            }
        }
    }
    let mut outputs = vec![None; inputs.count()];
    outputs[OUT] = Some(out);
    outputs[LSE] = inputs.wants(LSE).then_some(lse);
    outputs
}

/// One row into `out`, which is zero; returns the logarithm of the sum of exponentials.
fn attend<R: Real>(
    inputs: &Inputs<'_, R>,
    attrs: &Attrs,
    (request, head): (usize, usize),
    q: &[R],
    keys: &[usize],
    out: &mut [R],
) -> R {
    let (pages, table) = (&inputs[K_PAGES], &inputs[PAGE_TABLE]);
    let [_, page_size, num_kv_heads, head_dim] = pages.shape[..] else { unreachable!("four dimensions") };
    let kv_head = head / (inputs[Q].shape[1] / num_kv_heads);
    let factor = |index: usize| inputs.get(index).map_or(R::one(), |s| s.data[kv_head % s.data.len()]);
    // Where key or value `j` of the request is: [page][slot][head][element].
    let at = |j: usize| {
        let page = table.data[request * table.row_len() + j / page_size].f64() as usize;
        ((page * page_size + j % page_size) * num_kv_heads + kv_head) * head_dim
    };
    let scale = attrs.optional_float(SCALE).unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
    let scale = R::of(scale as f32 as f64) * factor(K_SCALE);
    let cap = attrs.float(SOFTCAP) as f32 as f64;
    let score = |&j: &usize| {
        let dot = q.iter().zip(&pages.data[at(j)..]).fold(R::zero(), |sum, (&q, &k)| sum + q * k);
        if cap == 0.0 { dot * scale } else { R::of(cap) * (dot * scale / R::of(cap)).tanh() }
    };
    let scores: Vec<R> = keys.iter().map(score).collect();
    let sink = inputs.get(SINKS).map(|sinks| sinks.data[head]);
    let none = R::of(f64::NEG_INFINITY);
    let most = scores.iter().copied().fold(none, R::max_nan);
    if most.f64() == f64::NEG_INFINITY {
        // Zeros, but values that are not finite may show where only the scores hide them.
        for &key in keys {
            for (o, &v) in out.iter_mut().zip(&inputs[V_PAGES].data[at(key)..]) {
                *o = (*o + R::zero() * v).or(R::zero());
            }
        }
        return sink.unwrap_or(none);
    }
    let most = sink.map_or(most, |sink| most.max_nan(sink));
    // Beside an 8-bit cache, weights may be rounded to f16, which ends at 2^-24.
    let lost = if [K_SCALE, V_SCALE].iter().any(|&scale| inputs.wants(scale)) { 2f64.powi(-25) } else { 0.0 };
    let mut sum = sink.map_or(R::zero(), |sink| (sink - most).exp());
    for (&j, &score) in keys.iter().zip(&scores) {
        let weight = (score - most).exp().flushed().blurred(f64::from(f32::MIN_POSITIVE));
        sum = sum + weight;
        let weight = weight.stored().blurred(lost);
        for (o, &v) in out.iter_mut().zip(&inputs[V_PAGES].data[at(j)..]) {
            *o = *o + (weight * v).flushed_in_parts();
        }
    }
    for o in out {
        *o = *o * factor(V_SCALE) / sum;
    }
    most + (sum - R::one()).ln_1p()
}
