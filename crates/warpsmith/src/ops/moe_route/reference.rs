//! The definitions of `moe_route` and its gradient.

use super::backward as back;
use super::options::{
    CAPACITY, GROUP_SCORE, GROUPS, NOISE, NORMALIZE, SCALE, SCORE, SEED, TOP_GROUPS, TOP_K,
};
use super::{BIAS, COUNTS, DROPPED, IDS, LOGITS, ORDER, POSITIONS, WEIGHTS};
use crate::lab::reference::choice::{clean, exp, exponential, random_bits, whole};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// logits: [t, e], bias: [e]. Experts are chosen in f32 whatever `R` is: the roundings are part of the definition.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let logits = &inputs[LOGITS];
    let (t, e, k) = (logits.shape[0], logits.shape[1], attrs.int(TOP_K) as usize);
    let mut weights = Array::zeros(&[t, k]);
    let mut ids: Vec<usize> = Vec::new();
    for (token, row) in logits.rows().enumerate() {
        let row: Vec<R> = row.iter().map(|&x| clean(x)).collect();
        let chosen = choose(&row, inputs.get(BIAS).map(|bias| &bias.data[..]), token, attrs);
        let scale = R::of(attrs.float(SCALE) as f32 as f64);
        let shares = shares(&row, &chosen, attrs.choice(SCORE), attrs.bool(NORMALIZE));
        for (slot, share) in shares.into_iter().enumerate() {
            weights.data[token * k + slot] = share * scale;
        }
        ids.extend(chosen);
    }
    let capacity = match attrs.int(CAPACITY) as usize {
        0 => usize::MAX,
        capacity => capacity,
    };
    let mut slots_of: Vec<Vec<usize>> = vec![Vec::new(); e];
    let mut dropped = vec![0.0; e];
    for (slot, &id) in ids.iter().enumerate() {
        if slots_of[id].len() < capacity {
            slots_of[id].push(slot);
        } else {
            dropped[id] += 1.0;
            weights.data[slot] = R::zero();
        }
    }
    let (mut order, mut positions) = (vec![-1.0; t * k], vec![-1.0; t * k]);
    for (place, &slot) in slots_of.iter().flatten().enumerate() {
        order[place] = slot as f64;
        positions[slot] = place as f64;
    }
    let counts: Vec<f64> = slots_of.iter().map(|slots| slots.len() as f64).collect();
    let ids: Vec<f64> = ids.into_iter().map(|id| id as f64).collect();
    let mut out = vec![None; inputs.count()];
    out[WEIGHTS] = Some(weights);
    out[IDS] = Some(Array::of(&[t, k], &ids));
    out[COUNTS] = inputs.wants(COUNTS).then(|| Array::of(&[e], &counts));
    out[ORDER] = inputs.wants(ORDER).then(|| Array::of(&[t, k], &order));
    out[POSITIONS] = inputs.wants(POSITIONS).then(|| Array::of(&[t, k], &positions));
    out[DROPPED] = inputs.wants(DROPPED).then(|| Array::of(&[e], &dropped));
    out
}

/// The experts of a token, the best first.
fn choose<R: Real>(row: &[R], bias: Option<&[R]>, token: usize, attrs: &Attrs) -> Vec<usize> {
    let clean = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { x.min(f32::MAX) };
    let [groups, top_groups] = [GROUPS, TOP_GROUPS].map(|option| attrs.int(option) as usize);
    let top_groups = if top_groups == 0 { groups } else { top_groups };
    let deviation = attrs.float(NOISE) as f32;
    let mut scores: Vec<f32> = row.iter().map(|x| x.f64() as f32).collect();
    if deviation > 0.0 {
        for (expert, score) in scores.iter_mut().enumerate() {
            *score = clean(*score + deviation * normal(attrs.int(SEED), token, expert));
        }
    }
    let by_sums = top_groups < groups && attrs.choice(GROUP_SCORE) == 0;
    if bias.is_some() || by_sums {
        let plain = if attrs.choice(SCORE) == 0 { softmax(&scores) } else { sigmoid(&scores) };
        for (expert, score) in scores.iter_mut().enumerate().filter(|(_, score)| **score > f32::NEG_INFINITY)
        {
            *score = clean(plain[expert] + bias.map_or(0.0, |bias| bias[expert].f64() as f32));
        }
    }
    let size = scores.len() / groups;
    let group_scores: Vec<f32> = scores
        .chunks(size)
        .map(|group| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.partial_cmp(a).expect("numbers"));
            if by_sums && size > 1 { clean(sorted[0] + sorted[1]) } else { sorted[0] }
        })
        .collect();
    let best = best_first(&group_scores);
    let mut candidates: Vec<usize> = best_first(&scores);
    candidates.retain(|expert| best[..top_groups].contains(&(expert / size)));
    candidates.truncate(attrs.int(TOP_K) as usize);
    candidates
}

/// Positions by falling score, of equal ones the lowest first.
fn best_first(scores: &[f32]) -> Vec<usize> {
    let mut all: Vec<usize> = (0..scores.len()).collect();
    all.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).expect("numbers"));
    all
}

