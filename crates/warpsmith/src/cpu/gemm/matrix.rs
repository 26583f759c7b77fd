//! The operands: matrices anywhere in memory, and their rows as units.
//!
//! A *unit* is 32 bits: one f32, or two neighbouring bf16 or f16 of a row. The dot-product instructions consume pairs as one lane,
//! so in units all types pack the same way.

use super::isa::Isa;
use crate::cpu::prefetch::fetch_near;
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, map};
use crate::tensor::{DType, F8E4M3, F8E5M2};
use half::{bf16, f16};

/// A matrix of `rows` x `k` elements in memory, with any strides.
#[derive(Copy, Clone, Debug)]
pub struct Matrix {
    /// Its first element.
    pub data: *const u8,
    /// The type of its elements.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Length of a row: the dimension that is summed over.
    pub k: usize,
    /// Elements from one row to the next.
    pub row_stride: isize,
    /// Elements from one element of a row to the next.
    pub k_stride: isize,
}

// SAFETY: the pointer is read only, by a call whose caller promised that the memory outlives it.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A matrix whose rows follow each other without gaps.
    pub fn dense<T: CpuElement>(data: &[T], rows: usize, k: usize) -> Matrix {
        assert!(data.len() >= rows * k, "{} elements for {rows} x {k}", data.len());
        let stride = k as isize;
        Matrix { data: data.as_ptr().cast(), dtype: T::DTYPE, rows, k, row_stride: stride, k_stride: 1 }
    }

    /// Address of an element.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, k: usize) -> *const u8 {
        let offset = row as isize * self.row_stride + k as isize * self.k_stride;
        self.data.wrapping_offset(offset * self.dtype.size() as isize)
    }

    /// Bytes from one row to the next.
    pub(super) fn row_bytes(&self) -> isize {
        self.row_stride * self.dtype.size() as isize
    }

    /// Whether the rows lie in memory as rows of units.
    pub(super) fn is_units(&self, unit: Unit) -> bool {
        self.dtype == unit.dtype() && (self.k_stride == 1 || self.k == 1)
    }
}

/// What the 32 bits of a unit hold.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) enum Unit {
    /// One f32.
    F32,
    /// Two bf16.
    Bf16,
    /// Two f16.
    F16,
}

impl Unit {
    /// What products of these types are computed on. The 8-bit floats are exact in bf16 and in f16.
    pub fn of(isa: Isa, x: DType, w: DType) -> Unit {
        let fits =
            |narrow: DType| [x, w].iter().all(|&d| d == narrow || matches!(d, DType::F8E4M3 | DType::F8E5M2));
        match isa {
            _ if isa >= Isa::Avx512Dot && fits(DType::BF16) => Unit::Bf16,
            _ if isa >= Isa::AmxF16 && fits(DType::F16) => Unit::F16,
            _ => Unit::F32,
        }
    }

    /// Elements in a unit.
    pub const fn elements(self) -> usize {
        match self {
            Unit::F32 => 1,
            Unit::Bf16 | Unit::F16 => 2,
        }
    }

    /// The type of the elements.
    pub const fn dtype(self) -> DType {
        match self {
            Unit::F32 => DType::F32,
            Unit::Bf16 => DType::BF16,
            Unit::F16 => DType::F16,
        }
    }

    /// Units in a packed row of `k` elements. Tiles consume 16 units at once, so rows that may go through tiles
    /// are padded with zeros to whole tiles.
    pub const fn packed_len(self, k: usize) -> usize {
        match self {
            Unit::F32 => k,
            Unit::Bf16 | Unit::F16 => k.div_ceil(16 * self.elements()) * 16,
        }
    }
}

/// The types to copy as: halves that stay as they are count as bf16, whichever they are.
fn copied_as(unit: Unit, from: DType) -> (Unit, DType) {
    if (unit, from) == (Unit::F16, DType::F16) { (Unit::Bf16, DType::BF16) } else { (unit, from) }
}

