//! `linear_backward` on CUDA devices: one pass over `dout`, then the products with the kernels of `linear`.

use super::super::Problem;
use super::super::align;
use super::super::bf16x3;
use super::super::cuda::{GENERIC_DEVICE, SM80_DEVICE, addressable, run_generic, run_sm80, sm80_supports};
use super::super::problem::{Matrix, Part};
use super::super::sm90;
use super::{BackwardProblem, DBIAS, DOUT, Z, transpose};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{element, flag};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

kernel_params! {
    struct LinearPassParams {
        dout: u64, z: u64, dz: u64, dbias: u64, partial: u64,
        lines: i64, n: i64,
        /// Of a block of the pass, or of `partial` when it is added up.
        rows: i64,
        dout_row: i64, dout_col: i64, z_row: i64, z_col: i64, dbias_step: i64,
        scale: f32,
    }
}

/// Columns and rows of a block's threads, as in the device code, and the rows of dout that a block goes over.
const COLUMNS: usize = 32;
const LANES: u32 = 8;
const ROWS: usize = 64;

static PASS: CudaKernel = CudaKernel {
    source: Source { name: "linear_backward", code: include_str!("kernel.cu") },
    prelude: LinearPassParams::prelude,
    function: "linear_backward_pass",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let kinds = [None, Some(Kind::Gelu), Some(Kind::GeluTanh), Some(Kind::Silu), Some(Kind::Relu)];
        let written = [[true, true], [true, false], [false, true]];
        let mut all = Vec::new();
        for dtype in FLOATS {
            for (kind, vector) in kinds.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
                all.extend(written.map(|written| pass_defines(dtype, kind, written, vector)));
            }
            all.push(sum_defines(dtype));
        }
        all
    },
};

fn pass_defines(dtype: DType, kind: Option<Kind>, [dz, dbias]: [bool; 2], vector: bool) -> Defines {
    vec![
        element(dtype),
        ("FUNCTION", kind.map_or("Identity", Kind::device_name).into()),
        flag("HAS_DZ", dz),
        flag("HAS_DBIAS", dbias),
        flag("VECTOR", vector),
        flag("SUM", false),
    ]
}

fn sum_defines(dtype: DType) -> Defines {
    let mut defines = pass_defines(dtype, None, [false, true], false);
    defines.retain(|(name, _)| *name != "SUM");
    defines.push(flag("SUM", true));
    defines
}

/// How the rows of dout are shared out, from their number alone: the order of the sums follows from it.
struct Blocks {
    rows: usize,
    count: usize,
}

impl Blocks {
    fn of(p: &BackwardProblem) -> Blocks {
        const MOST: usize = 65_535;
        let rows = ROWS * p.lines.div_ceil(ROWS * MOST).max(1);
        Blocks { rows, count: p.lines.div_ceil(rows).max(1) }
    }

    /// Bytes of their sums, if there is more than one.
    fn partial_bytes(&self, p: &BackwardProblem) -> usize {
        if p.has_dbias && self.count > 1 { self.count * p.n * size_of::<f32>() } else { 0 }
    }
}

/// `dz`, and from the next multiple of 256 bytes on the sums of each block.
fn workspace(p: &BackwardProblem, _: &DeviceInfo) -> usize {
    partial_at(p) + Blocks::of(p).partial_bytes(p)
}

fn partial_at(p: &BackwardProblem) -> usize {
    p.workspace().next_multiple_of(256)
}

/// Whether rows of `dout` and `z` can be moved in pieces of 16 bytes, and those of `dz` too.
fn is_vector(p: &BackwardProblem) -> bool {
    let whole = |elements: usize| (elements * p.dtype.size()).is_multiple_of(16);
    let dense = |matrix: &Matrix| {
        let rows_apart = p.lines <= 1 || whole(matrix.row.unsigned_abs());
        matrix.aligned && (p.n <= 1 || matrix.col == 1) && rows_apart
    };
    whole(p.n) && dense(&p.dout) && (p.activation.is_none() || dense(&p.z))
}

