//! Every tier against scalar Rust, lane by lane.

use super::*;

/// Values that tell implementations apart: both zeros, subnormals, ties, extremes, infinities and NaN.
const VALUES: [f32; 24] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.999_999_8,
    1e-45,
    -1e-45,
    1e-38,
    1.175_494_4e-38,
    3.4e38,
    f32::MAX,
    f32::MIN,
    1e10,
    -7.25,
    0.333_333_34,
    16_777_216.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

struct Lanewise;

impl Task for Lanewise {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lanes = |v: S::V| {
            let mut out = vec![0.0f32; S::N];
            // SAFETY: `out` holds N values.
            unsafe { s.store(out.as_mut_ptr(), v) };
            out
        };
        let check = |what: &str, v: S::V, want: f32, args: &[f32]| {
            for got in lanes(v) {
                assert!(same(got, want), "{} {what}{args:?}: got {got:e}, want {want:e}", S::TIER);
            }
        };
        for a in VALUES {
            let va = s.splat(a);
            check("abs", s.abs(va), a.abs(), &[a]);
            check("neg", s.neg(va), -a, &[a]);
            check("sqrt", s.sqrt(va), a.sqrt(), &[a]);
            check("floor", s.floor(va), a.floor(), &[a]);
            check("round", s.round(va), a.round_ties_even(), &[a]);
            let yes_no = s.select(s.is_nan(va), s.splat(1.0), s.zero());
            check("is_nan", yes_no, a.is_nan() as u8 as f32, &[a]);
            assert_eq!(s.any(s.is_nan(va)), a.is_nan());
            if a.abs() < 1e9 {
                check("to int and back", s.i_to_f32(s.f32_to_i(va)), a.round_ties_even() as i32 as f32, &[a]);
            }
            for b in VALUES {
                let vb = s.splat(b);
                check("add", s.add(va, vb), a + b, &[a, b]);
                check("sub", s.sub(va, vb), a - b, &[a, b]);
                check("mul", s.mul(va, vb), a * b, &[a, b]);
                check("div", s.div(va, vb), a / b, &[a, b]);
                check("max", s.max(va, vb), if a > b { a } else { b }, &[a, b]);
                check("min", s.min(va, vb), if a < b { a } else { b }, &[a, b]);
                let nan = a.is_nan() || b.is_nan();
                check(
                    "max_nan",
                    s.max_nan(va, vb),
                    if nan {
                        f32::NAN
                    } else if a > b {
                        a
                    } else {
                        b
                    },
                    &[a, b],
                );
                check(
                    "min_nan",
                    s.min_nan(va, vb),
                    if nan {
                        f32::NAN
                    } else if a < b {
                        a
                    } else {
                        b
                    },
                    &[a, b],
                );
                for (what, mask, want) in [
                    ("lt", s.lt(va, vb), a < b),
                    ("le", s.le(va, vb), a <= b),
                    ("gt", s.gt(va, vb), a > b),
                    ("eq", s.eq(va, vb), a == b),
                ] {
                    check(what, s.select(mask, s.splat(1.0), s.zero()), want as u8 as f32, &[a, b]);
                }
                check("with_sign", s.with_sign(s.abs(va), vb), a.abs().copysign(b), &[a, b]);
                for c in VALUES {
                    let vc = s.splat(c);
                    check("fma", s.fma(va, vb, vc), a.mul_add(b, c), &[a, b, c]);
                    check("fnma", s.fnma(va, vb, vc), (-a).mul_add(b, c), &[a, b, c]);
                }
            }
        }
    }
}

#[test]
fn elementwise_methods_match_scalar_rust_on_every_tier() {
    for tier in Tier::available() {
        dispatch(tier, Lanewise);
    }
}

/// xorshift: the tests need variety, not quality.
fn random_bits(state: &mut u64) -> u32 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 24) as u32
}

struct RandomFma;

