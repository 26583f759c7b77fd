//! Products of blocks that the caller keeps in the caches: for kernels that feed one product into the next.
//!
//! A product takes up to [`Blocks::rows`] rows of a left operand, [`Blocks::ROW`] units apart, and one panel of a right one:
//! [`Blocks::PANEL`] columns side by side, unit by unit. Its sums are rows of [`Blocks::PANEL`] f32. They are added in the
//! order [`super`] describes, so their bits depend neither on the number of rows nor on where k is cut.

use super::amx::{self, Tiles};
use super::columns::{Columnwise, copy_panels};
#[cfg(target_arch = "x86_64")]
use super::dot;
use super::isa::Isa;
use super::matrix::{Block, Matrix, Unit, copy_rows};
use super::panel::{HALF, PANEL, Panels, Side};
use super::vector::{self, LEFT_STRIDE, Start};
use crate::cpu::Tier;
use crate::cpu::prefetch::fetch_near;
use crate::tensor::DType;
use std::ops::Range;

/// How blocks of one type are multiplied, with the tile registers of this thread.
pub struct Blocks {
    isa: Isa,
    pub(super) unit: Unit,
    splits: bool,
    pub(super) tiles: Tiles,
}

/// One product: `rows` rows of the left operand and a panel of `cols` columns, over `units` units.
#[derive(Copy, Clone)]
pub struct BlockProduct {
    /// Rows, [`Blocks::ROW`] units apart.
    pub left: *const u32,
    /// Number of rows.
    pub rows: usize,
    /// A panel, or columns of units that lie `right_width` apart.
    pub right: *const u32,
    /// [`Blocks::PANEL`]; other values only on tiles, or where a unit is an f32.
    pub right_width: isize,
    /// Units from a unit of the panel to the one prefetched with it.
    pub right_ahead: isize,
    /// Columns of the panel that count.
    pub cols: usize,
    /// Units to multiply; a multiple of [`Blocks::STEP`], except where a unit is an f32.
    pub units: usize,
    /// Rows of [`Blocks::PANEL`] sums.
    pub out: *mut f32,
    /// Whether `out` holds sums to add to.
    pub resume: bool,
}

/// Where in the panels of a right operand a matrix goes.
#[derive(Clone, Debug)]
pub struct Place {
    /// The columns that its rows become; those past the last row become zero. From a multiple of [`Blocks::TILE`] to one.
    pub columns: Range<usize>,
    /// The units that its k becomes, the first in the first of them; what is past it becomes zero.
    pub units: Range<usize>,
    /// Units of a panel.
    pub panel: usize,
}

impl Blocks {
    /// Units from one row of a left operand to the next.
    pub const ROW: usize = LEFT_STRIDE;
    /// Columns of a panel.
    pub const PANEL: usize = PANEL;
    /// Columns that are packed together.
    pub const TILE: usize = HALF;
    /// The usual [`BlockProduct::right_ahead`] of a panel.
    pub const PANEL_AHEAD: isize = vector::PANEL_AHEAD;
    /// For more rows, pack the matrix: in place it is transposed again for every four rows.
    const MOST_IN_PLACE: usize = 8;
    /// For more rows the sums of one panel are enough to keep the processor busy.
    const MOST_ACROSS: usize = 3;
    /// Units that tiles consume at once: rows and panels are padded with zeros to whole steps.
    pub const STEP: usize = amx::STEP;
    /// Elements of k that tiles multiply at once where operands are split.
    pub const SPLIT_STEP: usize = 32;
    /// Room, in f32, for as many of 32 rows or columns, split in three.
    pub const SPLIT: usize = 3 * PANEL * Self::SPLIT_STEP / 2;

    /// Products of two operands of `dtype`.
    pub fn new(isa: Isa, dtype: DType) -> Blocks {
        let isa = isa.min(Isa::supported());
        // SAFETY: tiles are used if [`Isa::has_tiles`] alone, and it is not above what is supported.
        let tiles = unsafe { Tiles::new() };
        Blocks {
            isa,
            unit: Unit::of(isa, dtype, dtype),
            splits: isa.has_tiles() && dtype == DType::F32,
            tiles,
        }
    }

