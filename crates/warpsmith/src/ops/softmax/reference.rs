//! The definition of `softmax` and its gradient.

use super::{SCALE, X, backward as back};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// Per row: t = scale x; out = exp(t - max(t)) / sum(exp(t - max(t))).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let scale = attrs.float(SCALE);
    let scaled = |x: R| if scale == 1.0 { x } else { x * R::of(scale) };
    let mut out = inputs[X].map(scaled);
    let n = out.row_len().max(1);
    for row in out.data.chunks_exact_mut(n) {
        let max = row.iter().fold(R::of(f64::NEG_INFINITY), |max, &t| max.max_nan(t));
        row.iter_mut().for_each(|t| *t = (*t - max).exp());
        let sum = row.iter().fold(R::zero(), |sum, &e| sum + e);
        row.iter_mut().for_each(|e| *e = *e / sum);
    }
    vec![None, Some(out)]
}

/// Per row, with y the result of softmax: dx = scale y (dout - sum(y dout)).
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (y, dout) = (&inputs[back::Y], &inputs[back::DOUT]);
    let scale = R::of(attrs.float(SCALE));
    let mut dx = Array::zeros(&y.shape);
    let n = y.row_len().max(1);
    for ((y, dout), dx) in y.rows().zip(dout.rows()).zip(dx.data.chunks_exact_mut(n)) {
        let dot = (0..n).fold(R::zero(), |sum, i| sum + y[i] * dout[i]);
        for i in 0..n {
            dx[i] = scale * y[i] * (dout[i] - dot);
        }
    }
    vec![None, None, Some(dx)]
}
