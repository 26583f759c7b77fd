//! The operands: matrices anywhere in memory, and their rows as units.
//!
//! A *unit* is 32 bits: one f32, or two neighbouring bf16 or f16 of a row. The dot-product instructions consume pairs as one lane,
//! so in units all types pack the same way.

#[cfg(target_arch = "x86_64")]
use super::columns::turn_rows;
use super::isa::Isa;
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

/// The types to copy as: 16-bit types that are only copied count as bf16.
pub(super) fn copied_as(unit: Unit, from: DType) -> (Unit, DType) {
    if (unit, from) == (Unit::F16, DType::F16) { (Unit::Bf16, DType::BF16) } else { (unit, from) }
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
    #[cfg(target_arch = "x86_64")]
    if tier == Tier::Avx512 && block.matrix.row_stride == 1 && block.matrix.k_stride != 1 {
        // SAFETY: passed on; the tier was detected.
        return unsafe { turn_rows(unit, block, dst, stride, padded) };
    }
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
                // Along the columns, which are contiguous in a transposed matrix. AVX-512 has a path of its own for
                // those.
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
