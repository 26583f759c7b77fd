//! The definitions of `grouped_linear` and its gradient.

use super::backward as back;
use super::{ACT, BIAS, COUNTS, GATE, INDEX, OUT, RESIDUAL, ROW_SCALE, SCALE, W, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::grouped::reference::{activated, dot, dot_of};
use crate::ops::linear::{Activation, Gate};
use std::ops::Range;

/// The rows of each group.
fn groups<R: Real>(counts: &Array<R>) -> Vec<Range<usize>> {
    let mut end = 0;
    let mut range = |count: &R| {
        let start = end;
        end += count.f64() as usize;
        start..end
    };
    counts.data.iter().map(&mut range).collect()
}

/// x: [x_rows, k], w: [groups, w_rows, k], counts: [groups], index: [rows], bias: [groups, w_rows], row_scale: [rows],
/// residual: [rows, n].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w, index) = (&inputs[X], &inputs[W], inputs.get(INDEX));
    let (activation, gate) = (Activation::ALL[attrs.choice(ACT)], Gate::ALL[attrs.choice(GATE)]);
    let scale = R::of(attrs.float(SCALE) as f32 as f64);
    let (k, w_rows) = (x.row_len(), w.shape[1]);
    let n = if gate == Gate::None { w_rows } else { w_rows / 2 };
    let rows = index.map_or(x.shape[0], |index| index.data.len());
    let mut out = Array::zeros(&[rows, n]);
    for (group, range) in groups(&inputs[COUNTS]).into_iter().enumerate() {
        for row in range {
            let from = index.map_or(row as f64, |index| index.data[row].f64());
            let x = if from < 0.0 { vec![R::zero(); k] } else { x.data[from as usize * k..][..k].to_vec() };
            let sum = |j: usize| {
                let at = group * w_rows + j;
                let z = dot(&x, &w.data[at * k..][..k]);
                inputs.get(BIAS).map_or(z, |bias| z + bias.data[at])
            };
            let z: Vec<R> = (0..w_rows).map(sum).collect();
            for (j, mut y) in activated(&z, activation, gate).into_iter().enumerate() {
                y = y * scale;
                if let Some(row_scale) = inputs.get(ROW_SCALE) {
                    y = y * row_scale.data[row];
                }
                if let Some(residual) = inputs.get(RESIDUAL) {
                    y = y + residual.data[row * n + j];
                }
                out.data[row * n + j] = y;
            }
        }
    }
    let mut all = vec![None; OUT];
    all.push(Some(out));
    all
}

/// dz = dout scale act'(z), stored; of each group dx = dz w, dw = dzᵀ x, dbias = the sum of dz before it was stored.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w, dout) = (&inputs[back::X], &inputs[back::W], &inputs[back::DOUT]);
    let activation = Activation::ALL[attrs.choice(back::ACT)].kind();
    let scale = R::of(attrs.float(back::SCALE) as f32 as f64);
    let (n, k, groups_count) = (w.shape[1], x.row_len(), w.shape[0]);
    let slope = |i: usize| activation.map_or(R::one(), |kind| kind.derivative(inputs[back::Z].data[i]));
    let exact: Vec<R> = (0..dout.data.len()).map(|i| dout.data[i] * scale * slope(i)).collect();
    let dz: Vec<R> = exact.iter().map(|&v| v.stored()).collect();
    let (mut dx, mut dw) = (Array::<R>::zeros(&x.shape), Array::<R>::zeros(&w.shape));
    let mut dbias = Array::<R>::zeros(&[groups_count, n]);
    for (group, rows) in groups(&inputs[back::COUNTS]).into_iter().enumerate() {
        for row in rows.clone() {
            for i in 0..k {
                dx.data[row * k + i] = dot_of(n, |j| (dz[row * n + j], w.data[(group * n + j) * k + i]));
            }
        }
        for j in 0..n {
            let at = group * n + j;
            dbias.data[at] = rows.clone().fold(R::zero(), |sum, row| sum + exact[row * n + j]);
            for i in 0..k {
                let pair = |row: usize| (dz[(rows.start + row) * n + j], x.data[(rows.start + row) * k + i]);
                dw.data[at * k + i] = dot_of(rows.len(), pair);
            }
        }
    }
    let wanted = |index: usize, array| inputs.wants(index).then_some(array);
    let gradients = [wanted(back::DX, dx), wanted(back::DW, dw), wanted(back::DBIAS, dbias)];
    [vec![None; back::DX], gradients.to_vec()].concat()
}
