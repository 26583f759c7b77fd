//! Activations for results that are rounded to bf16, in half the instructions of [`super::coarse`]: a cubic for each of 32
//! pieces of the range where inputs mostly are, its coefficients looked up in registers. [`super::coarse`] has the rest,
//! and all of it on tiers that would look up in memory. NaN and infinities as there.

use super::coarse::{self, Bf16};
use super::math::{GELU_TANH_A, GELU_TANH_B};
use super::simd::{Simd, TABLE};

/// An activation from `least` on, in pieces that double their width once or thrice.
///
/// With `z = slope x + start`, which is 2 at `least`, five bits of `z` number the pieces: the upper `BITS` of the
/// mantissa, and the lower ones of the exponent.
#[repr(align(64))]
struct Pieces<const BITS: u32> {
    /// The coefficients of each piece, for powers of `x`: not of `x` less something, so that what is relatively accurate
    /// for a piece at zero needs no product with `x`.
    coefficients: [[f32; TABLE]; 4],
    slope: f32,
    start: f32,
}

/// Bits of the least `z`.
const FIRST: i32 = 0x4000_0000;

/// What `x` is multiplied by.
#[derive(Clone, Copy)]
enum Factor {
    NormalDistribution,
    TanhOfGelu,
    Sigmoid,
    TanhOfSoftplus,
}

impl<const BITS: u32> Pieces<BITS> {
    const SHIFT: u32 = 23 - BITS;

    /// The pieces of `x` times `factor`; those of the first doubling of `z` are together as wide as `unit`.
    const fn new(factor: Factor, least: f64, unit: f64) -> Self {
        let slope = (2.0 / unit) as f32;
        let start = (2.0 - least * slope as f64) as f32;
        let mut coefficients = [[0.0; TABLE]; 4];
        let mut n = 0;
        while n < TABLE {
            let edges = [
                (f32::from_bits(FIRST as u32 + ((n as u32) << Self::SHIFT)) as f64 - start as f64)
                    / slope as f64,
                (f32::from_bits(FIRST as u32 + ((n as u32 + 1) << Self::SHIFT)) as f64 - start as f64)
                    / slope as f64,
            ];
            let cubic = cubic(factor, edges);
            let mut k = 0;
            while k < 4 {
                coefficients[k][n] = cubic[k] as f32;
                k += 1;
            }
            n += 1;
        }
        Pieces { coefficients, slope, start }
    }

    /// The activation where the pieces are, elsewhere that of `rest`.
    #[inline(always)]
    fn value<S: Simd>(&self, s: S, x: S::V, rest: impl Fn(S, S::V) -> S::V) -> S::V {
        if !S::LOOKS_UP_IN_REGISTERS {
            return rest(s, x);
        }
        let z = s.bits_of(s.fma(x, s.splat(self.slope), s.splat(self.start)));
        let index = s.shr(z, Self::SHIFT);
        let [c0, c1, c2, c3] = &self.coefficients;
        let y = s.fma(s.look_up(c3, index), x, s.look_up(c2, index));
        let y = s.fma(s.fma(y, x, s.look_up(c1, index)), x, s.look_up(c0, index));
        // What is past the pieces differs in the bits above, NaN too.
        let above = -(TABLE as i32) << Self::SHIFT;
        let wrong = s.ixor(z, s.isplat(FIRST));
        if !s.any_bits(wrong, above) {
            return y;
        }
        let inside = s.igt(s.isplat(1), s.shr(wrong, Self::SHIFT + TABLE.ilog2()));
        s.select(inside, y, rest(s, x))
    }
}