/// The products on Hopper's tensor cores, with copies of what they cannot transpose and of what the copy engine cannot
/// load, which follow the rest of the scratch memory.
pub(super) const SM90: Kernel<BackwardProblem> = Kernel::cuda("linear_backward_sm90", &PASS, |launch| {
    let p = launch.problem;
    go_over(launch)?;
    let copies_at = launch.workspace + copies_at(p, launch.info);
    // SAFETY: `check` made the products of these tensors, and the stream has `dz` complete before them; the scratch memory
    // has the size that was asked for.
    unsafe {
        let products = transpose::run(launch, p.parts(launch.args, launch.workspace), copies_at)?;
        let products = align::run(launch, products, copies_at + transposed_bytes(p))?;
        products.iter().try_for_each(|(product, part)| sm90::run(launch, product, part))
    }
})
.and(&sm90::DEVICE)
.and(&transpose::DEVICE)
.and(&align::DEVICE)
.with_workspace(|p, info| {
    let aligned = p.products().map(|product| align::bytes(&transpose::straight(product))).sum::<usize>();
    copies_at(p, info) + transposed_bytes(p) + aligned
})
.when(|p, info| {
    supports(p, info, |product, info| sm90::supports(&align::aligned(&transpose::straight(product)), info))
});

fn transposed_bytes(p: &BackwardProblem) -> usize {
    p.products().map(transpose::bytes).sum()
}

fn copies_at(p: &BackwardProblem, info: &DeviceInfo) -> usize {
    workspace(p, info).next_multiple_of(256)
}

/// The products on tensor cores.
pub(super) const SM80: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_sm80", &PASS, |launch| run(launch, run_sm80::<BackwardProblem>))
        .and(&SM80_DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, sm80_supports));

/// The products of f32 at full precision on tensor cores.
pub(super) const BF16X3: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_bf16x3", &PASS, |launch| run(launch, bf16x3::run::<BackwardProblem>))
        .and(&bf16x3::DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, bf16x3::supports));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_generic", &PASS, |launch| run(launch, run_generic::<BackwardProblem>))
        .and(&GENERIC_DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, |p, _| addressable(p)));

type Supports = fn(&Problem, &DeviceInfo) -> std::result::Result<(), String>;

fn supports(p: &BackwardProblem, info: &DeviceInfo, product: Supports) -> std::result::Result<(), String> {
    p.products().try_for_each(|problem| product(problem, info))
}

type Multiply = unsafe fn(&Launch<'_, BackwardProblem>, &Problem, &Part) -> Result<()>;

fn run(launch: &Launch<'_, BackwardProblem>, multiply: Multiply) -> Result<()> {
    let p = launch.problem;
    go_over(launch)?;
    // SAFETY: `check` made the products of these tensors, and the stream has `dz` complete before them.
    p.parts(launch.args, launch.workspace)
        .try_for_each(|(product, part)| unsafe { multiply(launch, product, &part) })
}

/// The pass over `dout`, and the sum of its sums, where there is a use for them.
fn go_over(launch: &Launch<'_, BackwardProblem>) -> Result<()> {
    let p = launch.problem;
    if !p.has_pass() || p.n == 0 {
        return Ok(());
    }
    let at = |index| launch.args.address(index) as u64;
    let blocks = Blocks::of(p);
    let params = LinearPassParams {
        dout: at(DOUT),
        z: at(Z),
        dz: launch.workspace as u64,
        dbias: at(DBIAS),
        partial: (launch.workspace + partial_at(p)) as u64,
        lines: p.lines as i64,
        n: p.n as i64,
        rows: blocks.rows as i64,
        dout_row: p.dout.row as i64,
        dout_col: p.dout.col as i64,
        z_row: p.z.row as i64,
        z_col: p.z.col as i64,
        dbias_step: p.dbias_step as i64,
        scale: f32::from_bits(p.scale_bits),
    };
    let config = |columns: usize, rows: usize| {
        let grid = [p.n.div_ceil(columns) as u32, rows as u32, 1];
        LaunchConfig::new(grid, [COLUMNS as u32, LANES, 1], 0)
    };
    let defines = pass_defines(p.dtype, p.activation, [p.stores_dz, p.has_dbias], is_vector(p));
    let pass = config(COLUMNS * 16 / p.dtype.size(), blocks.count);
    // SAFETY: `check` bound the shapes; the scratch memory has the size that was asked for.
    unsafe { launch.record_part(&PASS, &defines, &pass, &params)? };
    if blocks.partial_bytes(p) == 0 {
        return Ok(());
    }
    let params = LinearPassParams { rows: blocks.count as i64, ..params };
    // SAFETY: as above; the pass has written the sums by then.
    unsafe { launch.record_part(&PASS, &sum_defines(p.dtype), &config(COLUMNS, 1), &params) }
}
