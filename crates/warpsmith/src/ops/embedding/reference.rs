//! The definitions of `embedding` and its gradient.

use super::backward::{DOUT, IDS as BACK_IDS, VOCAB};
use super::{IDS, WEIGHT};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// weight: [vocab, n], ids: [m]. out[i] = weight[ids[i]].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let (weight, ids) = (&inputs[WEIGHT], &inputs[IDS]);
    let n = weight.row_len();
    let mut out = Array::zeros(&[ids.data.len(), n]);
    for (i, id) in ids.data.iter().enumerate() {
        let row = id.f64() as usize;
        out.data[i * n..][..n].copy_from_slice(&weight.data[row * n..][..n]);
    }
    vec![None, None, Some(out)]
}

/// ids: [m], dout: [m, n]. dweight[v] = sum of dout[i] over all i with ids[i] = v.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (ids, dout) = (&inputs[BACK_IDS], &inputs[DOUT]);
    let n = dout.row_len();
    let mut dweight = Array::zeros(&[attrs.int(VOCAB) as usize, n]);
    for (i, id) in ids.data.iter().enumerate() {
        let row = id.f64() as usize;
        for j in 0..n {
            dweight.data[row * n + j] = dweight.data[row * n + j] + dout.data[i * n + j];
        }
    }
    vec![None, None, Some(dweight)]
}
