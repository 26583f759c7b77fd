//! Weights and noise, operation by operation, exactly as in `kernel.cu` and `reference.rs`. `moe_route` chooses with the same.

use crate::cpu::Simd;
use crate::cpu::random::RandomStream;

/// Below this a temperature takes the largest logit.
pub(in crate::ops) const COLD: f32 = 1e-5;
/// Weights are counted in multiples of its inverse.
pub(in crate::ops) const UNIT: f32 = (1u64 << 40) as f32;
/// The least weight of a token that can be drawn.
pub(in crate::ops) const LEAST: f32 = 1.0 / UNIT;
/// Exponents below this give weights far below [`LEAST`].
const LOWEST: f32 = -60.0;

/// `2^f = 1 + f (EXP2[0] + f (EXP2[1] + ...))` for `f` from -1/2 to 1/2.
const EXP2: [f32; 6] =
    [std::f32::consts::LN_2, 0.24022648, 0.055503324, 0.009618437, 0.0013398875, 0.00015353362];
/// `ln(1 + f) = f + f^2 (LN[0] + f (LN[1] + ...))` for `f` from about -0.3 to 0.42.
const LN: [f32; 8] =
    [-0.4999999, 0.3333395, -0.2500176, 0.19962022, -0.16570306, 0.14918347, -0.14309312, 0.08736038];

/// `exp(t)` of `t` that are not positive; below [`LEAST`] anything.
#[inline(always)]
pub(in crate::ops) fn weights<S: Simd>(s: S, t: S::V) -> S::V {
    let y = s.mul(t, s.splat(std::f32::consts::LOG2_E));
    let y = s.max(y, s.splat(LOWEST));
    let n = s.round(y);
    let f = s.sub(y, n);
    let mut p = s.splat(EXP2[5]);
    for c in [EXP2[4], EXP2[3], EXP2[2], EXP2[1], EXP2[0], 1.0] {
        p = s.fma(p, f, s.splat(c));
    }
    s.mul(p, s.pow2(n))
}

/// The noise of a row's tokens: a counter-based generator.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Noise {
    stream: RandomStream,
}

impl Noise {
    pub fn new(seed: i64, position: i64) -> Noise {
        Noise { stream: RandomStream::new(seed, position) }
    }

    /// Minus the logarithm of a number uniform between 0 and 1.
    #[inline(always)]
    pub fn of(self, token: u32) -> f32 {
        exponential((self.bits(token) >> 32) as u32)
    }

    /// 64 random bits.
    #[inline(always)]
    pub fn bits(self, token: u32) -> u64 {
        self.stream.bits(u64::from(token))
    }
}

/// `-ln(1 - (2 bits/2 + 1) / 2^32)`: accurate relative to itself at both ends, and never zero.
#[inline(always)]
pub(in crate::ops) fn exponential(bits: u32) -> f32 {
    const SCALE: f32 = 1.0 / (1u64 << 32) as f32;
    if bits < 1 << 30 {
        return -ln_1p(-((bits | 1) as f32 * SCALE));
    }
    // The remainder is computed directly: one minus a number would be rounded.
    let x = (!bits | 1) as f32 * SCALE;
    // The exponent of x over 1/sqrt(2), so that 1 + f is from there to sqrt(2).
    let over = x.to_bits().wrapping_sub(0x3f35_04f3) as i32 >> 23;
    let f = f32::from_bits(x.to_bits().wrapping_sub((over << 23) as u32)) - 1.0;
    -(over as f32).mul_add(std::f32::consts::LN_2, ln_1p(f))
}

#[inline(always)]
fn ln_1p(f: f32) -> f32 {
    let mut p = LN[7];
    for c in [LN[6], LN[5], LN[4], LN[3], LN[2], LN[1], LN[0]] {
        p = p.mul_add(f, c);
    }
    (p * f).mul_add(f, f)
}

/// Bits whose unsigned order is that of numbers.
#[inline(always)]
pub(in crate::ops) fn ordered(x: f32) -> u32 {
    let bits = x.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

/// A weight as a whole number.
#[inline(always)]
pub(in crate::ops) fn whole(weight: f32) -> u64 {
    (weight * UNIT) as u64
}

/// The weight that the most likely tokens of a total must have together.
#[inline(always)]
pub(in crate::ops) fn target(top_p: f32, total: u64) -> u64 {
    ((f64::from(top_p) * total as f64) as u64).max(1)
}
