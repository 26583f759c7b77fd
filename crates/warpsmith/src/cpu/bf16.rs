//! Functions for results that are rounded to bf16, as coarse as that allows: values within `2^-10` of the exact ones,
//! derivatives within `2^-18` more, absolutely, since they have zeros. The same bits on every tier; NaN and infinities as
//! in [`super::math`].
//!
//! The polynomials are minimax fits of this project.

use super::math::{GELU_TANH_A, GELU_TANH_B, mish_quotient, poly, upper_tail_quotient};
use super::simd::Simd;
use std::f32::consts::LOG2_E;

/// `2^x` for `x <= 0`; relative error `2^-13`.
#[inline(always)]
pub fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let p = poly(s, s.fraction(x), [0.999_925_26, 0.695_833_2, 0.226_067_92, 0.078_024_06]);
    s.scale2_floor(p, x)
}

/// `2^x` for `x <= 0`; relative error `2^-22`, and none for whole `x`.
#[inline(always)]
pub fn exp2_fine<S: Simd>(s: S, x: S::V) -> S::V {
    let c = [1.0, 0.693_151_3, 0.240_164_58, 0.055_799_585, 0.009_017_376, 0.001_867_001];
    s.scale2_floor(poly(s, s.fraction(x), c), x)
}

/// `-|x| log2 e`.
#[inline(always)]
fn binary_decay<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(s.abs(x), s.splat(-LOG2_E))
}

/// `1 / b` for `b` in `2^-100 .. 2^100`; relative error `2^-22`.
#[inline(always)]
fn reciprocal_fine<S: Simd>(s: S, b: S::V) -> S::V {
    let (r, one) = (reciprocal(s, b), s.splat(1.0));
    s.fma(r, s.fnma(b, r, one), r)
}

/// `1 / b` for `b` in `2^-100 .. 2^100`; relative error `2^-12`.
#[inline(always)]
fn reciprocal<S: Simd>(s: S, b: S::V) -> S::V {
    // Negating the exponent and reflecting the mantissa is right to a twentieth; the series 1 + e + e^2 for what that
    // is wrong by leaves the cube of it.
    let r = s.of_bits(s.isub(s.isplat(0x7ef1_27ea), s.bits_of(b)));
    let e = s.fnma(b, r, s.splat(1.0));
    s.fma(r, s.fma(e, e, e), r)
}

/// `x sigmoid(y)` where `y` has the sign of `x`.
#[inline(always)]
fn times_sigmoid<S: Simd>(s: S, x: S::V, y: S::V) -> S::V {
    let u = exp2(s, binary_decay(s, y));
    // 1 / (1 + u) for 0 <= u <= 1; relative error 2^-11.
    let r = poly(s, u, [0.999_702_63, -0.984_834_1, 0.865_890_1, -0.532_852_95, 0.152_243_05]);
    s.mul(x, s.mul(r, s.select(s.lt(y, s.zero()), u, s.splat(1.0))))
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
    let (a, b) = mish_quotient(s, x, exp2(s, binary_decay(s, x)));
    s.mul(x, s.mul(a, reciprocal(s, b)))
}

/// [`super::math::gelu`].
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    // The fit ends at 14.5, where the tail is zero in f32. The operand order lets NaN through.
    let t = s.min(s.splat(14.5), s.abs(x));
    // log2 of the upper tail of the normal distribution, to 2^-9.7.
    let log = poly(
        s,
        t,
        [
            -1.001_181_8,
            -1.139_472_8,
            -0.477_705_84,
            -0.042_007_115,
            4.890_160_6e-3,
            -3.509_717e-4,
            1.386_998_7e-5,
            -2.296_258_4e-7,
        ],
    );
    let tail = exp2(s, log);
    s.mul(x, s.select(s.lt(x, s.zero()), tail, s.sub(s.splat(1.0), tail)))
}

