//! The definition of `copy`.

use super::{ORDER, SWAPPED, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// x: [batch, rows, cols]; out: the same, or [batch, cols, rows].
pub fn copied<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let x = &inputs[X];
    let mut out = x.clone();
    if attrs.choice(ORDER) == SWAPPED {
        let (batch, rows, cols) = (x.shape[0], x.shape[1], x.shape[2]);
        out.shape = vec![batch, cols, rows];
        for b in 0..batch {
            for i in 0..rows {
                for j in 0..cols {
                    out.data[(b * cols + j) * rows + i] = x.data[(b * rows + i) * cols + j];
                }
            }
        }
    }
    vec![None, Some(out)]
}
