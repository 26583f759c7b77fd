//! The definition of `attention`.

use super::{
    BIAS, CAUSAL, DROPOUT, K, KV_STARTS, LSE, MASK, OFFSET, OUT, Q, Q_STARTS, SCALE, SEED, SINKS, SOFTCAP, V,
    WINDOW,
};
use crate::cpu::attention::Dropout;
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use std::ops::Range;

/// One head of the queries of one request.
struct Head {
    /// The number of the request.
    request: usize,
    /// Index of the batch; zero for packed requests.
    batch: usize,
    head: usize,
    /// Tokens of the request, counted over the whole tensor.
    queries: Range<usize>,
    keys: Range<usize>,
}

/// out = softmax(scale q kᵀ + bias) v, over the keys that a query sees and a sink.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (q, k) = (&inputs[Q], &inputs[K]);
    let [batch, q_len, num_heads, _] = q.shape[..] else { unreachable!("four dimensions") };
    let kv_len = k.shape[1];
    let mut out = Array::zeros(&q.shape);
    let mut lse = Array::zeros(&[batch, num_heads, q_len]);
    let range =
        |starts: &Array<R>, r: usize| starts.data[r].f64() as usize..starts.data[r + 1].f64() as usize;
    let requests: Vec<(usize, Range<usize>, Range<usize>)> =
        match (inputs.get(Q_STARTS), inputs.get(KV_STARTS)) {
            (Some(q_starts), Some(kv_starts)) => {
                (0..q_starts.data.len() - 1).map(|r| (0, range(q_starts, r), range(kv_starts, r))).collect()
            }
            _ => (0..batch).map(|b| (b, b * q_len..(b + 1) * q_len, b * kv_len..(b + 1) * kv_len)).collect(),
        };
    for (request, (batch, queries, keys)) in requests.into_iter().enumerate() {
        for head in 0..num_heads {
            let head = Head { request, batch, head, queries: queries.clone(), keys: keys.clone() };
            for i in 0..queries.len() {
                let token = queries.start + i;
                let at = batch * num_heads * q_len + head.head * q_len + (token - batch * q_len);
                let row = &mut out.data[(token * num_heads + head.head) * q.row_len()..][..q.row_len()];
                lse.data[at] = attend(inputs, attrs, &head, i, row);
            }
        }
    }
    let mut outputs = vec![None; inputs.count()];
    outputs[OUT] = Some(out);
    outputs[LSE] = inputs.wants(LSE).then_some(lse);
    outputs
}

/// Query `i` of a head into `out`, which is zero; returns the logarithm of the sum of exponentials.
fn attend<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs, head: &Head, i: usize, out: &mut [R]) -> R {
    let (k, v) = (&inputs[K], &inputs[V]);
    let (num_kv_heads, d) = (k.shape[2], k.shape[3]);
    let kv_head = head.head / (inputs[Q].shape[2] / num_kv_heads);
    let position = i as i64 + head.keys.len() as i64 - head.queries.len() as i64;
    let window = attrs.int(WINDOW);
    let seen = |j: usize| {
        let visible = !attrs.bool(CAUSAL) || j as i64 <= position;
        let recent = window == 0 || j as i64 >= position - window;
        visible && recent && at(inputs, MASK, head, i, j).is_none_or(|m| m.f64() != 0.0)
    };
    // Where token `j` of the request has its key and value.
    let row = |j: usize| ((head.keys.start + j) * num_kv_heads + kv_head) * d;
    let scores: Vec<(usize, R)> = (0..head.keys.len())
        .filter(|&j| seen(j))
        .map(|j| (j, score(inputs, attrs, head, i, j, &k.data[row(j)..][..d])))
        .collect();
    let sink = inputs.get(SINKS).map(|sinks| sinks.data[head.head]);
    let none = R::of(f64::NEG_INFINITY);
    let most = scores.iter().fold(none, |most, &(_, score)| most.max_nan(score));
    if most.f64() == f64::NEG_INFINITY {
        // Zeros; but non-finite values may show where only the scores hide them.
        for &key in scores.iter().map(|(key, _)| key) {
            for (o, &v) in out.iter_mut().zip(&v.data[row(key)..][..d]) {
                *o = (*o + R::zero() * v).or(R::zero());
            }
        }
        return sink.unwrap_or(none);
    }
    let most = sink.map_or(most, |sink| most.max_nan(sink));
    let mut sum = sink.map_or(R::zero(), |sink| (sink - most).exp());
    let dropout = Dropout::new(attrs.float(DROPOUT), attrs.int(SEED), attrs.int(OFFSET));
    for &(j, score) in &scores {
        let mut p = (score - most).exp().flushed().blurred(f64::from(f32::MIN_POSITIVE));
        sum = sum + p;
        if dropout.is_some_and(|dropout| !dropout.of_head(head.request, head.head).keeps(i, j)) {
            p = R::zero();
        }
        let value = &v.data[row(j)..][..d];
        let p = p.stored();
        for (o, &value) in out.iter_mut().zip(value) {
            *o = *o + (p * value).flushed_in_parts();
        }
    }
    let factor = R::of(dropout.map_or(1.0, |dropout| f64::from(dropout.factor())));
    for o in out {
        *o = *o / sum * factor;
    }
    most + (sum - R::one()).ln_1p()
}

fn score<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs, head: &Head, i: usize, j: usize, key: &[R]) -> R {
    let q = &inputs[Q];
    let query = &q.data[((head.queries.start + i) * q.shape[2] + head.head) * key.len()..][..key.len()];
    let scale = attrs.optional_float(SCALE).unwrap_or_else(|| 1.0 / (key.len() as f64).sqrt());
    let dot = query.iter().zip(key).fold(R::zero(), |sum, (&q, &k)| sum + q * k);
    let mut score = dot * R::of(scale as f32 as f64);
    let cap = attrs.float(SOFTCAP) as f32 as f64;
    if cap != 0.0 {
        score = R::of(cap) * (score / R::of(cap)).tanh();
    }
    at(inputs, BIAS, head, i, j).map_or(score, |bias| score + bias)
}

/// The element of a mask or bias, which may be shared by the batch or the heads.
fn at<R: Real>(inputs: &Inputs<'_, R>, index: usize, head: &Head, i: usize, j: usize) -> Option<R> {
    let grid = inputs.get(index)?;
    let [batch, heads, q_len, kv_len] = grid.shape[..] else { unreachable!("four dimensions") };
    let (b, h) = (head.batch % batch, head.head % heads);
    Some(grid.data[((b * heads + h) * q_len + i) * kv_len + j])
}