/// The units of two vectors of neighbouring elements, which fit what units hold.
#[inline(always)]
fn paired<S: Simd>(s: S, unit: Unit, even: S::V, odd: S::V) -> S::V {
    let bits = match unit {
        Unit::F16 => {
            let [even, odd] = [even, odd].map(
                #[inline(always)]
                |v| s.h_to_i(s.f32_to_f16(v)),
            );
            s.ior(even, s.shl(odd, 16))
        }
        // What fits bf16 has zeros in the low half of its f32.
        _ => s.ior(s.shr(s.bits_of(even), 16), s.iand(s.bits_of(odd), s.isplat(!0xffff))),
    };
    s.of_bits(bits)
}

/// A block of a matrix to be copied as units: `rows` rows from `row`, elements `k .. k + len` of each.
#[derive(Copy, Clone)]
pub(super) struct Block<'a> {
    pub matrix: &'a Matrix,
    pub row: usize,
    pub rows: usize,
    pub k: usize,
    pub len: usize,
}

/// Copies a block as rows of units, `stride` units apart at `dst`, each padded with zeros to `padded` units.
///
/// # Safety
/// The block must be inside the matrix and `dst` hold `rows * stride` units; `padded <= stride`.
pub(super) unsafe fn copy_rows(
    tier: Tier,
    unit: Unit,
    block: Block<'_>,
    dst: *mut u32,
    stride: usize,
    padded: usize,
) {
    use std::marker::PhantomData as P;
    let (unit, dtype) = copied_as(unit, block.matrix.dtype);
    match unit {
        Unit::F32 => {
            let rows = Rows::<f32> { block, dst: dst.cast(), stride, padded };
            match dtype {
                DType::F32 => dispatch(tier, From::<f32, f32>(rows, P)),
                DType::F16 => dispatch(tier, From::<f16, f32>(rows, P)),
                DType::BF16 => dispatch(tier, From::<bf16, f32>(rows, P)),
                DType::F8E4M3 => dispatch(tier, From::<F8E4M3, f32>(rows, P)),
                DType::F8E5M2 => dispatch(tier, From::<F8E5M2, f32>(rows, P)),
                other => unreachable!("no products of {other}"),
            }
        }
        Unit::Bf16 => {
            let rows = Rows::<bf16> { block, dst: dst.cast(), stride: stride * 2, padded: padded * 2 };
            match dtype {
                DType::BF16 => dispatch(tier, From::<bf16, bf16>(rows, P)),
                DType::F8E4M3 => dispatch(tier, From::<F8E4M3, bf16>(rows, P)),
                DType::F8E5M2 => dispatch(tier, From::<F8E5M2, bf16>(rows, P)),
                other => unreachable!("{other} does not fit bf16"),
            }
        }
        Unit::F16 => {
            let rows = Rows::<f16> { block, dst: dst.cast(), stride: stride * 2, padded: padded * 2 };
            match dtype {
                DType::F8E4M3 => dispatch(tier, From::<F8E4M3, f16>(rows, P)),
                DType::F8E5M2 => dispatch(tier, From::<F8E5M2, f16>(rows, P)),
                other => unreachable!("{other} does not fit f16"),
            }
        }
    }
}

/// A block on its way to rows of `U`.
struct Rows<'a, U> {
    block: Block<'a>,
    dst: *mut U,
    stride: usize,
    padded: usize,
}

struct From<'a, T, U>(Rows<'a, U>, std::marker::PhantomData<T>);

impl<T: CpuElement, U: CpuElement> From<'_, T, U> {
    #[inline(always)]
    fn convert(x: T) -> U {
        if T::DTYPE == U::DTYPE {
            // SAFETY: the same type under two names; a conversion would quieten NaN.
            unsafe { std::mem::transmute_copy::<T, U>(&x) }
        } else {
            U::from_f32(x.to_f32())
        }
    }
}

