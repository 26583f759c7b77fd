//! The definition of `rope` and, with the other sign, of its gradient.

use super::{COS, LAYOUT, POSITIONS, ROTARY_DIM, SCALE, SIN, THETA, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;

/// x: [tokens, heads, head_dim], positions: [tokens]. Per token and pair i of d = rotary_dim:
/// angle = position * scale * theta^(-2 i / d); (a, b) -> (a cos - b sin, b cos + a sin), `sign` times the sine.
pub fn rotated<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs, sign: R) -> Vec<Option<Array<R>>> {
    let (x, positions) = (&inputs[X], &inputs[POSITIONS]);
    let mut out = x.clone();
    let head_dim = x.row_len();
    let heads = x.shape[x.shape.len() - 2];
    let dim = if attrs.int(ROTARY_DIM) as usize == 0 { head_dim } else { attrs.int(ROTARY_DIM) as usize };
    for (token, &position) in positions.data.iter().enumerate() {
        for i in 0..dim / 2 {
            let frequency = R::of(attrs.float(THETA)).powf(R::of(-2.0 * i as f64 / dim as f64));
            let angle = position * R::of(attrs.float(SCALE)) * frequency;
            let (mut cos, mut sin) = (angle.cos(), angle.sin());
            if let (Some(cos_table), Some(sin_table)) = (inputs.get(COS), inputs.get(SIN)) {
                let at = position.f64() as usize * (dim / 2) + i;
                (cos, sin) = (cos_table.data[at], sin_table.data[at]);
            }
            let (first, second) =
                if attrs.choice(LAYOUT) == 1 { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
            for head in 0..heads {
                let at = (token * heads + head) * head_dim;
                let (a, b) = (x.data[at + first], x.data[at + second]);
                out.data[at + first] = a * cos - b * (sign * sin);
                out.data[at + second] = b * cos + a * (sign * sin);
            }
        }
    }
    vec![None, None, None, None, Some(out)]
}

/// Rotates one head, in ops that do so on the way. Options are at the positions that they have in `rope`; `tables` are of
/// cosines and sines.
pub(in crate::ops) fn rotate_head<R: Real>(
    head: &mut [R],
    position: R,
    tables: Option<(&Array<R>, &Array<R>)>,
    attrs: &Attrs,
) {
    let dim = if attrs.int(ROTARY_DIM) as usize == 0 { head.len() } else { attrs.int(ROTARY_DIM) as usize };
    for i in 0..dim / 2 {
        let (first, second) = if attrs.choice(LAYOUT) == 1 { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
        let (cos, sin) = match tables {
            Some((cos, sin)) => {
                let at = position.f64() as usize * (dim / 2) + i;
                (cos.data[at], sin.data[at])
            }
            None => {
                let frequency = R::of(attrs.float(THETA)).powf(R::of(-2.0 * i as f64 / dim as f64));
                let angle = position * R::of(attrs.float(SCALE)) * frequency;
                (angle.cos(), angle.sin())
            }
        };
        let (a, b) = (head[first], head[second]);
        (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
    }
}
