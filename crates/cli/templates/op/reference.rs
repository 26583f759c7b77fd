//! The definition of `new_op`.

use super::{ALPHA, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = x * alpha
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let mut out = inputs[X].clone();
    // The kernels hold the factor in f32.
    let alpha = R::of(attrs.float(ALPHA) as f32 as f64);
    for value in &mut out.data {
        *value = *value * alpha;
    }
    vec![None, Some(out)]
}
