//! Adds the partial sums in scratch memory: one launch for all sums of a call.

use super::super::Problem;
use super::super::problem::{Order, Part};
use super::super::sm90::Divisor;
use super::super::split::{self, Split};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::element;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Sums of a call: of both products, and of the columns of `dz`.
const MOST: usize = 3;
/// Columns of a thread, as in the device code, its threads, and those of them that have different columns where the others
/// have further parts.
pub(super) const UNIT: usize = split::ROW_UNIT;
const THREADS: usize = 256;
const LANES: usize = 32;

kernel_params! {
    struct AddParams { sums: [AddedSum; 3] }
}

kernel_params! {
    /// As [`Sum`]; blocks from `first_block` on are for it, and it has `units` of columns, `per_row` of them in a row.
    struct AddedSum {
        parts: u64, out: u64,
        between: i64, pitch: i64, out_row: i64, out_col: i64,
        per_row: Divisor,
        units: u32, first_block: u32, columns: i32, count: i32, vector: i32, shared: i32,
    }
}

pub(super) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_backward_add", code: include_str!("add.cu") },
    prelude: AddParams::prelude,
    function: "linear_backward_add",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.map(|dtype| vec![element(dtype)]).into(),
};

/// A matrix that is the sum of `count` others, which are `between` elements apart. Their rows are `pitch` apart, a multiple of
/// [`UNIT`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum {
    pub parts: usize,
    pub count: usize,
    pub between: usize,
    pub pitch: usize,
    pub rows: usize,
    pub columns: usize,
    pub out: usize,
    pub out_row: isize,
    pub out_col: isize,
    /// Whether [`UNIT`] neighbours of a row of the result can be written at once.
    pub vector: bool,
    /// Whether the warps of a block share the parts, because there are many.
    pub is_shared: bool,
}

impl Sum {
    /// The sum of the parts of a product, at `scratch`.
    pub fn of(split: &Split, product: &Problem, part: &Part, scratch: usize) -> Sum {
        Sum {
            parts: scratch,
            count: split.parts(),
            between: split::between(product),
            pitch: split::pitch(product),
            rows: product.m,
            columns: product.n,
            out: part.out,
            out_row: product.out.row,
            out_col: product.out.col,
            vector: product.out_order == Order::Rows,
            is_shared: false,
        }
    }

    fn per_row(&self) -> usize {
        self.columns.div_ceil(UNIT)
    }

    fn units(&self) -> usize {
        self.rows * self.per_row()
    }

    fn blocks(&self) -> usize {
        self.units().div_ceil(if self.is_shared { LANES } else { THREADS })
    }

    fn params(&self, first_block: u32) -> AddedSum {
        AddedSum {
            parts: self.parts as u64,
            out: self.out as u64,
            between: self.between as i64,
            pitch: self.pitch as i64,
            out_row: self.out_row as i64,
            out_col: self.out_col as i64,
            per_row: Divisor::new(self.per_row()),
            units: self.units() as u32,
            first_block,
            columns: self.columns as i32,
            count: self.count as i32,
            vector: self.vector as i32,
            shared: self.is_shared as i32,
        }
    }
}

/// Adds the parts of `sums`, none of which is empty, to results of `dtype`.
///
/// # Safety
/// The memory of the sums must hold what they say, until the work on the stream is done.
pub(super) unsafe fn run<P>(launch: &Launch<'_, P>, dtype: DType, sums: &[Sum]) -> Result<()> {
    let Some(first) = sums.first() else { return Ok(()) };
    // Missing sums have no blocks.
    let mut params = AddParams { sums: [first.params(u32::MAX); MOST] };
    let mut blocks = 0;
    for (slot, sum) in params.sums.iter_mut().zip(sums) {
        // Threads past the last unit divide their number too.
        if sum.units() > i32::MAX as usize - THREADS {
            return Err(Error::Launch {
                kernel: DEVICE.function.into(),
                what: "number of threads",
                got: sum.units() as u64,
                limit: i32::MAX as u64,
            });
        }
        *slot = sum.params(blocks as u32);
        blocks += sum.blocks();
    }
    let config = LaunchConfig::new([blocks as u32, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: the caller vouches for the memory; the blocks cover every unit of every sum.
    unsafe { launch.record_part(&DEVICE, &vec![element(dtype)], &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_column() {
        for (rows, columns) in [(1, 1usize), (3, 5), (156, 1024), (1, 14544), (4096, 130)] {
            for is_shared in [false, true] {
                let pitch = columns.next_multiple_of(UNIT);
                let (out_row, between) = (columns as isize, rows * pitch);
                let sum = Sum {
                    parts: 0,
                    count: 2,
                    between,
                    pitch,
                    rows,
                    columns,
                    out: 0,
                    out_row,
                    out_col: 1,
                    vector: false,
                    is_shared,
                };
                let threads = if is_shared { LANES } else { THREADS };
                assert!(sum.blocks() * threads * UNIT >= rows * columns);
                assert!((sum.blocks() - 1) * threads < sum.units());
            }
        }
    }
}
