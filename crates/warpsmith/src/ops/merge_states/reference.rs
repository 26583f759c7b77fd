//! The definition of `merge_states`.

use super::{COUNTS, LSE, LSES, OUTS};
use crate::lab::{Array, Inputs, Real};

/// outs: [parts, tokens, heads, dim], lses: [parts, tokens, heads]. Per token and head, over parts p that are not empty:
/// w[p] = exp(lse[p] - m), m the largest lse; out = sum(w[p] outs[p]) / sum(w[p]); lse = m + ln(sum(w[p])).
pub fn merged<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let (outs, lses) = (&inputs[OUTS], &inputs[LSES]);
    let [parts, tokens, heads, dim] = outs.shape[..] else { unreachable!("four dimensions") };
    let mut out = Array::zeros(&[tokens, heads, dim]);
    let mut lse = Array::zeros(&[tokens, heads]);
    for row in 0..tokens * heads {
        let count = inputs.get(COUNTS).map_or(parts, |counts| counts.data[row / heads].f64() as usize);
        let lse_of = |p: usize| lses.data[p * tokens * heads + row];
        let used: Vec<usize> = (0..count).filter(|&p| lse_of(p).f64() != f64::NEG_INFINITY).collect();
        let largest = used.iter().map(|&p| lse_of(p)).fold(R::of(f64::NEG_INFINITY), R::max_nan);
        lse.data[row] = largest;
        if used.is_empty() {
            continue;
        }
        let weights: Vec<R> = used.iter().map(|&p| (lse_of(p) - largest).exp()).collect();
        let sum = weights.iter().fold(R::zero(), |sum, &w| sum + w);
        lse.data[row] = largest + (sum - R::one()).ln_1p();
        for i in 0..dim {
            let terms = used.iter().zip(&weights);
            let terms = terms.map(|(&p, &w)| w * outs.data[(p * tokens * heads + row) * dim + i]);
            out.data[row * dim + i] = terms.fold(R::zero(), |sum, term| sum + term) / sum;
        }
    }
    vec![None, None, None, Some(out), inputs.wants(LSE).then_some(lse)]
}