/// The cubic in `x` for `x` times `factor` between two places, with about the least relative error: that of the solution is
/// the same, in turn too large and too small, at the extrema of a Chebyshev polynomial.
const fn cubic(factor: Factor, [low, high]: [f64; 2]) -> [f64; 4] {
    // Through zero, what is relatively accurate has no constant term.
    let through_zero = low <= 1e-6 && high >= -1e-6;
    let unknowns = if through_zero { 4 } else { 5 };
    // cos(k pi / 4) and cos(k pi / 3).
    const HALF_SQRT_2: f64 = std::f64::consts::FRAC_1_SQRT_2;
    let places =
        if through_zero { [1.0, 0.5, -0.5, -1.0, 0.0] } else { [1.0, HALF_SQRT_2, 0.0, -HALF_SQRT_2, -1.0] };
    let mut rows = [[0.0; 6]; 5];
    let mut i = 0;
    while i < unknowns {
        let x = 0.5 * (low + high) + 0.5 * (high - low) * places[i];
        let f = factor.at(x);
        // Of both sides over x f(x), or f(x) alone where a power of x is left out.
        let mut power = if through_zero { 1.0 / f } else { 1.0 / (x * f) };
        let mut k = 0;
        while k < unknowns - 1 {
            rows[i][k] = power;
            power *= x;
            k += 1;
        }
        rows[i][k] = if i % 2 == 0 { 1.0 } else { -1.0 };
        rows[i][5] = 1.0;
        i += 1;
    }
    let solution = solve(rows, unknowns);
    let [a, b, c, d, _] = solution;
    if through_zero { [0.0, a, b, c] } else { [a, b, c, d] }
}

/// Solves the first `n` of linear equations, given as coefficients and, last, the right side.
const fn solve(mut rows: [[f64; 6]; 5], n: usize) -> [f64; 5] {
    let mut k = 0;
    while k < n {
        let mut pivot = k;
        let mut i = k + 1;
        while i < n {
            if rows[i][k].abs() > rows[pivot][k].abs() {
                pivot = i;
            }
            i += 1;
        }
        (rows[k], rows[pivot]) = (rows[pivot], rows[k]);
        let mut i = 0;
        while i < n {
            if i != k {
                let ratio = rows[i][k] / rows[k][k];
                let mut j = k;
                while j < 6 {
                    rows[i][j] -= ratio * rows[k][j];
                    j += 1;
                }
            }
            i += 1;
        }
        k += 1;
    }
    let mut solution = [0.0; 5];
    let mut k = 0;
    while k < n {
        solution[k] = rows[k][5] / rows[k][k];
        k += 1;
    }
    solution
}

impl Factor {
    const fn at(self, x: f64) -> f64 {
        match self {
            Factor::NormalDistribution => normal_distribution(x),
            Factor::TanhOfGelu => sigmoid(x * (GELU_TANH_A as f64 + GELU_TANH_B as f64 * x * x)),
            Factor::Sigmoid => sigmoid(x),
            Factor::TanhOfSoftplus => {
                let w = exp(x);
                let n = w * (w + 2.0);
                n / (n + 2.0)
            }
        }
    }
}

/// `e^x`, for tables made by the compiler.
const fn exp(x: f64) -> f64 {
    // The Taylor series of e^(x/1024), and squares.
    let t = x / 1024.0;
    let (mut sum, mut term, mut k) = (1.0, 1.0, 1);
    while k < 12 {
        term *= t / k as f64;
        sum += term;
        k += 1;
    }
    let mut k = 0;
    while k < 10 {
        sum *= sum;
        k += 1;
    }
    sum
}

const fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
}

