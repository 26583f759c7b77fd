//! Elementary functions and activations on vectors of `f32`.
//!
//! The results are within a few units in the last place of the exact value wherever the function is well
//! conditioned, down to subnormal results, and have the same bits on every tier. NaN gives NaN. At infinities each
//! function gives what its defining formula gives in exact floating-point rules: `silu(-inf)` is `-inf * 0`, NaN.
//!
//! The polynomials are minimax fits of this project (Lawson's iteration, coefficients rounded to `f32` one at a
//! time with the rest refitted); the errors given beside them are relative to the function, in units of `2^-24`.

use super::simd::Simd;
use std::f32::consts::LOG2_E;

/// `1.5 * 2^23`: adding it rounds a small value to a whole number, subtracting it again leaves that number.
const ROUND: f32 = 12_582_912.0;
/// The upper bits of `ln 2`, few enough that products with exponents are exact.
const LN2_HI: f32 = 0.693_145_75;
/// `ln 2 - LN2_HI`.
const LN2_LO: f32 = 1.428_606_8e-6;
/// Below this, `exp` rounds to zero.
const EXP_ZERO: f32 = -103.972_08;

/// `c[0] + c[1] x + c[2] x^2 + ...`
#[inline(always)]
pub fn poly<S: Simd, const K: usize>(s: S, x: S::V, c: [f32; K]) -> S::V {
    let mut sum = s.splat(c[K - 1]);
    for &c in c[..K - 1].iter().rev() {
        sum = s.fma(sum, x, s.splat(c));
    }
    sum
}

/// `x = n ln 2 + r` with whole `n` and `|r| <= ln 2 / 2`; gives `(n, r)`.
#[inline(always)]
fn reduce<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let n = s.sub(s.fma(x, s.splat(LOG2_E), s.splat(ROUND)), s.splat(ROUND));
    let r = s.fnma(n, s.splat(LN2_HI), x);
    (n, s.fnma(n, s.splat(LN2_LO), r))
}

/// `e^r` for `|r| <= ln 2 / 2`; error 0.05.
#[inline(always)]
fn exp_reduced<S: Simd>(s: S, r: S::V) -> S::V {
    let q = poly(s, r, [0.499_999_94, 0.166_665_21, 0.041_668_28, 0.008_368_69, 0.001_381_951_2]);
    let one = s.splat(1.0);
    s.fma(s.fma(q, r, one), r, one)
}

/// `e^(x + lo)` for `x <= 0` (or NaN) and `|lo|` below the spacing of `x`. Lanes that round to zero do no arithmetic
/// on tiny numbers, which would trap into microcode: `-inf` is what masked attention scores look like.
#[inline(always)]
fn exp_nonpositive<S: Simd>(s: S, x: S::V, lo: S::V) -> S::V {
    let vanishes = s.lt(x, s.splat(EXP_ZERO));
    let (n, r) = reduce(s, s.select(vanishes, s.zero(), x));
    let e = s.scale2(exp_reduced(s, s.add(r, lo)), n);
    s.select(vanishes, s.zero(), e)
}

/// `e^-|x|`.
#[inline(always)]
fn exp_neg_abs<S: Simd>(s: S, x: S::V) -> S::V {
    exp_nonpositive(s, s.neg(s.abs(x)), s.zero())
}

/// `e^x`.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let vanishes = s.lt(x, s.splat(EXP_ZERO));
    // 89 is past the overflow to infinity; the operand order of `min` lets NaN through.
    let clamped = s.min(s.splat(89.0), s.select(vanishes, s.zero(), x));
    let (n, r) = reduce(s, clamped);
    s.select(vanishes, s.zero(), s.scale2(exp_reduced(s, r), n))
}

