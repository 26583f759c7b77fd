//! Softmax on CUDA devices: host half.

use super::backward::{DOUT, DX, Y};
use super::{OUT, Problem, X};
use crate::cuda::rows::{
    DENSE, ONE_REDUCTION, RowKind, RowTable, RowTiling, Rows, SPREAD, SPREAD_ANY, StagedRows, blocks_ahead,
    element, flag, is_large,
};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "softmax", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source = Source { name: "softmax_backward", code: include_str!("backward.cu") };

/// Forward: the powers of a row are kept as f32, so a thread has half as many chunks of the narrow types.
fn table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => {
            &[(16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (128, 4), (256, 4), (512, 4), (1024, 4), (1024, 8)]
        }
        _ => ONE_REDUCTION,
    }
}

/// Backward: two tensors, widened to f32 when the sum is known.
fn backward_table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2), (512, 4), (512, 8)],
        _ => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2), (512, 4)],
    }
}

/// Backward, rows that the blocks of a cluster share. For lengths that are in the table above too, threads and chunks
/// are the same, so that both kernels give the same bits.
fn split_table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(512, 2), (512, 4), (512, 8), (2048, 4), (4096, 4), (4096, 8)],
        _ => &[(512, 2), (512, 4), (1024, 4), (2048, 4), (4096, 4), (4096, 8)],
    }
}

/// Blocks of a cluster, at most.
const MOST_BLOCKS: usize = 8;
/// Threads of one row that each block has where there are so many rows that they fill the device.
const SPLIT_LANES: usize = 256;

/// Rows of any length, forward: `items` chunks in flight at once, by as many threads as have registers for them.
const LONG: RowTiling = RowTiling::alone(640, 4);
/// Backward: as many chunks of two tensors.
const LONG_BACKWARD: RowTiling = RowTiling::alone(640, 2);

kernel_params! {
    struct SoftmaxParams {
        x: u64, out: u64,
        num_rows: i64, hidden: i32,
        /// Chunks of each thread that the kernel for long rows keeps in shared memory.
        cached: i32,
        sign: f32,
        /// Of the scale, times log2(e).
        magnitude: f32,
        x_step: i64, out_step: i64,
        is_large: i32,
        blocks_ahead: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct SoftmaxBackwardParams {
        y: u64, dout: u64, dx: u64,
        num_rows: i64, hidden: i32, scale: f32,
        y_step: i64, dout_step: i64, dx_step: i64,
        rows: Rows,
    }
}

fn defines(dtype: DType, vector: u8, tiling: &RowTiling) -> Defines {
    split_defines(dtype, vector, tiling, 1, 0)
}

/// With the tiling of each of `split` blocks, and `stages` of dense rows in shared memory.
fn split_defines(dtype: DType, vector: u8, block: &RowTiling, split: usize, stages: usize) -> Defines {
    let mut defines = block.defines();
    let long = split == 1 && [LONG, LONG_BACKWARD].contains(block);
    defines.extend([
        element(dtype),
        ("VECTOR", vector.to_string()),
        flag("LONG", long),
        ("SPLIT", split.to_string()),
        ("STAGES", stages.to_string()),
    ]);
    defines
}

fn variants(vectors: &[u8], tilings: impl Fn(DType) -> Vec<RowTiling>) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for tiling in tilings(dtype) {
            all.extend(vectors.iter().map(|&vector| defines(dtype, vector, &tiling)));
        }
    }
    all
}

/// Of dense rows that go through shared memory.
fn staged_variants(table: fn(DType) -> RowTable) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for tiling in RowTiling::all(table(dtype)) {
            all.extend([1, 2].map(|stages| split_defines(dtype, DENSE, &tiling, 1, stages)));
        }
    }
    all
}

const fn device(
    source: Source,
    prelude: fn() -> String,
    function: &'static str,
    variants: fn() -> Vec<Defines>,
) -> CudaKernel {
    CudaKernel {
        source,
        prelude,
        function,
        min_arch: Arch::new(6, 0, false),
        fast_math: false,
        overlaps: true,
        variants,
    }
}

/// Of rows in registers, but those that begin anywhere.
fn row_variants(table: fn(DType) -> RowTable) -> Vec<Defines> {
    let mut all = variants(&[0, 1, 2], |dtype| RowTiling::all_of_many(table(dtype)));
    all.extend(variants(&[SPREAD, SPREAD_ANY], |dtype| RowTiling::all_of_many_spread(table(dtype))));
    all
}

