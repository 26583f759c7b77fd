//! What tiles multiply: rows of which none of the six products of terms leaves the range of f32. Infinities, NaN and very large
//! or small numbers do.
//!
//! Tiles know no subnormals: they take terms below 2^-126 for zero, and so the products of terms. How much a sum may
//! lose follows from the largest numbers of its two rows. A sum so small that the loss could show is not used
//! ([`may_lack`]): vectors compute it, as they do for rows out of range. So a sum is as exact as one of f32 whatever
//! its factors are, and rows with tiny numbers, such as those that gelu makes, are multiplied by tiles where sums are
//! not tiny too.

use crate::cpu::array;
use crate::cpu::gemm::panel::{HALF, PANEL};
use crate::cpu::scratch::Plain;
use std::arch::x86_64::*;
use std::ops::RangeInclusive;

/// Sums of two exponents (of f32, with its bias) whose products tiles make: each product is below 2^122, so that none of the
/// six overflows, and the largest above 2^-80, so that what is flushed to zero is 2^-46 of it.
const EXPONENTS: RangeInclusive<i32> = 254 - 80..=254 + 120;
/// Exponents of a row's largest number. The parts of smaller numbers would be flushed; a number flushed to zero, times
/// a large one, is too large an error for attention scores, which are not checked one by one.
const LARGEST: RangeInclusive<u32> = 127 - 96..=127 + 80;
/// Exponents of the largest number of a row that tiles multiply with numbers up to one, and add up a thousand times.
pub(super) const VALUES: RangeInclusive<u32> = 127 - 80..=127 + 100;
/// What a sum loses at most for each element of k and a largest factor of one: each of six products may be taken for
/// zero, and so may three terms of each factor, times a number up to one and a bit. That is 12.1 times 2^-126.
const LACK: f32 = 16.0 * f32::MIN_POSITIVE;
/// How many times as large as its loss a sum must be. A unit in the last place of f32 is then four times that.
const ENOUGH: f32 = (1u32 << 26) as f32;
/// An exponent that matches no other.
const NEVER: i32 = 1 << 16;

/// The largest magnitudes of 32 rows, as bits.
pub(super) type Magnitudes = [u32; PANEL];

/// The exponent of a row's largest magnitude. That of a row of zeros matches whatever the others match.
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

/// The bound below which sums of tiles over so many elements of k lose too much, if the largest factors have these
/// magnitudes.
fn least(k: usize, left: u32, right: u32) -> f32 {
    if left == 0 || right == 0 {
        return 0.0;
    }
    k as f32 * (LACK * ENOUGH) * f32::from_bits(left).max(f32::from_bits(right)).max(1.0)
}

/// Whether a sum that tiles made over `k` elements of two rows with these largest magnitudes may not be used.
pub(super) fn is_unfit(k: usize, left: u32, right: u32, sum: f32) -> bool {
    !fits(left, right) || sum.abs() < least(k, left, right)
}

/// Whether some of a tile of sums, [`PANEL`] apart, over `k` elements of rows that match lose too much.
///
/// # Safety
/// Sums of rows that are not zero must be readable, and 32 of each.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn may_lack(k: usize, left: &Magnitudes, right: &Magnitudes, sums: *const f32) -> bool {
    let splat = _mm512_set1_ps;
    let each = splat(k as f32 * (LACK * ENOUGH));
    let columns: [(__mmask16, __m512); 2] = array(|g| {
        // SAFETY: half the magnitudes are a vector.
        let bits = unsafe { _mm512_loadu_si512(right.as_ptr().add(g * HALF).cast()) };
        (_mm512_test_epi32_mask(bits, bits), _mm512_max_ps(_mm512_castsi512_ps(bits), splat(1.0)))
    });
    let mut lacking = 0;
    for (row, &largest) in left.iter().enumerate().filter(|(_, largest)| **largest != 0) {
        let largest = splat(f32::from_bits(largest));
        for (g, &(exist, columns)) in columns.iter().enumerate() {
            let least = _mm512_mul_ps(each, _mm512_max_ps(columns, largest));
            // SAFETY: passed on.
            let sum = _mm512_abs_ps(unsafe { _mm512_loadu_ps(sums.add(row * PANEL + g * HALF)) });
            lacking |= _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(exist, sum, least);
        }
    }
    lacking != 0
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::cpu::Tier;

    #[test]
    fn sums_that_may_lack_something_are_found_by_both() {
        if Tier::supported() < Tier::Avx512 {
            return;
        }
        let mut left = [0; PANEL];
        let mut right = [0; PANEL];
        for (i, (left, right)) in left.iter_mut().zip(&mut right).enumerate().take(PANEL - 3) {
            (*left, *right) = (2f32.powi(i as i32 - 20).to_bits(), 2f32.powi(40 - 3 * i as i32).to_bits());
        }
        let k = 100;
        for exponent in (-140..40).step_by(7) {
            for at in [0, 15, 16 * PANEL + 7, 28 * PANEL + 28, 28 * PANEL + 29, 29 * PANEL, 31 * PANEL + 31] {
                let mut sums = [-1e30f32; PANEL * PANEL];
                sums[at] = -2f32.powi(exponent);
                let unfit = is_unfit(k, left[at / PANEL], right[at % PANEL], sums[at]);
                // SAFETY: the instructions are there, and the memory is the test's.
                let lacking = unsafe { may_lack(k, &left, &right, sums.as_ptr()) };
                assert_eq!(lacking, unfit, "2^{exponent} at {at}");
                let lacks = left[at / PANEL] != 0 && right[at % PANEL] != 0 && exponent < -100;
                assert!(unfit || !lacks);
                assert!(!unfit || exponent < 0);
            }
        }
        assert!(
            !is_unfit(k, 0, 1f32.to_bits(), 0.0) && !is_unfit(k, 1f32.to_bits(), 1f32.to_bits(), f32::NAN)
        );
    }

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
        assert!(fit(0.0, 1e-14) && fit(0.0, 1e24));
        for odd in [f32::INFINITY, f32::NAN, f32::MAX, 1e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert!(!fit(odd, 1.0) && !fit(odd, odd), "{odd}");
        }
        assert!(
            !fit(1e26, 1e-10)
                && !fit(1e20, 1e20)
                && !fit(1e-20, 1e-20)
                && !fit(f32::INFINITY, 0.0)
                && !fit(f32::NAN, 0.0)
        );
    }
}
