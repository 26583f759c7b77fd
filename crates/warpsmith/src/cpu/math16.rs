//! Approximations that are good enough for results that are rounded to 16 bits: in about half the instructions of
//! [`super::math`]. The same bits on every tier; NaN and infinities as there.
//!
//! The polynomials are minimax fits of this project.

pub mod derivatives;

use super::math::{GELU_TANH_A, GELU_TANH_B, poly};
use super::simd::Simd;
use std::f32::consts::LOG2_E;

/// What a result is rounded to: how many of the digits computed will show.
pub trait Precision {
    /// `2^x` for `x` from 0 to 1.
    fn significand<S: Simd>(s: S, x: S::V) -> S::V;
    /// `2^x` for `x <= 127`; below -126 it may be zero.
    fn exp2<S: Simd>(s: S, x: S::V) -> S::V;
    /// `1 / b` for `b` in `2^-100 .. 2^100`.
    fn reciprocal<S: Simd>(s: S, b: S::V) -> S::V;
    /// The binary logarithm of the upper tail of the normal distribution at `t >= 0`, and [`LIFT_GELU`] more; from 14.5
    /// on, where the tail is zero in f32, any number below that of 14.5.
    fn log_tail<S: Simd>(s: S, t: S::V) -> S::V;
}

/// Values within `2^-10` of the exact ones.
pub struct Bf16;

/// Values within `2^-13` of the exact ones.
pub struct F16;

impl Precision for Bf16 {
    /// Relative error `2^-13`.
    #[inline(always)]
    fn significand<S: Simd>(s: S, x: S::V) -> S::V {
        poly(s, x, [0.999_925_26, 0.695_833_2, 0.226_067_92, 0.078_024_06])
    }

    #[inline(always)]
    fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
        s.scale2_floor_normal(Self::significand(s, s.fraction(x)), x)
    }

    /// Relative error `2^-12`.
    #[inline(always)]
    fn reciprocal<S: Simd>(s: S, b: S::V) -> S::V {
        // Negating the exponent and reflecting the mantissa is right to a twentieth; the series 1 + e + e^2 for what
        // that is wrong by leaves the cube of it.
        let r = s.of_bits(s.isub(s.isplat(0x7ef1_27ea), s.bits_of(b)));
        let e = s.fnma(b, r, s.splat(1.0));
        s.fma(r, s.fma(e, e, e), r)
    }

    /// Error `2^-9.7`.
    #[inline(always)]
    fn log_tail<S: Simd>(s: S, t: S::V) -> S::V {
        let c = [
            -1.001_181_8 + LIFT_GELU,
            -1.139_472_8,
            -0.477_705_84,
            -0.042_007_115,
            4.890_160_6e-3,
            -3.509_717e-4,
            1.386_998_7e-5,
            -2.296_258_4e-7,
        ];
        poly(s, t, c)
    }
}

impl Precision for F16 {
    /// Relative error `2^-18`.
    #[inline(always)]
    fn significand<S: Simd>(s: S, x: S::V) -> S::V {
        poly(s, x, [1.000_002_6, 0.693_003_83, 0.241_442_67, 0.052_011_605, 0.013_534_096])
    }

    #[inline(always)]
    fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
        s.scale2_floor(Self::significand(s, s.fraction(x)), x)
    }

    /// Relative error `2^-22`.
    #[inline(always)]
    fn reciprocal<S: Simd>(s: S, b: S::V) -> S::V {
        let r = Bf16::reciprocal(s, b);
        s.fma(r, s.fnma(b, r, s.splat(1.0)), r)
    }

    /// Error `2^-14`.
    #[inline(always)]
    fn log_tail<S: Simd>(s: S, t: S::V) -> S::V {
        let c = [
            -1.000_064_5 + LIFT_GELU,
            -1.150_528_6,
            -0.459_734_38,
            -0.053_201_154,
            8.364_349e-3,
            -9.530_717e-4,
            7.473_921e-5,
            -3.785_347_4e-6,
            1.107_937_4e-7,
            -1.418_035e-9,
        ];
        poly(s, t, c)
    }
}

/// `2^x` for `x <= 127`; relative error `2^-22`.
#[inline(always)]
pub fn exp2_fine<S: Simd>(s: S, x: S::V) -> S::V {
    let c = [1.0, 0.693_151_3, 0.240_164_58, 0.055_799_585, 0.009_017_376, 0.001_867_001];
    s.scale2_floor(poly(s, s.fraction(x), c), x)
}

// Products with an exponential are numbers for longer than the exponential itself: subnormal ones too, of which bf16 has those
// down to 2^-133. So exponentials are computed too large, by two to the power of these, and are never subnormal, which is slow.
// They end where no result of bf16 is left: by 2^8, and what `x` is there. More would cost small `x` their last digits.
const LIFT_GELU: f32 = 11.76;
const LIFT_GELU_TANH: f32 = 11.36;
/// Those of silu and mish may be subnormal.
const LIFT_SILU: f32 = 6.54;
/// Two to the powers of these.
const RAISED_GELU: f32 = 13.547_904 * 256.0;
const RAISED_GELU_TANH: f32 = 10.267_407 * 256.0;
const RAISED_SILU: f32 = 93.054_24;

/// From here on `e^x / (1 + e^x)` and the like are 1, and before it nothing overflows. Operand orders let NaN through.
const SATURATED: f32 = 40.0;