impl<T: CpuElement, U: CpuElement> Task for From<'_, T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Rows { block: Block { matrix, row, rows, k, len }, dst, stride, padded } = self.0;
        let src = |r: usize, i: usize| matrix.at(row.wrapping_add(r), k.wrapping_add(i)).cast::<T>();
        // SAFETY: `copy_rows` was promised the block and the rows at `dst`.
        unsafe {
            if matrix.k_stride == 1 {
                for r in 0..rows {
                    let to = dst.add(r * stride);
                    if T::DTYPE == U::DTYPE {
                        std::ptr::copy_nonoverlapping(src(r, 0).cast::<U>(), to, len);
                    } else {
                        map(
                            s,
                            src(r, 0),
                            to,
                            len,
                            false,
                            #[inline(always)]
                            |v| v,
                        );
                    }
                }
            } else {
                // Along the columns, which are contiguous in a transposed matrix.
                for i in 0..len {
                    for r in 0..rows {
                        *dst.add(r * stride + i) = Self::convert(*src(r, i));
                    }
                }
            }
            for r in 0..rows {
                std::ptr::write_bytes(dst.add(r * stride + len), 0, padded - len);
            }
        }
    }
}

/// Copies a block of at most 16 rows of a matrix whose columns are contiguous as the columns of a panel: unit `i` of
/// the block at `dst + i * width`, 16 lanes of which those past the rows are zero. `units` units are written; elements
/// past the block count as zero.
///
/// # Safety
/// The block must be inside the matrix, and `dst` hold the units.
pub(super) unsafe fn copy_columns(
    tier: Tier,
    unit: Unit,
    block: Block<'_>,
    dst: *mut u32,
    width: usize,
    units: usize,
) {
    use std::marker::PhantomData as P;
    let (unit, dtype) = copied_as(unit, block.matrix.dtype);
    let columns = Columns { block, dst, width, units, unit };
    match dtype {
        DType::F32 => dispatch(tier, Across::<f32>(columns, P)),
        DType::F16 => dispatch(tier, Across::<f16>(columns, P)),
        DType::BF16 => dispatch(tier, Across::<bf16>(columns, P)),
        DType::F8E4M3 => dispatch(tier, Across::<F8E4M3>(columns, P)),
        DType::F8E5M2 => dispatch(tier, Across::<F8E5M2>(columns, P)),
        other => unreachable!("no columns of {other}"),
    }
}

/// A block on its way to columns of a panel.
struct Columns<'a> {
    block: Block<'a>,
    dst: *mut u32,
    width: usize,
    units: usize,
    unit: Unit,
}

struct Across<'a, T>(Columns<'a>, std::marker::PhantomData<T>);

impl<T: CpuElement> Across<'_, T> {
    /// Element `i` of the rows from `lane` on, zero past the block.
    ///
    /// # Safety
    /// The block must be inside the matrix.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, lane: usize, i: usize) -> S::V {
        let Block { matrix, row, rows, k, len } = self.0.block;
        let p = matrix.at(row.wrapping_add(lane), k.wrapping_add(i)).cast::<T>();
        let count = rows.saturating_sub(lane).min(S::N);
        // SAFETY: `count` rows from `lane` on are in the block, and so is element `i` if it is below `len`.
        unsafe {
            match count {
                _ if i >= len => s.zero(),
                _ if count == S::N => T::load(s, p),
                _ => T::load_partial(s, p, count),
            }
        }
    }
}

impl<T: CpuElement> Task for Across<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Columns { dst, width, units, unit, .. } = self.0;
        let mut lane = 0usize;
        while lane < 16 {
            // SAFETY: `copy_columns` was promised the block and the units at `dst`.
            unsafe {
                let mut to = dst.cast::<f32>().add(lane);
                for i in 0..units {
                    let v = match unit {
                        Unit::F32 => self.load(s, lane, i),
                        _ => paired(s, unit, self.load(s, lane, 2 * i), self.load(s, lane, 2 * i + 1)),
                    };
                    s.store(to, v);
                    to = to.add(width);
                }
            }
            lane = lane.wrapping_add(S::N);
        }
    }
}

