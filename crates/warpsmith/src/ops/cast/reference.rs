//! The definition of `cast`.

use super::{INVERSE, SCALE, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = x, x * scale or x / scale; x: [rows, hidden], scale: [1] or [rows]. The result is rounded where it is stored.
pub fn cast<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let mut out = inputs[X].clone();
    if let Some(scale) = inputs.get(SCALE) {
        let hidden = out.row_len();
        for (i, value) in out.data.iter_mut().enumerate() {
            let scale = scale.data[if scale.data.len() == 1 { 0 } else { i / hidden }];
            *value = if attrs.bool(INVERSE) { *value / scale } else { *value * scale };
        }
    }
    vec![None, None, Some(out)]
}