impl Task for RandomFma {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut state = 0x9e37_79b9_7f4a_7c15;
        let mut out = vec![0.0f32; S::N];
        for _ in 0..200_000 {
            let a = f32::from_bits(random_bits(&mut state));
            let b = f32::from_bits(random_bits(&mut state));
            // Half of the time an addend that nearly cancels the product, where the roundings are hardest.
            let c = match random_bits(&mut state) {
                r if r % 2 == 0 => f32::from_bits(r),
                r => -(a * b) * (1.0 + (r % 64) as f32 * f32::EPSILON),
            };
            // SAFETY: `out` holds N values.
            unsafe { s.store(out.as_mut_ptr(), s.fma(s.splat(a), s.splat(b), s.splat(c))) };
            let want = a.mul_add(b, c);
            assert!(same(out[0], want), "{} fma({a:e}, {b:e}, {c:e}): {:e}, want {want:e}", S::TIER, out[0]);
        }
    }
}

#[test]
fn fma_rounds_once_on_every_tier() {
    for tier in Tier::available() {
        dispatch(tier, RandomFma);
    }
}

struct Integers;

impl Task for Integers {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let check = |what: &str, v: S::I, want: i32| {
            let mut out = vec![0.0f32; S::N];
            // SAFETY: `out` holds N values.
            unsafe { s.store(out.as_mut_ptr(), s.of_bits(v)) };
            assert!(
                out.iter().all(|x| x.to_bits() as i32 == want),
                "{} {what}: {out:?}, want {want}",
                S::TIER
            );
        };
        for a in [0, 1, -1, 0x1234_5678, i32::MIN, i32::MAX, 0x00ff_ff80] {
            let va = s.isplat(a);
            for k in [1, 7, 16, 23, 31] {
                check("shl", s.shl(va, k), a << k);
                check("shr", s.shr(va, k), ((a as u32) >> k) as i32);
                check("sar", s.sar(va, k), a >> k);
            }
            check("low half", s.h_to_i(s.i_to_h(va)), a & 0xffff);
            check("low byte", s.b_to_i(s.i_to_b(va)), a & 0xff);
            for b in [0, 5, -5, i32::MAX, i32::MIN] {
                let vb = s.isplat(b);
                check("iadd", s.iadd(va, vb), a.wrapping_add(b));
                check("isub", s.isub(va, vb), a.wrapping_sub(b));
                check("iand", s.iand(va, vb), a & b);
                check("ior", s.ior(va, vb), a | b);
                check("ixor", s.ixor(va, vb), a ^ b);
                check("imin", s.imin(va, vb), a.min(b));
                check("igt", s.iselect(s.igt(va, vb), s.isplat(1), s.isplat(0)), (a > b) as i32);
            }
        }
        for n in -126..=127 {
            check("pow2", s.bits_of(s.pow2(s.splat(n as f32))), (2f64.powi(n) as f32).to_bits() as i32);
        }
        for n in -252..=252 {
            for v in [0.75f32, 1.0, 1.999_999_9, 0.500_000_06] {
                let want = (v as f64 * 2f64.powi(n)) as f32;
                check("scale2", s.bits_of(s.scale2(s.splat(v), s.splat(n as f32))), want.to_bits() as i32);
            }
        }
    }
}

#[test]
fn integer_methods_match_scalar_rust_on_every_tier() {
    for tier in Tier::available() {
        dispatch(tier, Integers);
    }
}

struct Reductions;

impl Task for Reductions {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut state = 7;
        for round in 0..1000 {
            let mut lanes: Vec<f32> =
                (0..S::N).map(|_| (random_bits(&mut state) as f32 - 2e9) * 1e-3).collect();
            // SAFETY: `lanes` holds N values.
            let load = |lanes: &[f32]| unsafe { s.load(lanes.as_ptr()) };
            let mut tree = lanes.clone();
            while tree.len() > 1 {
                let half = tree.len() / 2;
                tree = (0..half).map(|i| tree[i] + tree[i + half]).collect();
            }
            assert_eq!(s.reduce_add(load(&lanes)).to_bits(), tree[0].to_bits());
            let largest = lanes.iter().copied().fold(f32::MIN, f32::max);
            assert_eq!(s.reduce_max(load(&lanes)), largest);
            let mut swapped = vec![0.0f32; S::N];
            // SAFETY: `swapped` holds N values.
            unsafe { s.store(swapped.as_mut_ptr(), s.swap_pairs(load(&lanes))) };
            assert!((0..S::N).all(|i| swapped[i] == lanes[i ^ 1]), "{lanes:?} {swapped:?}");
            lanes[round % S::N] = f32::NAN;
            assert!(s.reduce_max(load(&lanes)).is_nan());
        }
    }
}

