//! Functions for results that are rounded to f16: within `2^-13` of the exact value in about half the
//! instructions of [`super::math`]. The same bits on every tier; NaN and infinities as there.
//!
//! The polynomials are minimax fits of this project.

use super::math::{GELU_TANH_A, GELU_TANH_B, poly};
use super::simd::Simd;
use std::f32::consts::LOG2_E;

/// `1 / (1 + u)` for `0 <= u <= 1`; relative error `2^-9`.
const RECIPROCAL: [f32; 4] = [0.998_266_94, -0.942_807_8, 0.665_511_5, -0.221_837_13];

/// `2^x` for `x <= 1`; relative error `2^-18`.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let c = [1.000_002_6, 0.693_003_83, 0.241_442_67, 0.052_011_605, 0.013_534_096];
    s.scale2_floor(poly(s, s.fraction(x), c), x)
}

/// `e^-|x|`.
#[inline(always)]
fn exp_neg_abs<S: Simd>(s: S, x: S::V) -> S::V {
    exp2(s, s.mul(s.abs(x), s.splat(-LOG2_E)))
}

/// `x sigmoid(y)` where `y` has the sign of `x`.
#[inline(always)]
fn times_sigmoid<S: Simd>(s: S, x: S::V, y: S::V) -> S::V {
    let one = s.splat(1.0);
    let u = exp_neg_abs(s, y);
    // 1 / (1 + u) to 2^-9, and after a step of Newton's to 2^-17.
    let r = poly(s, u, RECIPROCAL);
    let r = s.fma(r, s.fnma(s.add(one, u), r, one), r);
    s.mul(x, s.mul(r, s.select(s.lt(y, s.zero()), u, one)))
}

/// [`super::math::silu`].
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    times_sigmoid(s, x, x)
}

/// [`super::math::gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let slope = s.fma(s.mul(x, x), s.splat(GELU_TANH_B), s.splat(GELU_TANH_A));
    times_sigmoid(s, x, s.mul(x, slope))
}

/// [`super::math::mish`].
#[inline(always)]
pub fn mish<S: Simd>(s: S, x: S::V) -> S::V {
    let u = exp_neg_abs(s, x);
    let (a, b) = super::math::mish_quotient(s, x, u);
    s.mul(x, s.div(a, b))
}

/// [`super::math::gelu`].
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    // The fit ends at 14.5, where the tail is zero in f32. The operand order lets NaN through.
    let t = s.min(s.splat(14.5), s.abs(x));
    // log2 of the upper tail of the normal distribution, to 2^-14.
    let log = poly(
        s,
        t,
        [
            -1.000_064_5,
            -1.150_528_6,
            -0.459_734_38,
            -0.053_201_154,
            8.364_349e-3,
            -9.530_717e-4,
            7.473_921e-5,
            -3.785_347_4e-6,
            1.107_937_4e-7,
            -1.418_035e-9,
        ],
    );
    let tail = exp2(s, log);
    s.mul(x, s.select(s.lt(x, s.zero()), tail, s.sub(s.splat(1.0), tail)))
}

#[cfg(test)]
mod tests {
    use super::super::math;
    use super::*;
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
            let pairs = self.0.iter().map(|&x| {
                let x = s.splat(x);
                let [a, b] = [[silu(s, x), gelu(s, x)], [gelu_tanh(s, x), mish(s, x)]];
                let [c, d] =
                    [[math::silu(s, x), math::gelu(s, x)], [math::gelu_tanh(s, x), math::mish(s, x)]];
                [(a[0], c[0]), (a[1], c[1]), (b[0], d[0]), (b[1], d[1])].map(|(a, b)| (first(a), first(b)))
            });
            pairs.collect()
        }
    }

    #[test]
    fn errors_are_below_those_of_rounding_to_16_bits() {
        let x: Vec<f32> = (-40_000..40_000)
            .map(|i| i as f32 / 400.0)
            .chain((-60..0).map(|e| 2f32.powi(e)))
            .chain([0.0, -0.0, 1e30, -1e30, f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
            .collect();
        for tier in Tier::available() {
            for (x, pairs) in x.iter().zip(dispatch(tier, Compare(&x))) {
                for (function, (coarse, accurate)) in ["silu", "gelu", "gelu_tanh", "mish"].iter().zip(pairs)
                {
                    let same = coarse == accurate || (coarse.is_nan() && accurate.is_nan());
                    // Subnormal results have no relative precision.
                    let bound = accurate.abs() * 2f32.powi(-13) + f32::MIN_POSITIVE * 2f32.powi(-12);
                    let near = (coarse - accurate).abs() <= bound;
                    assert!(same || near, "{function} {tier} ({x:e}): {coarse:e}, want {accurate:e}");
                }
            }
        }
    }
}
