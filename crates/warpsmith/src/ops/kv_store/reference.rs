//! The definition of `kv_store`.

use super::{COS, K, K_CACHE, K_SCALE, POSITIONS, SIN, SLOTS, V, V_CACHE, V_SCALE};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::rope::reference::rotate_head;

/// k, v: [tokens, heads, dim]; the caches: [slots, heads, dim]. Row slots[t] becomes rotated(k[t]) / k_scale, and
/// v[t] / v_scale. The result is rounded where it is stored.
pub fn stored<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (heads, dim) = (inputs[K].shape[1], inputs[K].shape[2]);
    let (mut k_cache, mut v_cache) = (inputs[K_CACHE].clone(), inputs[V_CACHE].clone());
    for (token, slot) in inputs[SLOTS].data.iter().enumerate().filter(|(_, slot)| slot.f64() >= 0.0) {
        for head in 0..heads {
            let (from, to) = ((token * heads + head) * dim, (slot.f64() as usize * heads + head) * dim);
            let mut key = inputs[K].data[from..from + dim].to_vec();
            if let Some(positions) = inputs.get(POSITIONS) {
                rotate_head(&mut key, positions.data[token], inputs.get(COS).zip(inputs.get(SIN)), attrs);
            }
            let scale = |index: usize| match inputs.get(index) {
                Some(scale) => scale.data[head % scale.data.len()],
                None => R::one(),
            };
            for i in 0..dim {
                k_cache.data[to + i] = key[i] / scale(K_SCALE);
                v_cache.data[to + i] = inputs[V].data[from + i] / scale(V_SCALE);
            }
        }
    }
    let mut out = vec![None; K_CACHE];
    out.extend([Some(k_cache), Some(v_cache)]);
    out
}
