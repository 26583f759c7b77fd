//! The right operand in panels: 32 rows of the matrix side by side, unit by unit.
//!
//! Panel `p` holds `[units][32]`: for each unit along k the 32 lanes that the kernels multiply at once. Two halves of
//! 16 make one AVX-512 vector, or one tile of 16 x 16 units, each. In the gated form one half comes from the gate's
//! matrix and the other from that of the values it gates, so that both products of an output meet in one tile.

use super::columns::{Columnwise, copy_columns, copy_panels};
use super::matrix::{Block, Matrix, Unit, copy_rows};
use crate::cpu::scratch::Need;
use crate::cpu::{Tier, parallel_for};
use crate::tensor::DType;
use std::ops::Range;

/// Columns of a panel.
pub(super) const PANEL: usize = 32;
/// Columns of half a panel: lanes of a vector, rows of a tile.
pub(super) const HALF: usize = 16;
/// Sums of a tile: a block of rows times a panel.
pub(super) const TILE: usize = PANEL * PANEL;
/// Units of a row that are converted before they are transposed.
const STAGE: usize = 256;

/// One matrix, or two whose products form pairs.
#[derive(Copy, Clone, Debug)]
pub(super) struct Side {
    /// Twice the same for one matrix.
    pub halves: [Matrix; 2],
    pub gated: bool,
}

impl Side {
    pub fn one(matrix: Matrix) -> Side {
        Side { halves: [matrix, matrix], gated: false }
    }

    /// Outputs along this side.
    pub fn len(&self) -> usize {
        self.halves[0].rows
    }

    pub fn k(&self) -> usize {
        self.halves[0].k
    }

    /// Outputs in a panel.
    pub fn panel_len(&self) -> usize {
        if self.gated { HALF } else { PANEL }
    }

    pub fn panels(&self) -> usize {
        self.len().div_ceil(self.panel_len())
    }

    /// Whether it is one non-empty f32 matrix with contiguous columns: then panels can be used in place, except for the
    /// last, which may have fewer columns.
    pub fn lies_in_columns(&self) -> bool {
        let matrix = &self.halves[0];
        let in_columns = matrix.row_stride == 1 && matrix.k_stride > 1 && matrix.k > 0;
        !self.gated && matrix.dtype == DType::F32 && in_columns
    }

    /// The matrix of half `g` of a panel, its first row there and how many rows it has.
    pub fn half(&self, panel: usize, g: usize) -> (&Matrix, usize, usize) {
        let first = panel * self.panel_len() + if self.gated { 0 } else { g * HALF };
        (&self.halves[g], first, self.len().saturating_sub(first).min(HALF))
    }
}

/// Panels of some width in memory: `[panels][units][width]`.
#[derive(Copy, Clone)]
pub(super) struct Panels {
    pub data: *mut u32,
    pub unit: Unit,
    /// Units of a row, padding included.
    pub units: usize,
    /// [`PANEL`], or the number of rows where there are at most [`HALF`]: then tiles are loaded narrower.
    pub width: usize,
}

// SAFETY: parallel loops write disjoint panels and read them after the loop that wrote them.
unsafe impl Send for Panels {}
// SAFETY: as above.
unsafe impl Sync for Panels {}

impl Panels {
    /// Where `unit` of `panel` is.
    #[inline(always)]
    pub fn at(&self, panel: usize, unit: usize) -> *mut u32 {
        self.data.wrapping_add((panel * self.units + unit) * self.width)
    }

    /// Bytes that `panels` panels take.
    pub fn bytes(&self, panels: usize) -> usize {
        panels * self.units * self.width * size_of::<u32>()
    }

    /// The same as scratch.
    pub fn need(&self, panels: usize) -> Need {
        Need::of::<u32>(panels * self.units * self.width)
    }

