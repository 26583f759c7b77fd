//! The definition of `qk_norm_rope`.

use super::{COS, EPS, K, K_OUT, K_WEIGHT, POSITIONS, Q, Q_OUT, Q_WEIGHT, SIN};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::rope::reference::rotate_head;

/// q: [tokens, heads, dim], k: [tokens, kv_heads, dim]. Each head becomes rotated(normed(x)).
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let positions = &inputs[POSITIONS];
    let tables = inputs.get(COS).zip(inputs.get(SIN));
    let mut out = vec![None; K_OUT + 1];
    for (from, weight, to) in [(Q, Q_WEIGHT, Q_OUT), (K, K_WEIGHT, K_OUT)] {
        let mut x = inputs[from].clone();
        let (heads, dim) = (x.shape[1], x.shape[2]);
        for (at, head) in x.data.chunks_exact_mut(dim.max(1)).enumerate() {
            normalise(head, &inputs[weight].data, R::of(attrs.float(EPS)));
            rotate_head(head, positions.data[at / heads], tables, attrs);
        }
        out[to] = Some(x);
    }
    out
}

/// x / sqrt(mean(x²) + eps) * weight
fn normalise<R: Real>(x: &mut [R], weight: &[R], eps: R) {
    let squares = x.iter().fold(R::zero(), |sum, &x| sum + x * x);
    let root = (squares / R::of(x.len() as f64) + eps).sqrt();
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = *x / root * weight;
    }
}
