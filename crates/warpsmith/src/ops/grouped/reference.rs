//! The sums that the definitions of grouped products are made of.

use crate::lab::Real;
use crate::lab::reference::{TENSOR_GROUP, alignment_error, subnormal_product};
use crate::ops::linear::{Activation, Gate};

/// The product of two rows.
pub(in crate::ops) fn dot<R: Real>(x: &[R], w: &[R]) -> R {
    dot_of(x.len(), |i| (x[i], w[i]))
}

/// The sum of the products of `len` pairs.
pub(in crate::ops) fn dot_of<R: Real>(len: usize, pair: impl Fn(usize) -> (R, R)) -> R {
    (0..len).step_by(TENSOR_GROUP).fold(R::zero(), |sum, from| {
        let pairs = || (from..len.min(from + TENSOR_GROUP)).map(&pair);
        let product = |(a, b): (R, R)| (a.flushed_factor() * b.flushed_factor()).flushed();
        let sum = pairs().fold(sum, |sum, pair| sum + product(pair));
        sum.flushed().blurred(alignment_error(subnormal_product(pairs())))
    })
}

/// What activation and gate make of the sums of a row, given those sums.
pub(in crate::ops) fn activated<R: Real>(z: &[R], activation: Activation, gate: Gate) -> Vec<R> {
    let act = |z: R| activation.kind().map_or(z, |kind| kind.value_of_product(z));
    let n = z.len() / 2;
    match gate {
        Gate::None => z.iter().map(|&z| act(z)).collect(),
        Gate::Halves => (0..n).map(|j| act(z[j]) * z[n + j]).collect(),
        Gate::Interleaved => (0..n).map(|j| act(z[2 * j]) * z[2 * j + 1]).collect(),
    }
}
