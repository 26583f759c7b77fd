//! The definition of `argmax`.

use super::X;
use crate::lab::{Array, Inputs, Real};

/// x: [m, n]. out[i] = the lowest j with the largest x[i, j], as if NaN were below all numbers.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let x = &inputs[X];
    let mut out = Array::zeros(&x.shape[..x.shape.len() - 1]);
    for (row, out) in x.rows().zip(&mut out.data) {
        let mut best = 0;
        for (j, value) in row.iter().enumerate() {
            let beats_nan = row[best].f64().is_nan() && !value.f64().is_nan();
            if *value > row[best] || beats_nan {
                best = j;
            }
        }
        *out = R::of(best as f64);
    }
    vec![None, Some(out)]
}
