//! The definition of `attention_backward`.

use super::{
    BIAS, CAUSAL, DBIAS, DK, DLSE, DOUT, DQ, DROPOUT, DSINKS, DV, K, KV_STARTS, LSE, MASK, OFFSET, OUT, Q,
    Q_STARTS, SCALE, SEED, SINKS, SOFTCAP, V, WINDOW,
};
use crate::cpu::attention::Dropout;
use crate::lab::reference::cutting_error;
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

/// The gradients, those of `q` and `k` without the scale.
struct Gradients<R> {
    dq: Array<R>,
    dk: Array<R>,
    dv: Array<R>,
    dbias: Option<Array<R>>,
    dsinks: Array<R>,
}

/// p = exp(s - lse); dz = p (dout · v - D) with D = dout · out - dlse; ds = dz times the slope of the cap.
/// dq = scale ds k; dk = scale dsᵀ q; dv = pᵀ dout; dbias = dz; dsinks = -exp(sink - lse) D.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (q, k) = (&inputs[Q], &inputs[K]);
    let [batch, q_len, num_heads, head_dim] = q.shape[..] else { unreachable!("four dimensions") };
    let kv_len = k.shape[1];
    let mut gradients = Gradients {
        dq: Array::zeros(&q.shape),
        dk: Array::zeros(&k.shape),
        dv: Array::zeros(&k.shape),
        dbias: inputs.get(BIAS).map(|bias| Array::zeros(&bias.shape)),
        dsinks: Array::zeros(&[num_heads]),
    };
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
                add_row(inputs, attrs, &head, i, &mut gradients);
            }
        }
    }
    let scale = R::of(scale(attrs, head_dim));
    let scaled = |array: Array<R>| array.map(|x| x * scale);
    let mut outputs = vec![None; inputs.count()];
    outputs[DQ] = Some(scaled(gradients.dq));
    outputs[DK] = Some(scaled(gradients.dk));
    outputs[DV] = Some(gradients.dv.map(|x| x * factor::<R>(dropout(attrs))));
    outputs[DBIAS] = gradients.dbias.filter(|_| inputs.wants(DBIAS));
    outputs[DSINKS] = inputs.wants(DSINKS).then_some(gradients.dsinks);
    outputs
}

/// Adds what query `i` of a head contributes.
fn add_row<R: Real>(
    inputs: &Inputs<'_, R>,
    attrs: &Attrs,
    head: &Head,
    i: usize,
    gradients: &mut Gradients<R>,
) {
    let (q, k, v, out, dout) = (&inputs[Q], &inputs[K], &inputs[V], &inputs[OUT], &inputs[DOUT]);
    let [_, q_len, num_heads, d] = q.shape[..] else { unreachable!("four dimensions") };
    let num_kv_heads = k.shape[2];
    let kv_head = head.head / (num_heads / num_kv_heads);
    let token = head.queries.start + i;
    let own = (token * num_heads + head.head) * d;
    let row = (head.batch * num_heads + head.head) * q_len + (token - head.batch * q_len);
    let lse = inputs[LSE].data[row];
    let dot = |a: &[R], b: &[R]| a.iter().zip(b).fold(R::zero(), |sum, (&a, &b)| sum + a * b);
    let (query, dout) = (&q.data[own..][..d], &dout.data[own..][..d]);
    let product = dot(dout, &out.data[own..][..d]);
    let delta = inputs.get(DLSE).map_or(product, |dlse| product - dlse.data[row]);
    // Nothing has a weight in a row that saw nothing.
    let empty = lse.f64() == f64::NEG_INFINITY;
    let weight = |score: R| match empty {
        true => R::zero(),
        false => (score - lse).exp().flushed().blurred(f64::from(f32::MIN_POSITIVE)),
    };
    if let Some(sinks) = inputs.get(SINKS) {
        let sum = &mut gradients.dsinks.data[head.head];
        *sum = *sum - weight(sinks.data[head.head]) * delta;
    }
    let position = i as i64 + head.keys.len() as i64 - head.queries.len() as i64;
    let window = attrs.int(WINDOW);
    let dropout = dropout(attrs);
    let factor = factor::<R>(dropout);
    let (scale, cap) = (R::of(scale(attrs, d)), attrs.float(SOFTCAP) as f32 as f64);
    for j in 0..head.keys.len() {
        let visible = !attrs.bool(CAUSAL) || j as i64 <= position;
        let recent = window == 0 || j as i64 >= position - window;
        let masked = at(inputs, MASK, head, i, j).is_some_and(|at| inputs[MASK].data[at].f64() == 0.0);
        if !visible || !recent || masked {
            continue;
        }
        let other = ((head.keys.start + j) * num_kv_heads + kv_head) * d;
        let (key, value) = (&k.data[other..][..d], &v.data[other..][..d]);
        let mut score = dot(query, key) * scale;
        let mut slope = R::one();
        if cap != 0.0 {
            let tanh = (score / R::of(cap)).tanh();
            score = R::of(cap) * tanh;
            slope = R::one() - tanh * tanh;
        }
        let bias = at(inputs, BIAS, head, i, j);
        if let Some(at) = bias {
            score = score + inputs[BIAS].data[at];
        }
        let p = weight(score);
        let drops = dropout.is_some_and(|dropout| !dropout.of_head(head.request, head.head).keeps(i, j));
        let (kept, dp) = match drops {
            true => (R::zero(), R::zero()),
            false => {
                let products = dout.iter().zip(value).map(|(&a, &b)| a * b);
                (p, dot(dout, value).blurred(cutting_error(products)) * factor)
            }
        };
        let dz = p * (dp - delta);
        if let (Some(at), Some(dbias)) = (bias, &mut gradients.dbias) {
            dbias.data[at] = dbias.data[at] + dz;
        }
        let ds = (dz * slope).blurred(f64::from(f32::MIN_POSITIVE)).stored();
        let kept = kept.stored();
        for c in 0..d {
            let (dq, dk) = (&mut gradients.dq.data[own + c], &mut gradients.dk.data[other + c]);
            *dq = *dq + ds * key[c];
            *dk = *dk + ds * query[c];
            let dv = &mut gradients.dv.data[other + c];
            *dv = *dv + kept * dout[c];
        }
    }
}

fn dropout(attrs: &Attrs) -> Option<Dropout> {
    Dropout::new(attrs.float(DROPOUT), attrs.int(SEED), attrs.int(OFFSET))
}

/// The factor of weights that are kept.
fn factor<R: Real>(dropout: Option<Dropout>) -> R {
    R::of(dropout.map_or(1.0, |dropout| f64::from(dropout.factor())))
}

fn scale(attrs: &Attrs, head_dim: usize) -> f64 {
    let scale = attrs.optional_float(SCALE).unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
    f64::from(scale as f32)
}

/// Where the element of a mask or bias is, which may be shared by the batch or the heads.
fn at<R: Real>(inputs: &Inputs<'_, R>, index: usize, head: &Head, i: usize, j: usize) -> Option<usize> {
    let [batch, heads, q_len, kv_len] = inputs.get(index)?.shape[..] else { unreachable!("four dimensions") };
    let (b, h) = (head.batch % batch, head.head % heads);
    Some(((b * heads + h) * q_len + i) * kv_len + j)
}