    /// Packs panels `first .. first + count` of `side` to the front, on all threads.
    ///
    /// # Safety
    /// `data` must hold `bytes(count)` bytes that nobody else uses, and the matrices must be readable.
    pub unsafe fn pack(&self, tier: Tier, side: &Side, first: usize, count: usize) {
        if self.is_columnwise(side) {
            let grain = (1 << 12) / (count * PANEL * HALF).max(1) + 1;
            return parallel_for(self.units.div_ceil(HALF), grain, |range| {
                let (from, to) = (range.start * HALF, (range.end * HALF).min(self.units));
                // SAFETY: each range writes its own units.
                unsafe {
                    self.pack_columns(tier, side, first..first + count, from, to - from, self.at(0, from))
                };
            });
        }
        let halves = if self.width == PANEL { 2 } else { 1 };
        // A part is at least 16 KiB: less is not worth another thread.
        let grain = (1 << 12) / (self.units * HALF).max(1) + 1;
        parallel_for(count * halves, grain, |range| {
            for i in range {
                let (panel, g) = (i / halves, i % halves);
                // SAFETY: each (panel, g) writes its own columns.
                unsafe { self.pack_half(tier, side, first + panel, g, 0, self.units, self.at(panel, 0)) };
            }
        });
    }

    /// Packs the units `from .. from + len` of some panels of `side`, on this thread; there must be `len` units in a row.
    ///
    /// # Safety
    /// `data` must hold as many panels, which nobody else uses, and the matrices must be readable.
    pub unsafe fn pack_here(&self, tier: Tier, side: &Side, panels: Range<usize>, from: usize, len: usize) {
        if self.is_columnwise(side) {
            // SAFETY: passed on.
            return unsafe { self.pack_columns(tier, side, panels, from, len, self.at(0, 0)) };
        }
        for (index, panel) in panels.enumerate() {
            for g in 0..2 {
                // SAFETY: passed on.
                unsafe { self.pack_half(tier, side, panel, g, from, len, self.at(index, 0)) };
            }
        }
    }

    /// Whether panels are best packed side by side, so that memory is read in order.
    fn is_columnwise(&self, side: &Side) -> bool {
        let matrix = &side.halves[0];
        !side.gated && self.width == PANEL && matrix.row_stride == 1 && matrix.k_stride != 1
    }

    /// Packs the units `from .. from + len` of some panels to `dst`, the place of unit `from` of the first.
    ///
    /// # Safety
    /// As for [`Panels::pack_here`], where [`Panels::is_columnwise`].
    unsafe fn pack_columns(
        &self,
        tier: Tier,
        side: &Side,
        panels: Range<usize>,
        from: usize,
        len: usize,
        dst: *mut u32,
    ) {
        /// How many units ahead of the one being packed to prefetch.
        const AHEAD: usize = 8;
        let matrix = &side.halves[0];
        let (row, k) = (panels.start * PANEL, (from * self.unit.elements()).min(matrix.k));
        let part = Matrix {
            data: matrix.at(row, k),
            rows: matrix.rows.min(panels.end * PANEL) - row,
            k: matrix.k - k,
            ..*matrix
        };
        let ahead = (AHEAD * self.unit.elements() * matrix.dtype.size()) as isize * matrix.k_stride;
        let columns = Columnwise {
            matrix: &part,
            unit: self.unit,
            dst,
            width: PANEL,
            units: len,
            panel: self.units,
            ahead,
        };
        // SAFETY: the part is inside the matrix; the target is the caller's.
        unsafe { copy_panels(tier, columns) };
    }

