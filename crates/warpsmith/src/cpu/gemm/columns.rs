//! Matrices whose columns are contiguous: as columns of panels, and transposed as rows.

use super::matrix::{Block, Matrix, Unit, copied_as};
#[cfg(target_arch = "x86_64")]
use super::panel::avx512::transposed;
#[cfg(target_arch = "x86_64")]
use super::panel::{HALF, PANEL};
use crate::cpu::array;
use crate::cpu::prefetch::fetch_near;
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch};
use crate::tensor::{DType, F8E4M3, F8E5M2};
use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// The units of two vectors of neighbouring elements, which fit what units hold.
#[inline(always)]
fn paired<S: Simd>(s: S, unit: Unit, even: S::V, odd: S::V) -> S::V {
    let bits = match unit {
        Unit::F16 => {
            let (even, odd) = (s.h_to_i(s.f32_to_f16(even)), s.h_to_i(s.f32_to_f16(odd)));
            s.ior(even, s.shl(odd, 16))
        }
        // What fits bf16 has zeros in the low half of its f32.
        _ => s.ior(s.shr(s.bits_of(even), 16), s.iand(s.bits_of(odd), s.isplat(!0xffff))),
    };
    s.of_bits(bits)
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
    /// Bytes from an element to the one to prefetch.
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
            let len = |k: usize| if k < matrix.k { columns } else { 0 };
            let (first_len, second_len) = (len(k), len(k.wrapping_add(1)));
            let mut to = dst.wrapping_add(index.wrapping_mul(width)).cast::<f32>();
            let mut column = 0usize;
            while column < columns {
                let mut lane = 0usize;
                while lane < width {
                    let at = column.wrapping_add(lane);
                    let first_count = first_len.saturating_sub(at).min(S::N);
                    let second_count = second_len.saturating_sub(at).min(S::N);
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

/// Units that become columns before they are transposed.
#[cfg(target_arch = "x86_64")]
const STAGE: usize = 64;

/// [`copy_rows`](super::matrix::copy_rows) of a matrix whose columns are contiguous: 16 rows of 16 units at a time are
/// transposed in registers. Prefetches the rows [`PANEL`] further on.
///
/// # Safety
/// As for that, with AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn turn_rows(unit: Unit, block: Block<'_>, dst: *mut u32, stride: usize, padded: usize) {
    let per_unit = unit.elements();
    let Block { matrix, row, rows, k, len } = block;
    let units = len.div_ceil(per_unit);
    let mut stage = [const { std::mem::MaybeUninit::<u32>::uninit() }; HALF * STAGE];
    let stage = stage.as_mut_ptr().cast::<u32>();
    for first in (0..rows).step_by(HALF) {
        let lanes = HALF.min(rows - first);
        for from in (0..units).step_by(STAGE) {
            let count = STAGE.min(units - from);
            let (at, elements) = (from * per_unit, (count * per_unit).min(len - from * per_unit));
            for i in 0..elements {
                fetch_near(matrix.at(row + first + PANEL, k + at + i), 1);
            }
            let part = Block { matrix, row: row + first, rows: lanes, k: k + at, len: elements };
            let to = dst.wrapping_add(first * stride + from);
            // SAFETY: the part is inside the block, the stage holds its units, and the target so many of each row.
            unsafe {
                copy_columns(Tier::Avx512, unit, part, stage, HALF, count);
                for unit in (0..count).step_by(HALF) {
                    let here = HALF.min(count - unit);
                    let columns = array(|i| {
                        // What is past the last unit is not stored.
                        _mm512_loadu_si512(stage.wrapping_add((unit + i.min(here - 1)) * HALF).cast())
                    });
                    let mask = (u32::MAX >> (32 - here)) as __mmask16;
                    for (lane, row) in transposed(columns).into_iter().enumerate().take(lanes) {
                        _mm512_mask_storeu_epi32(to.wrapping_add(lane * stride + unit).cast(), mask, row);
                    }
                }
            }
        }
    }
    for row in 0..rows {
        // SAFETY: the caller's rows hold `padded` units.
        unsafe { std::ptr::write_bytes(dst.wrapping_add(row * stride + units), 0, padded - units) };
    }
}
