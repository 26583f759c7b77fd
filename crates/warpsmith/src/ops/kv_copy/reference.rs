//! The definition of `kv_copy`.

use super::{CACHE, PAIRS};
use crate::lab::{Array, Inputs, Real};

/// cache: [layers, pages, page], pairs: [n, 2]. For each layer and pair: page dst becomes what page src was.
pub fn copied<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let (cache, pairs) = (&inputs[CACHE], &inputs[PAIRS]);
    let (layers, pages) = (cache.shape[0], cache.shape[1]);
    let page: usize = cache.shape[2..].iter().product();
    let mut out = cache.clone();
    for pair in pairs.rows() {
        let (src, dst) = (pair[0].f64(), pair[1].f64());
        if src < 0.0 || dst < 0.0 {
            continue;
        }
        for layer in 0..layers {
            let at = |index: f64| (layer * pages + index as usize) * page;
            out.data[at(dst)..][..page].copy_from_slice(&cache.data[at(src)..][..page]);
        }
    }
    vec![None, Some(out)]
}