/// [`super::math::d_gelu`].
#[inline(always)]
pub fn d_gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let (p, q) = upper_tail_quotient(s, s.abs(x));
    let e = exp2_fine(s, s.mul(s.mul(x, x), s.splat(-0.5 * LOG2_E)));
    let tail = s.mul(e, s.mul(p, reciprocal_fine(s, q)));
    let cdf = s.select(s.lt(x, s.zero()), tail, s.sub(s.splat(1.0), tail));
    // phi(x) = e / sqrt(2 pi)
    s.fma(s.mul(x, s.splat(0.398_942_3)), e, cdf)
}

/// [`super::math::d_gelu_tanh`].
#[inline(always)]
pub fn d_gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let square = s.mul(x, x);
    let (a, b, one) = (s.splat(GELU_TANH_A), s.splat(GELU_TANH_B), s.splat(1.0));
    let y = s.mul(x, s.fma(square, b, a));
    let u = exp2_fine(s, binary_decay(s, y));
    // The inner derivative, bounded so that zero times it stays zero: `u` is zero long before x^2 = 400.
    let inner = s.fma(s.min(s.splat(400.0), square), s.splat(3.0 * GELU_TANH_B), a);
    let inverse = reciprocal_fine(s, s.add(one, u));
    let sigmoid = s.mul(s.select(s.lt(x, s.zero()), u, one), inverse);
    let spread = s.mul(s.mul(u, inverse), s.mul(inverse, inner));
    s.fma(x, spread, sigmoid)
}

/// [`super::math::d_silu`].
#[inline(always)]
pub fn d_silu<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let u = exp2_fine(s, binary_decay(s, x));
    let inverse = reciprocal_fine(s, s.add(one, u));
    let mirrored = s.mul(u, inverse);
    let negative = s.lt(x, s.zero());
    let sigmoid = s.select(negative, mirrored, inverse);
    let mirrored = s.select(negative, inverse, mirrored);
    s.mul(sigmoid, s.fma(x, mirrored, one))
}

/// [`super::math::d_mish`].
#[inline(always)]
pub fn d_mish<S: Simd>(s: S, x: S::V) -> S::V {
    let u = exp2_fine(s, binary_decay(s, x));
    let (a, b) = mish_quotient(s, x, u);
    let one = s.splat(1.0);
    // d/dx tanh(softplus(x)) = 4 w (w + 1) / (w^2 + 2w + 2)^2, and for positive x the same in u = 1/w.
    let power = s.select(s.lt(x, s.zero()), u, s.mul(u, u));
    let inverse = reciprocal_fine(s, b);
    let slope = s.mul(s.mul(s.splat(4.0), power), s.mul(s.add(one, u), s.mul(inverse, inverse)));
    s.fma(x, slope, s.mul(a, inverse))
}

#[cfg(test)]
mod tests {
    use super::super::math;
    use super::*;
    use crate::cpu::{Task, Tier, dispatch};

    /// Each function beside the accurate one: values, then derivatives.
    struct Compare<'a>(&'a [f32]);

    impl Task for Compare<'_> {
        type Out = Vec<[(f32, f32); 8]>;

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
                    (silu(s, x), math::silu(s, x)),
                    (gelu(s, x), math::gelu(s, x)),
                    (gelu_tanh(s, x), math::gelu_tanh(s, x)),
                    (mish(s, x), math::mish(s, x)),
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
        let names = ["silu", "gelu", "gelu_tanh", "mish", "d_silu", "d_gelu", "d_gelu_tanh", "d_mish"];
        // Every bf16 number.
        let x: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits((bits as u32) << 16)).collect();
        let lowest = dispatch(Tier::Portable, Compare(&x));
        for tier in Tier::available() {
            for ((x, pairs), low) in x.iter().zip(dispatch(tier, Compare(&x))).zip(&lowest) {
                for (i, (got, want)) in pairs.into_iter().enumerate() {
                    let same = got == want || (got.is_nan() && want.is_nan());
                    // Subnormal results have no relative precision; derivatives have zeros.
                    let absolute = if i < 4 { f32::MIN_POSITIVE } else { 2f32.powi(-18) };
                    let bound = want.abs() * 2f32.powi(-10) + absolute;
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
