//! Which numbers tiles multiply: those of which none of the six products of terms leaves the range of f32. Infinities, NaN and
//! very large or small numbers do. Tiles know no subnormals.

use crate::cpu::gemm::panel::PANEL;
use crate::cpu::scratch::Plain;
use std::ops::RangeInclusive;

/// Sums of two exponents (of f32, with its bias) whose products tiles make: each product is below 2^122, so that none of the
/// six overflows, and the largest above 2^-80, so that what is flushed to zero is 2^-46 of it.
const EXPONENTS: RangeInclusive<i32> = 254 - 80..=254 + 120;
/// Exponents of a row's largest number. The parts of smaller numbers would be flushed, those of larger ones be infinite.
const LARGEST: RangeInclusive<u32> = 127 - 96..=127 + 100;
/// Exponents of the largest number of a row that tiles multiply with numbers up to one, and add up a thousand times.
pub(super) const VALUES: RangeInclusive<u32> = 127 - 80..=127 + 100;
/// Stands for an exponent that fits to none.
const NEVER: i32 = 1 << 16;

/// The largest magnitudes of 32 rows, as bits.
pub(super) type Magnitudes = [u32; PANEL];

/// The exponent of a row's largest magnitude. That of a row of zeros fits to all that others fit to.
fn exponent(largest: u32) -> i32 {
    match largest >> 23 {
        _ if largest == 0 => 127,
        e if LARGEST.contains(&e) => e as i32,
        e if e < *LARGEST.start() => -NEVER,
        _ => NEVER,
    }
}

/// The lowest and the highest exponent of some rows.
#[derive(Copy, Clone)]
pub(super) struct Exponents {
    low: i32,
    high: i32,
}

impl Exponents {
    pub fn of(magnitudes: &Magnitudes) -> Exponents {
        let all = magnitudes.map(exponent);
        let low = all.iter().fold(i32::MAX, |a, &b| a.min(b));
        Exponents { low, high: all.iter().fold(i32::MIN, |a, &b| a.max(b)) }
    }

    /// Whether tiles make the products of all these rows with all of those.
    pub fn fits(self, other: Exponents) -> bool {
        EXPONENTS.contains(&(self.low + other.low)) && EXPONENTS.contains(&(self.high + other.high))
    }
}

/// The largest magnitudes of 32 rows, and the exponents among them.
#[derive(Copy, Clone)]
pub(crate) struct Sizes {
    magnitudes: Magnitudes,
    exponents: Exponents,
}

// SAFETY: whole numbers of 32 bits alone, of any value.
unsafe impl Plain for Sizes {}

impl Sizes {
    pub(super) fn of(magnitudes: Magnitudes) -> Sizes {
        Sizes { magnitudes, exponents: Exponents::of(&magnitudes) }
    }

    /// Of rows of zeros.
    pub fn nothing() -> Sizes {
        Sizes::of([0; PANEL])
    }

    /// Whether tiles make the products of all these rows with all of those.
    #[inline(always)]
    pub fn fits(&self, other: &Sizes) -> bool {
        self.exponents.fits(other.exponents)
    }

    /// Whether tiles make the product of one of these rows with one of those.
    pub fn fits_at(&self, i: usize, other: &Sizes, j: usize) -> bool {
        fits(self.magnitudes[i], other.magnitudes[j])
    }
}

/// Whether tiles make the products of two rows with these largest magnitudes.
pub(super) fn fits(left: u32, right: u32) -> bool {
    EXPONENTS.contains(&(exponent(left) + exponent(right)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_unless_their_products_leave_the_range() {
        let bits = |x: f32| x.to_bits();
        let fit = |a: f32, b: f32| {
            let exponents = |x: f32| Exponents::of(&[bits(x); PANEL]);
            assert_eq!(fits(bits(a), bits(b)), exponents(a).fits(exponents(b)), "{a} {b}");
            assert_eq!(fits(bits(a), bits(b)), fits(bits(b), bits(a)), "{a} {b}");
            fits(bits(a), bits(b))
        };
        assert!(fit(1.0, 1.0) && fit(1e-12, 1e-12) && fit(1e18, 1e18) && fit(1e-20, 1e20) && fit(0.0, 0.0));
        assert!(fit(0.0, 1e-14) && fit(0.0, 1e30));
        for odd in [f32::INFINITY, f32::NAN, f32::MAX, 1e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert!(!fit(odd, 1.0) && !fit(odd, odd), "{odd}");
        }
        assert!(!fit(1e20, 1e20) && !fit(1e-20, 1e-20) && !fit(f32::INFINITY, 0.0) && !fit(f32::NAN, 0.0));
    }
}
