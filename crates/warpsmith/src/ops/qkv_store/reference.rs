//! The definition of `qkv_store`.

use super::{COS, EPS, K_CACHE, K_SCALE, K_WEIGHT, POSITIONS, Q_WEIGHT, QKV, SIN, SLOTS, V_CACHE, V_SCALE};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::rope::reference::rotate_head;

/// qkv: [tokens, heads, dim]; the caches: [slots, kv_heads, dim]. Queries and keys become rotated(normed(x)); what is stored is
/// divided by its scale, and rounded there.
pub fn stored<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (heads, dim, kv_heads) = (inputs[QKV].shape[1], inputs[QKV].shape[2], inputs[K_CACHE].shape[2]);
    let queries = heads - 2 * kv_heads;
    let (mut qkv, mut k_cache, mut v_cache) =
        (inputs[QKV].clone(), inputs[K_CACHE].clone(), inputs[V_CACHE].clone());
    for (token, slot) in inputs[SLOTS].data.iter().enumerate() {
        for head in 0..heads {
            let at = (token * heads + head) * dim;
            let mut x = inputs[QKV].data[at..at + dim].to_vec();
            if head < queries + kv_heads {
                if let Some(weight) = inputs.get(if head < queries { Q_WEIGHT } else { K_WEIGHT }) {
                    normalise(&mut x, &weight.data, R::of(attrs.float(EPS)));
                }
                if let Some(positions) = inputs.get(POSITIONS) {
                    rotate_head(&mut x, positions.data[token], inputs.get(COS).zip(inputs.get(SIN)), attrs);
                }
            }
            if head < queries {
                qkv.data[at..at + dim].copy_from_slice(&x);
            } else if slot.f64() >= 0.0 {
                let (cache, head, scale) = match head - queries {
                    key if key < kv_heads => (&mut k_cache, key, K_SCALE),
                    value => (&mut v_cache, value - kv_heads, V_SCALE),
                };
                let to = (slot.f64() as usize * kv_heads + head) * dim;
                let scale = inputs.get(scale).map_or(R::one(), |scale| scale.data[head % scale.data.len()]);
                for i in 0..dim {
                    cache.data[to + i] = x[i] / scale;
                }
            }
        }
    }
    let mut out = vec![None; QKV];
    out.extend([Some(qkv), Some(k_cache), Some(v_cache)]);
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