/// `ln(1 + f) + e ln 2` for `1 + f` in `[sqrt(1/2), sqrt(2))` and whole `e`; error of the polynomial 0.1.
#[inline(always)]
fn log_reduced<S: Simd>(s: S, f: S::V, e: S::V) -> S::V {
    let p = poly(
        s,
        f,
        [
            0.333_333_3,
            -0.250_008_23,
            0.200_012_49,
            -0.166_233_14,
            0.142_013_06,
            -0.131_602_36,
            0.127_645_85,
            -0.076_378_78,
        ],
    );
    let f2 = s.mul(f, f);
    // f + (f^3 p - f^2/2 + e ln2_lo), the small terms first.
    let small = s.mul(s.mul(f, f2), p);
    let small = s.fma(e, s.splat(LN2_LO), small);
    let small = s.fnma(s.splat(0.5), f2, small);
    s.fma(e, s.splat(LN2_HI), s.add(f, small))
}

/// `x = 2^e m` with `m` in `[sqrt(1/2), sqrt(2))` for normal `x > 0`; gives `(e, m)`.
#[inline(always)]
fn split_exponent<S: Simd>(s: S, x: S::V) -> (S::I, S::V) {
    let sqrt_half = s.isplat(0x3f35_04f3);
    let offset = s.isub(s.bits_of(x), sqrt_half);
    let m = s.iadd(s.iand(offset, s.isplat(0x007f_ffff)), sqrt_half);
    (s.sar(offset, 23), s.of_bits(m))
}

/// The logarithm of `x` where it is not positive and finite, `y` elsewhere.
#[inline(always)]
fn log_edges<S: Simd>(s: S, x: S::V, y: S::V) -> S::V {
    let infinity = s.splat(f32::INFINITY);
    let y = s.select(s.lt(x, infinity), y, x);
    let y = s.select(s.lt(x, s.zero()), s.splat(f32::NAN), y);
    s.select(s.eq(x, s.zero()), s.neg(infinity), y)
}

/// `ln x`. Zero gives `-inf`, negative numbers NaN.
#[inline(always)]
pub fn log<S: Simd>(s: S, x: S::V) -> S::V {
    let subnormal = s.lt(x, s.splat(f32::MIN_POSITIVE));
    let normal = s.select(subnormal, s.mul(x, s.splat(8_388_608.0)), x);
    let (e, m) = split_exponent(s, normal);
    let shift = s.select(subnormal, s.splat(23.0), s.zero());
    let y = log_reduced(s, s.sub(m, s.splat(1.0)), s.sub(s.i_to_f32(e), shift));
    log_edges(s, x, y)
}

/// `ln(1 + x)`, accurate for small `x` too. `-1` gives `-inf`, smaller numbers NaN.
#[inline(always)]
pub fn log1p<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let u = s.add(one, x);
    // 1 + x = u + lost, exactly.
    let back = s.sub(u, one);
    let lost = s.add(s.sub(one, s.sub(u, back)), s.sub(x, back));
    let (e, m) = split_exponent(s, u);
    // 2^-e; where `e` is too large for that, `lost` does not matter.
    let scale = s.of_bits(s.shl(s.isub(s.isplat(127), s.imin(e, s.isplat(127))), 23));
    let y = log_reduced(s, s.fma(lost, scale, s.sub(m, one)), s.i_to_f32(e));
    let y = log_edges(s, u, y);
    s.select(s.eq(x, s.zero()), x, y)
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    // The operand order of `max` lets NaN through.
    s.add(s.max(s.zero(), x), log1p(s, exp_neg_abs(s, x)))
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let magnitude = s.abs(x);
    // With t = e^2|x| - 1, tanh |x| = t / (t + 2), which is 1 in f32 from 20 on.
    let (n, r) = reduce(s, s.min(s.splat(20.0), s.add(magnitude, magnitude)));
    // e^r - 1, relative error 0.007.
    let q = poly(s, r, [0.5, 0.166_666_66, 0.041_666_493, 0.008_333_543, 0.001_393_234_7, 0.000_197_642_6]);
    let q = s.fma(s.mul(r, r), q, r);
    let power = s.pow2(n);
    let t = s.fma(power, q, s.sub(power, one));
    s.with_sign(s.div(t, s.add(t, s.splat(2.0))), x)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let (numerator, denominator, _) = sigmoid_parts(s, x);
    s.div(numerator, denominator)
}

