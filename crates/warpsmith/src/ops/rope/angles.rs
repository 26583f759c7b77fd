//! Angles as fractions of a turn in 64-bit fixed point, and sine and cosine of them.
//!
//! A position is a whole number, so whole turns of the frequency contribute whole turns to the angle: only the
//! fraction of the frequency counts, and `position * fraction` in wrapping 64-bit arithmetic is the reduced angle,
//! exact but for the rounding of the fraction itself. The device code does the same (`kernel.cu`).

use crate::cpu::{Simd, math::poly};
use crate::error::Result;
use crate::tensor::storage::room_for;
use std::cell::RefCell;
use std::f64::consts::TAU;
use std::rc::Rc;

/// [`frequency`] of every pair. A model asks for the same few at each layer and step, and powers are slow, so each
/// thread caches those of its last calls.
pub fn frequencies(rotary_dim: usize, theta: f64, scale: f64) -> Result<Rc<Vec<u64>>> {
    /// Models have one rotation, or one for local and one for global layers.
    const KEPT: usize = 4;
    type Key = (usize, u64, u64);
    type Known = [Option<(Key, Rc<Vec<u64>>)>; KEPT];
    thread_local! {
        static KNOWN: RefCell<Known> = const { RefCell::new([const { None }; KEPT]) };
    }
    let key = (rotary_dim, theta.to_bits(), scale.to_bits());
    KNOWN.with_borrow_mut(|known| {
        if let Some((_, frequencies)) = known.iter().flatten().find(|(other, _)| *other == key) {
            return Ok(frequencies.clone());
        }
        let mut all = room_for(rotary_dim / 2)?;
        all.extend((0..rotary_dim / 2).map(|i| frequency(i, rotary_dim, theta, scale)));
        let all = Rc::new(all);
        known.rotate_right(1);
        known[0] = Some((key, all.clone()));
        Ok(all)
    })
}

/// `scale * theta^(-2 pair / rotary_dim)` radians, in units of 2^-64 turns, without whole turns.
pub fn frequency(pair: usize, rotary_dim: usize, theta: f64, scale: f64) -> u64 {
    let turns = scale * theta.powf(-2.0 * pair as f64 / rotary_dim as f64) / TAU;
    // The product may round up to 2^64: a whole turn, which equals zero.
    ((turns - turns.floor()) * 2f64.powi(64)) as u128 as u64
}

/// The quarter turn nearest to an angle, and what is left of the angle in units of quarter turns, at most one half.
#[inline(always)]
pub fn reduced(angle: u64) -> (i32, f32) {
    const EIGHTH: u64 = 1 << 61;
    const QUARTERS: f32 = 1.0 / (1u64 << 62) as f32;
    let quarter = angle.wrapping_add(EIGHTH) >> 62;
    (quarter as i32, angle.wrapping_sub(quarter << 62) as i64 as f32 * QUARTERS)
}

/// Cosine and sine of `quarter + rest` quarter turns, for `|rest| <= 1/2`.
///
/// Near-minimax polynomials in the square of the rest; with the rounding of the rest itself, 1.5 units in the last
/// place.
#[inline(always)]
pub fn cos_sin<S: Simd>(s: S, quarter: S::I, rest: S::V) -> (S::V, S::V) {
    // sin(pi/2 x) = x (pi/2 + p(x^2)), with what f32 cannot hold of pi/2 in p.
    const SIN: [f32; 4] = [-4.854_626e-8, -0.645_963_5, 0.079_680_22, -0.004_602_163];
    const COS: [f32; 4] = [-1.233_700_5, 0.253_669_4, -0.020_861_529, 0.000_906_741_7];
    let z = s.mul(rest, rest);
    let sin = s.fma(rest, s.splat(std::f32::consts::FRAC_PI_2), s.mul(rest, poly(s, z, SIN)));
    let cos = s.fma(poly(s, z, COS), z, s.splat(1.0));
    // An odd quarter swaps the two; quarters 1 and 2 negate the cosine, 2 and 3 the sine.
    let one = s.isplat(1);
    let odd = s.igt(s.iand(quarter, one), s.isplat(0));
    let (c, n) = (s.select(odd, sin, cos), s.select(odd, cos, sin));
    (negated_if_2(s, c, s.iadd(quarter, one)), negated_if_2(s, n, quarter))
}

/// `v`, negated where bit 1 of `quarter` is set.
#[inline(always)]
fn negated_if_2<S: Simd>(s: S, v: S::V, quarter: S::I) -> S::V {
    let sign = s.shl(s.iand(quarter, s.isplat(2)), 30);
    s.of_bits(s.ixor(s.bits_of(v), sign))
}