#[test]
fn reductions_and_swaps_use_the_documented_lanes() {
    for tier in Tier::available() {
        dispatch(tier, Reductions);
    }
}

struct Shuffles;

impl Task for Shuffles {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        fn check<S: Simd>(s: S) {
            let mixed: Vec<f32> = (0..2 * S::N).map(|i| i as f32).collect();
            let mut out = vec![0f32; 2 * S::N];
            // SAFETY: both hold the lanes of two vectors.
            unsafe {
                let (a, b) = (s.load(mixed.as_ptr()), s.load(mixed.as_ptr().add(S::N)));
                let (even, odd) = s.unzip(a, b);
                s.store(out.as_mut_ptr(), even);
                s.store(out.as_mut_ptr().add(S::N), odd);
                for i in 0..S::N {
                    assert_eq!((out[i], out[S::N + i]), (mixed[2 * i], mixed[2 * i + 1]), "{}", S::TIER);
                }
                let (a, b) = s.zip(even, odd);
                s.store(out.as_mut_ptr(), a);
                s.store(out.as_mut_ptr().add(S::N), b);
            }
            assert_eq!(out, mixed, "{}", S::TIER);
        }
        check(s);
        check(Pair(s));
    }
}

#[test]
fn unzip_parts_lanes_and_zip_joins_them() {
    for tier in Tier::available() {
        dispatch(tier, Shuffles);
    }
}

struct PairedMemory;

impl Task for PairedMemory {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pair = Pair(s);
        let x: Vec<f32> = (1..=2 * S::N).map(|i| i as f32).collect();
        for n in 0..=2 * S::N {
            let mut y = vec![-1f32; 2 * S::N];
            // SAFETY: both hold the lanes of a pair.
            unsafe { pair.store_partial(y.as_mut_ptr(), pair.load_partial(x.as_ptr(), n), n) };
            assert!(y[..n] == x[..n] && y[n..].iter().all(|&y| y == -1.0), "{} {n}: {y:?}", S::TIER);
        }
    }
}

#[test]
fn pairs_touch_only_the_lanes_asked_for() {
    for tier in Tier::available() {
        dispatch(tier, PairedMemory);
    }
}

struct Lookup;

impl Task for Lookup {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let s = Pair(s);
        let mut table = [0f32; TABLE];
        for (i, entry) in table.iter_mut().enumerate() {
            *entry = i as f32 + 0.5;
        }
        for start in [0, 7, 1000, -3] {
            // Every lane another number, of which the upper bits do not count.
            let numbers: Vec<i32> = (0..MAX_LANES as i32).map(|i| (start + i * 5) ^ (i << 9)).collect();
            let mut out = [0f32; MAX_LANES];
            // SAFETY: both hold the lanes of a vector.
            unsafe {
                let index = s.bits_of(s.load(numbers.as_ptr().cast()));
                s.store(out.as_mut_ptr(), s.look_up(&table, index));
                assert_eq!(s.any_bits(index, i32::MIN), numbers[..<Pair<S>>::N].iter().any(|&n| n < 0));
            }
            for (n, got) in numbers.iter().zip(out).take(<Pair<S>>::N) {
                assert_eq!(got, table[*n as usize % TABLE], "{} {n}", S::TIER);
            }
        }
        for (bits, asked, any) in
            [(0b0110, 0b1001, false), (0b0110, 0b0010, true), (i32::MIN, i32::MIN, true)]
        {
            assert_eq!(s.any_bits(s.isplat(bits), asked), any, "{}", S::TIER);
        }
    }
}

#[test]
fn tables_are_looked_up_by_the_lowest_bits_and_any_bit_is_found() {
    for tier in Tier::available() {
        dispatch(tier, Lookup);
    }
}

#[test]
fn an_unavailable_tier_falls_back() {
    struct Which;
    impl Task for Which {
        type Out = Tier;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> Tier {
            S::TIER
        }
    }
    for tier in Tier::ALL {
        assert_eq!(dispatch(tier, Which), tier.min(Tier::supported()));
    }
}