/// `sigmoid(x)` as a quotient free of overflow and cancellation, and `e^-|x|`.
#[inline(always)]
fn sigmoid_parts<S: Simd>(s: S, x: S::V) -> (S::V, S::V, S::V) {
    let u = exp_neg_abs(s, x);
    let one = s.splat(1.0);
    (s.select(s.lt(x, s.zero()), u, one), s.add(one, u), u)
}

/// `1 / sqrt(x)` with two correct roundings.
#[inline(always)]
pub fn rsqrt<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(s.splat(1.0), s.sqrt(x))
}

/// From here on the upper tail of the normal distribution is zero in f32.
pub(super) const TAIL_ENDS: f32 = 14.5;

/// From here on the product of it and `t` is zero in f32. Where a product is too small to be a number, arithmetic traps into
/// microcode.
const GELU_ENDS: f32 = 14.356_5;

/// `(P(t), Q(t))` such that `P / Q = e^(t^2/2) (1 - Phi(t))` for the normal distribution `Phi` and
/// `0 <= t <= TAIL_ENDS`; error 0.19 before rounding.
#[inline(always)]
pub(super) fn upper_tail_quotient<S: Simd>(s: S, t: S::V) -> (S::V, S::V) {
    let p = poly(s, t, [0.5, 0.437_594_77, 0.182_681_4, 0.040_436_465, 0.004_084_138_7]);
    let q = poly(s, t, [1.0, 1.673_074_4, 1.200_279_2, 0.467_999_94, 0.101_365_72, 0.010_237_296]);
    (p, q)
}

/// `e^(t^2/2) (1 - Phi(t))` for `0 <= t <= TAIL_ENDS`.
#[inline(always)]
fn scaled_upper_tail<S: Simd>(s: S, t: S::V) -> S::V {
    let (p, q) = upper_tail_quotient(s, t);
    s.div(p, q)
}

/// `2^(-c t^2 log2 e)` for `0 <= t <= TAIL_ENDS`, given `-c log2 e` in two parts: without the loss of rounding the square
/// or the product.
#[inline(always)]
fn gauss<S: Simd>(s: S, t: S::V, c: [f32; 2]) -> S::V {
    raised_gauss(s, t, c, s.zero())
}

/// [`gauss`] times `2^lift`, for `lift` that is whole, and zero where the power is not below `-lift`: then their sum is exact.
#[inline(always)]
fn raised_gauss<S: Simd>(s: S, t: S::V, [c, c_rest]: [f32; 2], lift: S::V) -> S::V {
    let c = s.splat(c);
    let square = s.mul(t, t);
    let excess = s.fnma(t, t, square);
    let power = s.mul(square, c);
    let rest = s.fma(square, c, s.neg(power));
    let rest = s.fma(square, s.splat(c_rest), s.fnma(excess, c, rest));
    // 2^r for 0 <= r <= 1; error 0.04.
    let c = [1.0, 0.693_147_06, 0.240_229_09, 0.055_486_184, 0.009_673_775, 0.001_248_229, 0.000_215_659_7];
    s.scale2_floor(poly(s, s.add(s.fraction(power), rest), c), s.add(power, lift))
}

/// The density of the normal distribution at zero.
pub(super) const INVERSE_SQRT_2PI: f32 = 0.398_942_3;
/// `-log2(e) / 2` and what that leaves.
const HALF_GAUSS: [f32; 2] = [-0.5 * LOG2_E, -9.629_815e-9];
/// `-log2 e` and what that leaves.
const GAUSS: [f32; 2] = [-LOG2_E, -1.925_963e-8];

