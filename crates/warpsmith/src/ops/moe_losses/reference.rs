//! The definitions of `moe_losses` and its gradient.

use super::backward as back;
use super::{ENTROPY, IDS, IMPORTANCE, LOAD, LOAD_BALANCE, LOGITS, PROBABILITY, SCORE, Z_LOSS};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// logits: [t, e], ids: [t, k].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (logits, ids) = (&inputs[LOGITS], &inputs[IDS]);
    let (t, e) = (R::of(logits.shape[0] as f64), logits.shape[1]);
    let mut load = vec![0.0; e];
    for id in &ids.data {
        load[id.f64() as usize] += 1.0;
    }
    let slots = R::of(ids.data.len() as f64);
    let over = |x: R, y: R| if y == R::zero() { R::zero() } else { x / y };
    let load: Vec<R> = load.into_iter().map(|count| over(R::of(count), slots)).collect();
    let mut probability = vec![R::zero(); e];
    let (mut squares, mut entropy) = (R::zero(), R::zero());
    for row in logits.rows() {
        let (_, top, log) = distribution(row);
        squares = squares + (top + log) * (top + log);
        let y = scores(row, attrs);
        let (p, top, log) = distribution(&y);
        for ((sum, &p), &y) in probability.iter_mut().zip(&p).zip(&y) {
            *sum = *sum + p;
            if p != R::zero() {
                entropy = entropy + p * (top - y);
            }
        }
        entropy = entropy + log;
    }
    let probability: Vec<R> = probability.into_iter().map(|sum| over(sum, t)).collect();
    let products = load.iter().zip(&probability).fold(R::zero(), |sum, (&load, &p)| sum + load * p);
    let (mean, variation) = spread(&probability);
    let mut out = vec![None; inputs.count()];
    let number = |x: R| Array { shape: vec![], data: vec![x] };
    out[LOAD_BALANCE] = Some(number(R::of(e as f64) * products));
    out[Z_LOSS] = Some(number(over(squares, t)));
    out[IMPORTANCE] = Some(number(over(variation / R::of(e as f64), mean * mean)));
    out[LOAD] = inputs.wants(LOAD).then_some(Array { shape: vec![e], data: load });
    out[PROBABILITY] = inputs.wants(PROBABILITY).then_some(Array { shape: vec![e], data: probability });
    out[ENTROPY] = inputs.wants(ENTROPY).then(|| number(over(entropy, t)));
    out
}

/// What probabilities are the softmax of: logits, or the logarithms of their sigmoids.
fn scores<R: Real>(row: &[R], attrs: &Attrs) -> Vec<R> {
    let log_sigmoid = |x: R| {
        let below = x < R::zero();
        let tail = (if below { x } else { -x }).exp().ln_1p();
        if below { x - tail } else { -tail }
    };
    row.iter().map(|&x| if attrs.choice(SCORE) == 0 { x } else { log_sigmoid(x) }).collect()
}

/// 1 / (1 + e^-x).
fn logistic<R: Real>(x: R) -> R {
    let below = x < R::zero();
    let e = (if below { x } else { -x }).exp();
    (if below { e } else { R::one() }) / (R::one() + e)
}

/// The softmax of a row, its largest element, and the logarithm of the sum of exponentials relative to that.
fn distribution<R: Real>(x: &[R]) -> (Vec<R>, R, R) {
    let top = x.iter().fold(R::of(f64::NEG_INFINITY), |top, &x| top.max_nan(x));
    let powers: Vec<R> = x.iter().map(|&x| (x - top).exp()).collect();
    let sum = powers.iter().fold(R::zero(), |sum, &e| sum + e);
    let p = powers.into_iter().map(|e| e / sum).collect();
    (p, top, (sum - R::one()).ln_1p())
}

/// The mean, and the sum of the squares of differences to it.
fn spread<R: Real>(x: &[R]) -> (R, R) {
    let mean = x.iter().fold(R::zero(), |sum, &x| sum + x) / R::of(x.len() as f64);
    (mean, x.iter().fold(R::zero(), |sum, &x| sum + (x - mean) * (x - mean)))
}

/// logits: [t, e], load and probability: [e], the gradients of losses: [].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let logits = &inputs[back::LOGITS];
    let (t, experts) = (R::of(logits.shape[0] as f64), logits.shape[1]);
    let (e, probability) = (R::of(experts as f64), &inputs[back::PROBABILITY].data);
    let [dbalance, dz, dimportance] =
        [back::DLOAD_BALANCE, back::DZ_LOSS, back::DIMPORTANCE].map(|index| inputs[index].data[0]);
    let (mean, variation) = spread(probability);
    let sum = e * mean;
    let arrives: Vec<R> = (0..experts)
        .map(|i| {
            let slope = R::of(2.0) * e / (sum * sum) * (probability[i] - mean - variation / sum);
            (e * inputs[back::LOAD].data[i] * dbalance + slope * dimportance) / t
        })
        .collect();
    let mut dlogits = Array::zeros(&logits.shape);
    for (token, row) in logits.rows().enumerate() {
        let (plain, top, log) = distribution(row);
        let lse = top + log;
        let (p, ..) = distribution(&scores(row, attrs));
        let dot = p.iter().zip(&arrives).fold(R::zero(), |sum, (&p, &v)| sum + p * v);
        for (i, out) in dlogits.data[token * experts..][..experts].iter_mut().enumerate() {
            let mut d = p[i] * (arrives[i] - dot);
            if attrs.choice(SCORE) == 1 {
                d = d * logistic(-row[i]);
            }
            *out = d + R::of(2.0) * lse * plain[i] * dz / t;
        }
    }
    let mut out = vec![None; inputs.count()];
    out[back::DLOGITS] = Some(dlogits);
    out
}
