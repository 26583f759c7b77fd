//! The definition of `moe_ffn`.

use super::{ACT, B1, B2, GATE, IDS, RESIDUAL, ROUTING, SCALE, SHARED_W1, SHARED_W2, W1, W2, X};
use crate::lab::{Array, Inputs, Real};
use crate::op::Attrs;
use crate::ops::grouped::reference::{activated, dot};
use crate::ops::linear::{Activation, Gate};

/// One expert: w1 [rows, hidden], w2 [hidden, ffn], b1 [rows], b2 [hidden].
#[derive(Clone, Copy)]
pub(super) struct Expert<'a, R> {
    pub w1: &'a [R],
    pub w2: &'a [R],
    pub b1: Option<&'a [R]>,
    pub b2: Option<&'a [R]>,
}

impl<'a, R: Real> Expert<'a, R> {
    /// Expert `e` of a call.
    pub fn of(inputs: &Inputs<'a, R>, e: usize) -> Self {
        let matrix = |array: &'a Array<R>| {
            let len = array.shape[1..].iter().product::<usize>();
            &array.data[e * len..][..len]
        };
        let [w1, w2] = [W1, W2].map(|index| matrix(inputs.get(index).expect("required")));
        Expert { w1, w2, b1: inputs.get(B1).map(matrix), b2: inputs.get(B2).map(matrix) }
    }

    /// The expert that all tokens are sent to.
    pub fn shared(inputs: &Inputs<'a, R>) -> Option<Self> {
        let (w1, w2) = (inputs.get(SHARED_W1)?, inputs.get(SHARED_W2)?);
        Some(Expert { w1: &w1.data, w2: &w2.data, b1: None, b2: None })
    }

    /// The sums of the first product, `rows` of them.
    pub fn first(&self, x: &[R], rows: usize) -> Vec<R> {
        let row = |j: usize| dot(x, &self.w1[j * x.len()..][..x.len()]);
        (0..rows).map(|j| self.b1.map_or_else(|| row(j), |b| row(j) + b[j])).collect()
    }

    /// The result for a row of h, stored.
    pub fn second(&self, h: &[R], hidden: usize) -> Vec<R> {
        let row = |i: usize| dot(h, &self.w2[i * h.len()..][..h.len()]);
        (0..hidden).map(|i| self.b2.map_or_else(|| row(i), |b| row(i) + b[i])).collect()
    }
}

/// The rows of a first matrix: of the experts, or of the shared one.
pub(super) fn rows_of<R>(array: &Array<R>) -> usize {
    array.shape[array.shape.len() - 2]
}

/// x: [m, hidden], ids and weights: [m, top_k].
pub fn forward<R: Real>(inputs: &Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<Array<R>>> {
    let (x, ids, weights) = (&inputs[X], &inputs[IDS], &inputs[ROUTING]);
    let (hidden, top_k) = (x.row_len(), ids.row_len());
    let (activation, gate) = (Activation::ALL[attrs.choice(ACT)], Gate::ALL[attrs.choice(GATE)]);
    let scale = R::of(attrs.float(SCALE) as f32 as f64);
    let result = |expert: &Expert<'_, R>, x: &[R], rows: usize| {
        let h = activated(&expert.first(x, rows), activation, gate);
        let h: Vec<R> = h.into_iter().map(R::stored).collect();
        expert.second(&h, hidden)
    };
    let mut out = Array::zeros(&x.shape);
    for (token, row) in x.rows().enumerate() {
        let sum = &mut out.data[token * hidden..][..hidden];
        for slot in token * top_k..(token + 1) * top_k {
            let id = ids.data[slot].f64();
            if id < 0.0 {
                continue;
            }
            let y = result(&Expert::of(inputs, id as usize), row, rows_of(&inputs[W1]));
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum = *sum + weights.data[slot] * y);
        }
        if let Some(shared) = Expert::shared(inputs) {
            let y = result(&shared, row, rows_of(&inputs[SHARED_W1]));
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum = *sum + y);
        }
        for (i, sum) in sum.iter_mut().enumerate() {
            *sum = *sum * scale;
            if let Some(residual) = inputs.get(RESIDUAL) {
                *sum = *sum + residual.data[token * hidden + i];
            }
        }
    }
    let mut all = vec![None; super::OUT];
    all.push(Some(out));
    all
}
