//! The definitions of `cross_entropy` and its gradient.

use super::backward as back;
use super::options::{IGNORE_INDEX, LABEL_SMOOTHING, REDUCTION, SOFTCAP, Z_LOSS};
use super::{COUNT, LOGITS, LOSS, LSE, TARGETS};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// Positions of reductions.
pub(in crate::ops) const MEAN: usize = 0;
pub(in crate::ops) const NONE: usize = 2;

/// Whether the rows of these targets count.
pub(in crate::ops) fn counted<R: Real>(targets: &Array<R>, attrs: &Attrs) -> Vec<bool> {
    targets.data.iter().map(|target| target.f64() != attrs.int(IGNORE_INDEX) as f64).collect()
}

/// Logits with the soft cap.
fn capped<R: Real>(x: &[R], attrs: &Attrs) -> Vec<R> {
    let cap = R::of(attrs.float(SOFTCAP) as f32 as f64);
    x.iter().map(|&x| if cap == R::zero() { x } else { cap * (x / cap).tanh() }).collect()
}

/// x: [v]. The loss of the row, and its lse.
pub(in crate::ops) fn row_loss<R: Real>(x: &[R], target: usize, attrs: &Attrs) -> (R, R) {
    let option = |index: usize| R::of(attrs.float(index) as f32 as f64);
    let (smooth, z_loss) = (option(LABEL_SMOOTHING), option(Z_LOSS));
    let z = capped(x, attrs);
    let top = z.iter().fold(R::of(f64::NEG_INFINITY), |top, &z| top.max_nan(z));
    let sum = z.iter().fold(R::zero(), |sum, &z| sum + (z - top).exp());
    let log = (sum - R::one()).ln_1p();
    let lse = top + log;
    let mut loss = log;
    // Nothing of a part that does not count, infinite or not.
    if smooth != R::one() {
        loss = loss + (R::one() - smooth) * (top - z[target]);
    }
    if smooth != R::zero() {
        let below = z.iter().fold(R::zero(), |sum, &z| sum + (top - z));
        loss = loss + smooth * (below / R::of(z.len() as f64));
    }
    if z_loss != R::zero() {
        loss = loss + z_loss * (lse * lse);
    }
    (loss, lse)
}

/// x: [v]. The gradient of the row's loss, times `factor`.
pub(in crate::ops) fn row_gradient<R: Real>(
    x: &[R],
    target: usize,
    lse: R,
    factor: R,
    attrs: &Attrs,
) -> Vec<R> {
    let option = |index: usize| R::of(attrs.float(index) as f32 as f64);
    let (smooth, z_loss, cap) = (option(LABEL_SMOOTHING), option(Z_LOSS), option(SOFTCAP));
    let even = smooth / R::of(x.len() as f64);
    let weight = if z_loss == R::zero() { R::one() } else { R::one() + R::of(2.0) * z_loss * lse };
    let gradient = |(j, (&x, z)): (usize, (&R, R))| {
        let share = if j == target { even + (R::one() - smooth) } else { even };
        let d = factor * (weight * (z - lse).exp() - share);
        if cap == R::zero() {
            return d;
        }
        let tanh = (x / cap).tanh();
        d * (R::one() - tanh * tanh)
    };
    x.iter().zip(capped(x, attrs)).enumerate().map(gradient).collect()
}

/// From the losses of rows to the result.
pub(in crate::ops) fn reduced<R: Real>(losses: &[R], count: usize, attrs: &Attrs) -> R {
    let sum = losses.iter().fold(R::zero(), |sum, &loss| sum + loss);
    if attrs.choice(REDUCTION) == MEAN { sum / R::of(count as f64) } else { sum }
}

/// logits: [m, v], targets: [m].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (logits, targets) = (&inputs[LOGITS], &inputs[TARGETS]);
    let m = targets.data.len();
    let (mut losses, mut lse) = (Array::zeros(&[m]), Array::zeros(&[m]));
    let counted = counted(targets, attrs);
    for (i, row) in logits.rows().enumerate().filter(|&(i, _)| counted[i]) {
        (losses.data[i], lse.data[i]) = row_loss(row, targets.data[i].f64() as usize, attrs);
    }
    let count = counted.iter().filter(|&&counts| counts).count();
    let mut out = vec![None; COUNT + 1];
    out[LOSS] = Some(match attrs.choice(REDUCTION) {
        NONE => losses,
        _ => Array { shape: vec![], data: vec![reduced(&losses.data, count, attrs)] },
    });
    out[LSE] = inputs.wants(LSE).then_some(lse);
    out[COUNT] = inputs.wants(COUNT).then(|| Array::of(&[], &[count as f64]));
    out
}

/// logits: [m, v], targets and lse: [m], count: [], dloss: [m] or [].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (logits, targets, lse) = (&inputs[back::LOGITS], &inputs[back::TARGETS], &inputs[back::LSE]);
    let (count, dloss) = (inputs[back::COUNT].data[0], &inputs[back::DLOSS]);
    let counted = counted(targets, attrs);
    let mut dlogits = Array::zeros(&logits.shape);
    let v = logits.row_len();
    for (i, row) in logits.rows().enumerate().filter(|&(i, _)| counted[i]) {
        let factor = match attrs.choice(REDUCTION) {
            NONE => dloss.data[i],
            MEAN => dloss.data[0] / count,
            _ => dloss.data[0],
        };
        let gradient = row_gradient(row, targets.data[i].f64() as usize, lse.data[i], factor, attrs);
        dlogits.data[i * v..][..v].copy_from_slice(&gradient);
    }
    vec![None, None, None, None, None, Some(dlogits)]
}
