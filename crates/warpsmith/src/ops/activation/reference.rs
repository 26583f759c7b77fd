//! The definition of `activation` and its gradient.

use super::{DOUT, KINDS, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// out = f(x).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let kind = KINDS[attrs.choice(0)];
    vec![None, Some(inputs[X].map(|x| kind.value(x)))]
}

/// dx = dout f'(x).
pub fn backward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let kind = KINDS[attrs.choice(0)];
    let mut dx = inputs[X].map(|x| kind.derivative(x));
    for (d, &dout) in dx.data.iter_mut().zip(&inputs[DOUT].data) {
        *d = dout * *d;
    }
    vec![None, None, Some(dx)]
}
