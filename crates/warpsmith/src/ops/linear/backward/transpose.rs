//! Copies of transposed f32 operands, for the tensor cores of Hopper, which transpose 16-bit types alone.

use super::super::Problem;
use super::super::problem::{Order, Part, Strides};
use crate::cuda::LaunchConfig;
use crate::error::Result;
use crate::jit::CudaKernel;
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::op::Launch;

/// Operands of the two products of a call that may be transposed: `w` of `dx`, and both of `dw`.
const MOST: usize = 3;
/// Rows and columns of a block's tile, as in the device code, and its threads.
const TILE: usize = 64;
const THREADS: u32 = 256;
/// Rows of a copy start at multiples of this many elements, and copies at multiples of this many bytes.
const ROW_UNIT: usize = 8;
const COPY_UNIT: usize = 256;

kernel_params! {
    struct TransposeParams { matrices: [TransposedMatrix; 3] }
}

kernel_params! {
    /// `rows` and `columns` are those of the copy; `pitch` elements lie between its columns in the original.
    struct TransposedMatrix { from: u64, to: u64, pitch: i64, to_pitch: i64, rows: i32, columns: i32 }
}

pub(super) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "linear_backward_transpose", code: include_str!("transpose.cu") },
    prelude: TransposeParams::prelude,
    function: "linear_backward_transpose",
    min_arch: Arch::new(9, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![Vec::new()],
};

/// The product with copies in place of its transposed f32 operands.
pub(super) fn straight(product: &Problem) -> Problem {
    let mut straight = *product;
    if product.x_dtype.size() == 4 {
        let row = product.k.next_multiple_of(ROW_UNIT) as isize;
        for (strides, order, starts) in [
            (&mut straight.x, &mut straight.x_order, &mut straight.x_starts),
            (&mut straight.w, &mut straight.w_order, &mut straight.w_starts),
        ] {
            if *order == Order::Columns {
                (*strides, *order, *starts) = (Strides { batch: 0, row, col: 1 }, Order::Rows, Order::Rows);
            }
        }
    }
    straight
}

/// Bytes of the copies that [`straight`] asks for.
pub(super) fn bytes(product: &Problem) -> usize {
    let straight = straight(product);
    let copy = |order: Order, now: Order, rows: usize| match order == now {
        true => 0,
        false => copy_bytes(product, rows),
    };
    copy(product.x_order, straight.x_order, product.m) + copy(product.w_order, straight.w_order, product.n)
}

fn copy_bytes(product: &Problem, rows: usize) -> usize {
    (rows * product.k.next_multiple_of(ROW_UNIT) * size_of::<f32>()).next_multiple_of(COPY_UNIT)
}

/// Makes the copies of `products` at `workspace`, and gives the products that use them.
///
/// # Safety
/// The parts must hold the tensors of their products, and `workspace` must have [`bytes`] for each, until the work on the
/// stream is done.
pub(super) unsafe fn run<'a, P>(
    launch: &Launch<'_, P>,
    products: impl Iterator<Item = (&'a Problem, Part)>,
    workspace: usize,
) -> Result<Vec<(Problem, Part)>> {
    let mut params = TransposeParams {
        matrices: [TransposedMatrix { from: 0, to: 0, pitch: 0, to_pitch: 0, rows: 0, columns: 0 }; MOST],
    };
    let (mut copies, mut tiles, mut to) = (0, 0, workspace);
    let mut copy = |product: &Problem, from: &mut usize, rows: usize, pitch: isize| {
        params.matrices[copies] = TransposedMatrix {
            from: *from as u64,
            to: to as u64,
            pitch: pitch as i64,
            to_pitch: product.k.next_multiple_of(ROW_UNIT) as i64,
            rows: rows as i32,
            columns: product.k as i32,
        };
        copies += 1;
        tiles = tiles.max(rows.div_ceil(TILE) * product.k.div_ceil(TILE));
        *from = to;
        to += copy_bytes(product, rows);
    };
    let products = products
        .map(|(product, mut part)| {
            let straight = straight(product);
            if straight.x_order != product.x_order {
                copy(product, &mut part.x, product.m, product.x.col);
            }
            if straight.w_order != product.w_order {
                copy(product, &mut part.w, product.n, product.w.col);
            }
            (straight, part)
        })
        .collect();
    if copies > 0 {
        let config = LaunchConfig::new([tiles as u32, copies as u32, 1], [THREADS, 1, 1], 0);
        // SAFETY: the caller vouches for the tensors and the scratch memory; a block without a tile does nothing.
        unsafe { launch.record_part(&DEVICE, &Vec::new(), &config, &params)? };
    }
    Ok(products)
}
