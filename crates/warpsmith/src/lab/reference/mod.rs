//! The arithmetics in which references are evaluated: `f64` for the truth, [`Naive`] for the error of a plain
//! implementation in a given dtype, [`Random`] for its average error, and [`Probe`] for the range it needs.

pub(crate) mod choice;
mod naive;
mod probe;
mod random;

pub use naive::Naive;
pub use probe::Probe;
pub use random::Random;

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
    /// bits below the leading bit of the largest before they are added. `subnormal` is [`subnormal_product`] of the group.
    fn add_products(self, products: &[Self], _subnormal: f64) -> Self {
        products.iter().fold(self, |sum, &product| sum + product)
    }
    /// A product of a matrix product, or a sum. The identity, but under [`flushing`] for bf16: subnormal ones may be zero.
    fn flushed(self) -> Self {
        self
    }
    /// A factor of a matrix product, which may have been computed. The identity, but under [`flushing`] for bf16.
    fn flushed_factor(self) -> Self {
        self
    }
    /// The product of an exponential, at most one, and a value. The identity, but under [`flushing`]: [`Real::flushed`], and in
    /// f32, which is multiplied in parts, none of which may be subnormal.
    fn flushed_in_parts(self) -> Self {
        self
    }
    /// A result that may be off by this, at random. The identity except for [`Random`].
    fn blurred(self, _by: f64) -> Self {
        self
    }
    /// `self` as the truth, `naive` in all other arithmetic: where two results are right, of which the truth is not finite.
    fn or(self, naive: Self) -> Self {
        naive
    }
    /// One for positive numbers, else zero. For [`Random`] a coin's throw where rounding may decide about the sign.
    fn step(self) -> Self {
        Self::of(if self > Self::zero() { 1.0 } else { 0.0 })
    }
    /// e to the power.
    fn exp(self) -> Self;
    /// ln(1 + x).
    fn ln_1p(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Error function.
    fn erf(self) -> Self;
    /// One plus the hyperbolic tangent. Exact in `f64` where they nearly cancel.
    fn one_plus_tanh(self) -> Self {
        Self::one() + self.tanh()
    }
    /// One plus the error function. Exact in `f64` where they nearly cancel.
    fn one_plus_erf(self) -> Self {
        Self::one() + self.erf()
    }
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
    fn or(self, _naive: Self) -> Self {
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
    fn one_plus_tanh(self) -> Self {
        if self < 0.0 { 2.0 / (1.0 + (-2.0 * self).exp()) } else { 1.0 + self.tanh() }
    }
    fn one_plus_erf(self) -> Self {
        libm::erfc(-self)
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

/// Bits below the leading bit of the largest addend that tensor cores keep of products of 16-bit types.
const TENSOR_BITS_16: i32 = 24;

/// The value of the last bit that is kept of a group's addends; `None` if nothing is truncated.
fn tensor_unit(addends: impl Iterator<Item = f64>) -> Option<f64> {
    let largest = addends.fold(0.0, |largest: f64, v| if v.is_nan() { v } else { largest.max(v.abs()) });
    (largest.is_finite() && largest > 0.0).then(|| (largest.log2().floor() - TENSOR_BITS as f64).exp2())
}

/// The smallest number that tensor cores multiply without loss: below it a factor, zero too, has the exponent of this one there.
/// f32 is multiplied in parts, raised by `2^24`.
pub fn smallest_factor() -> f64 {
    let dtype = STORED_AS.get();
    if dtype == DType::F32 {
        2f64.powi(-150)
    } else {
        dtype.smallest_subnormal() / (2.0 * dtype.unit_roundoff())
    }
}

/// The largest product of a group in which a factor is below [`smallest_factor`], as tensor cores align it. All addends lose the
/// digits that this leaves no room for.
pub fn subnormal_product<R: Real>(factors: impl Iterator<Item = (R, R)>) -> f64 {
    let smallest = smallest_factor();
    // Of the parts of f32, some are zero in any factor.
    let in_parts = STORED_AS.get() == DType::F32;
    factors.fold(0.0, |largest, (a, b)| {
        let (a, b) = (a.f64().abs(), b.f64().abs());
        if in_parts && a.max(b).is_finite() {
            return largest.max(smallest * a.max(b));
        }
        let counts = a.min(b) < smallest && a.max(b).is_finite();
        if counts { f64::max(largest, a.max(smallest) * b.max(smallest)) } else { largest }
    })
}

/// How far a sum may be off whose addends were aligned to `subnormal`, a [`subnormal_product`]. Zero for 8-bit types, for which
/// [`Real::add_products`] does it.
pub fn alignment_error(subnormal: f64) -> f64 {
    if STORED_AS.get().size() == 1 || subnormal == 0.0 {
        return 0.0;
    }
    (subnormal.log2().floor() - f64::from(TENSOR_BITS_16)).exp2() * (TENSOR_GROUP as f64).sqrt()
}

/// How far a sum of products of 16 bits may be off on tensor cores, which cut each addend below the last bit of the largest. Shows
/// only where the sum cancels with one that was made otherwise. Zero for other types.
pub fn cutting_error<R: Real>(products: impl Iterator<Item = R>) -> f64 {
    let (count, largest) = products.fold((0, 0.0), |(n, most), p| (n + 1, f64::max(most, p.f64().abs())));
    if STORED_AS.get().size() != 2 || largest == 0.0 || !largest.is_finite() {
        return 0.0;
    }
    (largest.log2().floor() - f64::from(TENSOR_BITS_16)).exp2() * f64::from(count).sqrt()
}

thread_local! {
    /// The type values are stored in. Not a type parameter: references are long, and would be compiled for each type.
    static STORED_AS: Cell<DType> = const { Cell::new(DType::F32) };
}

thread_local! {
    /// Whether subnormal products and sums may be zero.
    static FLUSHES: Cell<bool> = const { Cell::new(false) };
}

/// Runs `evaluate` on this thread for kernels whose instructions take subnormal products and sums for zero.
pub(crate) fn flushing<T>(evaluate: impl FnOnce() -> T) -> T {
    /// Ends it, also where a reference panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            FLUSHES.set(false);
        }
    }
    FLUSHES.set(true);
    let _end = End;
    evaluate()
}

/// Whether the type values are stored in has 16 bits.
pub fn is_stored_in_16_bits() -> bool {
    STORED_AS.get().size() == 2
}

/// Whether results of matrix products lose what is subnormal now.
#[inline]
fn flushes() -> bool {
    FLUSHES.get() && STORED_AS.get() == DType::BF16
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

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tensor_cores_cut_8_bit_addends_below_the_largest() {
        let kept = 1.0 + 2f64.powi(-TENSOR_BITS);
        let sum = |small: f64| Naive::of(1.0).add_products(&[Naive::of(small)], 0.0).f64();
        storing_as(DType::F8E4M3, || {
            assert_eq!((sum(kept - 1.0), sum(2f64.powi(-TENSOR_BITS - 1))), (kept, 1.0));
            let random = Random::of(1.0).add_products(&[Random::of(0.25)], 0.0);
            assert!(random.deviation() > 2f64.powi(-TENSOR_BITS) / 2.0 && random.f64() == 1.25);
            assert!(sum(f64::NAN).is_nan());
        });
        storing_as(DType::BF16, || assert_eq!(sum(2f64.powi(-20)), 1.0 + 2f64.powi(-20)));
    }

    #[test]
    fn errors_of_both_factors_count_where_one_has_cancelled() {
        let cancelled = Random::of(5.0).blurred(1.0) - Random::of(5.0);
        let deviation = |error: f64| (Random::of(1.0).blurred(error) * cancelled).deviation();
        assert!((deviation(0.0) / cancelled.deviation() - 1.0).abs() < 1e-5);
        let both = (deviation(0.0).powi(2) + 4.0 / 9.0).sqrt();
        assert!((deviation(2.0) / both - 1.0).abs() < 1e-5);
    }

    #[test]
    fn what_may_overflow_when_it_is_stored_is_uncertain() {
        let stored = |value: f64| Random::of(value).blurred(100.0).stored().deviation();
        storing_as(DType::F16, || assert!(stored(65400.0).is_infinite() && stored(-65000.0) < 100.0));
        storing_as(DType::BF16, || assert!(stored(65400.0) < 200.0));
    }

    #[test]
    fn tensor_cores_align_subnormal_factors_as_if_they_were_normal() {
        let of = |a: f64, b: f64| subnormal_product([(a, b), (1.0, 1.0)].into_iter());
        storing_as(DType::F16, || {
            assert_eq!((of(2f64.powi(-24), 1024.0), of(0.5, 0.5)), (2f64.powi(-4), 0.0));
            assert_eq!((of(0.0, 1024.0), of(0.0, f64::INFINITY)), (2f64.powi(-4), 0.0));
            let blurred = Random::of(1e-4).blurred(alignment_error(2f64.powi(-4)));
            assert!((2f64.powi(-28)..2f64.powi(-25)).contains(&blurred.deviation()));
            assert_eq!(Random::of(1e-4).blurred(alignment_error(0.0)).deviation(), 0.0);
        });
        storing_as(DType::F32, || assert_eq!(of(1e-44, 8.0), 2f64.powi(-147)));
        storing_as(DType::F8E4M3, || {
            let kept = 2f64.powi(-TENSOR_BITS) / 4.0;
            assert_eq!(Naive::zero().add_products(&[Naive::of(kept)], 0.25).f64(), kept);
            assert_eq!(Naive::zero().add_products(&[Naive::of(kept)], 0.5).f64(), 0.0);
            assert_eq!(alignment_error(1.0), 0.0);
        });
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

    /// A kernel that takes subnormal exponentials for zero must not pass unless its op says so.
    #[test]
    fn exponentials_are_expected_down_to_the_last_subnormal() {
        let small = Random::of(-95.0).exp();
        assert!(small.f64() < f64::from(f32::MIN_POSITIVE) && 6.0 * small.deviation() < small.f64());
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
