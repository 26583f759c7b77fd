//! The definition of `sample`.

use super::{LOGITS, LOGPROB, MIN_P, POSITION, RAW, SEED, TEMPERATURE, TOP_K, TOP_P, VOCAB};
use crate::lab::reference::choice::{clean, exp, exponential, random_bits, whole};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// logits: [m, n]. The token is computed in f32 and in integers whatever `R` is: the roundings are part of the definition.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let logits = &inputs[LOGITS];
    let m = logits.shape[0];
    let n = match attrs.int(VOCAB) as usize {
        0 => logits.shape[1],
        vocab => vocab,
    };
    let (mut tokens, mut logprobs) = (Array::zeros(&[m]), Array::zeros(&[m]));
    for (i, row) in logits.rows().enumerate() {
        let value = |arg: usize, default: f64| inputs.get(arg).map_or(default, |array| array.data[i].f64());
        let row: Vec<f32> = row[..n].iter().map(|&l| clean(l).f64() as f32).collect();
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if most == f32::NEG_INFINITY {
            (tokens.data[i], logprobs.data[i]) = (R::of(-1.0), R::of(f64::NAN));
            continue;
        }
        let temperature = value(TEMPERATURE, 1.0) as f32;
        let token = if temperature >= 1e-5 {
            let weights: Vec<f32> = row.iter().map(|l| exp((l - most) * (1.0 / temperature))).collect();
            let cuts = (value(MIN_P, 0.0) as f32, value(TOP_K, 0.0), value(TOP_P, 1.0) as f32);
            let [seed, position] = [SEED, POSITION].map(|arg| value(arg, 0.0) as i64);
            draw(&row, &weights, &remaining(&row, &weights, cuts), seed, position)
        } else {
            row.iter().position(|&l| l == most).expect("the largest")
        };
        tokens.data[i] = R::of(token as f64);
        let raw = inputs.get(RAW).unwrap_or(logits);
        let raw = &raw.data[i * raw.row_len()..][..n];
        let most = raw.iter().map(|&l| clean(l).f64()).fold(f64::NEG_INFINITY, f64::max);
        let shifted = |l: R| clean(l) - R::of(most);
        let sum = raw.iter().fold(R::zero(), |sum, &l| sum + shifted(l).exp());
        logprobs.data[i] = shifted(raw[token]) - (sum - R::one()).ln_1p();
    }
    let mut outputs = vec![None; LOGPROB - 1];
    outputs.push(Some(tokens));
    outputs.push(inputs.wants(LOGPROB).then_some(logprobs));
    outputs
}

/// The tokens that the cuts leave.
fn remaining(row: &[f32], weights: &[f32], (min_p, top_k, top_p): (f32, f64, f32)) -> Vec<usize> {
    let mut left: Vec<usize> = (0..row.len()).filter(|&j| weights[j] >= 2f32.powi(-40)).collect();
    if min_p > 0.0 {
        left.retain(|&j| weights[j] >= min_p.min(1.0));
    }
    let by_logit = |left: &[usize]| {
        let mut sorted = left.to_vec();
        sorted.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        sorted
    };
    if top_k >= 1.0 && (top_k as usize) < left.len() {
        let least = row[by_logit(&left)[top_k as usize - 1]];
        left.retain(|&j| row[j] >= least);
    }
    if top_p < 1.0 {
        let total: u64 = left.iter().map(|&j| whole(weights[j])).sum();
        let wanted = ((top_p as f64 * total as f64) as u64).max(1);
        let mut sum = 0;
        let mut least = f32::NEG_INFINITY;
        for j in by_logit(&left) {
            if sum < wanted {
                least = row[j];
            }
            sum += whole(weights[j]);
        }
        left.retain(|&j| row[j] >= least);
    }
    left
}

/// The token with the largest weight over noise, the first of equal ones.
fn draw(row: &[f32], weights: &[f32], left: &[usize], seed: i64, position: i64) -> usize {
    debug_assert!(left.iter().all(|&j| row[j].is_finite()));
    let noise = |j: usize| exponential((random_bits(seed, position, j) >> 32) as u32);
    let score = |j: usize| weights[j] / noise(j);
    left.iter().copied().reduce(|best, j| if score(j) > score(best) { j } else { best }).expect("the largest")
}
