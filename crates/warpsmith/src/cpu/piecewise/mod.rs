//! Activations in pieces: a polynomial for each of 32 parts of the range where inputs mostly are, its coefficients
//! looked up in registers. That takes half the instructions of [`super::math`] and [`super::math16`], which cover the
//! rest of the range, and all of it on tiers whose table look-ups would go to memory. NaN and infinities as there.

mod fit;

use super::math;
use super::simd::{Simd, TABLE};
use fit::{Factor, minimax};

/// Where the pieces of a function are. With `z = slope x + start`, which is 2 where they begin, five bits of `z` number
/// them: the upper `BITS` of the mantissa, and the lower ones of the exponent. So their width doubles with `z`.
struct Range<const BITS: u32> {
    slope: f32,
    start: f32,
}

/// Bits of the least `z`.
const FIRST: u32 = 0x4000_0000;

impl<const BITS: u32> Range<BITS> {
    const SHIFT: u32 = 23 - BITS;

    /// Pieces from `least` on; those of the first doubling of `z` are together as wide as `unit`.
    const fn new(least: f64, unit: f64) -> Self {
        let slope = (2.0 / unit) as f32;
        Range { slope, start: (2.0 - least * slope as f64) as f32 }
    }

    /// Where piece `n` begins.
    const fn edge(&self, n: usize) -> f64 {
        let z = f32::from_bits(FIRST + ((n as u32) << Self::SHIFT));
        (z as f64 - self.start as f64) / self.slope as f64
    }

    /// The number of the piece of each lane, in its lowest bits, and `z`.
    #[inline(always)]
    fn find<S: Simd>(&self, s: S, x: S::V) -> (S::I, S::I) {
        let z = s.bits_of(s.fma(x, s.splat(self.slope), s.splat(self.start)));
        (s.shr(z, Self::SHIFT), z)
    }

    /// `y` where there are pieces, elsewhere what `rest` gives for `x`.
    #[inline(always)]
    fn or_else<S: Simd>(&self, s: S, z: S::I, y: S::V, rest: impl Fn() -> S::V) -> S::V {
        // What is past the pieces differs from their `z` in the bits above, NaN too.
        let above = Self::SHIFT + TABLE.ilog2();
        if !s.any_differs(z, FIRST as i32, -1 << above) {
            return y;
        }
        let strange = s.ixor(z, s.isplat(FIRST as i32));
        s.select(s.igt(s.isplat(1), s.shr(strange, above)), y, rest())
    }
}

/// A cubic in `x` itself for each piece: what is relatively accurate for those at zero needs no product with `x`. Good for
/// results that are rounded to bf16.
struct Cubics<const BITS: u32> {
    range: Range<BITS>,
    coefficients: [[f32; TABLE]; 4],
}

impl<const BITS: u32> Cubics<BITS> {
    const fn new(factor: Factor, range: Range<BITS>) -> Self {
        let mut coefficients = [[0.0; TABLE]; 4];
        let mut n = 0;
        while n < TABLE {
            let (low, high) = (range.edge(n), range.edge(n + 1));
            // Through zero there is no constant term.
            let first = if low < 1e-6 && high > -1e-6 { 1 } else { 0 };
            let fitted = minimax(factor, [low, high], 0.0, 4 - first, first == 0);
            let mut k = first;
            while k < 4 {
                coefficients[k][n] = fitted[k - first] as f32;
                k += 1;
            }
            n += 1;
        }
        Cubics { range, coefficients }
    }

    #[inline(always)]
    fn value<S: Simd>(&self, s: S, x: S::V, rest: impl Fn() -> S::V) -> S::V {
        if !S::LOOKS_UP_IN_REGISTERS {
            return rest();
        }
        let (index, z) = self.range.find(s, x);
        let y = horner(s, &self.coefficients, index, x);
        self.range.or_else(s, z, y, rest)
    }
}

/// For each piece a polynomial of `K` terms in the distance from its middle, for what `x` is multiplied by: accurate enough
/// for f32.
struct Centered<const BITS: u32, const K: usize> {
    range: Range<BITS>,
    middles: [f32; TABLE],
    coefficients: [[f32; TABLE]; K],
}

impl<const BITS: u32, const K: usize> Centered<BITS, K> {
    const fn new(factor: Factor, range: Range<BITS>) -> Self {
        let (mut middles, mut coefficients) = ([0.0; TABLE], [[0.0; TABLE]; K]);
        let mut n = 0;
        while n < TABLE {
            let (low, high) = (range.edge(n), range.edge(n + 1));
            middles[n] = (0.5 * (low + high)) as f32;
            let fitted = minimax(factor, [low, high], middles[n] as f64, K, false);
            let mut k = 0;
            while k < K {
                coefficients[k][n] = fitted[k] as f32;
                k += 1;
            }
            n += 1;
        }
        Centered { range, middles, coefficients }
    }

    #[inline(always)]
    fn value<S: Simd>(&self, s: S, x: S::V, rest: impl Fn() -> S::V) -> S::V {
        if !S::LOOKS_UP_IN_REGISTERS {
            return rest();
        }
        let (index, z) = self.range.find(s, x);
        let t = s.sub(x, s.look_up(&self.middles, index));
        let y = s.mul(x, horner(s, &self.coefficients, index, t));
        self.range.or_else(s, z, y, rest)
    }
}

