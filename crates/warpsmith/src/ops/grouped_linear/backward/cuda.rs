//! `grouped_linear_backward` on CUDA devices: a pass over `dout` where it is not `dz` itself, the product with the transposed matrices
//! for `dx`, and the launches of `weights.rs` for the rest.

use super::weights::{self, Rows, Sums, Weights};
use super::{BackwardProblem, COUNTS, DBIAS, DOUT, DW, DX, W, X, Z};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::ops::grouped::Matrices;
use crate::ops::grouped_linear::cuda::{self as grouped, Operands};
use crate::ops::grouped_linear::problem::Problem as Grouped;
use crate::ops::grouped_linear::sm90;
use crate::ops::linear::problem::{Matrix, Problem as Product};
use crate::tensor::DType;

kernel_params! {
    struct GroupedPassParams {
        dout: u64, z: u64, dz: u64, exact: u64,
        rows: i64, n: i64, dout_row: i64, dout_col: i64, z_row: i64, z_col: i64, scale: f32,
    }
}

const THREADS: usize = 256;

static PASS: CudaKernel = CudaKernel {
    source: Source { name: "grouped_linear_backward_pass", code: include_str!("pass.cu") },
    prelude: GroupedPassParams::prelude,
    function: "grouped_linear_backward_pass",
    min_arch: weights::PROVEN,
    fast_math: false,
    overlaps: true,
    variants: || {
        let kinds = [None, Some(Kind::Gelu), Some(Kind::GeluTanh), Some(Kind::Silu), Some(Kind::Relu)];
        FLOATS.iter().flat_map(|&dtype| kinds.map(|kind| pass_defines(dtype, kind))).collect()
    },
};

fn pass_defines(dtype: DType, kind: Option<Kind>) -> Defines {
    vec![element(dtype), ("FUNCTION", kind.map_or("Identity", Kind::device_name).into())]
}

/// Whether the unrounded `dz` goes into scratch memory, to be added up.
fn stores_exact(p: &BackwardProblem) -> bool {
    p.dbias.is_some() && p.changes_dout()
}

/// Bytes of `dz`, at a multiple of 256, and of the unrounded one behind it.
fn scratch(p: &BackwardProblem) -> [usize; 2] {
    let elements = |is: bool, size: usize| if is { (p.rows * p.n * size).next_multiple_of(256) } else { 0 };
    [elements(p.stores_dz(), p.dtype.size()), elements(stores_exact(p), size_of::<f32>())]
}

/// Whether rows of `dz` consist of whole aligned pieces of 16 bytes.
fn dz_pieces(p: &BackwardProblem) -> bool {
    if p.stores_dz() { (p.n * p.dtype.size()).is_multiple_of(16) } else { p.pieces.dout }
}

/// The product that makes `dx`.
fn product(p: &BackwardProblem) -> Option<Grouped> {
    let w = Matrices { group: p.w.group, row: p.w.col, col: p.w.row };
    let row = Matrix { row: w.row, col: w.col, aligned: false };
    Some(Grouped {
        product: Product::product(p.dtype, false, [1, p.k, p.n], [p.dz(), row, p.dx?]),
        rows: p.rows,
        x_rows: p.rows,
        groups: p.groups,
        w,
        bias: None,
        counts_step: p.counts_step,
        index: None,
        row_scale: None,
        x_pieces: dz_pieces(p),
        w_pieces: p.pieces.w_across,
        w_across: p.pieces.w,
        out_pieces: p.pieces.dx,
        clears: true,
    })
}

/// The sum that is the gradient of the matrices.
fn gradient(p: &BackwardProblem) -> Option<Weights> {
    let rows = |matrix: Matrix, count: usize, pieces: bool| Rows { matrix, count, gathered: false, pieces };
    Some(Weights {
        dtype: p.dtype,
        rows: p.rows,
        groups: p.groups,
        counts_step: p.counts_step,
        a: rows(p.dz(), p.n, dz_pieces(p)),
        b: rows(p.x, p.k, p.pieces.x),
        out: p.dw?,
        out_pieces: p.pieces.dw,
    })
}

type Supports<P> = fn(&P, &DeviceInfo) -> std::result::Result<(), String>;

fn supports(
    p: &BackwardProblem,
    info: &DeviceInfo,
    product_supports: Supports<Grouped>,
    weights_support: Supports<Weights>,
) -> std::result::Result<(), String> {
    product(p).map_or(Ok(()), |product| product_supports(&product, info))?;
    gradient(p).map_or(Ok(()), |gradient| weights_support(&gradient, info))?;
    weights::addressable([p.rows, p.groups, p.n, p.k])
}

