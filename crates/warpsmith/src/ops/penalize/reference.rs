//! The definition of `penalize`.

use super::{BIAS, COUNTS, FREQUENCY, IDS, LOGITS, PRESENCE, REPETITION};
use crate::lab::{Array, Inputs, Real};

/// logits: [m, n], ids: [m, s].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>) -> Vec<Option<Array<R>>> {
    let (ids, counts) = (&inputs[IDS], &inputs[COUNTS]);
    let mut logits = inputs[LOGITS].clone();
    let (n, s) = (logits.row_len(), ids.row_len());
    let by_row = |arg: usize, row: usize, other: f64| inputs.get(arg).map_or(R::of(other), |a| a.data[row]);
    for (at, id) in ids.data.iter().enumerate() {
        let (row, id, count) = (at / s, id.f64(), counts.data[at]);
        if !(0.0..n as f64).contains(&id) {
            continue;
        }
        let logit = &mut logits.data[row * n + id as usize];
        if count.f64() >= 0.0 {
            let repetition = by_row(REPETITION, row, 1.0);
            *logit = if logit.f64() > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if count.f64() > 0.0 {
            *logit = *logit - (by_row(FREQUENCY, row, 0.0) * count + by_row(PRESENCE, row, 0.0));
        }
        if let Some(bias) = inputs.get(BIAS) {
            *logit = *logit + bias.data[at];
        }
    }
    vec![None, None, None, None, None, None, Some(logits)]
}
