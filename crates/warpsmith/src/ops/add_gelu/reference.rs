//! The definition of `add_gelu` and its gradient.

use super::{APPROXIMATE, BIAS, DBIAS, DOUT, KINDS, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = gelu(x + bias).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, bias, kind) = (&inputs[X], &inputs[BIAS], KINDS[attrs.choice(APPROXIMATE)]);
    let rows = x.rows().flat_map(|row| row.iter().zip(&bias.data));
    let data = rows.map(|(&x, &b)| kind.value(x + b)).collect();
    vec![None, None, Some(Array { shape: x.shape.clone(), data })]
}

/// dx = dout gelu'(x + bias); dbias = sum of dx over rows.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, bias, kind) = (&inputs[X], &inputs[BIAS], KINDS[attrs.choice(APPROXIMATE)]);
    let mut dx = Array::zeros(&x.shape);
    let mut dbias = Array::zeros(&bias.shape);
    let n = x.row_len();
    for ((x, dout), dx) in x.rows().zip(inputs[DOUT].rows()).zip(dx.data.chunks_exact_mut(n.max(1))) {
        for i in 0..n {
            dx[i] = dout[i] * kind.derivative(x[i] + bias.data[i]);
            dbias.data[i] = dbias.data[i] + dx[i];
        }
    }
    vec![None, None, None, Some(dx), inputs.wants(DBIAS).then_some(dbias)]
}
