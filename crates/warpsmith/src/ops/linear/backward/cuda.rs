//! `linear_backward` on CUDA devices: one pass over `dout`, then the products with the kernels of `linear`, then the
//! addition of partial sums.

use super::super::Problem;
use super::super::align;
use super::super::bf16x3;
use super::super::cuda::{GENERIC_DEVICE, SM80_DEVICE, addressable, run_generic, run_sm80, sm80_supports};
use super::super::problem::{Matrix, Part};
use super::super::sm90;
use super::super::split::Split;
use super::add::{self, Sum};
use super::{BackwardProblem, DBIAS, DOUT, DW, DX, Z, outer, transpose};
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
        /// Of a block.
        rows: i64,
        dout_row: i64, dout_col: i64, z_row: i64, z_col: i64, dbias_step: i64, partial_row: i64,
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
    ]
}

/// How the rows of dout are divided, from their number alone: the order of the sums follows from it.
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

    /// Whether their sums are still to be added.
    fn is_partial(&self, p: &BackwardProblem) -> bool {
        has_pass(p) && p.has_dbias && self.count > 1
    }

    fn partial_bytes(&self, p: &BackwardProblem) -> usize {
        if self.is_partial(p) { self.count * partial_row(p) * size_of::<f32>() } else { 0 }
    }
}

/// Elements from the sums of one block to those of the next.
fn partial_row(p: &BackwardProblem) -> usize {
    p.n.next_multiple_of(add::UNIT)
}

/// Whether the gradient of `w` is computed without a product.
fn has_outer(p: &BackwardProblem) -> bool {
    p.dw.as_ref().is_some_and(outer::takes)
}

/// Whether a pass over `dout` precedes the products: the gradient of `w` for few rows sums its columns too.
fn has_pass(p: &BackwardProblem) -> bool {
    p.stores_dz || p.has_dbias && !has_outer(p)
}

/// Where things begin in the scratch memory, after `dz`: the sums of blocks, of the parts of `dx` and of `dw`, and what the
/// kernels of the products need. All at multiples of 256 bytes.
struct Scratch {
    partial: usize,
    dx: usize,
    dw: usize,
    end: usize,
}

impl Scratch {
    fn of(p: &BackwardProblem) -> Scratch {
        let bytes = |product: &Option<Problem>, split: fn(&Problem) -> Option<Split>| {
            product.as_ref().map_or(0, |product| split(product).map_or(0, |split| split.bytes(product)))
        };
        let partial = p.workspace().next_multiple_of(256);
        let dx = (partial + Blocks::of(p).partial_bytes(p)).next_multiple_of(256);
        let dw = (dx + bytes(&p.dx, Split::of_dx)).next_multiple_of(256);
        let end = (dw + bytes(&p.dw, Split::of_dw)).next_multiple_of(256);
        Scratch { partial, dx, dw, end }
    }
}

fn workspace(p: &BackwardProblem, _: &DeviceInfo) -> usize {
    Scratch::of(p).end
}

/// Whether rows of `dout` and `z` can be moved in 16-byte pieces, and those of `dz` too.
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
    let sum = before_products(launch)?;
    let copies_at = launch.workspace + Scratch::of(p).end;
    // SAFETY: `check` made the products of these tensors, and the stream has `dz` complete before them; the scratch memory
    // has the size that was asked for.
    let products = unsafe {
        let products = transpose::run(launch, products(launch), copies_at)?;
        align::run(launch, products, copies_at + transposed_bytes(p))?
    };
    multiply_all(launch, products, run_sm90, sum)
})
.and(&sm90::DEVICE)
.and(&transpose::DEVICE)
.and(&align::DEVICE)
.and(&add::DEVICE)
.and(&outer::DEVICE)
.with_workspace(|p, _| {
    let aligned = multiplied(p).map(|product| align::bytes(&transpose::straight(product))).sum::<usize>();
    Scratch::of(p).end + transposed_bytes(p) + aligned
})
.when(|p, info| {
    supports(p, info, |product, info| sm90::supports(&align::aligned(&transpose::straight(product)), info))
});

/// A product, of the tensors or for the scratch memory.
///
/// # Safety
/// As for `sm90::run`.
unsafe fn run_sm90(launch: &Launch<'_, BackwardProblem>, product: &Problem, part: &Part) -> Result<()> {
    let scratch = launch.workspace..launch.workspace + Scratch::of(launch.problem).end;
    // SAFETY: passed on.
    unsafe {
        match scratch.contains(&part.out) {
            true => sm90::run_for_scratch(launch, product, part),
            false => sm90::run(launch, product, part),
        }
    }
}

