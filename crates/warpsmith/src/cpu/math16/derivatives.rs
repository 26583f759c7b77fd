//! Derivatives that are good enough for results that are rounded to bf16: within `2^-10` of the exact values and
//! `2^-18` more, absolutely, since they have zeros. The same bits on every tier; NaN and infinities as in
//! [`crate::cpu::math`].
//!
//! The polynomials are minimax fits of this project.

use super::{F16, Precision, exp2_fine};
use crate::cpu::math::{GELU_TANH_A, GELU_TANH_B, INVERSE_SQRT_2PI, TAIL_ENDS, upper_tail_quotient};
use crate::cpu::simd::Simd;
use std::f32::consts::LOG2_E;

/// `e^x` for `x` up to `2^limit`, given `x log2 e`: where functions have reached their limits for good, but the square of
/// `1 / (1 + e^x)` is zero. The operand order lets NaN through.
#[inline(always)]
fn bounded_exp<S: Simd>(s: S, binary: S::V, limit: f32) -> S::V {
    exp2_fine(s, s.min(s.splat(limit), binary))
}

/// [`crate::cpu::math::d_gelu`].
#[inline(always)]
pub fn d_gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let magnitude = s.abs(x);
    let (p, q) = upper_tail_quotient(s, s.min(s.splat(TAIL_ENDS), magnitude));
    // Sums of many derivatives show errors that one does not: fine factors, although the result is rounded to bf16.
    let scaled_tail = s.mul(p, F16::reciprocal(s, q));
    let e = exp2_fine(s, s.mul(s.mul(x, x), s.splat(-0.5 * LOG2_E)));
    // For negative x, Phi(x) + x phi(x) with phi(x) = e / sqrt(2 pi); for positive ones 1 less that of -x.
    let d = s.mul(e, s.fnma(magnitude, s.splat(INVERSE_SQRT_2PI), scaled_tail));
    s.select(s.lt(x, s.zero()), d, s.sub(s.splat(1.0), d))
}

/// [`crate::cpu::math::d_gelu_tanh`].
#[inline(always)]
pub fn d_gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let square = s.mul(x, x);
    let slope = s.fma(square, s.splat(GELU_TANH_B * LOG2_E), s.splat(GELU_TANH_A * LOG2_E));
    let w = bounded_exp(s, s.mul(x, slope), 80.0);
    // The inner derivative, bounded so that zero times it stays zero: the rest is zero long before x^2 = 400.
    let inner = s.fma(s.min(s.splat(400.0), square), s.splat(3.0 * GELU_TANH_B), s.splat(GELU_TANH_A));
    let inverse = F16::reciprocal(s, s.add(w, s.splat(1.0)));
    let spread = s.mul(w, s.mul(inverse, inverse));
    s.fma(x, s.mul(spread, inner), s.mul(w, inverse))
}

/// [`crate::cpu::math::d_silu`].
#[inline(always)]
pub fn d_silu<S: Simd>(s: S, x: S::V) -> S::V {
    let w = bounded_exp(s, s.mul(x, s.splat(LOG2_E)), 80.0);
    let inverse = F16::reciprocal(s, s.add(w, s.splat(1.0)));
    s.fma(x, s.mul(w, s.mul(inverse, inverse)), s.mul(w, inverse))
}

/// [`crate::cpu::math::d_mish`].
#[inline(always)]
pub fn d_mish<S: Simd>(s: S, x: S::V) -> S::V {
    let (two, four) = (s.splat(2.0), s.splat(4.0));
    // With w = e^x and n = w (w + 2), tanh(softplus(x)) = n / (n + 2), and its derivative 4 w (w + 1) / (n + 2)^2.
    let w = bounded_exp(s, s.mul(x, s.splat(LOG2_E)), 40.0);
    let n = s.mul(w, s.add(w, two));
    let inverse = F16::reciprocal(s, s.add(n, two));
    let w4 = s.mul(w, four);
    let slope = s.mul(s.fma(w4, w, w4), s.mul(inverse, inverse));
    s.fma(x, slope, s.mul(n, inverse))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::math;
    use crate::cpu::{Task, Tier, dispatch};

    /// Each function beside the accurate one.
    struct Compare<'a>(&'a [f32]);

    impl Task for Compare<'_> {
        type Out = Vec<[(f32, f32); 4]>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Out {
            let first = |v: S::V| {
                let mut lanes = [0f32; 16];
                // SAFETY: no tier has more than 16 lanes.
                unsafe { s.store(lanes.as_mut_ptr(), v) };
                lanes[0]
            };
            let of = |x: &f32| {
                let x = s.splat(*x);
                let values = [
                    (d_silu(s, x), math::d_silu(s, x)),
                    (d_gelu(s, x), math::d_gelu(s, x)),
                    (d_gelu_tanh(s, x), math::d_gelu_tanh(s, x)),
                    (d_mish(s, x), math::d_mish(s, x)),
                ];
                values.map(|(got, want)| (first(got), first(want)))
            };
            self.0.iter().map(of).collect()
        }
    }

    #[test]
    fn errors_are_below_those_of_rounding_and_bits_are_those_of_every_tier() {
        let names = ["d_silu", "d_gelu", "d_gelu_tanh", "d_mish"];
        // Every bf16 number.
        let x: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits((bits as u32) << 16)).collect();
        let lowest = dispatch(Tier::Portable, Compare(&x));
        for tier in Tier::available() {
            for ((x, pairs), low) in x.iter().zip(dispatch(tier, Compare(&x))).zip(&lowest) {
                for (i, (got, want)) in pairs.into_iter().enumerate() {
                    let same = got == want || (got.is_nan() && want.is_nan());
                    let bound = want.abs() * 2f32.powi(-10) + 2f32.powi(-18);
                    let near = (got - want).abs() <= bound;
                    assert!(same || near, "{} {tier} ({x:e}): {got:e}, want {want:e}", names[i]);
                    assert!(
                        got.to_bits() == low[i].0.to_bits() || got.is_nan(),
                        "{} {tier} ({x:e}): {got:e}, portable {:e}",
                        names[i],
                        low[i].0
                    );
                }
            }
        }
    }
}
