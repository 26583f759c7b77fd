//! The definition of `layer_norm` and its gradient.

use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::norm::{BIAS, EPS, RESIDUAL, SUM, WEIGHT, X, backward as back};

/// Per row of length n: s = x + residual; m = sum(s) / n; out = (s - m) / sqrt(sum((s - m)^2) / n + eps) * weight
/// + bias.
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
        let (mean, scale) = moments(row, attrs.float(EPS));
        for i in 0..n {
            out[i] = (row[i] - mean) * scale;
            if let Some(weight) = inputs.get(WEIGHT) {
                out[i] = out[i] * weight.data[i];
            }
            if let Some(bias) = inputs.get(BIAS) {
                out[i] = out[i] + bias.data[i];
            }
        }
    }
    vec![None, None, None, Some(out), inputs.wants(SUM).then_some(sum), None]
}

fn moments<R: Real>(row: &[R], eps: f64) -> (R, R) {
    let n = R::of(row.len() as f64);
    let mean = row.iter().fold(R::zero(), |sum, &x| sum + x) / n;
    let squares = row.iter().fold(R::zero(), |sum, &x| sum + (x - mean) * (x - mean));
    (mean, R::one() / (squares / n + R::of(eps)).sqrt())
}

/// With r = 1 / deviation(x), y = (x - mean) r and g = dout * weight:
/// dx = r (g - y mean(g y) - mean(g)) + dsum;  dweight = sum over rows of dout * y;  dbias = sum of dout.
/// The mean of g y is that of g (x - mean), times r.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, dout) = (&inputs[back::X], &inputs[back::DOUT]);
    let weight = inputs.get(back::WEIGHT);
    let n = x.row_len();
    let mut dx = Array::zeros(&x.shape);
    let (mut dweight, mut dbias) = (Array::zeros(&[n]), Array::zeros(&[n]));
    for (row, (x, dout)) in x.rows().zip(dout.rows()).enumerate() {
        let (mean, r) = moments(x, attrs.float(EPS));
        let g = |i: usize| weight.map_or(dout[i], |w| dout[i] * w.data[i]);
        let y = |i: usize| (x[i] - mean) * r;
        let mean_gy = (0..n).fold(R::zero(), |sum, i| sum + g(i) * (x[i] - mean)) * r / R::of(n as f64);
        let mean_g = (0..n).fold(R::zero(), |sum, i| sum + g(i)) / R::of(n as f64);
        for i in 0..n {
            let mut d = r * (g(i) - y(i) * mean_gy - mean_g);
            if let Some(dsum) = inputs.get(back::DSUM) {
                d = d + dsum.data[row * n + i];
            }
            dx.data[row * n + i] = d;
            dweight.data[i] = dweight.data[i] + dout[i] * y(i);
            dbias.data[i] = dbias.data[i] + dout[i];
        }
    }
    let sums = [(back::DWEIGHT, dweight), (back::DBIAS, dbias)];
    let [dweight, dbias] = sums.map(|(index, sum)| inputs.wants(index).then_some(sum));
    vec![None, None, None, None, Some(dx), dweight, dbias]
}
