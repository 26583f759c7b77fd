//! Numbers by which ops choose tokens and experts: f32 and whole numbers, whatever arithmetic a reference is evaluated in. Their
//! roundings are part of what the ops promise: the same choice on every device.

use super::Real;

/// A logit as a number or minus infinity.
pub(crate) fn clean<R: Real>(x: R) -> R {
    let value = x.f64();
    if value.is_nan() {
        R::of(f64::NEG_INFINITY)
    } else if value > f32::MAX as f64 {
        R::of(f32::MAX as f64)
    } else {
        x
    }
}

/// e^t for t <= 0.
pub(crate) fn exp(t: f32) -> f32 {
    let y = (t * std::f32::consts::LOG2_E).max(-60.0);
    let n = y.round_ties_even();
    let f = y - n;
    let c =
        [0.00015353362f32, 0.0013398875, 0.009618437, 0.055503324, 0.24022648, std::f32::consts::LN_2, 1.0];
    c[1..].iter().fold(c[0], |p, &c| p.mul_add(f, c)) * 2f32.powi(n as i32)
}

/// Such a number as a multiple of 2^-40.
pub(crate) fn whole(e: f32) -> u64 {
    (e * 2f32.powi(40)) as u64
}

/// 64 random bits: those with this number at a position of a seed.
pub(crate) fn random_bits(seed: i64, position: i64, number: usize) -> u64 {
    const STEP: u64 = 0x9e3779b97f4a7c15;
    let mix = |z: u64| {
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    };
    let of_seed = mix((seed as u64).wrapping_add(STEP));
    let stream = mix(of_seed.wrapping_add((position as u64).wrapping_mul(STEP)));
    mix(stream.wrapping_add((number as u64 + 1).wrapping_mul(STEP)))
}

/// -ln(1 - x), x uniform between 0 and 1.
pub(crate) fn exponential(bits: u32) -> f32 {
    let part = |bits: u32| (bits | 1) as f32 * 2f32.powi(-32);
    if bits < 1 << 30 {
        return -ln_1p(-part(bits));
    }
    // 1 - x = m 2^e with m from 1/sqrt(2) to sqrt(2).
    let (mut m, mut e) = (part(!bits), 0.0f32);
    while m < f32::from_bits(0x3f3504f3) {
        (m, e) = (m * 2.0, e - 1.0);
    }
    -(e.mul_add(std::f32::consts::LN_2, ln_1p(m - 1.0)))
}

fn ln_1p(f: f32) -> f32 {
    let c =
        [0.08736038f32, -0.14309312, 0.14918347, -0.16570306, 0.19962022, -0.2500176, 0.3333395, -0.4999999];
    let p = c[1..].iter().fold(c[0], |p, &c| p.mul_add(f, c));
    (p * f).mul_add(f, f)
}