/// The softmax by which experts are chosen: shares of a sum of whole multiples of 2^-40.
fn softmax(x: &[f32]) -> Vec<f32> {
    let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let of = |x: f32| if x == f32::NEG_INFINITY { 0.0 } else { exp(x - most) };
    let total: u64 = x.iter().map(|&x| whole(of(x))).sum();
    x.iter().map(|&x| of(x) / (total as f32 * 2f32.powi(-40))).collect()
}

fn sigmoid(x: &[f32]) -> Vec<f32> {
    let of = |x: f32| {
        let e = exp(-x.abs());
        (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
    };
    x.iter().map(|&x| of(x)).collect()
}

/// A normally distributed number for an expert of a token.
fn normal(seed: i64, token: usize, expert: usize) -> f32 {
    let bits = random_bits(seed, token as i64, expert);
    let turns = (bits as u32 as i32).unsigned_abs() as f32 * 2f32.powi(-32);
    (2.0 * exponential((bits >> 32) as u32)).sqrt() * cosine(turns)
}

/// The cosine of up to half a turn, as the sine of a quarter less it.
fn cosine(turns: f32) -> f32 {
    let q = 0.25 - turns;
    let c = [-15.094643f32, 42.058693, -76.70586, 81.60525, -41.3417, 6.2831855];
    c[1..].iter().fold(c[0], |p, &c| p.mul_add(q * q, c)) * q
}

/// What each chosen expert has before the factor of all: of the scores of all, or of those of the chosen.
fn shares<R: Real>(row: &[R], chosen: &[usize], score: usize, normalize: bool) -> Vec<R> {
    let of: Vec<R> = chosen.iter().map(|&expert| row[expert]).collect();
    let lowest = R::of(f64::NEG_INFINITY);
    let top = |x: &[R]| x.iter().fold(lowest, |top, &x| if x > top { x } else { top });
    if top(&of) == lowest {
        return vec![R::zero(); of.len()];
    }
    let sum = |x: &[R]| x.iter().fold(R::zero(), |sum, &x| sum + x);
    let relative = |x: &[R], top: R| -> Vec<R> { x.iter().map(|&x| (x - top).exp()).collect() };
    if score == 0 {
        let among = if normalize { &of } else { row };
        let divisor = sum(&relative(among, top(among)));
        return relative(&of, top(among)).into_iter().map(|e| e / divisor).collect();
    }
    let scores: Vec<R> = of.iter().map(|&x| logistic(x)).collect();
    let divisor = if normalize { sum(&scores) + R::of(1e-20f32 as f64) } else { R::one() };
    scores.into_iter().map(|s| s / divisor).collect()
}

/// 1 / (1 + e^-x).
fn logistic<R: Real>(x: R) -> R {
    let below = x < R::zero();
    let e = (if below { x } else { -x }).exp();
    (if below { e } else { R::one() }) / (R::one() + e)
}

/// logits: [t, e], ids, weights and dweights: [t, k].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let logits = &inputs[back::LOGITS];
    let ids = &inputs[back::IDS];
    let (e, k) = (logits.shape[1], ids.shape[1]);
    let (score, normalize) = (attrs.choice(back::SCORE), attrs.bool(back::NORMALIZE));
    let scale = R::of(attrs.float(back::SCALE) as f32 as f64);
    let mut dlogits = Array::zeros(&logits.shape);
    for (token, row) in logits.rows().enumerate() {
        let row: Vec<R> = row.iter().map(|&x| clean(x)).collect();
        let slots = token * k..(token + 1) * k;
        let chosen: Vec<usize> = ids.data[slots.clone()].iter().map(|id| id.f64() as usize).collect();
        let gradients: Vec<R> = slots
            .map(|slot| match inputs[back::WEIGHTS].data[slot].f64() == 0.0 {
                true => R::zero(),
                false => inputs[back::DWEIGHTS].data[slot],
            })
            .collect();
        let out = &mut dlogits.data[token * e..(token + 1) * e];
        let shares = shares(&row, &chosen, score, normalize);
        let products = shares.iter().zip(&gradients).map(|(&share, &gradient)| share * gradient);
        let dot = products.fold(R::zero(), |sum, product| sum + product);
        if score == 0 && !normalize {
            let everyone: Vec<usize> = (0..e).collect();
            let all = self::shares(&row, &everyone, 0, false);
            let mut arrived = vec![R::zero(); e];
            for (&expert, &gradient) in chosen.iter().zip(&gradients) {
                arrived[expert] = arrived[expert] + gradient;
            }
            for (expert, out) in out.iter_mut().enumerate() {
                *out = scale * (all[expert] * (arrived[expert] - dot));
            }
            continue;
        }
        for ((&expert, &gradient), &share) in chosen.iter().zip(&gradients).zip(&shares) {
            let from = if normalize { gradient - dot } else { gradient };
            // The slope of a sigmoid, over the sigmoid.
            let slope = if score == 0 { R::one() } else { logistic(-row[expert]) };
            out[expert] = out[expert] + scale * (share * from * slope);
        }
    }
    let mut out = vec![None; inputs.count()];
    out[back::DLOGITS] = Some(dlogits);
    out
}