fn transposed_bytes(p: &BackwardProblem) -> usize {
    multiplied(p).map(transpose::bytes).sum()
}

/// The products on tensor cores.
pub(super) const SM80: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_sm80", &PASS, |launch| run(launch, run_sm80::<BackwardProblem>))
        .and(&SM80_DEVICE)
        .and(&add::DEVICE)
        .and(&outer::DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, sm80_supports));

/// The products of f32 at full precision on tensor cores.
pub(super) const BF16X3: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_bf16x3", &PASS, |launch| run(launch, bf16x3::run::<BackwardProblem>))
        .and(&bf16x3::DEVICE)
        .and(&add::DEVICE)
        .and(&outer::DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, bf16x3::supports));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_generic", &PASS, |launch| run(launch, run_generic::<BackwardProblem>))
        .and(&GENERIC_DEVICE)
        .and(&add::DEVICE)
        .and(&outer::DEVICE)
        .with_workspace(workspace)
        .when(|p, info| supports(p, info, |p, _| addressable(p)));

type Supports = fn(&Problem, &DeviceInfo) -> std::result::Result<(), String>;

fn supports(p: &BackwardProblem, info: &DeviceInfo, product: Supports) -> std::result::Result<(), String> {
    p.products().try_for_each(|problem| product(problem, info))
}

