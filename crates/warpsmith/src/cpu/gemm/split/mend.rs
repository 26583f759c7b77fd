//! Sums that tiles cannot make: of rows with infinities, NaN, or numbers so large or small that one of the six products
//! leaves the range of f32, where tiles know no subnormals. They are made again as on AVX-512.

use super::Operand;
use crate::cpu::gemm::buffer::Buffer;
use crate::cpu::gemm::drive::TILE;
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::{Block, Unit, copy_rows};
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side};
use crate::cpu::gemm::vector::{self, LEFT_STRIDE};
use std::ops::RangeInclusive;

/// Elements of k that are multiplied at once.
const DEPTH: usize = 512;
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
fn fits(left: u32, right: u32) -> bool {
    EXPONENTS.contains(&(exponent(left) + exponent(right)))
}

/// The memory that rows are mended in; made when it is needed first.
#[derive(Default)]
pub(super) struct Mender {
    buffer: Buffer,
}

impl Mender {
    const LEFT: usize = PANEL * LEFT_STRIDE;
    const RIGHT: usize = PANEL * DEPTH;

    /// Makes the sums of a tile again that tiles got wrong.
    ///
    /// # Safety
    /// The block and the panel must be inside the operands, and `sums` hold their tile.
    #[cold]
    #[inline(never)]
    pub unsafe fn mend(
        &mut self,
        (left, block, left_largest): (&Side, usize, &Magnitudes),
        (right, panel, right_largest): (&Operand<'_>, usize, &Magnitudes),
        sums: *mut f32,
    ) {
        let bytes = (Self::LEFT + Self::RIGHT + TILE) * size_of::<f32>();
        if self.buffer.len() < bytes {
            self.buffer = Buffer::new(bytes);
            // SAFETY: the buffer was just made. Rows that do not exist are multiplied with the others.
            unsafe { std::ptr::write_bytes(self.buffer.as_ptr(), 0, bytes) };
        }
        let rows = self.buffer.as_ptr().cast::<u32>();
        let packed = rows.wrapping_add(Self::LEFT);
        let out = packed.wrapping_add(Self::RIGHT).cast::<f32>();
        let (isa, unit) = (Isa::Avx512, Unit::F32);
        let mut from = 0;
        loop {
            let units = DEPTH.min(left.k() - from);
            // SAFETY: the buffer has room for a block of k of all rows and columns, which are inside the operands.
            unsafe {
                for g in 0..2 {
                    let (matrix, row, rows_of) = left.half(block, g);
                    let block = Block { matrix, row, rows: rows_of, k: from, len: units };
                    copy_rows(
                        isa.tier(),
                        unit,
                        block,
                        rows.wrapping_add(g * HALF * LEFT_STRIDE),
                        LEFT_STRIDE,
                        units,
                    );
                }
                let right = match *right {
                    Operand::Packed(panels) => panels.at(panel, from),
                    Operand::Rows(side) => {
                        let to = Panels { data: packed, unit, units, width: PANEL };
                        for g in 0..2 {
                            to.pack_half(isa.tier(), side, panel, g, from, units, packed);
                        }
                        packed
                    }
                };
                let (left, right_width) = (rows.cast_const(), PANEL as isize);
                let resume = from > 0;
                let product = vector::Product {
                    rows: PANEL,
                    units,
                    left,
                    right,
                    right_width,
                    out,
                    resume,
                    right_ahead: vector::PANEL_AHEAD,
                    ahead: None,
                };
                vector::multiply(isa, unit, product);
            }
            from += units;
            if from >= left.k() {
                break;
            }
        }
        for (i, &a) in left_largest.iter().enumerate() {
            for (j, &b) in right_largest.iter().enumerate() {
                if !fits(a, b) {
                    // SAFETY: both hold a tile.
                    unsafe { *sums.add(i * PANEL + j) = *out.add(i * PANEL + j) };
                }
            }
        }
    }
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
