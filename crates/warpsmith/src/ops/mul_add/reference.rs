//! The definition of `mul_add` and its gradient.

use super::{A, B, C, DA, DB, DOUT};
use crate::lab::{Array, Inputs, Real};

/// out = a b + c.
pub fn forward<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let mut out = product(&inputs[A], &inputs[B]);
    for (out, &c) in out.data.iter_mut().zip(&inputs[C].data) {
        *out = *out + c;
    }
    vec![None, None, None, Some(out)]
}

/// da = dout b; db = dout a.
pub fn backward<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let dout = &inputs[DOUT];
    let (da, db) = (product(dout, &inputs[B]), product(dout, &inputs[A]));
    vec![None, None, None, inputs.wants(DA).then_some(da), inputs.wants(DB).then_some(db)]
}

fn product<R: Real>(a: &Array<R>, b: &Array<R>) -> Array<R> {
    let data = a.data.iter().zip(&b.data).map(|(&a, &b)| a * b);
    Array { shape: a.shape.clone(), data: data.collect() }
}