const fn kernel(
    name: &'static str,
    products: &'static CudaKernel,
    weights: &'static CudaKernel,
    run: fn(&Launch<'_, BackwardProblem>) -> Result<()>,
) -> Kernel<BackwardProblem> {
    Kernel::cuda(name, &PASS, run)
        .and(products)
        .and(weights)
        .and(&weights::SUMS)
        .with_workspace(|p, _| scratch(p).iter().sum())
}

/// The product that makes `dx` on Hopper's tensor cores.
pub(super) const SM90: Kernel<BackwardProblem> =
    kernel("grouped_linear_backward_sm90", &sm90::DEVICE, &weights::SM80_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe { run(launch, |p, at| sm90::run(launch, p, at), |p, at| weights::run_sm80(launch, p, at)) }
    })
    .when(|p, info| match p.dx {
        Some(_) => supports(p, info, sm90::supports, weights::sm80_supports),
        None => Err("nobody asks for `dx`".into()),
    });

/// The products on tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<BackwardProblem> =
    kernel("grouped_linear_backward_sm80", &grouped::SM80_DEVICE, &weights::SM80_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe {
            run(launch, |p, at| grouped::run_sm80(launch, p, at), |p, at| weights::run_sm80(launch, p, at))
        }
    })
    .when(|p, info| supports(p, info, grouped::sm80_supports, weights::sm80_supports));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<BackwardProblem> =
    kernel("grouped_linear_backward_generic", &grouped::GENERIC_DEVICE, &weights::GENERIC_DEVICE, |launch| {
        // SAFETY: passed on.
        unsafe {
            run(
                launch,
                |p, at| grouped::run_generic(launch, p, at),
                |p, at| weights::run_generic(launch, p, at),
            )
        }
    })
    .when(|p, info| supports(p, info, |p, _| grouped::addressable(p), |_, _| Ok(())));

/// Records the launches of a call.
///
/// # Safety
/// `multiply` and `add` must record products and sums of what they are given, which is the call's own or in scratch memory.
unsafe fn run(
    launch: &Launch<'_, BackwardProblem>,
    multiply: impl Fn(&Grouped, &Operands) -> Result<()>,
    add: impl Fn(&Weights, &weights::Operands) -> Result<()>,
) -> Result<()> {
    let (p, args) = (launch.problem, launch.args);
    let [dz_bytes, _] = scratch(p);
    let (scratch_dz, exact) = (launch.workspace, launch.workspace + dz_bytes);
    if (p.stores_dz() || stores_exact(p)) && p.rows * p.n > 0 {
        let params = GroupedPassParams {
            dout: args.address(DOUT) as u64,
            z: args.address(Z) as u64,
            dz: if p.stores_dz() { scratch_dz as u64 } else { 0 },
            exact: if stores_exact(p) { exact as u64 } else { 0 },
            rows: p.rows as i64,
            n: p.n as i64,
            dout_row: p.dout.row as i64,
            dout_col: p.dout.col as i64,
            z_row: p.z.row as i64,
            z_col: p.z.col as i64,
            scale: f32::from_bits(p.scale_bits),
        };
        let blocks = grid_blocks(PASS.function, (p.rows * p.n).div_ceil(THREADS))?;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: `check` bound `dout` and `z` to rows and columns, and the scratch memory has room for both results.
        unsafe { launch.record(&pass_defines(p.dtype, p.activation), &config, &params)? };
    }
    let (counts, dz) = (args.address(COUNTS), if p.stores_dz() { scratch_dz } else { args.address(DOUT) });
    if let Some(product) = product(p).filter(|_| p.rows * p.k > 0) {
        let operands =
            Operands { x: dz, w: args.address(W), counts, out: args.address(DX), ..Operands::NONE };
        multiply(&product, &operands)?;
    }
    if let Some(gradient) = gradient(p).filter(|_| p.groups * p.n * p.k > 0) {
        let operands =
            weights::Operands { a: dz, b: args.address(X), counts, order: 0, out: args.address(DW) };
        add(&gradient, &operands)?;
    }
    let Some([apart, step]) = p.dbias.filter(|_| p.groups * p.n > 0) else { return Ok(()) };
    let dense = Matrix { row: p.n as isize, col: 1, aligned: true };
    let (from, dtype, matrix) = match stores_exact(p) {
        true => (exact, DType::F32, dense),
        false => (args.address(DOUT), p.dtype, p.dout),
    };
    let sums = Sums {
        dtype,
        out_dtype: p.dtype,
        rows: p.rows,
        groups: p.groups,
        n: p.n,
        counts_step: p.counts_step,
        matrix,
        strides: [apart, step],
    };
    let operands = weights::SumOperands { from, weights: 0, order: 0, counts, out: args.address(DBIAS) };
    // SAFETY: `check` bound the tensors to rows, groups and columns; the pass wrote what is in the scratch memory.
    unsafe { sums.run(launch, &operands) }
}