/// `2^x` up to [`SATURATED`], subnormal results too: `silu` and `mish` have some that bf16 can show.
#[inline(always)]
fn saturating_exp2<P: Precision, S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.min(s.splat(SATURATED), x);
    s.scale2_floor(P::significand(s, s.fraction(x)), x)
}

/// `x sigmoid(y)`, given `w = raised e^y`.
#[inline(always)]
fn times_sigmoid<P: Precision, S: Simd>(s: S, x: S::V, w: S::V, raised: f32) -> S::V {
    // Not x / (w + raised), which is so small that subnormal x would lose digits: as one factor of a gate's product, they show.
    let w = s.mul(w, s.splat(1.0 / raised));
    s.mul(s.mul(x, P::reciprocal(s, s.add(w, s.splat(1.0)))), w)
}

/// [`super::math::silu`].
#[inline(always)]
pub fn silu<P: Precision, S: Simd>(s: S, x: S::V) -> S::V {
    let w = saturating_exp2::<P, S>(s, s.fma(x, s.splat(LOG2_E), s.splat(LIFT_SILU)));
    times_sigmoid::<P, S>(s, x, w, RAISED_SILU)
}

/// [`super::math::gelu_tanh`].
#[inline(always)]
pub fn gelu_tanh<P: Precision, S: Simd>(s: S, x: S::V) -> S::V {
    let slope = s.fma(s.mul(x, x), s.splat(GELU_TANH_B * LOG2_E), s.splat(GELU_TANH_A * LOG2_E));
    let binary = s.fma(x, slope, s.splat(LIFT_GELU_TANH));
    let w = P::exp2(s, s.min(s.splat(SATURATED), binary));
    times_sigmoid::<P, S>(s, x, w, RAISED_GELU_TANH)
}

/// [`super::math::mish`].
#[inline(always)]
pub fn mish<P: Precision, S: Simd>(s: S, x: S::V) -> S::V {
    // With w = e^x, tanh(softplus(x)) = n / (n + 2) for n = w (w + 2). Here w, n and the 2 are raised.
    let w = saturating_exp2::<P, S>(s, s.fma(x, s.splat(LOG2_E), s.splat(LIFT_SILU)));
    let n = s.mul(w, s.fma(w, s.splat(1.0 / RAISED_SILU), s.splat(2.0)));
    s.mul(s.mul(x, P::reciprocal(s, s.add(n, s.splat(2.0 * RAISED_SILU)))), n)
}

/// [`super::math::gelu`].
#[inline(always)]
pub fn gelu<P: Precision, S: Simd>(s: S, x: S::V) -> S::V {
    // max(x, 0) - |x| tail(|x|). Only infinity itself must be kept from the product, and there is nothing to keep minus
    // infinity from: the formula gives NaN. The operand orders let NaN through.
    let magnitude = s.abs(s.min(s.splat(14.5), x));
    let log = P::log_tail(s, magnitude);
    let tail = s.scale2_floor_normal(P::significand(s, s.fraction(log)), log);
    s.fnma(s.mul(magnitude, tail), s.splat(1.0 / RAISED_GELU), s.max(s.zero(), x))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::math;
    use crate::cpu::{Task, Tier, dispatch};
    use std::marker::PhantomData;

    const NAMES: [&str; 4] = ["silu", "gelu", "gelu_tanh", "mish"];

    /// Each function beside the accurate one.
    struct Compare<'a, P>(&'a [f32], PhantomData<P>);

    impl<P: Precision> Task for Compare<'_, P> {
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
                let pairs = [
                    (silu::<P, S>(s, x), math::silu(s, x)),
                    (gelu::<P, S>(s, x), math::gelu(s, x)),
                    (gelu_tanh::<P, S>(s, x), math::gelu_tanh(s, x)),
                    (mish::<P, S>(s, x), math::mish(s, x)),
                ];
                pairs.map(|(got, want)| (first(got), first(want)))
            };
            self.0.iter().map(of).collect()
        }
    }

    fn check<P: Precision>(x: &[f32], bits: i32, absolute: f32) {
        let run = |tier| dispatch(tier, Compare::<P>(x, PhantomData));
        let lowest = run(Tier::Portable);
        for tier in Tier::available() {
            for ((x, pairs), low) in x.iter().zip(run(tier)).zip(&lowest) {
                for (i, (got, want)) in pairs.into_iter().enumerate() {
                    let same = got == want || (got.is_nan() && want.is_nan());
                    // Subnormal results have no relative precision.
                    let bound = want.abs() * 2f32.powi(-bits) + absolute;
                    let near = (got - want).abs() <= bound;
                    assert!(same || near, "{} {tier} ({x:e}): {got:e}, want {want:e}", NAMES[i]);
                    assert!(
                        got.to_bits() == low[i].0.to_bits() || got.is_nan(),
                        "{} {tier} ({x:e}): {got:e}, portable {:e}",
                        NAMES[i],
                        low[i].0
                    );
                }
            }
        }
    }

    #[test]
    fn errors_are_below_those_of_rounding_and_bits_are_those_of_every_tier() {
        let x: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits((bits as u32) << 16)).collect();
        // Less than that is zero in bf16, and far more in f16.
        let least = f32::MIN_POSITIVE * 2f32.powi(-8);
        check::<Bf16>(&x, 10, least);
        let x: Vec<f32> = (-40_000..40_000)
            .map(|i| i as f32 / 400.0)
            .chain((-60..0).map(|e| 2f32.powi(e)))
            .chain([0.0, -0.0, 1e30, -1e30, f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
            .collect();
        check::<Bf16>(&x, 10, least);
        check::<F16>(&x, 13, least);
    }
}
