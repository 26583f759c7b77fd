//! Sums of columns over the rows of each group: gradients of biases.

use crate::cpu::rows::{load_at, with_float};
use crate::cpu::{CpuElement, Simd, Task, Tier, dispatch, parallel_for};
use crate::tensor::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// Columns that a thread goes down at a time, at least: a cache line of 16-bit elements, or two of f32.
const COLUMNS: usize = 32;
/// The fewest elements a thread adds: less does not pay for waking a thread.
const GRAIN: usize = 1 << 14;

/// `out[g, j]` = the sum over the rows `r` of group `g` of `weights[r] * rows[r, j]`, in f32 and in their order.
#[derive(Clone, Copy)]
pub(in crate::ops) struct ColumnSums<'a> {
    /// Dense rows, of f32 or of the type of the result.
    pub rows: usize,
    pub dtype: DType,
    pub n: usize,
    /// Where the rows of each group begin, and the last one's end.
    pub starts: &'a [usize],
    /// Of each row, if they are not all one.
    pub weights: Option<&'a [f32]>,
    pub out: usize,
    pub out_dtype: DType,
    /// From group to group and along a row of the result.
    pub strides: [isize; 2],
}

impl ColumnSums<'_> {
    /// Computes all sums; of a group without rows they are zero.
    ///
    /// # Safety
    /// Rows and results must be as the fields say.
    pub unsafe fn run(&self, tier: Tier) {
        let (groups, strips) = (self.starts.len() - 1, self.n.div_ceil(COLUMNS));
        let rows = self.starts[groups] / groups.max(1) + 1;
        parallel_for(groups * strips, GRAIN.div_ceil(rows * COLUMNS), |parts| {
            let sums = self;
            with_float!(self.out_dtype, T => match self.dtype {
                DType::F32 => dispatch(tier, Strips::<f32, T> { sums, parts, t: PhantomData }),
                _ => dispatch(tier, Strips::<T, T> { sums, parts, t: PhantomData }),
            });
        });
    }
}

/// Some strips of columns, counted over all groups.
struct Strips<'a, T, U> {
    sums: &'a ColumnSums<'a>,
    parts: Range<usize>,
    t: PhantomData<(T, U)>,
}

impl<T: CpuElement, U: CpuElement> Task for Strips<'_, T, U> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.sums;
        let strips = p.n.div_ceil(COLUMNS);
        let mut lanes = [0f32; COLUMNS];
        for part in self.parts {
            let (group, first) = (part / strips, part % strips * COLUMNS);
            let columns = COLUMNS.min(p.n - first);
            let mut i = 0;
            while i < columns {
                let count = S::N.min(columns - i);
                let mut sum = s.zero();
                for row in p.starts[group]..p.starts[group + 1] {
                    // SAFETY: `run` was promised these rows; vectors of a strip are whole but for its last, and no tier has
                    // more lanes than a strip has columns.
                    unsafe {
                        let x = load_at(s, (p.rows as *const T).add(row * p.n + first), i, count);
                        let x = match p.weights {
                            Some(weights) => s.mul(s.splat(weights[row]), x),
                            None => x,
                        };
                        sum = s.add(sum, x);
                    }
                }
                // SAFETY: as above.
                unsafe { s.store_partial(lanes.as_mut_ptr().add(i), sum, count) };
                i += S::N;
            }
            for (j, &sum) in lanes[..columns].iter().enumerate() {
                let at = group as isize * p.strides[0] + (first + j) as isize * p.strides[1];
                // SAFETY: `run` was promised these results, and no other thread has this strip.
                unsafe { *(p.out as *mut U).wrapping_offset(at) = U::from_f32(sum) };
            }
        }
    }
}
