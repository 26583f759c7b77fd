//! What decides about experts, operation by operation, exactly as in `moe_route.cuh` and `reference.rs`.

use crate::cpu::Simd;
use crate::ops::sample::arithmetic::{UNIT, exponential, ordered, weights, whole};

/// `sin(2 pi q) = q (SINE[0] + q^2 (SINE[1] + ...))` for `q` from -1/4 to 1/4.
const SINE: [f32; 6] = [6.283_185_5, -41.341_7, 81.605_25, -76.705_86, 42.058_693, -15.094_643];

/// A number that orders: NaN as minus infinity, no plus infinity, no negative zero.
#[inline(always)]
pub(super) fn clean(x: f32) -> f32 {
    (if x.is_nan() { f32::NEG_INFINITY } else { x.min(f32::MAX) }) + 0.0
}

/// The bits by which experts are compared; zero is below those of all numbers.
#[inline(always)]
pub(super) fn key(score: f32) -> u32 {
    ordered(clean(score))
}

/// The number whose bits these are.
pub(super) fn number(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key ^ 1 << 31 } else { !key })
}

/// A logit with noise of `deviation`, from 64 random bits.
#[inline(always)]
pub(super) fn with_noise(logit: f32, deviation: f32, bits: u64) -> f32 {
    clean(logit + deviation * normal(bits))
}

/// A normally distributed number (Box and Muller).
#[inline(always)]
fn normal(bits: u64) -> f32 {
    (2.0 * exponential((bits >> 32) as u32)).sqrt() * cosine(bits as u32)
}

/// The cosine of `bits / 2^32` turns.
#[inline(always)]
fn cosine(bits: u32) -> f32 {
    let from_zero = if bits >> 31 == 1 { bits.wrapping_neg() } else { bits };
    let q = 0.25 - from_zero as f32 * (1.0 / (1u64 << 32) as f32);
    let square = q * q;
    let mut p = SINE[5];
    for c in [SINE[4], SINE[3], SINE[2], SINE[1], SINE[0]] {
        p = p.mul_add(square, c);
    }
    p * q
}

/// Replaces logits, whole vectors, by their softmax: minus infinity stays, the others are at least 2^-61.
#[inline(always)]
pub(super) fn softmax<S: Simd>(s: S, x: &mut [f32], most: f32) {
    let (low, top) = (s.splat(f32::NEG_INFINITY), s.splat(most));
    let mut total = 0;
    for chunk in x.chunks_exact_mut(S::N) {
        // SAFETY: whole vectors.
        unsafe {
            let v = s.load(chunk.as_ptr());
            s.store(chunk.as_mut_ptr(), s.select(s.eq(v, low), low, weights(s, s.sub(v, top))));
        }
        for &e in chunk.iter() {
            total += if e > 0.0 { whole(e) } else { 0 };
        }
    }
    let divisor = s.splat(total as f32 / UNIT);
    for chunk in x.chunks_exact_mut(S::N) {
        // SAFETY: whole vectors.
        unsafe { s.store(chunk.as_mut_ptr(), s.div(s.load(chunk.as_ptr()), divisor)) };
    }
}

/// Replaces logits, whole vectors, by their sigmoid: minus infinity stays.
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(s: S, x: &mut [f32]) {
    let (low, one) = (s.splat(f32::NEG_INFINITY), s.splat(1.0));
    for chunk in x.chunks_exact_mut(S::N) {
        // SAFETY: whole vectors.
        unsafe {
            let v = s.load(chunk.as_ptr());
            let e = weights(s, s.neg(s.abs(v)));
            let above = s.select(s.lt(v, s.zero()), e, one);
            s.store(chunk.as_mut_ptr(), s.select(s.eq(v, low), low, s.div(above, s.add(one, e))));
        }
    }
}