    /// Packs the units `from .. from + len` of one half of a panel to `dst`, the place of unit `from` of the panel.
    ///
    /// # Safety
    /// `dst` must hold `len` units of a panel; half `g` of them is written.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn pack_half(
        &self,
        tier: Tier,
        side: &Side,
        panel: usize,
        g: usize,
        from: usize,
        len: usize,
        dst: *mut u32,
    ) {
        let (matrix, row, rows) = side.half(panel, g);
        let per_unit = self.unit.elements();
        let cols = self.width.min(HALF);
        let target = |unit: usize| dst.wrapping_add(unit * self.width + g * HALF);
        if tier == Tier::Avx512 && matrix.is_units(self.unit) {
            let valid =
                (matrix.k.saturating_sub(from * per_unit)).min(len * per_unit) * self.unit.dtype().size();
            let source = Source {
                data: matrix.at(row, from * per_unit),
                stride: matrix.row_bytes(),
                rows,
                bytes: valid,
            };
            // SAFETY: the rows of the matrix are readable up to `valid` bytes; the target is the caller's.
            return unsafe { transpose(tier, &source, len, target(0), self.width, cols) };
        }
        if matrix.row_stride == 1 && self.width == PANEL && rows > 0 {
            let k = (from * per_unit).min(matrix.k);
            let block = Block { matrix, row, rows, k, len: (matrix.k - k).min(len * per_unit) };
            // SAFETY: the block is inside the matrix; the target is the caller's.
            return unsafe { copy_columns(tier, self.unit, block, target(0), self.width, len) };
        }
        let mut staged = [const { std::mem::MaybeUninit::<u32>::uninit() }; HALF * STAGE];
        let staged = staged.as_mut_ptr().cast::<u32>();
        let mut unit = 0;
        while unit < len {
            let units = STAGE.min(len - unit);
            let k = (from + unit) * per_unit;
            let count = matrix.k.saturating_sub(k).min(units * per_unit);
            let source = Source { data: staged.cast(), stride: STAGE as isize * 4, rows, bytes: units * 4 };
            // SAFETY: at most HALF rows of STAGE units are staged, and then read; the target is the caller's.
            unsafe {
                if count > 0 {
                    copy_rows(
                        tier,
                        self.unit,
                        Block { matrix, row, rows, k, len: count },
                        staged,
                        STAGE,
                        units,
                    );
                } else {
                    std::ptr::write_bytes(staged, 0, HALF * STAGE);
                }
                transpose(tier, &source, units, target(unit), self.width, cols);
            }
            unit += units;
        }
    }
}

/// Packed panels of the right operand: the first is `panel`, and its first unit `unit`.
#[derive(Copy, Clone)]
pub(super) struct Right {
    pub panels: Panels,
    pub panel: usize,
    pub unit: usize,
}

impl Right {
    /// Where a unit of a panel is.
    #[inline(always)]
    pub fn at(&self, panel: usize, unit: usize) -> *const u32 {
        self.panels.at(panel - self.panel, unit - self.unit)
    }
}

/// Transposes a tile of sums, 32 rows of which `cols` columns count: `cols` rows of 32 at `dst`.
///
/// # Safety
/// `sums` must hold 32 rows of [`PANEL`], `dst` `cols` of them.
pub(super) unsafe fn transpose_sums(tier: Tier, sums: *const f32, cols: usize, dst: *mut f32) {
    for g in 0..2 {
        let data = sums.wrapping_add(g * HALF * PANEL).cast();
        let source =
            Source { data, stride: (PANEL * size_of::<f32>()) as isize, rows: HALF, bytes: 4 * cols };
        // SAFETY: the caller's promise.
        unsafe { transpose(tier, &source, cols, dst.cast::<u32>().wrapping_add(g * HALF), PANEL, HALF) };
    }
}

/// Rows of units to be transposed: `rows <= 16` of `bytes` bytes each.
struct Source {
    data: *const u8,
    stride: isize,
    rows: usize,
    bytes: usize,
}

