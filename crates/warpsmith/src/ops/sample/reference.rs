//! The definition of `sample`.

use super::{LOGITS, LOGPROB, MIN_P, POSITION, RAW, SEED, TEMPERATURE, TOP_K, TOP_P, VOCAB};
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
        let row: Vec<f32> = row[..n].iter().map(|l| clean(l.f64()) as f32).collect();
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
        let most = raw.iter().map(|l| clean(l.f64())).fold(f64::NEG_INFINITY, f64::max);
        let shifted = |l: R| R::of(clean(l.f64())) - R::of(most);
        let sum = raw.iter().fold(R::zero(), |sum, &l| sum + shifted(l).exp());
        logprobs.data[i] = shifted(raw[token]) - (sum - R::one()).ln_1p();
    }
    let mut outputs = vec![None; LOGPROB - 1];
    outputs.push(Some(tokens));
    outputs.push(inputs.wants(LOGPROB).then_some(logprobs));
    outputs
}

/// A logit as a number or minus infinity.
fn clean(l: f64) -> f64 {
    if l.is_nan() { f64::NEG_INFINITY } else { l.min(f32::MAX as f64) }
}

/// e^t for t <= 0.
fn exp(t: f32) -> f32 {
    let y = (t * std::f32::consts::LOG2_E).max(-60.0);
    let n = y.round_ties_even();
    let f = y - n;
    let c =
        [0.00015353362f32, 0.0013398875, 0.009618437, 0.055503324, 0.24022648, std::f32::consts::LN_2, 1.0];
    c[1..].iter().fold(c[0], |p, &c| p.mul_add(f, c)) * 2f32.powi(n as i32)
}

/// -ln(1 - x), x uniform between 0 and 1.
fn noise(seed: i64, position: i64, token: usize) -> f32 {
    const STEP: u64 = 0x9e3779b97f4a7c15;
    let mix = |z: u64| {
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    };
    let of_seed = mix((seed as u64).wrapping_add(STEP));
    let stream = mix(of_seed.wrapping_add((position as u64).wrapping_mul(STEP)));
    let bits = (mix(stream.wrapping_add((token as u64 + 1).wrapping_mul(STEP))) >> 32) as u32;
    let part = |bits: u32| (bits | 1) as f32 * 2f32.powi(-32);
    if bits < 1 << 30 {
        return -ln_1p(-part(bits));
    }
    // 1 - x = m 2^e with m from 1/sqrt(2) to sqrt(2).
    let (mut m, mut e) = (part(!bits), 0.0f32);
    while m < f32::from_bits(0x3f3504f3) {
        (m, e) = (m * 2.0, e - 1.0);
    }
    -(e.mul_add(std::f32::consts::LN_2, ln_1p(m - 1.0)))
}

fn ln_1p(f: f32) -> f32 {
    let c =
        [0.08736038f32, -0.14309312, 0.14918347, -0.16570306, 0.19962022, -0.2500176, 0.3333395, -0.4999999];
    let p = c[1..].iter().fold(c[0], |p, &c| p.mul_add(f, c));
    (p * f).mul_add(f, f)
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
        let whole = |j: usize| (weights[j] * 2f32.powi(40)) as u64;
        let total: u64 = left.iter().map(|&j| whole(j)).sum();
        let wanted = ((top_p as f64 * total as f64) as u64).max(1);
        let mut sum = 0;
        let mut least = f32::NEG_INFINITY;
        for j in by_logit(&left) {
            if sum < wanted {
                least = row[j];
            }
            sum += whole(j);
        }
        left.retain(|&j| row[j] >= least);
    }
    left
}

/// The token with the largest weight over noise, the first of equal ones.
fn draw(row: &[f32], weights: &[f32], left: &[usize], seed: i64, position: i64) -> usize {
    debug_assert!(left.iter().all(|&j| row[j].is_finite()));
    let score = |j: usize| weights[j] / noise(seed, position, j);
    left.iter().copied().reduce(|best, j| if score(j) > score(best) { j } else { best }).expect("the largest")
}