/// Of rows of any length.
const LONG_VECTORS: [u8; 5] = [0, 1, DENSE, SPREAD, SPREAD_ANY];

static ROW_DEVICE: CudaKernel = device(SOURCE, SoftmaxParams::prelude, "softmax_row", || {
    let mut all = row_variants(table);
    all.extend(staged_variants(table));
    all
});
static LONG_DEVICE: CudaKernel =
    device(SOURCE, SoftmaxParams::prelude, "softmax_long", || variants(&LONG_VECTORS, |_| vec![LONG]));
static BACKWARD_ROW_DEVICE: CudaKernel =
    device(BACKWARD_SOURCE, SoftmaxBackwardParams::prelude, "softmax_backward_row", || {
        let mut all = row_variants(backward_table);
        all.extend(variants(&[DENSE], |dtype| {
            let tilings = RowTiling::all_of_many(backward_table(dtype));
            tilings.into_iter().filter(has_backward_room).collect()
        }));
        all
    });
static BACKWARD_SPLIT_DEVICE: CudaKernel = CudaKernel {
    min_arch: Arch::new(9, 0, false),
    ..device(BACKWARD_SOURCE, SoftmaxBackwardParams::prelude, "softmax_backward_split", || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            for &(lanes, items) in split_table(dtype) {
                let mut splits = vec![usual_split(lanes), MOST_BLOCKS];
                splits.dedup();
                for split in splits {
                    let block = RowTiling::alone(lanes / split, items);
                    let vectors = [0, 1, 2, DENSE, SPREAD, SPREAD_ANY].into_iter();
                    let fitting = vectors.filter(|&vector| has_split_room(&block, vector, dtype));
                    all.extend(fitting.map(|vector| split_defines(dtype, vector, &block, split, 0)));
                }
            }
        }
        all
    })
};
static BACKWARD_LONG_DEVICE: CudaKernel =
    device(BACKWARD_SOURCE, SoftmaxBackwardParams::prelude, "softmax_backward_long", || {
        variants(&LONG_VECTORS, |_| vec![LONG_BACKWARD])
    });

/// A row in the registers of a block or warp.
pub(super) const ROW: Kernel<Problem> = Kernel::cuda("softmax_row", &ROW_DEVICE, run_row)
    .when(|p, info| {
        fits(p, table(p.dtype))?;
        match vector_level(p) == DENSE && staged(p, info, table(p.dtype), 1).is_none() {
            true => Err("the row, which is not aligned, does not fit a block".into()),
            false => Ok(()),
        }
    })
    .configured(|p, info| match vector_level(p) {
        DENSE => describe(RowTiling::new(p.hidden, p.dtype, table(p.dtype))),
        _ => describe(tiling(p, info, table(p.dtype))),
    });

/// A row of any length.
pub(super) const LONG_ROW: Kernel<Problem> =
    Kernel::cuda("softmax_long", &LONG_DEVICE, run_long).when(|p, _| addressable(p)).configured(|p, info| {
        format!("{} threads a row, {} chunks of each in shared memory", LONG.lanes, cached_chunks(p, info))
    });

/// Rows of both inputs in the registers of a block or warp.
pub(super) const BACKWARD_ROW: Kernel<Problem> =
    Kernel::cuda("softmax_backward_row", &BACKWARD_ROW_DEVICE, run_backward_row)
        .when(|p, _| fits_backward(p))
        .configured(|p, info| describe(tiling(p, info, backward_table(p.dtype))));

/// The same with the blocks of a cluster for each row.
pub(super) const BACKWARD_SPLIT: Kernel<Problem> =
    Kernel::cuda("softmax_backward_split", &BACKWARD_SPLIT_DEVICE, run_backward_split)
        .when(|p, info| match split_tiling(p, info) {
            Some(_) => Ok(()),
            None => Err("the row needs less or more threads than a cluster has".into()),
        })
        .configured(|p, info| match split_tiling(p, info) {
            Some((block, split, _)) => format!("{split} blocks of {block}"),
            None => String::new(),
        });

/// Rows of any length.
pub(super) const BACKWARD_LONG: Kernel<Problem> =
    Kernel::cuda("softmax_backward_long", &BACKWARD_LONG_DEVICE, run_backward_long)
        .when(|p, _| addressable(p))
        .configured(|_, _| format!("{} threads a row", LONG_BACKWARD.lanes));

fn fits(p: &Problem, table: RowTable) -> std::result::Result<(), String> {
    match RowTiling::new(p.hidden, p.dtype, table) {
        Some(_) => Ok(()),
        None => Err("the row does not fit the registers of a block".into()),
    }
}