/// Writes `units` rows of `cols` columns at `dst`, `width` units apart: column `c` is row `c` of the source, followed
/// by zeros.
///
/// # Safety
/// The source must be readable, `dst` writable.
unsafe fn transpose(tier: Tier, source: &Source, units: usize, dst: *mut u32, width: usize, cols: usize) {
    #[cfg(target_arch = "x86_64")]
    if tier == Tier::Avx512 {
        // SAFETY: the tier was detected; the memory is the caller's promise.
        return unsafe { avx512::transpose(source, units, dst, width, cols) };
    }
    let _ = tier;
    for c in 0..cols {
        let row = source.data.wrapping_offset(c as isize * source.stride).cast::<u32>();
        let valid = if c < source.rows { units } else { 0 };
        // SAFETY: below `rows` the source holds `units` units, as staging made it.
        unsafe {
            for unit in 0..valid {
                *dst.add(unit * width + c) = row.add(unit).read_unaligned();
            }
            for unit in valid..units {
                *dst.add(unit * width + c) = 0;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    use super::{HALF, Source};
    use crate::cpu::array;
    use std::arch::x86_64::*;

    /// # Safety
    /// As for [`super::transpose`]; AVX-512 F and BW must be there.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn transpose(source: &Source, units: usize, dst: *mut u32, width: usize, cols: usize) {
        let whole =
            if source.rows == HALF && cols == HALF { units.min(source.bytes / 4) / HALF * HALF } else { 0 };
        let (mut from, mut to) = (source.data, dst);
        let end = from.wrapping_add(whole * 4);
        while from < end {
            let mut row = from;
            let block = array(|_| {
                // SAFETY: all 16 rows have these 64 bytes. The prefetch is a hint, and never a fault.
                unsafe {
                    let lane = _mm512_loadu_si512(row.cast());
                    _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(AHEAD).cast());
                    row = row.wrapping_offset(source.stride);
                    lane
                }
            });
            for lane in transposed(block) {
                // SAFETY: the target holds 16 columns of each unit.
                unsafe { _mm512_storeu_si512(to.cast(), lane) };
                to = to.wrapping_add(width);
            }
            from = from.wrapping_add(64);
        }
        // SAFETY: the rest of the caller's promise.
        unsafe { transpose_parts(source, whole, units, dst, width, cols) };
    }

    /// Prefetch distance: transposing this many bytes takes as long as memory takes to answer.
    const AHEAD: usize = 512;

    /// [`transpose`] from unit `unit` on, where rows, columns or units may be missing.
    ///
    /// # Safety
    /// As for [`transpose`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn transpose_parts(
        source: &Source,
        mut unit: usize,
        units: usize,
        dst: *mut u32,
        width: usize,
        cols: usize,
    ) {
        let columns = !(u32::MAX << cols) as __mmask16;
        while unit < units {
            let left = source.bytes.saturating_sub(unit * 4);
            let bytes: __mmask64 = if left >= 64 { !0 } else { !(u64::MAX << left) };
            let mut block = [_mm512_setzero_si512(); HALF];
            let mut row = source.data.wrapping_add(unit * 4);
            for lane in block.iter_mut().take(source.rows) {
                // SAFETY: the mask holds the bytes the row still has.
                *lane = unsafe { _mm512_maskz_loadu_epi8(bytes, row.cast()) };
                row = row.wrapping_offset(source.stride);
            }
            let mut to = dst.wrapping_add(unit * width);
            for lane in transposed(block).iter().take(units - unit) {
                // SAFETY: the target holds `cols` columns of each unit.
                unsafe { _mm512_mask_storeu_epi32(to.cast(), columns, *lane) };
                to = to.wrapping_add(width);
            }
            unit += HALF;
        }
    }

    /// The transpose of 16 x 16 units: pairs, then quads within the 128-bit lanes, then the lanes themselves.
    #[inline(always)]
    pub fn transposed(r: [__m512i; HALF]) -> [__m512i; HALF] {
        // SAFETY: register operations; the caller is compiled for AVX-512.
        unsafe {
            let mut pairs = r;
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
            }
            let mut quads = r;
            for i in 0..4 {
                for j in 0..2 {
                    quads[4 * i + 2 * j] = _mm512_unpacklo_epi64(pairs[4 * i + j], pairs[4 * i + j + 2]);
                    quads[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[4 * i + j], pairs[4 * i + j + 2]);
                }
            }
            let mut out = r;
            for j in 0..4 {
                let low = _mm512_shuffle_i32x4::<0x88>(quads[j], quads[4 + j]);
                let high = _mm512_shuffle_i32x4::<0x88>(quads[8 + j], quads[12 + j]);
                out[j] = _mm512_shuffle_i32x4::<0x88>(low, high);
                out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(low, high);
                let low = _mm512_shuffle_i32x4::<0xdd>(quads[j], quads[4 + j]);
                let high = _mm512_shuffle_i32x4::<0xdd>(quads[8 + j], quads[12 + j]);
                out[4 + j] = _mm512_shuffle_i32x4::<0x88>(low, high);
                out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(low, high);
            }
            out
        }
    }
}
