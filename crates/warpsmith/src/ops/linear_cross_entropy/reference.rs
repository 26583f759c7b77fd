//! The definitions of `linear_cross_entropy` and its gradient.

use super::backward as back;
use super::{COUNT, DW, DX, LOSS, TARGETS, W, X, part_rows};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::cross_entropy::reference::{MEAN, counted, reduced, row_gradient, row_loss};

/// x: [m, k], w: [v, k], targets: [m].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, w, targets) = (&inputs[X], &inputs[W], &inputs[TARGETS]);
    let (m, v, k) = (targets.data.len(), w.shape[0], w.shape[1]);
    let counted = counted(targets, attrs);
    let mut losses = vec![R::zero(); m];
    let mut dz = vec![R::zero(); m * v];
    for i in (0..m).filter(|&i| counted[i]) {
        let logit = |j: usize| (0..k).fold(R::zero(), |sum, h| sum + x.data[i * k + h] * w.data[j * k + h]);
        let logits: Vec<R> = (0..v).map(logit).collect();
        let target = targets.data[i].f64() as usize;
        let (loss, lse) = row_loss(&logits, target, attrs);
        losses[i] = loss;
        for (dz, of) in dz[i * v..][..v].iter_mut().zip(row_gradient(&logits, target, lse, R::one(), attrs)) {
            *dz = of.stored();
        }
    }
    let count = counted.iter().filter(|&&counts| counts).count();
    let mut out = vec![None; DW + 1];
    out[LOSS] = Some(Array { shape: vec![], data: vec![reduced(&losses, count, attrs)] });
    out[COUNT] = inputs.wants(COUNT).then(|| Array::of(&[], &[count as f64]));
    out[DX] = inputs.wants(DX).then(|| {
        let mut dx = Array::<R>::zeros(&[m, k]);
        for i in 0..m {
            for h in 0..k {
                dx.data[i * k + h] = (0..v).fold(R::zero(), |sum, j| sum + dz[i * v + j] * w.data[j * k + h]);
            }
        }
        dx
    });
    out[DW] = inputs.wants(DW).then(|| {
        let mut dw = Array::<R>::zeros(&[v, k]);
        let rows = part_rows(v);
        for first in (0..m).step_by(rows) {
            let part = first..(first + rows).min(m);
            for j in 0..v {
                for h in 0..k {
                    let sum = part.clone().fold(R::zero(), |sum, i| sum + dz[i * v + j] * x.data[i * k + h]);
                    let before = dw.data[j * k + h];
                    dw.data[j * k + h] = if first == 0 { sum } else { before.stored() + sum };
                }
            }
        }
        dw
    });
    out
}

/// dx_sum: [m, k], dw_sum: [v, k], count and dloss: [].
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (count, dloss) = (inputs[back::COUNT].data[0], inputs[back::DLOSS].data[0]);
    let factor = match attrs.choice(back::REDUCTION) {
        MEAN if count == R::zero() => R::zero(),
        MEAN => dloss / count,
        _ => dloss,
    };
    let scaled = |index: usize| inputs.get(index).map(|sum| sum.map(|d| factor * d));
    vec![None, None, None, None, scaled(back::DX_SUM), scaled(back::DW_SUM)]
}
