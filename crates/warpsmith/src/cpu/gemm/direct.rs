//! Few rows of bf16 or f16 times a matrix that is used in place.
//!
//! If the product is with the rows of the matrix, those are the left operand, so that only sums are transposed, whose
//! bits are the same ([`super::amx`]). If it is with the columns, pairs of rows become units just before they are
//! needed. Both prefetch between their steps: all prefetches at once would wait for L1 fill buffers.

use super::amx::{Product, Shape};
use super::block::Blocks;
use super::matrix::{Matrix, Unit};
use super::panel::{HALF, PANEL, Panels, Side};
use crate::cpu::prefetch::fetch_near;
use std::arch::asm;
use std::arch::x86_64::*;

/// At most [`HALF`] rows of a matrix of 16-bit elements, which follow each other.
#[derive(Copy, Clone)]
pub(crate) struct Rows {
    pub data: *const u8,
    /// Bytes from one row to the next.
    pub stride: isize,
    pub count: usize,
    /// Bytes to what is prefetched.
    pub ahead: isize,
}

impl Rows {
    fn at(&self, row: usize) -> *const u8 {
        self.data.wrapping_offset(row as isize * self.stride)
    }

    /// Prefetches `bytes` bytes of a row that is needed later.
    #[inline(always)]
    fn fetch(&self, row: usize, bytes: usize) {
        fetch_near(self.at(row).wrapping_offset(self.ahead), bytes);
    }
}

/// Two tiles of rows times `cols` columns of `steps` whole steps.
pub(crate) struct DirectProduct {
    pub left: [Rows; 2],
    /// As [`Blocks::pack_columns`] leaves them.
    pub right: *const u32,
    pub cols: usize,
    pub steps: usize,
    /// [`PANEL`] rows of [`PANEL`] sums each; `cols` of each are written, for rows that exist.
    pub out: *mut f32,
}

impl Blocks {
    /// Packs the rows of a matrix, at most [`HALF`], as columns of a right operand that is as wide as there are.
    ///
    /// # Safety
    /// [`Self::multiplies_direct`] must return true, the matrix be readable, and `dst` hold the units.
    pub(crate) unsafe fn pack_columns(&self, matrix: &Matrix, dst: *mut u32) {
        let units = self.units(matrix.k);
        let panels = Panels { data: dst, unit: self.unit, units, width: matrix.rows };
        // SAFETY: passed on.
        unsafe { panels.pack_half(self.tier(), &Side::one(*matrix), 0, 0, 0, units, dst) }
    }

    /// Computes a product.
    ///
    /// # Safety
    /// [`Self::multiplies_direct`] must return true, and the memory of `p` be as its fields say.
    pub(crate) unsafe fn multiply_direct(&mut self, p: &DirectProduct) {
        let shape = Shape { rows: p.left.map(|rows| rows.count), cols: [p.cols, 0] };
        // SAFETY: passed on.
        unsafe {
            if shape.rows != [HALF; 2] {
                let product = Product {
                    shape,
                    steps: p.steps,
                    left: p.left.map(|rows| rows.data),
                    left_stride: p.left[0].stride,
                    right: p.right,
                    right_width: p.cols,
                    out: p.out,
                    resume: false,
                };
                return self.tiles.multiply(self.unit, &product);
            }
            self.tiles.configure(shape);
            match self.unit {
                Unit::Bf16 => multiply_whole_bf16(p),
                Unit::F16 => multiply_whole_f16(p),
                Unit::F32 => unreachable!("tiles do not multiply f32"),
            }
        }
    }
}

