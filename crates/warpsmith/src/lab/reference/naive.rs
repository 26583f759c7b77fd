//! What a straightforward implementation computes.

use super::{Real, STORED_AS, flushes, tensor_unit};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// Plain `f32` arithmetic whose stored values are rounded to the type of [`storing_as`]: what a straightforward
/// implementation does.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub struct Naive(f32);

macro_rules! naive_arithmetic {
    ($($trait:ident $method:ident $op:tt),*) => {$(
        impl $trait for Naive {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                Naive(self.0 $op other.0)
            }
        }
    )*};
}
naive_arithmetic!(Add add +, Sub sub -, Mul mul *, Div div /);

impl Neg for Naive {
    type Output = Self;
    fn neg(self) -> Self {
        Naive(-self.0)
    }
}

impl Real for Naive {
    fn of(value: f64) -> Self {
        Naive(value as f32)
    }
    fn f64(self) -> f64 {
        self.0 as f64
    }
    #[inline]
    fn stored(self) -> Self {
        Naive(STORED_AS.get().round(self.0 as f64) as f32)
    }
    #[inline]
    fn tf32(self) -> Self {
        // A NaN whose payload is all in the bits that go would become infinity.
        Naive(if self.0.is_nan() { self.0 } else { f32::from_bits(self.0.to_bits() & !0x1fff) })
    }
    fn add_products(self, products: &[Self], subnormal: f64) -> Self {
        let addends = || std::iter::once(&self).chain(products).map(|v| v.f64());
        let truncates = STORED_AS.get().size() == 1;
        match truncates.then(|| tensor_unit(addends().chain([subnormal]))).flatten() {
            Some(unit) => Naive::of(addends().map(|v| (v / unit).trunc() * unit).sum()),
            None => products.iter().fold(self, |sum, &product| sum + product),
        }
    }
    #[inline]
    fn flushed(self) -> Self {
        if self.0.is_subnormal() && flushes() { Naive(0.0) } else { self }
    }
    #[inline]
    fn flushed_factor(self) -> Self {
        self.flushed()
    }
    #[inline]
    fn flushed_in_parts(self) -> Self {
        self.flushed()
    }
    fn exp(self) -> Self {
        Naive(self.0.exp())
    }
    fn ln_1p(self) -> Self {
        Naive(self.0.ln_1p())
    }
    fn tanh(self) -> Self {
        Naive(self.0.tanh())
    }
    fn erf(self) -> Self {
        Naive(libm::erff(self.0))
    }
    fn sqrt(self) -> Self {
        Naive(self.0.sqrt())
    }
    fn sin(self) -> Self {
        Naive(self.0.sin())
    }
    fn cos(self) -> Self {
        Naive(self.0.cos())
    }
    fn powf(self, exponent: Self) -> Self {
        Naive(self.0.powf(exponent.0))
    }
}