type Multiply = unsafe fn(&Launch<'_, BackwardProblem>, &Problem, &Part) -> Result<()>;

fn run(launch: &Launch<'_, BackwardProblem>, multiply: Multiply) -> Result<()> {
    let sum = before_products(launch)?;
    multiply_all(launch, products(launch).map(|(product, part)| (*product, part)), multiply, sum)
}

/// The gradients that are products.
fn multiplied(p: &BackwardProblem) -> impl Iterator<Item = &Problem> {
    let dw = p.dw.as_ref().filter(|dw| !outer::takes(dw));
    p.dx.iter().chain(dw)
}

/// The same with their addresses.
fn products<'a>(
    launch: &'a Launch<'_, BackwardProblem>,
) -> impl Iterator<Item = (&'a Problem, Part)> + use<'a> {
    let p = launch.problem;
    let no_dw = has_outer(p);
    p.parts(launch.args, launch.workspace)
        .filter(move |(_, part)| !no_dw || part.out != launch.args.address(DW))
}

/// Multiplies, in parts where that is faster, and adds the parts, and those of `sum`.
fn multiply_all(
    launch: &Launch<'_, BackwardProblem>,
    products: impl IntoIterator<Item = (Problem, Part)>,
    multiply: Multiply,
    sum: Option<Sum>,
) -> Result<()> {
    let p = launch.problem;
    let scratch = Scratch::of(p);
    let mut sums = Vec::from_iter(sum);
    for (product, part) in products {
        let (split, at) = match part.out == launch.args.address(DX) {
            true => (Split::of_dx(&product), scratch.dx),
            false => (Split::of_dw(&product), scratch.dw),
        };
        let parts = match split {
            None => vec![(product, part)],
            Some(split) => {
                let at = launch.workspace + at;
                sums.push(Sum::of(&split, &product, &part, at));
                split.products(&product, &part, at)
            }
        };
        // SAFETY: `check` made the products of these tensors, and the stream has `dz` complete before them; the scratch
        // memory has the size that was asked for.
        parts.iter().try_for_each(|(product, part)| unsafe { multiply(launch, product, part) })?;
    }
    // SAFETY: as above, and the stream has the parts complete by then.
    unsafe { add::run(launch, p.dtype, &sums) }
}

/// What comes before the products: the pass over `dout`, where there is a use for it, and the gradient of `w` for few rows.
/// Returns what is left to add of the columns' sums.
fn before_products(launch: &Launch<'_, BackwardProblem>) -> Result<Option<Sum>> {
    let p = launch.problem;
    let sum = go_over(launch)?;
    if let Some(dw) = p.dw.as_ref().filter(|dw| outer::takes(dw)) {
        let parts = p.parts(launch.args, launch.workspace);
        let part = parts.map(|(_, part)| part).find(|part| part.out == launch.args.address(DW));
        let dbias = (p.has_dbias && !has_pass(p)).then(|| (launch.args.address(DBIAS), p.dbias_step));
        // SAFETY: `check` made the product of these tensors, and the stream has `dz` complete before it.
        unsafe { outer::run(launch, dw, &part.expect("it has elements"), dbias)? };
    }
    Ok(sum)
}

/// The pass over `dout`, and what is left to add of its sums.
fn go_over(launch: &Launch<'_, BackwardProblem>) -> Result<Option<Sum>> {
    let p = launch.problem;
    if !has_pass(p) || p.n == 0 {
        return Ok(None);
    }
    let at = |index| launch.args.address(index) as u64;
    let blocks = Blocks::of(p);
    let partial = launch.workspace + Scratch::of(p).partial;
    let params = LinearPassParams {
        dout: at(DOUT),
        z: at(Z),
        dz: launch.workspace as u64,
        dbias: at(DBIAS),
        partial: partial as u64,
        lines: p.lines as i64,
        n: p.n as i64,
        rows: blocks.rows as i64,
        dout_row: p.dout.row as i64,
        dout_col: p.dout.col as i64,
        z_row: p.z.row as i64,
        z_col: p.z.col as i64,
        dbias_step: p.dbias_step as i64,
        partial_row: partial_row(p) as i64,
        scale: f32::from_bits(p.scale_bits),
    };
    let defines = pass_defines(p.dtype, p.activation, [p.stores_dz, p.has_dbias], is_vector(p));
    let grid = [p.n.div_ceil(COLUMNS * 16 / p.dtype.size()) as u32, blocks.count as u32, 1];
    let config = LaunchConfig::new(grid, [COLUMNS as u32, LANES, 1], 0);
    // SAFETY: `check` bound the shapes; the scratch memory has the size that was asked for.
    unsafe { launch.record_part(&PASS, &defines, &config, &params)? };
    Ok(blocks.is_partial(p).then(|| Sum {
        parts: partial,
        count: blocks.count,
        between: partial_row(p),
        pitch: partial_row(p),
        rows: 1,
        columns: p.n,
        out: launch.args.address(DBIAS),
        out_row: 0,
        out_col: p.dbias_step,
        vector: false,
        is_shared: true,
    }))
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    /// The gradients of all three, with dense tensors and no activation.
    fn problem(dtype: DType, [lines, n, k]: [usize; 3]) -> BackwardProblem {
        let dense = |columns: usize| Matrix { row: columns as isize, col: 1, aligned: true };
        let (dz, x, w) = (dense(n), dense(k), dense(k));
        BackwardProblem {
            dtype,
            lines,
            n,
            k,
            activation: None,
            scale_bits: 1f32.to_bits(),
            dout: dz,
            z: Matrix { row: 0, col: 0, aligned: false },
            dbias_step: 1,
            has_dbias: true,
            stores_dz: false,
            dx: Some(Problem::product(dtype, false, [lines, k, n], [dz, w.transposed(), x])),
            dw: Some(Problem::product(dtype, false, [n, k, lines], [dz.transposed(), x.transposed(), w])),
        }
    }

    #[test]
    fn short_sums_need_no_scratch_memory() {
        let scratch = Scratch::of(&problem(DType::BF16, [64, 1000, 1000]));
        assert_eq!([scratch.partial, scratch.dx, scratch.dw, scratch.end], [0; 4]);
    }

    #[test]
    fn parts_have_their_own_scratch_memory() {
        // Four blocks of rows, and nine parts of dx.
        let scratch = Scratch::of(&problem(DType::BF16, [256, 14544, 128]));
        assert_eq!(scratch.dx - scratch.partial, (4 * 14544 * 4usize).next_multiple_of(256));
        assert_eq!(scratch.dw - scratch.dx, 9 * 256 * 128 * 4);
        assert_eq!(scratch.end, scratch.dw);
        // 16 parts of dw.
        let scratch = Scratch::of(&problem(DType::BF16, [16384, 128, 256]));
        assert_eq!(scratch.end - scratch.dw, 16 * 128 * 256 * 4);
        let dz = BackwardProblem { stores_dz: true, ..problem(DType::BF16, [3, 129, 8]) };
        assert_eq!(Scratch::of(&dz).partial, (3 * 129 * 2usize).next_multiple_of(256));
    }

    #[test]
    fn few_rows_need_one_launch_for_w_and_bias() {
        let few = problem(DType::F32, [1, 2560, 10527]);
        assert!(has_outer(&few) && !has_pass(&few));
        assert_eq!(multiplied(&few).count(), 1, "the gradient of x");
        assert!(has_pass(&BackwardProblem { stores_dz: true, ..few }), "an activation is undone first");
        assert!(has_pass(&BackwardProblem { dw: None, ..few }));
        let more = problem(DType::F32, [17, 2560, 10527]);
        assert!(!has_outer(&more) && has_pass(&more) && multiplied(&more).count() == 2);
    }
}