/// `1 - erf(x)`, relatively accurate where it is tiny.
#[inline(always)]
pub fn erfc<S: Simd>(s: S, x: S::V) -> S::V {
    // The operand order of `min` lets NaN through, here and below.
    let magnitude = s.min(s.splat(TAIL_ENDS / std::f32::consts::SQRT_2), s.abs(x));
    let t = s.mul(magnitude, s.splat(std::f32::consts::SQRT_2));
    let two = s.splat(2.0);
    let tail = s.mul(s.mul(two, gauss(s, magnitude, GAUSS)), scaled_upper_tail(s, t));
    s.select(s.lt(x, s.zero()), s.sub(two, tail), tail)
}

/// The error function.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let magnitude = s.abs(x);
    let one = s.splat(1.0);
    // erf(x) / x - 1 up to 1; error 0.03.
    let p = poly(
        s,
        s.mul(x, x),
        [
            0.128_379_17,
            -0.376_126_26,
            0.112_835_79,
            -0.026_853_347,
            0.005_187_162,
            -0.000_799_785_3,
            0.000_078_069_03,
        ],
    );
    let near = s.fma(x, p, x);
    let far = s.with_sign(s.sub(one, erfc(s, magnitude)), x);
    s.select(s.lt(magnitude, one), near, far)
}

/// `max(x, 0)`.
#[inline(always)]
pub fn relu<S: Simd>(s: S, x: S::V) -> S::V {
    // The operand order lets NaN through.
    s.max(s.zero(), x)
}

/// Derivative of [`relu`]: 1 for positive `x`, 0 for negative and for zero, NaN for NaN.
#[inline(always)]
pub fn d_relu<S: Simd>(s: S, x: S::V) -> S::V {
    let step = s.select(s.gt(x, s.zero()), s.splat(1.0), s.zero());
    s.select(s.is_nan(x), x, step)
}

/// `x Phi(x)`, the exact GELU.
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::V) -> S::V {
    const LOWER: f32 = 1.0 / (1u64 << 32) as f32;
    // max(x, 0) - |x| (1 - Phi(|x|)). Infinity must be kept from the product; for minus infinity NaN is right.
    let magnitude = s.abs(s.min(s.splat(TAIL_ENDS), x));
    let ends = s.splat(GELU_ENDS);
    let t = s.min(ends, magnitude);
    // The far tail is raised by 2^32, because it would end before its product with `t` does. That is the only one rounded.
    let far = s.lt(s.splat(8.0), t);
    let (lift, factor) =
        (s.select(far, s.splat(32.0), s.zero()), s.select(far, s.splat(LOWER), s.splat(1.0)));
    let tail = s.mul(raised_gauss(s, t, HALF_GAUSS, lift), scaled_upper_tail(s, t));
    let tail = s.select(s.lt(magnitude, ends), tail, s.zero());
    s.fnma(s.mul(magnitude, factor), tail, relu(s, x))
}

/// Derivative of [`gelu`]: `Phi(x) + x phi(x)`.
#[inline(always)]
pub fn d_gelu<S: Simd>(s: S, x: S::V) -> S::V {
    let magnitude = s.abs(x);
    let t = s.min(s.splat(TAIL_ENDS), magnitude);
    let e = gauss(s, t, HALF_GAUSS);
    let (one, density) = (s.splat(1.0), s.splat(INVERSE_SQRT_2PI));
    // For negative x, with phi(x) = e^(-x^2/2) / sqrt(2 pi); for positive ones 1 less that of -x.
    let d = s.mul(e, s.fnma(magnitude, density, scaled_upper_tail(s, t)));
    let far = s.select(s.lt(x, s.zero()), d, s.sub(one, d));
    // Up to 1, where most activations lie, 1/2 + x (p(x^2) + phi(x)) has hardly any rounding to do; error of p 0.05.
    let p = poly(
        s,
        s.mul(x, x),
        [0.398_942_3, -0.066_490_54, 0.009_974_164, -0.001_188_023_8, 0.000_115_023_97, -8.171_795e-6],
    );
    let near = s.fma(s.mul(x, density), e, s.fma(x, p, s.splat(0.5)));
    s.select(s.lt(magnitude, one), near, far)
}