    /// The most rows of a product.
    pub fn rows(&self) -> usize {
        let at_once = vector::block_rows(self.isa);
        if self.on_tiles() || self.splits() { PANEL } else { PANEL / at_once * at_once }
    }

    /// The type of the operands' elements: that of the tensors, or f32 where they are widened.
    pub fn dtype(&self) -> DType {
        self.unit.dtype()
    }

    /// Elements in a unit.
    pub fn per_unit(&self) -> usize {
        self.unit.elements()
    }

    /// Units of a packed row of `k` elements.
    pub fn units(&self, k: usize) -> usize {
        self.unit.packed_len(k).next_multiple_of(Self::STEP)
    }

    /// Whether tiles multiply the elements in three parts ([`super::SplitBlocks`]): f32, but not f16 that is widened to
    /// f32 where tiles cannot multiply it: a single token reads half as many bytes then, and splitting would take
    /// longer than reading.
    pub fn splits(&self) -> bool {
        self.splits
    }

    /// Whether products of so few rows can use matrices in place on tiles.
    pub fn multiplies_direct(&self, rows: usize) -> bool {
        self.on_tiles() && rows <= HALF
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn tier(&self) -> Tier {
        self.isa.tier()
    }

    fn on_tiles(&self) -> bool {
        self.isa.has_tiles() && self.unit != Unit::F32
    }

    /// Packs rows of a matrix as rows of a left operand.
    ///
    /// # Safety
    /// The rows must be readable and `dst` hold as many rows of [`Blocks::ROW`] units; `k` must not exceed them.
    pub unsafe fn pack_rows(&self, matrix: &Matrix, rows: Range<usize>, dst: *mut u32) {
        let block = Block { matrix, row: rows.start, rows: rows.len(), k: 0, len: matrix.k };
        // SAFETY: passed on.
        unsafe { copy_rows(self.isa.tier(), self.unit, block, dst, Self::ROW, self.units(matrix.k)) }
    }

    /// Packs all rows of a matrix as columns of panels, and prefetches the matrix that is `ahead` bytes from it, which
    /// is needed next.
    ///
    /// # Safety
    /// The matrix must be readable and `dst` hold all panels.
    pub unsafe fn pack_panels(&self, matrix: &Matrix, ahead: isize, place: &Place, dst: *mut u32) {
        let Place { columns, units, panel } = place;
        let target = |column: usize| dst.wrapping_add((column / PANEL * panel + units.start) * PANEL);
        // SAFETY: passed on.
        unsafe {
            if matrix.row_stride == 1 && columns.start.is_multiple_of(PANEL) {
                let (dst, units) = (target(columns.start), units.len());
                let panels =
                    Columnwise { matrix, unit: self.unit, dst, width: PANEL, units, panel: *panel, ahead };
                return copy_panels(self.isa.tier(), panels);
            }
            // Rows are numbered as if the first one were the first column of the panels.
            let shift = -(columns.start as isize) * matrix.row_bytes();
            let rows = columns.start + matrix.rows;
            let side = Side::one(Matrix { data: matrix.data.wrapping_offset(shift), rows, ..*matrix });
            for half in columns.start / HALF..columns.end / HALF {
                for row in half * HALF..rows.min((half + 1) * HALF) {
                    let bytes = if matrix.k_stride == 1 { matrix.k * matrix.dtype.size() } else { 0 };
                    fetch_near(side.halves[0].at(row, 0).wrapping_offset(ahead), bytes);
                }
                let dst = target(half * HALF);
                let panels = Panels { data: dst, unit: self.unit, units: *panel, width: PANEL };
                let (index, g) = (half * HALF / PANEL, half % 2);
                panels.pack_half(self.isa.tier(), &side, index, g, 0, units.len(), dst);
            }
        }
    }

    /// Whether [`Self::multiply_in_place`] is possible and pays.
    pub fn multiplies_in_place(&self, rows: usize) -> bool {
        self.isa.tier() == Tier::Avx512 && self.unit == Unit::F32 && rows <= Self::MOST_IN_PLACE
    }

    /// The product of `rows` rows of a left operand with at most [`Blocks::TILE`] rows of an f32 matrix that are used
    /// in place, with the bits it has if they are packed: sums in the first columns of rows of [`Blocks::PANEL`] at
    /// `out`. Prefetches the matrix that is `ahead` bytes from this one.
    ///
    /// # Safety
    /// [`Self::multiplies_in_place`] must return true. The operands must be readable, the matrix have a row and
    /// neighbouring elements in a row, and `out` hold the sums.
    pub unsafe fn multiply_in_place(
        &self,
        left: *const f32,
        rows: usize,
        matrix: &Matrix,
        ahead: isize,
        out: *mut f32,
    ) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: passed on.
        unsafe {
            let left = dot::Rows { data: left, stride: Self::ROW, count: rows };
            dot::multiply_in_place(left, matrix, ahead, out);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (left, rows, matrix, ahead, out);
    }

    /// Whether [`Self::multiply_across`] is possible and pays.
    pub fn multiplies_across(&self, rows: usize) -> bool {
        self.isa.tier() == Tier::Avx512 && self.unit == Unit::F32 && rows <= Self::MOST_ACROSS
    }

    /// [`Self::multiply`] of `panels` adjacent panels, whose sums are `apart` floats apart. The additions to one sum
    /// depend on each other; those of several panels do not.
    ///
    /// # Safety
    /// As for [`Self::multiply`], for each panel; [`Self::multiplies_across`] must return true.
    pub unsafe fn multiply_across(&self, p: &BlockProduct, panels: usize, apart: usize) {
        #[cfg(target_arch = "x86_64")]
        for row in 0..p.rows {
            let across = dot::Across {
                row: p.left.wrapping_add(row * Self::ROW).cast(),
                lines: p.right.cast(),
                width: p.right_width,
                ahead: p.right_ahead,
                count: p.units,
                out: p.out.wrapping_add(row * PANEL),
                apart,
                resume: p.resume,
            };
            // SAFETY: passed on.
            unsafe { dot::multiply_across(across, panels) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (p, panels, apart);
    }

    /// The product of the first rows of two matrices, summed in f64 and rounded once.
    ///
    /// # Safety
    /// The rows must be readable, as long as each other, and no longer than a row of a left operand.
    pub unsafe fn multiply_finely(&self, left: &Matrix, right: &Matrix) -> f32 {
        let mut wide = [[0f32; Self::ROW]; 2];
        for (matrix, row) in [left, right].into_iter().zip(&mut wide) {
            let block = Block { matrix, row: 0, rows: 1, k: 0, len: matrix.k };
            // SAFETY: passed on.
            unsafe {
                copy_rows(self.isa.tier(), Unit::F32, block, row.as_mut_ptr().cast(), Self::ROW, matrix.k);
            }
        }
        let products = wide[0].iter().zip(&wide[1]).map(|(&l, &r)| l as f64 * r as f64);
        products.take(left.k).sum::<f64>() as f32
    }

    /// Computes a product.
    ///
    /// # Safety
    /// The memory of `p` must be as its fields say.
    pub unsafe fn multiply(&mut self, p: &BlockProduct) {
        let BlockProduct { left, rows, right, right_width, right_ahead, cols, units, out, resume } = *p;
        if !self.on_tiles() {
            let (start, ahead) = (Start::resuming(resume), None);
            let product =
                vector::Product { rows, units, left, right, right_width, right_ahead, out, start, ahead };
            // SAFETY: passed on; `Blocks::new` chose a supported instruction set.
            return unsafe { vector::multiply(self.isa, self.unit, product) };
        }
        let halves = |n: usize| [n.min(HALF), n.saturating_sub(HALF)];
        let left = left.cast::<u8>();
        let stride = Self::ROW * size_of::<u32>();
        let product = amx::Product {
            shape: amx::Shape { rows: halves(rows), cols: halves(cols) },
            steps: units / Self::STEP,
            left: [left, left.wrapping_add(HALF * stride)],
            left_stride: stride as isize,
            right,
            right_width: right_width as usize,
            out,
            resume,
        };
        // SAFETY: passed on.
        unsafe { self.tiles.multiply(self.unit, &product) }
    }
}