/// The normal distribution function.
const fn normal_distribution(x: f64) -> f64 {
    let t = x.abs();
    let density = 0.398_942_280_401_432_7 * exp(-0.5 * t * t);
    // The tail: a continued fraction where t is large, else what a series leaves of one half.
    let tail = if t > 3.0 {
        let (mut fraction, mut k) = (t, 100);
        while k > 0 {
            fraction = t + k as f64 / fraction;
            k -= 1;
        }
        density / fraction
    } else {
        let (mut sum, mut term, mut k) = (0.0, t, 1);
        while k < 100 {
            sum += term;
            term *= t * t / (2 * k + 1) as f64;
            k += 1;
        }
        0.5 - density * sum
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Relative error `2^-10.8`.
const GELU: &Pieces<3> = &Pieces::new(Factor::NormalDistribution, -5.25, 0.875);
/// Relative error `2^-11.2`.
const GELU_TANH: &Pieces<3> = &Pieces::new(Factor::TanhOfGelu, -4.5, 0.75);
/// Relative error `2^-10.9`.
const SILU: &Pieces<4> = &Pieces::new(Factor::Sigmoid, -10.0, 6.0);
/// Relative error `2^-10.1`.
const MISH: &Pieces<4> = &Pieces::new(Factor::TanhOfSoftplus, -10.0, 6.0);

macro_rules! activations {
    ($($name:ident: $pieces:ident;)*) => {$(
        #[doc = concat!("[`super::math::", stringify!($name), "`].")]
        #[inline(always)]
        pub fn $name<S: Simd>(s: S, x: S::V) -> S::V {
            $pieces.value(
                s,
                x,
                #[inline(always)]
                |s, x| coarse::$name::<Bf16, S>(s, x),
            )
        }
    )*};
}

activations! {
    gelu: GELU;
    gelu_tanh: GELU_TANH;
    silu: SILU;
    mish: MISH;
}

#[cfg(test)]
mod tests {
    use super::super::math;
    use super::super::simd::{MAX_LANES, Pair};
    use super::*;
    use crate::cpu::{Task, Tier, dispatch};

    /// Each function beside the accurate one, over vectors of neighbouring numbers.
    struct Compare<'a>(&'a [f32]);

    impl Task for Compare<'_> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let s = Pair(s);
            let lanes = |v: [S::V; 2]| {
                let mut lanes = [0f32; MAX_LANES];
                // SAFETY: no vector has more lanes.
                unsafe { s.store(lanes.as_mut_ptr(), v) };
                lanes
            };
            let first = |v: [S::V; 2]| lanes(v)[0];
            for x in self.0.chunks_exact(<Pair<S>>::N) {
                // SAFETY: the chunk is as long as the vector.
                let v = unsafe { s.load(x.as_ptr()) };
                let pairs = [
                    ("gelu", lanes(gelu(s, v)), lanes(math::gelu(s, v))),
                    ("gelu_tanh", lanes(gelu_tanh(s, v)), lanes(math::gelu_tanh(s, v))),
                    ("silu", lanes(silu(s, v)), lanes(math::silu(s, v))),
                    ("mish", lanes(mish(s, v)), lanes(math::mish(s, v))),
                ];
                for (name, got, want) in pairs {
                    for ((x, got), want) in x.iter().zip(got).zip(want) {
                        let same = got == want || (got.is_nan() && want.is_nan());
                        let near = (got - want).abs() <= want.abs() * 2f32.powi(-10) + f32::MIN_POSITIVE;
                        assert!(same || near, "{name} {} ({x:e}): {got:e}, want {want:e}", S::TIER);
                    }
                }
                // Alone or beside others that have no piece: the same bits.
                let alone = s.splat(x[0]);
                let both = [
                    (first(gelu(s, alone)), lanes(gelu(s, v))[0]),
                    (first(gelu_tanh(s, alone)), lanes(gelu_tanh(s, v))[0]),
                    (first(silu(s, alone)), lanes(silu(s, v))[0]),
                    (first(mish(s, alone)), lanes(mish(s, v))[0]),
                ];
                for (alone, among) in both {
                    assert!(alone.to_bits() == among.to_bits() || alone.is_nan(), "{} {:e}", S::TIER, x[0]);
                }
            }
        }
    }

    #[test]
    fn errors_are_below_those_of_rounding_wherever_an_element_stands() {
        let every = (0..=u16::MAX).map(|bits| f32::from_bits((bits as u32) << 16));
        let dense = (-160_000..160_000).map(|i| i as f32 / 10_007.0);
        let mut x: Vec<f32> = every.chain(dense).collect();
        // Once more with strangers in every vector.
        for (i, k) in (0..x.len()).zip((0..x.len()).rev()).step_by(3) {
            x.push(x[i]);
            x.push(x[k]);
            x.push([f32::NAN, f32::INFINITY, -30.0, 0.0][i % 4]);
        }
        for tier in Tier::available() {
            dispatch(tier, Compare(&x));
        }
    }
}