/// Panels to be made of all columns of a matrix whose columns are contiguous: `units` units of each.
pub(super) struct Columnwise<'a> {
    pub matrix: &'a Matrix,
    pub unit: Unit,
    pub dst: *mut u32,
    /// Columns of a panel.
    pub width: usize,
    pub units: usize,
    /// Units from one panel to the next.
    pub panel: usize,
    /// Bytes from an element to one that is needed soon.
    pub ahead: isize,
}

/// Copies all columns of one unit, then of the next, so that memory is read in its order. Columns past the last and
/// elements past `k` are zero.
///
/// # Safety
/// The matrix must be readable, and `dst` hold the units of all panels.
pub(super) unsafe fn copy_panels(tier: Tier, mut panels: Columnwise<'_>) {
    use std::marker::PhantomData as P;
    debug_assert_eq!(panels.matrix.row_stride, 1);
    let dtype;
    (panels.unit, dtype) = copied_as(panels.unit, panels.matrix.dtype);
    match dtype {
        DType::F32 => dispatch(tier, Interleave::<f32>(panels, P)),
        DType::F16 => dispatch(tier, Interleave::<f16>(panels, P)),
        DType::BF16 => dispatch(tier, Interleave::<bf16>(panels, P)),
        DType::F8E4M3 => dispatch(tier, Interleave::<F8E4M3>(panels, P)),
        DType::F8E5M2 => dispatch(tier, Interleave::<F8E5M2>(panels, P)),
        other => unreachable!("no panels of {other}"),
    }
}

struct Interleave<'a, T>(Columnwise<'a>, std::marker::PhantomData<T>);

impl<T: CpuElement> Interleave<'_, T> {
    /// `count` elements at `p`, if there are any.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const T, count: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            match count {
                _ if count == S::N => T::load(s, p),
                0 => s.zero(),
                _ => T::load_partial(s, p, count),
            }
        }
    }
}

impl<T: CpuElement> Task for Interleave<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Columnwise { matrix, unit, dst, width, units, panel, ahead } = self.0;
        let per_unit = unit.elements();
        let panel_len = panel.wrapping_mul(width);
        let columns = matrix.rows;
        let step = matrix.k_stride.wrapping_mul(size_of::<T>() as isize);
        let mut row = matrix.data.cast::<T>();
        for index in 0..units {
            let k = index.wrapping_mul(per_unit);
            let rows = [row, row.wrapping_byte_offset(step)];
            row = row.wrapping_byte_offset(step.wrapping_mul(per_unit as isize));
            for from in &rows[..per_unit] {
                fetch_near(from.wrapping_byte_offset(ahead).cast(), columns.wrapping_mul(size_of::<T>()));
            }
            // Rows past the last count as empty.
            let lens = [k, k.wrapping_add(1)].map(|k| if k < matrix.k { columns } else { 0 });
            let mut to = dst.wrapping_add(index.wrapping_mul(width)).cast::<f32>();
            let mut column = 0usize;
            while column < columns {
                let mut lane = 0usize;
                while lane < width {
                    let at = column.wrapping_add(lane);
                    let [first_count, second_count] = lens.map(|len| len.saturating_sub(at).min(S::N));
                    // SAFETY: `copy_panels` was promised the matrix and the panels; what is past either is not read.
                    unsafe {
                        let first = Self::load(s, rows[0].wrapping_add(at), first_count);
                        let v = if per_unit == 2 {
                            paired(s, unit, first, Self::load(s, rows[1].wrapping_add(at), second_count))
                        } else {
                            first
                        };
                        s.store(to.wrapping_add(lane), v);
                    }
                    lane = lane.wrapping_add(S::N);
                }
                to = to.wrapping_add(panel_len);
                column = column.wrapping_add(width);
            }
        }
    }
}
