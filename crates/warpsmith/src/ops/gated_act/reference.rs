//! The definition of `gated_act` and its gradient.

use super::{DOUT, INTERLEAVED, KIND, KINDS, LAYOUT, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// Where column `i` of gate and of up lies in a packed row for `n` columns.
fn columns(i: usize, n: usize, attrs: &Attrs) -> (usize, usize) {
    if attrs.choice(LAYOUT) == INTERLEAVED { (2 * i, 2 * i + 1) } else { (i, n + i) }
}

/// out = f(gate) up.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, kind) = (&inputs[X], KINDS[attrs.choice(KIND)]);
    let n = x.row_len() / 2;
    let mut shape = x.shape.clone();
    *shape.last_mut().expect("a row") = n;
    let mut out = Array::zeros(&shape);
    for (row, out) in x.rows().zip(out.data.chunks_exact_mut(n.max(1))) {
        for (i, out) in out.iter_mut().enumerate() {
            let (gate, up) = columns(i, n, attrs);
            *out = kind.value(row[gate]) * row[up];
        }
    }
    vec![None, Some(out)]
}

/// dgate = dout up f'(gate); dup = dout f(gate).
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, kind) = (&inputs[X], KINDS[attrs.choice(KIND)]);
    let n = x.row_len() / 2;
    let mut dx = Array::zeros(&x.shape);
    for ((row, dout), dx) in x.rows().zip(inputs[DOUT].rows()).zip(dx.data.chunks_exact_mut((2 * n).max(1))) {
        for i in 0..n {
            let (gate, up) = columns(i, n, attrs);
            dx[gate] = dout[i] * row[up] * kind.derivative(row[gate]);
            dx[up] = dout[i] * kind.value(row[gate]);
        }
    }
    vec![None, None, Some(dx)]
}
