//! Sums that vectors must recompute: tiles cannot compute them because products of their terms leave the range of f32,
//! or too coarsely because they are tiny ([`super::range`]).

use super::operand::Operand;
use super::range::{Exponents, Magnitudes, is_unfit, may_lack};
use crate::cpu::gemm::isa::Isa;
use crate::cpu::gemm::matrix::{Block, Unit, copy_rows};
use crate::cpu::gemm::packed::Packed;
use crate::cpu::gemm::panel::{HALF, PANEL, Panels, Side, TILE};
use crate::cpu::gemm::partition::block_len;
use crate::cpu::gemm::vector::{self, LEFT_STRIDE, Start};
use crate::cpu::scratch::{Need, Region};

/// The memory in which a thread recomputes sums.
pub(super) struct Recompute {
    /// A block of rows of the left operand.
    rows: *mut u32,
    /// A part of a panel.
    packed: *mut u32,
    out: *mut f32,
    is_clean: bool,
}

impl Recompute {
    const ROWS: usize = PANEL * LEFT_STRIDE;
    const PACKED: usize = PANEL * LEFT_STRIDE;
    pub const NEED: Need = Need::of::<u32>(Self::ROWS).and::<u32>(Self::PACKED).and::<f32>(TILE);

    /// Takes [`Recompute::NEED`] from `region`.
    pub fn new(region: &mut Region<'_>) -> Recompute {
        Recompute {
            rows: region.slice(Self::ROWS).as_mut_ptr(),
            packed: region.slice(Self::PACKED).as_mut_ptr(),
            out: region.slice(TILE).as_mut_ptr(),
            is_clean: false,
        }
    }

    /// Whether tiles cannot have made some of these sums over `k` elements of rows with these magnitudes.
    ///
    /// # Safety
    /// `sums` must hold those of the rows that are not zero. AVX-512 must be there.
    #[inline(always)]
    pub unsafe fn is_needed(
        k: usize,
        (left, left_exponents): (&Magnitudes, Exponents),
        (right, right_exponents): (&Magnitudes, Exponents),
        sums: *const f32,
    ) -> bool {
        // SAFETY: passed on.
        !left_exponents.fits(right_exponents) || unsafe { may_lack(k, left, right, sums) }
    }

    /// Recomputes the sums of a tile that tiles cannot make, as AVX-512 makes them.
    ///
    /// # Safety
    /// The block and the panel must be inside the operands, `sums` hold their tile, and the scratch be this thread's.
    #[cold]
    #[inline(never)]
    pub unsafe fn tile(
        &mut self,
        (left, block, left_largest): (&Side, usize, &Magnitudes),
        (right, panel, right_largest): (&Operand<'_>, usize, &Magnitudes),
        sums: *mut f32,
    ) {
        let [rows, packed] = [self.rows, self.packed];
        let out = self.out;
        if !self.is_clean {
            self.is_clean = true;
            // Missing rows are multiplied too: leftovers there could be subnormal, which is slow. SAFETY: the memory is
            // this thread's, and holds the rows.
            unsafe { std::ptr::write_bytes(rows, 0, Self::ROWS) };
        }
        let (isa, unit) = (Isa::Avx512, Unit::F32);
        let mut from = 0;
        loop {
            let units = block_len(left.k()).min(left.k() - from);
            // SAFETY: the scratch has room for a block of k of all rows and columns, which are inside the operands.
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
                    Operand::Packed(Packed::Wide(panels)) => panels.at(panel, from),
                    Operand::Packed(Packed::Narrow(panels)) => {
                        panels.widen(isa.tier(), panel, from, units, packed.cast());
                        packed
                    }
                    Operand::Rows(side) => {
                        let to = Panels { data: packed, unit, units, width: PANEL };
                        for g in 0..2 {
                            to.pack_half(isa.tier(), side, panel, g, from, units, packed);
                        }
                        packed
                    }
                };
                let (left, right_width) = (rows.cast_const(), PANEL as isize);
                let start = Start::of_block(from);
                let product = vector::Product {
                    rows: PANEL,
                    units,
                    left,
                    right,
                    right_width,
                    out,
                    start,
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
                // SAFETY: both hold a tile.
                unsafe {
                    let sum = sums.add(i * PANEL + j);
                    if is_unfit(left.k(), a, b, *sum) {
                        *sum = *out.add(i * PANEL + j);
                    }
                }
            }
        }
    }
}