/// The polynomials whose coefficients the lanes of `index` number.
#[inline(always)]
fn horner<S: Simd, const K: usize>(s: S, coefficients: &[[f32; TABLE]; K], index: S::I, x: S::V) -> S::V {
    let mut sum = s.look_up(&coefficients[K - 1], index);
    for c in coefficients[..K - 1].iter().rev() {
        sum = s.fma(sum, x, s.look_up(c, index));
    }
    sum
}

macro_rules! activations {
    ($($name:ident: $pieces:expr, $type:ty;)*) => {$(
        #[doc = concat!("[`math::", stringify!($name), "`].")]
        #[inline(always)]
        pub fn $name<S: Simd>(s: S, x: S::V) -> S::V {
            const PIECES: &$type = &<$type>::new($pieces.0, Range::new($pieces.1, $pieces.2));
            PIECES.value(
                s,
                x,
                #[inline(always)]
                || rest::$name(s, x),
            )
        }
    )*};
}

/// For results that are rounded to bf16: relative errors of `2^-10.8`, `2^-11.2`, `2^-10.9` and `2^-10.1`.
pub mod for_bf16 {
    use super::*;

    mod rest {
        use super::Simd;
        use crate::cpu::math16::{self, Bf16};

        macro_rules! of {
            ($($name:ident)*) => {$(
                #[inline(always)]
                pub fn $name<S: Simd>(s: S, x: S::V) -> S::V {
                    math16::$name::<Bf16, S>(s, x)
                }
            )*};
        }
        of!(gelu gelu_tanh silu mish);
    }

    activations! {
        gelu: (Factor::NormalDistribution, -5.25, 0.875), Cubics<3>;
        gelu_tanh: (Factor::TanhOfGelu, -4.5, 0.75), Cubics<3>;
        silu: (Factor::Sigmoid, -10.0, 6.0), Cubics<4>;
        mish: (Factor::TanhOfSoftplus, -10.0, 6.0), Cubics<4>;
    }
}

/// For results of f32.
pub mod for_f32 {
    use super::math as rest;
    use super::*;

    activations! {
        gelu: (Factor::NormalDistribution, -5.5, 4.0), Centered<4, 8>;
        gelu_tanh: (Factor::TanhOfGelu, -5.0, 3.5), Centered<4, 8>;
        silu: (Factor::Sigmoid, -10.0, 6.0), Centered<4, 7>;
        mish: (Factor::TanhOfSoftplus, -10.0, 6.0), Centered<4, 7>;
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::simd::MAX_LANES;
    use super::*;
    use crate::cpu::{Task, Tier, dispatch};

    /// In the tail the pieces are better than the function they stand for, which rounds its exponent: what is not `got`
    /// from that function is measured against f64.
    fn exact_gelu_tanh(x: &[f32], got: [f32; MAX_LANES], mut want: [f32; MAX_LANES]) -> [f32; MAX_LANES] {
        for ((want, got), x) in want.iter_mut().zip(got).zip(x.iter().copied().map(f64::from)) {
            if got != *want && x.is_finite() {
                let exponent = -1.595_769_121_605_730_7 * (x + 0.044_715 * x * x * x);
                *want = (x / (1.0 + exponent.exp())) as f32;
            }
        }
        want
    }

    /// Each function beside the accurate one, over vectors of neighbouring numbers.
    struct Compare<'a>(&'a [f32]);

    impl Task for Compare<'_> {
        type Out = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let s = s.pair();
            let lanes = |v: <S::Pair as Simd>::V| {
                let mut lanes = [0f32; MAX_LANES];
                // SAFETY: no vector has more lanes.
                unsafe { s.store(lanes.as_mut_ptr(), v) };
                lanes
            };
            let check = |name: &str, bits: i32, x: &[f32], [got, alone, want]: [[f32; MAX_LANES]; 3]| {
                for ((x, got), want) in x.iter().zip(got).zip(want) {
                    let same = got == want || (got.is_nan() && want.is_nan());
                    let near = (got - want).abs() <= want.abs() * 2f32.powi(-bits) + f32::MIN_POSITIVE;
                    assert!(same || near, "{name} {} ({x:e}): {got:e}, want {want:e}", S::TIER);
                }
                let same = got[0].to_bits() == alone[0].to_bits() || alone[0].is_nan();
                assert!(same, "{name} {} ({:e}) depends on its neighbours", S::TIER, x[0]);
            };
            for x in self.0.chunks_exact(<S::Pair as Simd>::N) {
                // SAFETY: the chunk is as long as the vector.
                let (v, alone) = (unsafe { s.load(x.as_ptr()) }, s.splat(x[0]));
                macro_rules! check {
                    ($($name:ident)*) => {$(
                        let want = lanes(math::$name(s, v));
                        let rough = [lanes(for_bf16::$name(s, v)), lanes(for_bf16::$name(s, alone)), want];
                        check(stringify!($name), 10, x, rough);
                        let got = lanes(for_f32::$name(s, v));
                        let want = match stringify!($name) {
                            "gelu_tanh" => exact_gelu_tanh(x, got, want),
                            _ => want,
                        };
                        let fine = [got, lanes(for_f32::$name(s, alone)), want];
                        check(stringify!($name), 21, x, fine);
                    )*};
                }
                check!(gelu gelu_tanh silu mish);
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
