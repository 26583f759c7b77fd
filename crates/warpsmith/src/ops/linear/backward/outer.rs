//! The gradient of `w` for few rows of `x`: without tensor cores, because writing the result takes longer than
//! computing it.

use super::super::Problem;
use super::super::problem::Part;
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::Launch;
use crate::ops::FLOATS;
use crate::tensor::DType;

/// Threads and rows of a block, as in the device code.
const THREADS: usize = 128;
const ROWS: usize = 32;
/// Blocks along a row, which the launch counts in 16 bits.
const MOST_ACROSS: usize = 65_535;

kernel_params! {
    struct OuterParams {
        dz: u64, x: u64, dw: u64, dbias: u64,
        dz_row: i64, dz_col: i64, x_row: i64, x_col: i64, dw_row: i64, dbias_step: i64,
        lines: i32, n: i32, k: i32,
    }
}

pub(super) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_backward_outer", code: include_str!("outer.cu") },
    prelude: OuterParams::prelude,
    function: "linear_backward_outer",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            let lines = (0..=most_lines(dtype).ilog2()).map(|log| 1 << log);
            all.extend(lines.flat_map(|lines| [true, false].map(|dbias| defines(dtype, lines, dbias))));
        }
        all
    },
};

fn defines(dtype: DType, lines: usize, dbias: bool) -> Defines {
    vec![element(dtype), ("LINES", lines.next_power_of_two().to_string()), flag("HAS_DBIAS", dbias)]
}

/// The most rows of `x`: with more, multiplying would take longer than writing. Elements of f32 take twice as long to write.
fn most_lines(dtype: DType) -> usize {
    4 * dtype.size()
}

/// Elements of 16 bytes.
fn unit(product: &Problem) -> usize {
    16 / product.out_dtype.size()
}

/// Blocks along a row: a row that does not start at a multiple of 16 bytes has a piece more.
fn across(product: &Problem) -> usize {
    (product.n.div_ceil(unit(product)) + 1).div_ceil(THREADS)
}

/// Whether this kernel computes `product`, a gradient of `w`, whose rows must be dense.
pub(super) fn takes(product: &Problem) -> bool {
    let dense = product.n <= 1 || product.out.col == 1;
    (1..=most_lines(product.out_dtype)).contains(&product.k)
        && product.m * product.n > 0
        && dense
        && product.m.max(product.n) <= 1 << 30
        && across(product) <= MOST_ACROSS
}

/// Computes `product`, and if `dbias` has an address and a stride, the sums of `dz` over its rows.
///
/// # Safety
/// It must be one that [`takes`]; `part` must hold its tensors and `dbias` a sum for each of its rows, until the work on the
/// stream is done.
pub(super) unsafe fn run<P>(
    launch: &Launch<'_, P>,
    product: &Problem,
    part: &Part,
    dbias: Option<(usize, isize)>,
) -> Result<()> {
    let (address, step) = dbias.unwrap_or_default();
    let params = OuterParams {
        dz: part.x as u64,
        x: part.w as u64,
        dw: part.out as u64,
        dbias: address as u64,
        // The rows of a product are columns of dz and x.
        dz_row: product.x.col as i64,
        dz_col: product.x.row as i64,
        x_row: product.w.col as i64,
        x_col: product.w.row as i64,
        dw_row: product.out.row as i64,
        dbias_step: step as i64,
        lines: product.k as i32,
        n: product.m as i32,
        k: product.n as i32,
    };
    let unit = unit(product);
    let down = product.m.div_ceil(unit * ROWS) * unit;
    let config = LaunchConfig::new([down as u32, across(product) as u32, 1], [THREADS as u32, 1, 1], 0);
    let defines = defines(product.out_dtype, product.k, dbias.is_some());
    // SAFETY: the caller vouches for the tensors; the blocks cover every row and every piece of it.
    unsafe { launch.record_part(&DEVICE, &defines, &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::super::super::problem::Matrix;
    use super::*;

    fn product(lines: usize, n: usize, k: usize, out: Matrix) -> Problem {
        let dz = Matrix { row: 1, col: n as isize, aligned: true };
        let x = Matrix { row: 1, col: k as isize, aligned: true };
        Problem::product(DType::BF16, false, [n, k, lines], [dz, x, out])
    }

    #[test]
    fn few_rows_with_a_dense_result_are_taken() {
        let dense = Matrix { row: 670, col: 1, aligned: false };
        assert!(takes(&product(1, 1723, 670, dense)) && takes(&product(8, 1723, 670, dense)));
        assert!(!takes(&product(9, 1723, 670, dense)) && !takes(&product(0, 1723, 670, dense)));
        assert!(!takes(&product(1, 0, 670, dense)) && !takes(&product(1, 5, 0, dense)));
        assert!(!takes(&product(1, 1723, 670, Matrix { row: 1, col: 1723, aligned: true })));
    }

    #[test]
    fn blocks_cover_every_piece_of_a_row_that_starts_anywhere() {
        for k in [1, 7, 8, 1016, 1017, 1024, 10527] {
            let p = product(1, 3, k, Matrix { row: k as isize, col: 1, aligned: true });
            assert!(across(&p) * THREADS * 8 >= k + 7, "{k}");
        }
    }
}