fn fits_backward(p: &Problem) -> std::result::Result<(), String> {
    fits(p, backward_table(p.dtype))?;
    let tiling = RowTiling::new(p.hidden, p.dtype, backward_table(p.dtype));
    match vector_level(p) == DENSE && !tiling.is_some_and(|t| has_backward_room(&t)) {
        true => Err("the row, which is not aligned, does not fit the registers of a block".into()),
        false => Ok(()),
    }
}

/// Whether threads have registers to arrange rows that begin anywhere.
fn has_backward_room(tiling: &RowTiling) -> bool {
    tiling.items < 4
}

/// Blocks of a cluster where there are many rows.
fn usual_split(lanes: usize) -> usize {
    (lanes / SPLIT_LANES).min(MOST_BLOCKS)
}

/// Shared memory in which the threads of a block of a cluster leave what their registers do not hold: one of both inputs.
fn kept_bytes(block: &RowTiling) -> usize {
    if block.items > 4 { block.lanes * block.items * 16 } else { 0 }
}

/// The tiling of each block of a cluster, how many there are, and `VECTOR`. Few rows are spread over more blocks.
fn split_tiling(p: &Problem, info: &DeviceInfo) -> Option<(RowTiling, usize, u8)> {
    let short = RowTiling::new(p.hidden, p.dtype, backward_table(p.dtype)).filter(|t| t.lanes < 512);
    let row = RowTiling::new(p.hidden, p.dtype, split_table(p.dtype)).filter(|_| short.is_none())?;
    let few = p.num_rows * MOST_BLOCKS <= info.units;
    let split = if few { MOST_BLOCKS } else { usual_split(row.lanes) };
    let vector = row.vector_level(p.hidden, p.dtype, row_kind(p));
    let block = RowTiling::alone(row.lanes / split, row.items);
    has_split_room(&block, vector, p.dtype).then_some((block, split, vector))
}

/// Whether threads have registers for elements that are loaded one by one, and for the addresses of those that lie anywhere.
fn has_split_room(block: &RowTiling, vector: u8, dtype: DType) -> bool {
    let few = block.items <= 4;
    match vector {
        SPREAD => few || dtype.size() == 4,
        SPREAD_ANY => few,
        _ => true,
    }
}

/// The tiling of rows in registers.
fn tiling(p: &Problem, info: &DeviceInfo, table: RowTable) -> Option<RowTiling> {
    let tiling = RowTiling::new(p.hidden, p.dtype, table)?.of_many(p.num_rows, info.units);
    Some(if vector_level(p) >= SPREAD { tiling.unbatched() } else { tiling })
}

/// The tiling of rows of `inputs` tensors that begin anywhere, and how they go through shared memory.
fn staged(p: &Problem, info: &DeviceInfo, table: RowTable, inputs: usize) -> Option<(RowTiling, StagedRows)> {
    let tiling = RowTiling::new(p.hidden, p.dtype, table)?;
    Some((tiling, StagedRows::new(&tiling, p.num_rows, inputs, 0, info)?))
}

fn describe(tiling: Option<RowTiling>) -> String {
    tiling.map(|t| t.to_string()).unwrap_or_default()
}

fn row_kind(p: &Problem) -> RowKind {
    RowKind::new(&p.steps, p.vector_rows)
}

/// Of kernels that check whether a chunk exists.
fn vector_level(p: &Problem) -> u8 {
    row_kind(p).row_level(p.hidden, p.dtype)
}

/// Columns are counted in `int`, with headroom for a step past the end.
fn addressable(p: &Problem) -> std::result::Result<(), String> {
    if p.hidden <= 1 << 30 {
        Ok(())
    } else {
        Err(format!("rows of {} elements are longer than 2^30", p.hidden))
    }
}

/// How many chunks of each thread of the kernel for long rows fit shared memory, beside the little the kernel and the
/// system use. Changes where data is kept, never the result.
fn cached_chunks(p: &Problem, info: &DeviceInfo) -> usize {
    const RESERVED: usize = 2048;
    let room = info.shared_per_block.saturating_sub(RESERVED) / (LONG.lanes * 16);
    (p.hidden * p.dtype.size()).div_ceil(LONG.lanes * 16).min(room)
}

