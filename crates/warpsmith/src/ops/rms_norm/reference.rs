//! The definition of `rms_norm` and its gradient.

use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::norm::{EPS, RESIDUAL, SUM, WEIGHT, X, backward as back};

/// Per row of length n: s = x + residual; out = s / sqrt(sum(s^2) / n + eps) * weight.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let mut sum = inputs[X].clone();
    if let Some(residual) = inputs.get(RESIDUAL) {
        for (s, &r) in sum.data.iter_mut().zip(&residual.data) {
            *s = (*s + r).stored();
        }
    }
    let mut out = Array::zeros(&sum.shape);
    let n = sum.row_len();
    for (row, out) in sum.rows().zip(out.data.chunks_exact_mut(n.max(1))) {
        let scale = inverse_rms(row, attrs.float(EPS));
        for i in 0..n {
            out[i] = row[i] * scale;
            if let Some(weight) = inputs.get(WEIGHT) {
                out[i] = out[i] * weight.data[i];
            }
        }
    }
    vec![None, None, None, Some(out), inputs.wants(SUM).then_some(sum)]
}

fn inverse_rms<R: Real>(row: &[R], eps: f64) -> R {
    let squares = row.iter().fold(R::zero(), |sum, &x| sum + x * x);
    R::one() / (squares / R::of(row.len() as f64) + R::of(eps)).sqrt()
}

/// With r = 1 / rms(x), y = x r and g = dout * weight:
/// dx = r (g - y mean(g y)) + dsum;  dweight = sum over rows of dout * y.
/// The mean is that of g x, times r, so that one pass over a row gives both sums.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, dout) = (&inputs[back::X], &inputs[back::DOUT]);
    let weight = inputs.get(back::WEIGHT);
    let n = x.row_len();
    let mut dx = Array::zeros(&x.shape);
    let mut dweight = Array::zeros(&[n]);
    for (row, (x, dout)) in x.rows().zip(dout.rows()).enumerate() {
        let r = inverse_rms(x, attrs.float(EPS));
        let g = |i: usize| weight.map_or(dout[i], |w| dout[i] * w.data[i]);
        let mean = (0..n).fold(R::zero(), |sum, i| sum + g(i) * x[i]) * r / R::of(n as f64);
        for i in 0..n {
            let mut d = r * (g(i) - x[i] * r * mean);
            if let Some(dsum) = inputs.get(back::DSUM) {
                d = d + dsum.data[row * n + i];
            }
            dx.data[row * n + i] = d;
            dweight.data[i] = dweight.data[i] + dout[i] * (x[i] * r);
        }
    }
    vec![None, None, None, None, Some(dx), inputs.wants(back::DWEIGHT).then_some(dweight)]
}
