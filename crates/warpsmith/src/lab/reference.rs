//! The arithmetics in which references are evaluated: `f64` for the truth, [`Naive`] for the error of a plain
//! implementation in a given dtype, and [`Random`] for its average error.

use crate::tensor::DType;
use std::cell::Cell;
use std::ops::{Add, Div, Index, Mul, Neg, Sub};

/// Numbers a reference computes with.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Conversion from `f64`.
    fn of(value: f64) -> Self;
    /// Conversion to `f64`.
    fn f64(self) -> f64;
    /// The value after being stored in a tensor of the case's dtype. A reference calls this where intermediate
    /// results pass through memory. The identity for `f64`.
    fn stored(self) -> Self;
    /// The value truncated to the 10 mantissa bits of TF32, as tensor cores read it. The identity for `f64`.
    fn tf32(self) -> Self;
    /// Adds a group of at most [`TENSOR_GROUP`] products to the sum `self` the way tensor cores do for the case's
    /// dtype: one by one, except for 8-bit types, where the sum and the products are truncated to [`TENSOR_BITS`]
    /// bits below the leading bit of the largest before they are added.
    fn add_products(self, products: &[Self]) -> Self {
        products.iter().fold(self, |sum, &product| sum + product)
    }
    /// e to the power.
    fn exp(self) -> Self;
    /// ln(1 + x).
    fn ln_1p(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Error function.
    fn erf(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Sine.
    fn sin(self) -> Self;
    /// Cosine.
    fn cos(self) -> Self;
    /// Power.
    fn powf(self, exponent: Self) -> Self;

    /// Zero.
    fn zero() -> Self {
        Self::of(0.0)
    }

    /// One.
    fn one() -> Self {
        Self::of(1.0)
    }

    /// The larger of two numbers; NaN if either is NaN.
    fn max_nan(self, other: Self) -> Self {
        if self.f64().is_nan() || self > other { self } else { other }
    }
}

impl Real for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn f64(self) -> f64 {
        self
    }
    fn stored(self) -> Self {
        self
    }
    fn tf32(self) -> Self {
        self
    }
    fn exp(self) -> Self {
        self.exp()
    }
    fn ln_1p(self) -> Self {
        self.ln_1p()
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
    fn sin(self) -> Self {
        self.sin()
    }
    fn cos(self) -> Self {
        self.cos()
    }
    fn powf(self, exponent: Self) -> Self {
        self.powf(exponent)
    }
}

/// Products of 8-bit types that tensor cores add at once.
pub const TENSOR_GROUP: usize = 32;
/// Bits below the leading bit of the largest addend that tensor cores keep when they add products of 8-bit types.
pub const TENSOR_BITS: i32 = 13;

/// The value of the last bit that is kept of a group's addends; `None` if nothing is truncated.
fn tensor_unit(addends: impl Iterator<Item = f64>) -> Option<f64> {
    let largest = addends.fold(0.0, |largest: f64, v| if v.is_nan() { v } else { largest.max(v.abs()) });
    (largest.is_finite() && largest > 0.0).then(|| (largest.log2().floor() - TENSOR_BITS as f64).exp2())
}

thread_local! {
    /// The type values are stored in. Not a type parameter: references are long, and would be compiled for each type.
    static STORED_AS: Cell<DType> = const { Cell::new(DType::F32) };
}

/// Runs `evaluate` with values stored as `dtype` on this thread; as `f32` for types that are not computed in.
pub(crate) fn storing_as<T>(dtype: DType, evaluate: impl FnOnce() -> T) -> T {
    /// Puts the type back, also where a reference panics.
    struct Before(DType);
    impl Drop for Before {
        fn drop(&mut self) {
            STORED_AS.set(self.0);
        }
    }
    let dtype = match dtype {
        DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => dtype,
        _ => DType::F32,
    };
    let _before = Before(STORED_AS.replace(dtype));
    evaluate()
}

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
    fn stored(self) -> Self {
        Naive(STORED_AS.get().round(self.0 as f64) as f32)
    }
    fn tf32(self) -> Self {
        // A NaN whose payload is all in the bits that go would become infinity.
        Naive(if self.0.is_nan() { self.0 } else { f32::from_bits(self.0.to_bits() & !0x1fff) })
    }
    fn add_products(self, products: &[Self]) -> Self {
        let addends = || std::iter::once(&self).chain(products).map(|v| v.f64());
        match tensor_unit(addends()).filter(|_| STORED_AS.get().size() == 1) {
            Some(unit) => Naive::of(addends().map(|v| (v / unit).trunc() * unit).sum()),
            None => products.iter().fold(self, |sum, &product| sum + product),
        }
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

/// The exact value together with the variance of the error of [`Naive`] arithmetic, if every rounding errs at
/// random: how well conditioned each element of a result is.
#[derive(Clone, Copy)]
pub struct Random {
    value: f64,
    variance: f64,
}

/// Variance of one rounding of `value`, with relative errors uniform up to `unit`.
fn rounding(value: f64, unit: f64) -> f64 {
    let bound = value * unit;
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
        let variance = variance + rounding(value, 2.0 * DType::F32.unit_roundoff());
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
        let variance = carried(other.value, self.variance) + carried(self.value, other.variance);
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
    fn stored(self) -> Self {
        Random { variance: self.variance + rounding(self.value, STORED_AS.get().unit_roundoff()), ..self }
    }
    fn tf32(self) -> Self {
        Random { variance: self.variance + rounding(self.value, 1.0 / 1024.0), ..self }
    }
    fn add_products(self, products: &[Self]) -> Self {
        let sum = products.iter().fold(self, |sum, &product| sum + product);
        let addends = std::iter::once(self.value).chain(products.iter().map(|p| p.value));
        match tensor_unit(addends).filter(|_| STORED_AS.get().size() == 1) {
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

/// A row-major array of reference numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Array<R> {
    /// Sizes.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Vec<R>,
}

impl<R: Real> Array<R> {
    /// An array of zeros.
    pub fn zeros(shape: &[usize]) -> Self {
        Array { shape: shape.to_vec(), data: vec![R::zero(); shape.iter().product()] }
    }

    /// Conversion from `f64` elements.
    pub fn of(shape: &[usize], data: &[f64]) -> Self {
        Array { shape: shape.to_vec(), data: data.iter().map(|&x| R::of(x)).collect() }
    }

    /// Size of the last dimension (one for a scalar).
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The rows along the last dimension.
    pub fn rows(&self) -> impl Iterator<Item = &[R]> {
        let n = self.row_len();
        (0..self.data.len().checked_div(n).unwrap_or(0)).map(move |r| &self.data[r * n..(r + 1) * n])
    }

    /// An array of this shape computed element by element from the elements of this one.
    pub fn map(&self, f: impl Fn(R) -> R) -> Self {
        Array { shape: self.shape.clone(), data: self.data.iter().map(|&x| f(x)).collect() }
    }
}

/// The inputs of a reference, by position in the op's spec.
pub struct Inputs<'a, R> {
    arrays: &'a [Option<Array<R>>],
    wanted: u32,
}

impl<'a, R> Inputs<'a, R> {
    /// Inputs, and a bit for every argument present in the call, outputs too.
    pub fn new(arrays: &'a [Option<Array<R>>], wanted: u32) -> Self {
        Inputs { arrays, wanted }
    }

    /// An input, if given.
    pub fn get(&self, index: usize) -> Option<&'a Array<R>> {
        self.arrays[index].as_ref()
    }

    /// Whether an argument, such as an optional output, is part of the call.
    pub fn wants(&self, index: usize) -> bool {
        self.wanted & (1 << index) != 0
    }

    /// Number of arguments of the op: the length of what the reference returns.
    pub fn count(&self) -> usize {
        self.arrays.len()
    }
}

impl<R> Index<usize> for Inputs<'_, R> {
    type Output = Array<R>;
    fn index(&self, index: usize) -> &Array<R> {
        self.arrays[index].as_ref().expect("a required input")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_cores_cut_8_bit_addends_below_the_largest() {
        let kept = 1.0 + 2f64.powi(-TENSOR_BITS);
        let sum = |small: f64| Naive::of(1.0).add_products(&[Naive::of(small)]).f64();
        storing_as(DType::F8E4M3, || {
            assert_eq!((sum(kept - 1.0), sum(2f64.powi(-TENSOR_BITS - 1))), (kept, 1.0));
            let random = Random::of(1.0).add_products(&[Random::of(0.25)]);
            assert!(random.deviation() > 2f64.powi(-TENSOR_BITS) / 2.0 && random.f64() == 1.25);
            assert!(sum(f64::NAN).is_nan());
        });
        storing_as(DType::BF16, || assert_eq!(sum(2f64.powi(-20)), 1.0 + 2f64.powi(-20)));
    }

    #[test]
    fn naive_rounds_only_what_is_stored() {
        let x = Naive::of(1.0) + Naive::of(2f64.powi(-12));
        assert_eq!(x.f64(), 1.0 + 2f64.powi(-12));
        storing_as(DType::BF16, || {
            assert_eq!(x.stored().f64(), 1.0);
            storing_as(DType::F16, || assert_eq!(Naive::of(70000.0).stored().f64(), f64::INFINITY));
            assert_eq!(x.stored().f64(), 1.0);
        });
        // Not beyond, and not for types that are not computed in.
        for dtype in [DType::F32, DType::I64] {
            storing_as(dtype, || assert_eq!(x.stored().f64(), x.f64()));
        }
        let panics = std::panic::catch_unwind(|| storing_as(DType::BF16, || panic!("a reference")));
        assert!(panics.is_err() && x.stored().f64() == x.f64());
    }

    #[test]
    fn cancellation_shows_in_the_deviation() {
        let (a, b) = (Random::of(1.0) / Random::of(3.0), Random::of(1.0) / Random::of(3.0001));
        let difference = a - b;
        assert!(a.deviation() / a.f64() < 1e-7);
        assert!(difference.deviation() / difference.f64() > 1e-4);
        let product = Random::of(0.0) * a;
        assert_eq!((product.f64(), product.deviation()), (0.0, 0.0));
    }
}
