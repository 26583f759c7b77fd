//! Sine and cosine of f32.

use warpsmith::cpu::Simd;
use warpsmith::cpu::math::poly;
use warpsmith::cpu::simd::MAX_LANES;

/// Up to here, three parts of `pi / 2` leave a remainder that is accurate enough.
const REACH: f32 = 30_000.0;
/// `pi / 2` in three parts.
const PARTS: [f32; 3] = [1.570_796_4, -4.371_139e-8, -1.715_1e-15];

#[inline(always)]
pub(super) fn sin<S: Simd>(s: S, x: S::V) -> S::V {
    quarter(s, x, 0, f64::sin)
}

#[inline(always)]
pub(super) fn cos<S: Simd>(s: S, x: S::V) -> S::V {
    quarter(s, x, 1, f64::cos)
}

/// The sine, `ahead` quarters of a turn later.
#[inline(always)]
fn quarter<S: Simd>(s: S, x: S::V, ahead: i32, far: fn(f64) -> f64) -> S::V {
    let within = s.le(s.abs(x), s.splat(REACH));
    let near = s.select(within, x, s.zero());
    let turns = s.round(s.mul(near, s.splat(std::f32::consts::FRAC_2_PI)));
    let mut r = near;
    for part in PARTS {
        r = s.fnma(turns, s.splat(part), r);
    }
    let r2 = s.mul(r, r);
    let sine = poly(s, r2, [-0.166_666_55, 0.008_332_161, -0.000_195_152_96]);
    let sine = s.fma(s.mul(r, r2), sine, r);
    let cosine = poly(s, r2, [0.041_666_646, -0.001_388_731_6, 0.000_024_433_157]);
    let cosine = s.fma(s.mul(r2, r2), cosine, s.fnma(r2, s.splat(0.5), s.splat(1.0)));
    let quadrant = s.iadd(s.f32_to_i(turns), s.isplat(ahead));
    let odd = s.igt(s.iand(quadrant, s.isplat(1)), s.isplat(0));
    let sign = s.shl(s.iand(quadrant, s.isplat(2)), 30);
    let y = s.of_bits(s.ixor(s.bits_of(s.select(odd, cosine, sine)), sign));
    let outside = s.select(within, s.zero(), s.splat(1.0));
    if s.any(s.gt(outside, s.zero())) {
        return one_by_one(s, x, y, far);
    }
    y
}

/// The lanes that are too far out, NaN among them.
#[inline(never)]
fn one_by_one<S: Simd>(s: S, x: S::V, y: S::V, f: fn(f64) -> f64) -> S::V {
    let (mut from, mut to) = ([0f32; MAX_LANES], [0f32; MAX_LANES]);
    // SAFETY: both arrays have room for the widest vectors.
    unsafe {
        s.store(from.as_mut_ptr(), x);
        s.store(to.as_mut_ptr(), y);
    }
    for (to, from) in to.iter_mut().zip(from).take(S::N) {
        if from.abs() <= REACH {
            continue;
        }
        *to = f(f64::from(from)) as f32;
    }
    // SAFETY: as above.
    unsafe { s.load(to.as_ptr()) }
}
