//! Each function against f64 on every tier: dense sweeps, special values, and the naive f32 formula as a yardstick.

use super::*;
use crate::cpu::{Tier, dispatch, map, simd::Task};

unsafe extern "C" {
    #[link_name = "erf"]
    safe fn erf_f64(x: f64) -> f64;
    #[link_name = "erfc"]
    safe fn erfc_f64(x: f64) -> f64;
    #[link_name = "erff"]
    safe fn erf_f32(x: f32) -> f32;
    #[link_name = "erfcf"]
    safe fn erfc_f32(x: f32) -> f32;
}

/// Applies one function to a slice on a tier.
type Apply = fn(Tier, &[f32]) -> Vec<f32>;

/// A function under test.
struct Subject {
    name: &'static str,
    apply: Apply,
    exact: fn(f64) -> f64,
    /// The plain formula in f32 with the system's math library.
    naive: fn(f32) -> f32,
    /// Largest error in units in the last place, where the function promises one everywhere it is finite.
    ulps: Option<f64>,
}

macro_rules! apply {
    ($f:path) => {{
        struct Run<'a>(&'a [f32], &'a mut [f32]);
        impl Task for Run<'_> {
            type Out = ();
            #[inline(always)]
            fn run<S: Simd>(self, s: S) {
                // SAFETY: equally long slices, borrowed apart.
                unsafe {
                    map(
                        s,
                        self.0.as_ptr(),
                        self.1.as_mut_ptr(),
                        self.0.len(),
                        false,
                        #[inline(always)]
                        |v| $f(s, v),
                    )
                }
            }
        }
        |tier, x| {
            let mut y = vec![0.0; x.len()];
            dispatch(tier, Run(x, &mut y));
            y
        }
    }};
}

