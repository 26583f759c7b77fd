//! Partial sums on the CPU: how rows are grouped, and how the groups are added.

use super::Target;
use crate::cpu::rows::with_float;
use crate::cpu::{CpuElement, parallel_for};
use crate::tensor::DType;
use std::ops::Range;

/// Rows are summed in at most this many groups, whose borders depend on the number of rows alone: the order of
/// additions, and so the bits, do not depend on the number of threads.
const MAX_GROUPS: usize = 64;
/// Additions a thread makes at least: fewer do not pay for waking a thread.
const GRAIN: usize = 1 << 15;

/// Columns that are added at a time: their sums stay in L1.
const AT_ONCE: usize = 1024;

/// Rows of a group.
pub(in crate::ops) fn rows_per_group(num_rows: usize) -> usize {
    num_rows.div_ceil(MAX_GROUPS).max(4)
}

/// Number of groups.
pub(in crate::ops) fn groups(num_rows: usize) -> usize {
    num_rows.div_ceil(rows_per_group(num_rows))
}

/// Bytes of scratch memory for `sums` gradients of `hidden` elements.
pub(in crate::ops) fn workspace(sums: usize, num_rows: usize, hidden: usize) -> usize {
    sums * groups(num_rows) * hidden * size_of::<f32>()
}

/// Adds the groups' partial sums of each gradient in order. With no rows at all, the gradients are zero.
///
/// # Safety
/// `workspace` must hold `groups(num_rows)` rows of `hidden` sums for each target, and each target `hidden` elements of
/// `dtype`.
pub(in crate::ops) unsafe fn add(
    workspace: usize,
    num_rows: usize,
    hidden: usize,
    dtype: DType,
    targets: impl IntoIterator<Item = Target>,
) {
    let groups = groups(num_rows);
    for (slot, target) in targets.into_iter().enumerate() {
        let partial = workspace + slot * groups * hidden * size_of::<f32>();
        parallel_for(hidden, GRAIN.div_ceil(groups.max(1)), |columns| {
            // SAFETY: passed on; parts have disjoint columns.
            with_float!(dtype, T => unsafe { add_columns::<T>(partial, groups, hidden, columns.clone(), target) });
        });
    }
}

/// # Safety
/// As [`add`], for the `columns` of one gradient.
unsafe fn add_columns<T: CpuElement>(
    partial: usize,
    groups: usize,
    hidden: usize,
    columns: Range<usize>,
    (out, step): Target,
) {
    let (partial, out) = (partial as *const f32, out as *mut T);
    for first in columns.clone().step_by(AT_ONCE) {
        let columns = first..columns.end.min(first + AT_ONCE);
        let mut sums = [0f32; AT_ONCE];
        // SAFETY: the caller promised the partial sums and the gradient.
        unsafe {
            for group in 0..groups {
                let row = std::slice::from_raw_parts(partial.add(group * hidden + first), columns.len());
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            for (column, sum) in columns.zip(sums) {
                *out.offset(column as isize * step) = T::from_f32(sum);
            }
        }
    }
}