fn params(launch: &Launch<'_, Problem>, tiling: &RowTiling, cached: usize) -> SoftmaxParams {
    let p = launch.problem;
    let large = is_large(launch.info, p.num_rows * p.hidden, p.dtype);
    SoftmaxParams {
        x: launch.args.address(X) as u64,
        out: launch.args.address(OUT) as u64,
        num_rows: p.num_rows as i64,
        hidden: p.hidden as i32,
        cached: cached as i32,
        // Zero with a scale of zero, so that no difference of elements overflows before it is multiplied by zero.
        sign: if p.scale() == 0.0 { 0.0 } else { p.scale().signum() as f32 },
        magnitude: (p.scale().abs() * std::f64::consts::LOG2_E) as f32,
        x_step: p.steps[0] as i64,
        out_step: p.steps[1] as i64,
        is_large: large,
        blocks_ahead: blocks_ahead(launch.info, large, tiling.block_rows() * p.hidden * p.dtype.size()),
        rows: Rows::new(&p.rows),
    }
}

fn run_row(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    if vector_level(p) == DENSE {
        let (tiling, rows) = staged(p, launch.info, table(p.dtype), 1).expect("`supports` has passed");
        let defines = split_defines(p.dtype, DENSE, &tiling, 1, rows.stages);
        // SAFETY: as below, and shared memory holds the rows that are staged.
        return unsafe { launch.record(&defines, &rows.launch(&tiling)?, &params(launch, &tiling, 0)) };
    }
    let tiling = tiling(p, launch.info, table(p.dtype)).expect("`supports` has passed");
    let config = tiling.launch(p.num_rows)?;
    let vector = tiling.vector_level(p.hidden, p.dtype, row_kind(p));
    // SAFETY: `check` bound shapes and strides to the parameters, and the tiling covers the row.
    unsafe { launch.record(&defines(p.dtype, vector, &tiling), &config, &params(launch, &tiling, 0)) }
}

fn run_long(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let cached = cached_chunks(p, launch.info);
    let mut config = LONG.launch(p.num_rows)?;
    config.shared_bytes = (cached * LONG.lanes * 16) as u32;
    // SAFETY: `check` bound shapes and strides to the parameters, and shared memory holds the cached chunks.
    unsafe {
        launch.record(&defines(p.dtype, vector_level(p), &LONG), &config, &params(launch, &LONG, cached))
    }
}

fn run_backward_row(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = tiling(p, launch.info, backward_table(p.dtype)).expect("`supports` has passed");
    run_backward(launch, &tiling, tiling.vector_level(p.hidden, p.dtype, row_kind(p)))
}

fn run_backward_split(launch: &Launch<'_, Problem>) -> Result<()> {
    let (block, split, vector) = split_tiling(launch.problem, launch.info).expect("`supports` has passed");
    run_backward_blocks(launch, &block, split, vector)
}

fn run_backward_long(launch: &Launch<'_, Problem>) -> Result<()> {
    run_backward(launch, &LONG_BACKWARD, vector_level(launch.problem))
}

fn run_backward(launch: &Launch<'_, Problem>, tiling: &RowTiling, vector: u8) -> Result<()> {
    run_backward_blocks(launch, tiling, 1, vector)
}

/// With `split` blocks of this tiling for each row.
fn run_backward_blocks(
    launch: &Launch<'_, Problem>,
    block: &RowTiling,
    split: usize,
    vector: u8,
) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let [y_step, dout_step, dx_step, _] = p.steps.map(|s| s as i64);
    let params = SoftmaxBackwardParams {
        y: at(Y),
        dout: at(DOUT),
        dx: at(DX),
        num_rows: p.num_rows as i64,
        hidden: p.hidden as i32,
        scale: p.scale() as f32,
        y_step,
        dout_step,
        dx_step,
        rows: Rows::new(&p.rows),
    };
    let mut config = block.launch(p.num_rows * split)?;
    if split > 1 {
        config.cluster = Some([split as u32, 1, 1]);
        config.shared_bytes = kept_bytes(block) as u32;
    }
    // SAFETY: `check` bound shapes and strides to the parameters, and the tiling covers the row.
    unsafe { launch.record(&split_defines(p.dtype, vector, block, split, 0), &config, &params) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn rows_of_clusters_have_the_threads_that_rows_of_blocks_have() {
        for dtype in FLOATS {
            for hidden in (2049..20_000).chain([64_723, 131_072]) {
                let block = RowTiling::new(hidden, dtype, backward_table(dtype));
                let cluster = RowTiling::new(hidden, dtype, split_table(dtype)).expect("long enough");
                if let Some(t) = block.filter(|t| t.lanes == 512) {
                    assert_eq!((t.lanes, t.items), (cluster.lanes, cluster.items), "{hidden} {dtype}");
                }
            }
        }
    }
}