fn sigmoid64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
fn sigmoid32(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
fn phi64(x: f64) -> f64 {
    0.5 * erfc_f64(-x * std::f64::consts::FRAC_1_SQRT_2)
}
fn density64(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt()
}
fn softplus64(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
fn softplus32(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
const A64: f64 = 1.595_769_121_605_730_7;
/// sigmoid(2z) is (1 + tanh z) / 2 without the cancellation.
fn gelu_tanh64(x: f64) -> f64 {
    x * sigmoid64(A64 * (x + 0.044715 * x * x * x))
}
fn gelu_tanh32(x: f32) -> f32 {
    0.5 * x * (1.0 + (0.797_884_6f32 * (x + 0.044715 * x * x * x)).tanh())
}
fn d_gelu_tanh64(x: f64) -> f64 {
    let g = sigmoid64(A64 * (x + 0.044715 * x * x * x));
    let other = sigmoid64(-A64 * (x + 0.044715 * x * x * x));
    g + x * (g * other * A64 * (1.0 + 3.0 * 0.044715 * x * x))
}
fn d_gelu_tanh32(x: f32) -> f32 {
    let t = (0.797_884_6f32 * (x + 0.044715 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.797_884_6 * (1.0 + 3.0 * 0.044715 * x * x)
}
fn d_mish64(x: f64) -> f64 {
    let sp = softplus64(x);
    sp.tanh() + x * sigmoid64(x) / sp.cosh().powi(2)
}
fn d_mish32(x: f32) -> f32 {
    let t = softplus32(x).tanh();
    t + x * sigmoid32(x) * (1.0 - t * t)
}

fn subjects() -> Vec<Subject> {
    macro_rules! subject {
        ($f:ident, $exact:expr, $naive:expr, $ulps:expr) => {
            Subject { name: stringify!($f), apply: apply!($f), exact: $exact, naive: $naive, ulps: $ulps }
        };
    }
    vec![
        subject!(exp, f64::exp, f32::exp, Some(1.0)),
        subject!(log, f64::ln, f32::ln, Some(1.0)),
        subject!(log1p, f64::ln_1p, f32::ln_1p, Some(1.5)),
        subject!(softplus, softplus64, softplus32, Some(2.0)),
        subject!(tanh, f64::tanh, f32::tanh, Some(2.5)),
        subject!(sigmoid, sigmoid64, sigmoid32, Some(2.5)),
        subject!(rsqrt, |x| 1.0 / x.sqrt(), |x| 1.0 / x.sqrt(), Some(1.5)),
        subject!(erf, |x| erf_f64(x), |x| erf_f32(x), Some(1.0)),
        subject!(erfc, |x| erfc_f64(x), |x| erfc_f32(x), Some(5.5)),
        subject!(relu, |x| if x < 0.0 { 0.0 } else { x }, |x| if x < 0.0 { 0.0 } else { x }, Some(0.0)),
        subject!(
            d_relu,
            |x| if x.is_nan() { x } else { (x > 0.0) as u8 as f64 },
            |x| (x > 0.0) as u8 as f32,
            Some(0.0)
        ),
        subject!(gelu, |x| x * phi64(x), |x| 0.5 * x * (1.0 + erf_f32(x * 0.707_106_77)), Some(5.0)),
        subject!(
            d_gelu,
            |x| phi64(x) + x * density64(x),
            |x| 0.5 * (1.0 + erf_f32(x * 0.707_106_77)) + x * 0.398_942_3 * (-0.5 * x * x).exp(),
            None
        ),
        subject!(gelu_tanh, gelu_tanh64, gelu_tanh32, None),
        subject!(d_gelu_tanh, d_gelu_tanh64, d_gelu_tanh32, None),
        subject!(silu, |x| x * sigmoid64(x), |x| x * sigmoid32(x), Some(3.5)),
        subject!(
            d_silu,
            |x| sigmoid64(x) + x * sigmoid64(x) * sigmoid64(-x),
            |x| sigmoid32(x) * (1.0 + x * (1.0 - sigmoid32(x))),
            None
        ),
        subject!(mish, |x| x * softplus64(x).tanh(), |x| x * softplus32(x).tanh(), Some(4.5)),
        subject!(d_mish, d_mish64, d_mish32, None),
    ]
}

/// The functions in pieces, whose bits are those of the others only on tiers without.
fn in_pieces() -> Vec<Subject> {
    use crate::cpu::piecewise::for_f32;
    let mut found = subjects();
    found.retain_mut(|subject| {
        subject.apply = match subject.name {
            "gelu" => apply!(for_f32::gelu),
            "gelu_tanh" => apply!(for_f32::gelu_tanh),
            "silu" => apply!(for_f32::silu),
            "mish" => apply!(for_f32::mish),
            _ => return false,
        };
        true
    });
    found
}

/// All magnitudes evenly in the exponent, then the interesting range evenly, then the edges.
fn sweep() -> Vec<f32> {
    let mut x: Vec<f32> = (0..0x7f80_0000u32).step_by(19_961).map(f32::from_bits).collect();
    x.extend((0..200_000).map(|i| i as f32 * (110.0 / 200_000.0)));
    x.extend((0..100_000).map(|i| i as f32 * (8.0 / 100_000.0)));
    for edge in [
        87.33654f32,
        88.72284,
        88.8,
        89.0,
        103.97208,
        104.0,
        1.0,
        0.5,
        14.5,
        20.0,
        f32::MAX,
        f32::MIN_POSITIVE,
    ] {
        x.extend([edge.next_down(), edge, edge.next_up()]);
    }
    // Every value around the zeros of the derivatives, where cancellation shows.
    for zero in [0.751_791_5f32, 0.752_461_43, 1.278_464_6, 1.192_433] {
        x.extend((0..4000).map(|i| f32::from_bits(zero.to_bits() - 2000 + i)));
    }
    let negative: Vec<f32> = x.iter().map(|x| -x).collect();
    x.extend(negative);
    x
}

/// Spacing of f32 at `y`.
fn ulp(y: f64) -> f64 {
    let exponent = (y.abs().max(f32::MIN_POSITIVE as f64).log2().floor() as i32).min(127);
    2f64.powi(exponent - 23)
}

/// Error of a finite-or-not result; infinity where one is NaN or infinite and the other is not the same.
fn error(got: f32, want: f64) -> f64 {
    if got.is_nan() || want.is_nan() {
        return if got.is_nan() && want.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if (want as f32).is_infinite() || got.is_infinite() {
        // Just below the overflow either answer is within half a unit.
        let near_edge = want.abs() > f32::MAX as f64 * (1.0 - 2f64.powi(-23));
        let agree = got as f64 == want as f32 as f64 || (near_edge && got.abs() >= f32::MAX.next_down());
        return if agree { 0.0 } else { f64::INFINITY };
    }
    (got as f64 - want).abs()
}

#[test]
fn errors_stay_within_the_promised_ulps() {
    let x = sweep();
    for subject in subjects().into_iter().chain(in_pieces()) {
        for tier in Tier::available() {
            let (mut worst, mut at) = (0.0, 0.0);
            for (&x, y) in x.iter().zip((subject.apply)(tier, &x)) {
                let want = (subject.exact)(x as f64);
                // A product with a subnormal factor cannot be relatively accurate; the yardstick test covers it.
                if want.abs() < 2e-36 && x.abs() > 1.0 {
                    continue;
                }
                let e = error(y, want) / ulp(want);
                if e > worst {
                    (worst, at) = (e, x);
                }
            }
            println!("{:12} {tier}: {worst:.3} ulp at {at:e}", subject.name);
            if let Some(ulps) = subject.ulps {
                assert!(worst <= ulps, "{} {tier}: {worst:.2} ulp at {at:e}", subject.name);
            }
        }
    }
}

#[test]
fn gelu_is_subnormal_before_it_is_zero() {
    let x: Vec<f32> = (0..4000).map(|i| -13.0 - i as f32 / 2500.0).collect();
    let gelu: Apply = apply!(gelu);
    for tier in Tier::available() {
        for (&x, y) in x.iter().zip(gelu(tier, &x)) {
            let want = x as f64 * phi64(x as f64);
            let allowed = want.abs() * 2f64.powi(-20) + 2f64.powi(-149);
            assert!((y as f64 - want).abs() <= allowed, "{tier} ({x}): {y:e}, want {want:e}");
        }
    }
}

/// Where a result is not within the promised ulps (2 where none are), its error is at most twice the naive formula's
/// largest among exact results of about the same size.
#[test]
fn errors_are_at_most_twice_those_of_the_naive_formula() {
    /// Binades per band.
    const BAND: i32 = 4;
    /// Around its zero a derivative is the difference of terms near 1: results smaller than this share a band, since
    /// single binades there hold too few values to show the naive formula's error.
    const NEAR_ZERO: f64 = 1e-3;
    let x = sweep();
    for subject in subjects().into_iter().chain(in_pieces()) {
        let ys = (subject.apply)(Tier::supported(), &x);
        let promised = subject.ulps.unwrap_or(2.0);
        // Band: our largest error beyond the promise, where it is, and the naive formula's largest.
        let mut bands = std::collections::BTreeMap::<i32, (f64, f32, f64)>::new();
        for (&x, &y) in x.iter().zip(&ys) {
            let want = (subject.exact)(x as f64);
            let size = if (0.5..2.0).contains(&x.abs()) { want.abs().max(NEAR_ZERO) } else { want };
            let (ours, at, naive) = bands.entry((ulp(size).log2() as i32).div_euclid(BAND)).or_default();
            let e = error(y, want);
            if e > *ours && e > promised * ulp(want) {
                (*ours, *at) = (e, x);
            }
            *naive = naive.max(error((subject.naive)(x), want));
        }
        for (ours, at, naive) in bands.into_values() {
            assert!(ours <= 2.0 * naive, "{}: error {ours:e} at {at:e}, naive {naive:e}", subject.name);
        }
    }
}

#[test]
fn special_values_follow_the_formulas() {
    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
    for subject in subjects().into_iter().chain(in_pieces()) {
        for tier in Tier::available() {
            for (&x, y) in specials.iter().zip((subject.apply)(tier, &specials)) {
                let want = (subject.exact)(x as f64) as f32;
                let same = y == want || (y.is_nan() && want.is_nan());
                assert!(same, "{} {tier} ({x}): {y}, want {want}", subject.name);
            }
        }
    }
    let signed = |f: Apply, x: f32| f(Tier::best(), &[x])[0];
    for odd in [apply!(tanh) as Apply, apply!(erf), apply!(log1p), apply!(gelu), apply!(silu), apply!(mish)] {
        assert!(signed(odd, -0.0).is_sign_negative());
        assert!(signed(odd, 0.0).is_sign_positive());
    }
}

#[test]
fn all_tiers_give_the_same_bits() {
    let x = sweep();
    for subject in subjects() {
        let reference = (subject.apply)(Tier::Portable, &x);
        for tier in Tier::available() {
            for ((x, a), b) in x.iter().zip(&reference).zip((subject.apply)(tier, &x)) {
                let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                assert!(same, "{} {tier} ({x:e}): {b:e}, portable {a:e}", subject.name);
            }
        }
    }
}