/// GELU's tanh form is `x sigmoid(x (A + B x^2))`; this is `A = 2 sqrt(2/pi)`.
pub(super) const GELU_TANH_A: f32 = 1.595_769_121_605_730_7_f64 as f32;
/// `0.044715 A`.
pub(super) const GELU_TANH_B: f32 = (0.044_715 * 1.595_769_121_605_730_7_f64) as f32;

/// The tanh approximation of GELU, `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let slope = s.fma(s.mul(x, x), s.splat(GELU_TANH_B), s.splat(GELU_TANH_A));
    let (numerator, denominator, _) = sigmoid_parts(s, s.mul(x, slope));
    s.mul(x, s.div(numerator, denominator))
}

/// Derivative of [`gelu_tanh`].
#[inline(always)]
pub fn d_gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let square = s.mul(x, x);
    let (a, b) = (s.splat(GELU_TANH_A), s.splat(GELU_TANH_B));
    let (numerator, denominator, u) = sigmoid_parts(s, s.mul(x, s.fma(square, b, a)));
    // The inner derivative, bounded so that zero times it stays zero: `u` is zero long before x^2 = 400.
    let inner = s.fma(s.min(s.splat(400.0), square), s.splat(3.0 * GELU_TANH_B), a);
    let inverse = s.div(s.splat(1.0), denominator);
    let spread = s.mul(s.mul(u, inverse), s.mul(inverse, inner));
    s.fma(x, spread, s.mul(numerator, inverse))
}

/// `x sigmoid(x)`.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.mul(x, sigmoid(s, x))
}

/// Derivative of [`silu`]: `sigmoid(x) (1 + x sigmoid(-x))`; the factor outside the sum keeps the error small where the
/// sum is zero.
#[inline(always)]
pub fn d_silu<S: Simd>(s: S, x: S::V) -> S::V {
    let (numerator, denominator, u) = sigmoid_parts(s, x);
    let one = s.splat(1.0);
    let inverse = s.div(one, denominator);
    let mirrored = s.mul(s.select(s.lt(x, s.zero()), one, u), inverse);
    s.mul(s.mul(numerator, inverse), s.fma(x, mirrored, one))
}

/// `(a, b)` such that `tanh(softplus(x)) = a / b`, free of overflow, given `u = e^-|x|`.
#[inline(always)]
pub(super) fn mish_quotient<S: Simd>(s: S, x: S::V, u: S::V) -> (S::V, S::V) {
    let (one, two) = (s.splat(1.0), s.splat(2.0));
    // With w = e^x: (w^2 + 2w) / (w^2 + 2w + 2), and for positive x the same divided by w^2.
    let falling = s.mul(u, s.add(u, two));
    let rising = s.fma(two, u, one);
    let negative = s.lt(x, s.zero());
    let a = s.select(negative, falling, rising);
    let b = s.select(negative, s.add(falling, two), s.fma(s.mul(two, u), u, rising));
    (a, b)
}

/// `x tanh(softplus(x))`.
#[inline(always)]
pub fn mish<S: Simd>(s: S, x: S::V) -> S::V {
    let (a, b) = mish_quotient(s, x, exp_neg_abs(s, x));
    s.mul(x, s.div(a, b))
}

/// Derivative of [`mish`].
#[inline(always)]
pub fn d_mish<S: Simd>(s: S, x: S::V) -> S::V {
    let u = exp_neg_abs(s, x);
    let (a, b) = mish_quotient(s, x, u);
    let one = s.splat(1.0);
    // d/dx tanh(softplus(x)) = 4 w (w + 1) / (w^2 + 2w + 2)^2, and for positive x the same in u = 1/w.
    let power = s.select(s.lt(x, s.zero()), u, s.mul(u, u));
    let inverse = s.div(one, b);
    let slope = s.mul(s.mul(s.splat(4.0), power), s.mul(s.add(one, u), s.mul(inverse, inverse)));
    s.fma(x, slope, s.mul(a, inverse))
}

#[cfg(feature = "tests")]
#[path = "math_tests.rs"]
mod tests;