/// Two whole tiles of rows.
macro_rules! multiply_whole {
    ($dot:literal, $name:ident) => {
        /// # Safety
        /// The tiles must be configured for two by one tiles, and the memory of `p` be as its fields say.
        #[inline(always)]
        unsafe fn $name(p: &DirectProduct) {
            const STEP_BYTES: usize = 64;
            let asked = PANEL.div_ceil(p.steps);
            // SAFETY: tile loads and stores touch the rows of the configured shape, which the caller promised. The compiler knows no
            // tile registers, so they keep from one of these to the next what is not changed here.
            unsafe {
                asm!("tilezero tmm0", "tilezero tmm2", options(nomem, nostack));
                for step in 0..p.steps {
                    for row in step * asked..PANEL.min((step + 1) * asked) {
                        p.left[row / HALF].fetch(row % HALF, p.steps * STEP_BYTES);
                    }
                    asm!(
                        "tileloadd tmm6, [{right} + {width}]",
                        "tileloadd tmm4, [{l0} + {s0}]",
                        concat!($dot, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm5, [{l1} + {s1}]",
                        concat!($dot, " tmm2, tmm5, tmm6"),
                        right = in(reg) p.right.wrapping_add(step * HALF * p.cols),
                        width = in(reg) p.cols * size_of::<u32>(),
                        l0 = in(reg) p.left[0].data.wrapping_add(step * STEP_BYTES),
                        s0 = in(reg) p.left[0].stride,
                        l1 = in(reg) p.left[1].data.wrapping_add(step * STEP_BYTES),
                        s1 = in(reg) p.left[1].stride,
                        options(nostack, readonly),
                    );
                }
                asm!(
                    "tilestored [{out} + {width}], tmm0",
                    "tilestored [{out} + {width} + 2048], tmm2",
                    out = in(reg) p.out,
                    width = in(reg) PANEL * size_of::<f32>(),
                    options(nostack),
                );
            }
        }
    };
}

multiply_whole!("tdpbf16ps", multiply_whole_bf16);
multiply_whole!("tdpfp16ps", multiply_whole_f16);

/// Interleaves pairs of rows: units of a right operand whose columns are the elements of a row.
pub(crate) struct Pairs {
    rows: [Rows; 2],
    columns: usize,
    to: *mut u32,
    done: usize,
}

impl Pairs {
    /// Two tiles of rows of `columns` elements, a multiple of 32, which become [`HALF`] times as many units at `to`. What is
    /// past the last row becomes zero.
    pub fn new(rows: [Rows; 2], columns: usize, to: *mut u32) -> Pairs {
        Pairs { rows, columns, to, done: 0 }
    }

    /// Interleaves some more pairs.
    ///
    /// # Safety
    /// The rows must be readable, and the target hold the units.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn advance(&mut self, pairs: usize) {
        const fn order(first: u16) -> [u16; PANEL] {
            let (mut order, mut i) = ([0; PANEL], 0);
            while i < PANEL {
                order[i] = first + i as u16 / 2 + PANEL as u16 * (i as u16 % 2);
                i += 1;
            }
            order
        }
        static ORDERS: [[u16; PANEL]; 2] = [order(0), order(HALF as u16)];
        let end = HALF.min(self.done + pairs);
        // SAFETY: passed on; the orders are whole vectors.
        unsafe {
            let low = _mm512_loadu_si512(ORDERS[0].as_ptr().cast());
            let high = _mm512_loadu_si512(ORDERS[1].as_ptr().cast());
            for pair in self.done..end {
                let (rows, row) = (&self.rows[2 * pair / HALF], 2 * pair % HALF);
                rows.fetch(row, 2 * self.columns);
                rows.fetch(row + 1, 2 * self.columns);
                let (first, second) = (rows.at(row).cast::<u16>(), rows.at(row + 1).cast::<u16>());
                // Rows that are not there are not read.
                let mask = |row: usize| if row < rows.count { __mmask32::MAX } else { 0 };
                let (first_mask, second_mask) = (mask(row), mask(row + 1));
                let to = self.to.add(pair * self.columns);
                for column in (0..self.columns).step_by(PANEL) {
                    let a = _mm512_maskz_loadu_epi16(first_mask, first.wrapping_add(column).cast());
                    let b = _mm512_maskz_loadu_epi16(second_mask, second.wrapping_add(column).cast());
                    let units = to.add(column);
                    _mm512_storeu_si512(units.cast(), _mm512_permutex2var_epi16(a, low, b));
                    _mm512_storeu_si512(units.add(HALF).cast(), _mm512_permutex2var_epi16(a, high, b));
                }
            }
        }
        self.done = end;
    }
}
