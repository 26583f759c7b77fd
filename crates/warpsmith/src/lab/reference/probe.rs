//! The range that a computation needs, and another sample of its error.

use super::{Naive, Real, STORED_AS};
use crate::tensor::DType;
use std::cell::Cell;
use std::cmp::Ordering;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// [`Naive`] arithmetic in which every result is rounded up or down at random, together with the largest number on the way
/// to it, whatever the order of a sum.
///
/// Errors of the elements of a row often have one cause, such as the sum they are all divided by. If the naive computation is
/// right there by luck, it is right in all of them; a second sample tells.
#[derive(Clone, Copy)]
pub struct Probe {
    sample: f32,
    /// The sum of the magnitudes of what was added up: no partial sum is larger.
    mass: f64,
    /// The largest mass on the way.
    peak: f64,
}

thread_local! {
    /// The state of the roundings. They need not be good random numbers, only unrelated to the values.
    static STATE: Cell<u64> = const { Cell::new(0x9e37_79b9_7f4a_7c15) };
}

/// `exact` as one of the two neighbouring f32, at random.
fn round(exact: f64) -> f32 {
    let nearest = exact as f32;
    let error = exact - f64::from(nearest);
    if error == 0.0 || !nearest.is_finite() {
        return nearest;
    }
    let state = STATE.get();
    // xorshift64
    let state = state ^ (state << 13);
    let state = state ^ (state >> 7);
    let state = state ^ (state << 17);
    STATE.set(state);
    let other = if error > 0.0 { nearest.next_up() } else { nearest.next_down() };
    if state & (1 << 40) == 0 || !other.is_finite() { nearest } else { other }
}

impl Probe {
    /// Evaluates with roundings that are the same each time.
    pub fn repeatably<T>(evaluate: impl FnOnce() -> T) -> T {
        STATE.set(0x9e37_79b9_7f4a_7c15);
        evaluate()
    }

    fn new(exact: f64, mass: f64, before: f64) -> Self {
        Probe { sample: round(exact), mass, peak: before.max(mass) }
    }

    /// A function's value.
    fn through(self, exact: f64) -> Self {
        Probe::new(exact, exact.abs(), self.peak)
    }

    fn exact(self) -> f64 {
        f64::from(self.sample)
    }

    /// The largest number on the way.
    pub fn peak(&self) -> f64 {
        self.peak
    }
}

impl PartialEq for Probe {
    fn eq(&self, other: &Self) -> bool {
        self.sample == other.sample
    }
}
impl PartialOrd for Probe {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.sample.partial_cmp(&other.sample)
    }
}
impl Add for Probe {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Probe::new(self.exact() + other.exact(), self.mass + other.mass, self.peak.max(other.peak))
    }
}
impl Sub for Probe {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + -other
    }
}
impl Mul for Probe {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        // An exponential that has overflowed may meet zero, which is NaN.
        let overflowed = self.sample.is_infinite() || other.sample.is_infinite();
        let before = if overflowed { f64::INFINITY } else { self.peak.max(other.peak) };
        Probe::new(self.exact() * other.exact(), self.mass * other.mass, before)
    }
}
impl Div for Probe {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        // Kernels multiply by the reciprocal.
        let reciprocal = 1.0 / other.exact().abs();
        let before = self.peak.max(other.peak).max(reciprocal);
        Probe::new(self.exact() / other.exact(), self.mass * reciprocal, before)
    }
}
impl Neg for Probe {
    type Output = Self;
    fn neg(self) -> Self {
        Probe { sample: -self.sample, ..self }
    }
}

impl Real for Probe {
    fn of(value: f64) -> Self {
        Probe { sample: value as f32, mass: value.abs(), peak: value.abs() }
    }
    fn f64(self) -> f64 {
        self.exact()
    }
    #[inline]
    fn stored(self) -> Self {
        let dtype = STORED_AS.get();
        let peak = self.peak.max(self.mass * (DType::F32.max_finite() / dtype.max_finite()));
        Probe { sample: dtype.round(self.exact()) as f32, peak, ..self }
    }
    #[inline]
    fn tf32(self) -> Self {
        Probe { sample: Naive::of(self.exact()).tf32().f64() as f32, ..self }
    }
    fn add_products(self, products: &[Self], subnormal: f64) -> Self {
        let sum = products.iter().fold(self, |sum, &product| sum + product);
        let naive: Vec<Naive> = products.iter().map(|p| Naive::of(p.exact())).collect();
        if STORED_AS.get().size() == 1 {
            Probe { sample: Naive::of(self.exact()).add_products(&naive, subnormal).f64() as f32, ..sum }
        } else {
            sum
        }
    }
    fn exp(self) -> Self {
        // Too large an exponent gives infinity in every implementation, and its reciprocal zero: that is no overflow to fear.
        let value = self.exact().exp();
        let mass = if value > DType::F32.max_finite() { 1.0 } else { value };
        Probe::new(value, mass, self.peak)
    }
    fn ln_1p(self) -> Self {
        self.through(self.exact().ln_1p())
    }
    fn tanh(self) -> Self {
        self.through(self.exact().tanh())
    }
    fn erf(self) -> Self {
        self.through(libm::erf(self.exact()))
    }
    fn sqrt(self) -> Self {
        self.through(self.exact().sqrt())
    }
    fn sin(self) -> Self {
        self.through(self.exact().sin())
    }
    fn cos(self) -> Self {
        self.through(self.exact().cos())
    }
    fn powf(self, exponent: Self) -> Self {
        let value = self.exact().powf(exponent.exact());
        Probe::new(value, value.abs(), self.peak.max(exponent.peak))
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    fn sum(values: &[f64]) -> Probe {
        values.iter().fold(Probe::zero(), |sum, &x| sum + Probe::of(x))
    }

    #[test]
    fn a_sum_that_another_order_would_overflow_has_a_large_peak() {
        let terms = [3e38, -3e38, 3e38, -3e38, 1.0];
        assert_eq!(sum(&terms).f64(), 1.0);
        assert!(sum(&terms).peak() > 1e39);
        // It is remembered.
        assert!((Probe::one() / (Probe::one() + sum(&terms))).peak() > 1e39);
        assert_eq!(sum(&[1.0, -2.0, 3.0]).peak(), 6.0);
    }

    #[test]
    fn reciprocals_count_and_exponentials_do_not() {
        assert!((Probe::of(1e-40) / Probe::of(1e-40)).peak() > 1e39);
        let sigmoid = Probe::one() / (Probe::one() + Probe::of(1000.0).exp());
        assert_eq!(sigmoid.f64(), 0.0);
        assert!(sigmoid.peak() <= 1000.0);
        // Times zero, one that overflowed is NaN in f32.
        assert_eq!((Probe::of(300.0).exp() * Probe::zero()).peak(), f64::INFINITY);
    }

    #[test]
    fn roundings_go_either_way_and_are_the_same_each_time() {
        let thirds = || {
            Probe::repeatably(|| (0..100).map(|_| (Probe::one() / Probe::of(3.0)).f64()).collect::<Vec<_>>())
        };
        let seen = thirds();
        assert!(seen.iter().any(|x| *x > 1.0 / 3.0) && seen.iter().any(|x| *x < 1.0 / 3.0));
        assert_eq!(seen, thirds());
        assert_eq!((Probe::one() / Probe::of(4.0)).f64(), 0.25);
    }
}
