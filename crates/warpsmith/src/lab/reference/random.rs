//! How well conditioned a result is.

use super::{FLUSHES, Real, STORED_AS, flushes, tensor_unit};
use crate::tensor::DType::{self, F32};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// The exact value together with the variance of the error of [`Naive`] arithmetic, if every rounding errs at
/// random: how well conditioned each element of a result is.
#[derive(Clone, Copy)]
pub struct Random {
    value: f64,
    variance: f64,
}

/// Variance of one rounding of `value`, with errors uniform up to `unit` of it, or up to `least` where numbers become
/// subnormal. Zero is exact.
fn rounding(value: f64, unit: f64, least: f64) -> f64 {
    let bound = if value == 0.0 { 0.0 } else { (value.abs() * unit).max(least) };
    bound * bound / 3.0
}

/// Propagates an error of `variance` through a slope. An exact operand propagates nothing, whatever the slope.
fn carried(slope: f64, variance: f64) -> f64 {
    if variance == 0.0 || slope == 0.0 { 0.0 } else { slope * slope * variance }
}

impl Random {
    fn rounded(value: f64, variance: f64) -> Self {
        // Library functions are off by up to one unit in the last place, basic operations by half; assume one for
        // all.
        let variance = variance + rounding(value, 2.0 * F32.unit_roundoff(), F32.smallest_subnormal());
        Random { value, variance }
    }

    fn through(self, value: f64, slope: f64) -> Self {
        Random::rounded(value, carried(slope, self.variance))
    }

    /// Standard deviation of the naive computation's error.
    pub fn deviation(&self) -> f64 {
        self.variance.sqrt()
    }
}

impl PartialEq for Random {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}
impl PartialOrd for Random {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.value.partial_cmp(&other.value)
    }
}
impl Add for Random {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Random::rounded(self.value + other.value, self.variance + other.variance)
    }
}
impl Sub for Random {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Random::rounded(self.value - other.value, self.variance + other.variance)
    }
}
impl Mul for Random {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        // What both errors make together counts where a factor has cancelled.
        let both = carried(1.0, self.variance * other.variance);
        let variance = carried(other.value, self.variance) + carried(self.value, other.variance) + both;
        Random::rounded(self.value * other.value, variance)
    }
}
impl Div for Random {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        let value = self.value / other.value;
        let variance =
            carried(1.0 / other.value, self.variance) + carried(value / other.value, other.variance);
        Random::rounded(value, variance)
    }
}
impl Neg for Random {
    type Output = Self;
    fn neg(self) -> Self {
        Random { value: -self.value, ..self }
    }
}

impl Real for Random {
    fn of(value: f64) -> Self {
        Random { value, variance: 0.0 }
    }
    fn f64(self) -> f64 {
        self.value
    }
    #[inline]
    fn stored(self) -> Self {
        let dtype = STORED_AS.get();
        // Near the largest number of f16 there is no telling whether it becomes infinite.
        if dtype == DType::F16 && self.value.abs() + 6.0 * self.deviation() > dtype.max_finite() {
            return Random { variance: f64::INFINITY, ..self };
        }
        let rounding = rounding(self.value, dtype.unit_roundoff(), dtype.smallest_subnormal() / 2.0);
        Random { variance: self.variance + rounding, ..self }
    }
    #[inline]
    fn tf32(self) -> Self {
        Random { variance: self.variance + rounding(self.value, 1.0 / 1024.0, 0.0), ..self }
    }
    #[inline]
    fn flushed(self) -> Self {
        // Also of larger ones: in another order, what a product is added to may be subnormal.
        if flushes() { self.blurred(2.0 * f64::from(f32::MIN_POSITIVE)) } else { self }
    }
    #[inline]
    fn flushed_factor(self) -> Self {
        // Rounded otherwise, a number near the border is on its other side.
        let may_be_zero = self.value != 0.0 && self.value.abs() < 2.0 * f64::from(f32::MIN_POSITIVE);
        if may_be_zero && flushes() { self.blurred(f64::from(f32::MIN_POSITIVE)) } else { self }
    }
    #[inline]
    fn flushed_in_parts(self) -> Self {
        // Each of six products of parts may be zero.
        if FLUSHES.get() { self.blurred(6.0 * f64::from(f32::MIN_POSITIVE)) } else { self }
    }
    #[inline]
    fn blurred(self, by: f64) -> Self {
        Random { variance: self.variance + by * by / 3.0, ..self }
    }
    fn step(self) -> Self {
        // As far from zero, the tolerance of a computed number ends.
        let certain = self.variance == 0.0 || self.value.abs() > 6.0 * self.deviation();
        let variance = if certain { 0.0 } else { 0.25 };
        Random { value: self.value.step(), variance }
    }
    fn add_products(self, products: &[Self], subnormal: f64) -> Self {
        let sum = products.iter().fold(self, |sum, &product| sum + product);
        let addends = std::iter::once(self.value).chain(products.iter().map(|p| p.value)).chain([subnormal]);
        let truncates = STORED_AS.get().size() == 1;
        match truncates.then(|| tensor_unit(addends)).flatten() {
            // Each addend loses up to a unit.
            Some(unit) => {
                let cuts = (1 + products.len()) as f64 * unit * unit / 3.0;
                Random { variance: sum.variance + cuts, ..sum }
            }
            None => sum,
        }
    }
    fn exp(self) -> Self {
        self.through(self.value.exp(), self.value.exp())
    }
    fn ln_1p(self) -> Self {
        self.through(self.value.ln_1p(), 1.0 / (1.0 + self.value))
    }
    fn tanh(self) -> Self {
        let value = self.value.tanh();
        self.through(value, 1.0 - value * value)
    }
    fn erf(self) -> Self {
        let slope = std::f64::consts::FRAC_2_SQRT_PI * (-self.value * self.value).exp();
        self.through(libm::erf(self.value), slope)
    }
    fn one_plus_tanh(self) -> Self {
        Random { value: self.value.one_plus_tanh(), ..Random::one() + self.tanh() }
    }
    fn one_plus_erf(self) -> Self {
        Random { value: self.value.one_plus_erf(), ..Random::one() + self.erf() }
    }
    fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        self.through(value, 0.5 / value)
    }
    fn sin(self) -> Self {
        self.through(self.value.sin(), self.value.cos())
    }
    fn cos(self) -> Self {
        self.through(self.value.cos(), self.value.sin())
    }
    fn powf(self, exponent: Self) -> Self {
        let value = self.value.powf(exponent.value);
        let variance = carried(value * exponent.value / self.value, self.variance)
            + carried(value * self.value.ln(), exponent.variance);
        Random::rounded(value, variance)
    }
}
