//! Both norms on CUDA devices: host half.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X, backward as back};
use crate::cuda::rows::{RowKind, RowTable, RowTiling, Rows, blocks_ahead, element, flag, is_large};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::{FLOATS, column_sum};
use crate::tensor::DType;

const SOURCE: Source = Source { name: "norm", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source = Source { name: "norm_backward", code: include_str!("backward.cu") };
const ANY_ARCH: Arch = Arch::new(6, 0, false);

/// Forward: one row in registers, twice with a residual. With one reduction a row, more threads with fewer chunks
/// each are faster; with two, the fewer warps there are to join the better, but for the rows that eight warps hold. With a
/// mean to subtract, blocks of 1024 threads have too few registers.
const fn table(center: bool) -> RowTable {
    match center {
        false => &[
            (16, 1),
            (32, 1),
            (32, 2),
            (64, 2),
            (128, 2),
            (256, 2),
            (512, 2),
            (512, 3),
            (1024, 2),
            (1024, 4),
        ],
        true => &[(16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (256, 2), (256, 4), (512, 3), (512, 4)],
    }
}

/// Backward: x, dout, weight and two sums in f32, so fewer elements a thread; as many for each type.
const fn backward_table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2), (512, 4)],
        _ => &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2)],
    }
}

/// Backward, rows that the blocks of a cluster share. Where the table above has rows as long, it has as many threads
/// and chunks: both kernels give the same bits.
const fn split_table(dtype: DType) -> RowTable {
    match dtype.size() {
        4 => &[(512, 2), (512, 4), (1024, 4), (2048, 4)],
        _ => &[(512, 2), (1024, 2), (2048, 2)],
    }
}

/// Threads of one row that each block of a cluster has.
const SPLIT_LANES: usize = 256;

kernel_params! {
    struct NormParams {
        x: u64, weight: u64, bias: u64, residual: u64, out: u64, sum: u64,
        num_rows: i64, hidden: i32, eps: f32,
        x_step: i64, out_step: i64, residual_step: i64, sum_step: i64, weight_step: i64, bias_step: i64,
        is_large: i32, blocks_ahead: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct NormBackwardParams {
        x: u64, weight: u64, dout: u64, dsum: u64, dx: u64, partial: u64,
        num_rows: i64, num_groups: i64, hidden: i32, eps: f32,
        x_step: i64, dout_step: i64, dx_step: i64, dsum_step: i64, weight_step: i64,
        rows: Rows,
    }
}

/// The choices of the forward pass that are compiled in, besides tiling and type.
#[derive(Clone, Copy)]
struct Features {
    vector: u8,
    center: bool,
    residual: bool,
    prefetch: bool,
}

fn defines(tiling: &RowTiling, dtype: DType, features: Features) -> Defines {
    let mut defines = tiling.defines();
    defines.extend([
        element(dtype),
        ("VECTOR", features.vector.to_string()),
        flag("CENTER", features.center),
        flag("HAS_RESIDUAL", features.residual),
        flag("PREFETCH", features.prefetch),
    ]);
    defines
}

fn variants(center: bool, tilings: &[RowTiling], vectors: &[u8], prefetches: &[bool]) -> Vec<Defines> {
    let mut all = Vec::new();
    for tiling in tilings {
        for dtype in FLOATS {
            for &vector in vectors {
                for &prefetch in prefetches.iter().filter(|&&prefetch| !prefetch || can_prefetch(tiling)) {
                    let residuals = [false, true].into_iter().filter(|&with| has_room(tiling, vector, with));
                    all.extend(residuals.map(|residual| {
                        defines(tiling, dtype, Features { vector, center, residual, prefetch })
                    }));
                }
            }
        }
    }
    all
}

/// Whether weight and bias are loaded with the row instead of when they are needed: that saves a trip to L2 where there
/// are not enough other rows to hide it. Where there are, the registers are better spent on them.
fn prefetches(p: &Problem, tiling: &RowTiling, units: usize) -> bool {
    can_prefetch(tiling) && p.num_rows.div_ceil(tiling.block_rows()) <= BLOCKS_THAT_HIDE * units
}

/// The largest blocks have no registers to spare, and very many rows share the loads of their block.
fn can_prefetch(tiling: &RowTiling) -> bool {
    tiling.lanes < 1024 && tiling.batch == 1
}

/// Blocks of a multiprocessor from which on they hide each other's latency.
const BLOCKS_THAT_HIDE: usize = 4;

/// The tiling of a kernel that goes over a row several times: the threads of the one that keeps it in registers, so
/// that both add in the same order and give the same bits. A warp whose upper half has nothing adds like half a warp.
fn long_tiling(hidden: usize, dtype: DType, table: RowTable) -> RowTiling {
    let longest = table.last().expect("a table has rows").0;
    let lanes = RowTiling::new(hidden, dtype, table).map_or(longest, |t| t.lanes.max(32));
    RowTiling { rows: 1, ..RowTiling::alone(lanes, 1) }
}

fn long_tilings(table: RowTable) -> Vec<RowTiling> {
    let mut lanes: Vec<usize> = table.iter().map(|&(lanes, _)| lanes.max(32)).collect();
    lanes.dedup();
    lanes.into_iter().map(|lanes| RowTiling { rows: 1, ..RowTiling::alone(lanes, 1) }).collect()
}

const fn device(
    source: Source,
    prelude: fn() -> String,
    function: &'static str,
    variants: fn() -> Vec<Defines>,
) -> CudaKernel {
    CudaKernel { source, prelude, function, min_arch: ANY_ARCH, fast_math: false, overlaps: true, variants }
}

/// A kernel that keeps rows in registers. On the oldest GPUs the compiler spills; the others serve those.
const fn in_registers(device: CudaKernel) -> CudaKernel {
    CudaKernel { min_arch: Arch::new(7, 0, false), ..device }
}

static RMS_ROW: CudaKernel = in_registers(device(SOURCE, NormParams::prelude, "norm_row", || {
    variants(false, &RowTiling::all_of_many(table(false)), &[1, 2, 3], &[false, true])
}));
static LAYER_ROW: CudaKernel = in_registers(device(SOURCE, NormParams::prelude, "norm_row", || {
    variants(true, &RowTiling::all_of_many(table(true)), &[1, 2, 3], &[false, true])
}));
static RMS_LONG: CudaKernel = device(SOURCE, NormParams::prelude, "norm_long", || {
    variants(false, &long_tilings(table(false)), &[0, 1, 3], &[false])
});
static LAYER_LONG: CudaKernel = device(SOURCE, NormParams::prelude, "norm_long", || {
    variants(true, &long_tilings(table(true)), &[0, 1, 3], &[false])
});

/// A row in the registers of a block or warp.
pub(in crate::ops) const fn row(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_ROW } else { &RMS_ROW }, run_row)
        .when(|p, _| {
            let room = |t: &RowTiling| has_room(t, row_kind(p).vector_level(), p.has_residual);
            fits(p.hidden, p.num_rows, p.dtype, row_kind(p), table(p.center), room)
        })
        .configured(|p, info| tiling(p, info).map(|t| t.to_string()).unwrap_or_default())
}

/// A row of any length and layout.
pub(in crate::ops) const fn long(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_LONG } else { &RMS_LONG }, run_long)
        .when(|p, _| addressable(p.hidden, p.num_rows))
        .configured(|p, _| format!("{} threads a row", long_tiling(p.hidden, p.dtype, table(p.center)).lanes))
}

/// The tiling of rows in registers.
fn tiling(p: &Problem, info: &DeviceInfo) -> Option<RowTiling> {
    RowTiling::new(p.hidden, p.dtype, table(p.center)).map(|t| t.of_many(p.num_rows, info.units))
}

fn row_kind(p: &Problem) -> RowKind {
    RowKind::new(&p.steps, p.vector_rows)
}

/// Of the tensors that the backward kernels touch; the summed gradients are not among them.
fn backward_row_kind(p: &back::Problem) -> RowKind {
    RowKind::new(&p.steps[..5], p.vector_rows)
}

/// Whether rows can be kept in registers.
fn fits(
    hidden: usize,
    num_rows: usize,
    dtype: DType,
    kind: RowKind,
    table: RowTable,
    has_room: impl Fn(&RowTiling) -> bool,
) -> std::result::Result<(), String> {
    if kind == RowKind::Any {
        return Err("rows are not dense".into());
    }
    match RowTiling::new(hidden, dtype, table) {
        None => Err("the row does not fit the registers of a block".into()),
        Some(tiling) if !has_room(&tiling) => {
            Err("the row, which is not aligned, does not fit the registers of a block".into())
        }
        Some(_) => addressable(hidden, num_rows),
    }
}

/// Whether the forward kernel has registers for rows of this kind: those that begin anywhere must be arranged.
fn has_room(tiling: &RowTiling, vector: u8, residual: bool) -> bool {
    let largest = tiling.lanes == 1024 && tiling.items == 4;
    vector != RowKind::Dense.vector_level() || !residual || !largest
}

/// The same for the backward kernel.
fn has_backward_room(tiling: &RowTiling, vector: u8, center: bool) -> bool {
    vector != RowKind::Dense.vector_level() || !center || tiling.lanes < 512
}

/// Whether the blocks of a cluster can share a row.
fn has_clusters(info: &DeviceInfo) -> bool {
    info.arch.is_some_and(|arch| arch.major >= 9)
}

/// Columns are counted in `int`, with room for a step past the end, and rows in 32 bits.
fn addressable(hidden: usize, num_rows: usize) -> std::result::Result<(), String> {
    match (hidden <= 1 << 30, num_rows < 1 << 31) {
        (true, true) => Ok(()),
        (false, _) => Err(format!("rows of {hidden} elements are longer than 2^30")),
        (_, false) => Err(format!("{num_rows} rows are more than 2^31")),
    }
}

fn params(launch: &Launch<'_, Problem>, tiling: &RowTiling) -> NormParams {
    let p = launch.problem;
    let large = is_large(launch.info, p.num_rows * p.hidden, p.dtype);
    let inputs = 1 + p.has_residual as usize;
    let at = |index| launch.args.address(index) as u64;
    let [x_step, out_step, residual_step, sum_step, weight_step, bias_step] = p.steps.map(|s| s as i64);
    NormParams {
        x: at(X),
        weight: at(WEIGHT),
        bias: at(BIAS),
        residual: at(RESIDUAL),
        out: at(OUT),
        sum: at(SUM),
        num_rows: p.num_rows as i64,
        hidden: p.hidden as i32,
        eps: f32::from_bits(p.eps_bits),
        x_step,
        out_step,
        residual_step,
        sum_step,
        weight_step,
        bias_step,
        is_large: large,
        blocks_ahead: blocks_ahead(
            launch.info,
            large,
            inputs * tiling.block_rows() * p.hidden * p.dtype.size(),
        ),
        rows: Rows::new(&p.rows),
    }
}

fn run_row(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = tiling(p, launch.info).expect("`supports` has passed");
    let vector = tiling.vector_level(p.hidden, p.dtype, row_kind(p));
    run_tiled(launch, &tiling, vector, prefetches(p, &tiling, launch.info.units))
}

fn run_long(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    run_tiled(launch, &long_tiling(p.hidden, p.dtype, table(p.center)), row_kind(p).vector_level(), false)
}

fn run_tiled(launch: &Launch<'_, Problem>, tiling: &RowTiling, vector: u8, prefetch: bool) -> Result<()> {
    let p = launch.problem;
    let features = Features { vector, center: p.center, residual: p.has_residual, prefetch };
    let defines = defines(tiling, p.dtype, features);
    let config = tiling.launch(p.num_rows)?;
    // SAFETY: `check` bound shapes and strides to the parameters, and the tiling covers the row.
    unsafe { launch.record(&defines, &config, &params(launch, tiling)) }
}

// ---- backward ----

/// How far ahead of its use a row is fetched, in rows and the one in use; zero where rows cannot be staged. The fewer
/// chunks a thread has, the more rows it takes to keep memory busy.
fn stages(tiling: &RowTiling, vector: u8, info: &DeviceInfo) -> usize {
    let asynchronous = info.arch.is_some_and(|arch| arch.major >= 8) && [1, 2].contains(&vector);
    let wanted = if tiling.items == 1 { 5 } else { 3 };
    let fitting = (info.shared_per_block / stage_bytes(tiling)).min(wanted);
    if asynchronous && fitting >= 2 { fitting } else { 0 }
}

/// Shared memory for the x and dout of the rows of a block.
fn stage_bytes(tiling: &RowTiling) -> usize {
    2 * tiling.items * tiling.lanes * tiling.rows * 16
}

/// How the backward kernels share out rows, and how they move them.
#[derive(Clone, Copy)]
struct BackwardTiling {
    /// Of one block.
    block: RowTiling,
    /// Blocks of a cluster that share a row, or one.
    split: usize,
    vector: u8,
    stages: usize,
}

impl BackwardTiling {
    fn alone(block: RowTiling, vector: u8, stages: usize) -> Self {
        BackwardTiling { block, split: 1, vector, stages }
    }

    fn defines(&self, dtype: DType, center: bool, sums: bool) -> Defines {
        let mut defines = self.block.defines();
        defines.extend([
            element(dtype),
            ("SPLIT", self.split.to_string()),
            ("VECTOR", self.vector.to_string()),
            ("STAGES", self.stages.to_string()),
            flag("CENTER", center),
            flag("SUMS", sums),
        ]);
        defines
    }

    /// Groups of threads that share out the rows: as many as run at once, so that each leaves one partial sum.
    fn groups(&self, num_rows: usize, info: &DeviceInfo) -> usize {
        // Clusters live within a group of multiprocessors, of which there are 16 or a few more.
        let units = if self.split == 1 { info.units } else { (info.units / 16 * 16).max(1) };
        let at_once = units * (THREADS_AT_ONCE / self.block.lanes).max(1) / self.split;
        at_once.max(1).min(num_rows)
    }

    /// Shared memory of a block: stages, and so much that no more blocks share a multiprocessor than the number of
    /// groups counts on. Where one had more than its share, the others would wait for it.
    fn shared_bytes(&self, groups: usize, info: &DeviceInfo) -> usize {
        const RESERVED: usize = 1024;
        let staged = self.stages * stage_bytes(&self.block);
        let blocks = (THREADS_AT_ONCE / self.block.threads() as usize).max(1);
        if staged == 0 || !has_clusters(info) || groups * self.split <= info.units {
            return staged;
        }
        let crowding = (info.shared_per_block + RESERVED) / (blocks + 1) - RESERVED + 128;
        staged.max(crowding.next_multiple_of(128))
    }
}

/// Of a multiprocessor. More do not find registers for a row's elements and sums.
const THREADS_AT_ONCE: usize = 512;

/// Without and with sums over rows.
fn backward_variants(tiling: BackwardTiling, dtype: DType, center: bool) -> [Defines; 2] {
    [false, true].map(|sums| tiling.defines(dtype, center, sums))
}

fn backward_row_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for block in RowTiling::all(backward_table(dtype)) {
            let mut add = |vector, stages| {
                all.extend(backward_variants(BackwardTiling::alone(block, vector, stages), dtype, center));
            };
            if has_backward_room(&block, 3, center) {
                add(3, 0);
            }
            for vector in [1, 2] {
                let stages: &[usize] = if block.items == 1 { &[0, 2, 3, 4, 5] } else { &[0, 2, 3] };
                stages.iter().for_each(|&stages| add(vector, stages));
            }
        }
    }
    all
}

fn backward_split_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for &(lanes, items) in split_table(dtype) {
            let (block, split) = (RowTiling::alone(SPLIT_LANES, items), lanes / SPLIT_LANES);
            for (vector, stages) in [(0, 0), (1, 2), (1, 3), (2, 2), (2, 3), (3, 0)] {
                let tiling = BackwardTiling { block, split, vector, stages };
                all.extend(backward_variants(tiling, dtype, center));
            }
        }
    }
    all
}

fn backward_long_variants(center: bool) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for tiling in long_tilings(backward_table(dtype)) {
            for vector in [0, 1, 3] {
                all.extend(backward_variants(BackwardTiling::alone(tiling, vector, 0), dtype, center));
            }
        }
    }
    all
}

/// The kernel of rows in registers, with the blocks of a cluster for each.
const fn in_clusters(variants: fn() -> Vec<Defines>) -> CudaKernel {
    let device = device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_row", variants);
    CudaKernel { min_arch: Arch::new(9, 0, false), ..device }
}

static RMS_BACKWARD: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_row", || {
        backward_row_variants(false)
    });
static LAYER_BACKWARD: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_row", || backward_row_variants(true));
static RMS_BACKWARD_SPLIT: CudaKernel = in_clusters(|| backward_split_variants(false));
static LAYER_BACKWARD_SPLIT: CudaKernel = in_clusters(|| backward_split_variants(true));
static RMS_BACKWARD_LONG: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_long", || {
        backward_long_variants(false)
    });
static LAYER_BACKWARD_LONG: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_long", || {
        backward_long_variants(true)
    });

fn backward_tiling(p: &back::Problem, info: &DeviceInfo) -> Option<BackwardTiling> {
    let block = RowTiling::new(p.hidden, p.dtype, backward_table(p.dtype))?;
    let vector = block.vector_level(p.hidden, p.dtype, backward_row_kind(p));
    Some(BackwardTiling::alone(block, vector, stages(&block, vector, info)))
}

/// Of rows that are too long for the threads of one block of a cluster.
fn backward_split_tiling(p: &back::Problem, info: &DeviceInfo) -> Option<BackwardTiling> {
    let short = RowTiling::new(p.hidden, p.dtype, backward_table(p.dtype)).filter(|t| t.lanes <= SPLIT_LANES);
    let row = RowTiling::new(p.hidden, p.dtype, split_table(p.dtype)).filter(|_| short.is_none())?;
    let block = RowTiling::alone(SPLIT_LANES, row.items);
    let vector = row.vector_level(p.hidden, p.dtype, backward_row_kind(p));
    Some(BackwardTiling {
        block,
        split: row.lanes / SPLIT_LANES,
        vector,
        stages: stages(&block, vector, info),
    })
}

fn backward_long_tiling(p: &back::Problem) -> BackwardTiling {
    let block = long_tiling(p.hidden, p.dtype, backward_table(p.dtype));
    BackwardTiling::alone(block, backward_row_kind(p).vector_level(), 0)
}

/// Rows in registers, sums over rows in registers too.
pub(in crate::ops) const fn backward_row(name: &'static str, center: bool) -> Kernel<back::Problem> {
    Kernel::cuda(name, if center { &LAYER_BACKWARD } else { &RMS_BACKWARD }, run_backward_row)
        .when(|p, info| {
            let kind = backward_row_kind(p);
            // Threads that have to arrange their rows are better spread over more blocks.
            let spread = kind == RowKind::Dense && has_clusters(info);
            let room = |t: &RowTiling| {
                has_backward_room(t, kind.vector_level(), p.center) && !(spread && t.lanes == 512)
            };
            fits(p.hidden, p.num_rows, p.dtype, kind, backward_table(p.dtype), room)
        })
        .configured(|p, info| match backward_tiling(p, info) {
            Some(t) => format!("{}, {} groups of rows", t.block, t.groups(p.num_rows, info)),
            None => String::new(),
        })
        .with_workspace(|p, info| backward_tiling(p, info).map_or(0, |t| workspace(p, info, &t)))
        .and(&column_sum::cuda::DEVICE)
}

/// The same with the blocks of a cluster for each row.
pub(in crate::ops) const fn backward_split(name: &'static str, center: bool) -> Kernel<back::Problem> {
    Kernel::cuda(name, if center { &LAYER_BACKWARD_SPLIT } else { &RMS_BACKWARD_SPLIT }, run_backward_split)
        .when(|p, info| match backward_split_tiling(p, info) {
            None => Err("the row needs less or more threads than a cluster has".into()),
            Some(_) => addressable(p.hidden, p.num_rows),
        })
        .configured(|p, info| match backward_split_tiling(p, info) {
            Some(t) => {
                let (split, groups) = (t.split, t.groups(p.num_rows, info));
                format!("{split} blocks of {}, {groups} groups of rows", t.block)
            }
            None => String::new(),
        })
        .with_workspace(|p, info| backward_split_tiling(p, info).map_or(0, |t| workspace(p, info, &t)))
        .and(&column_sum::cuda::DEVICE)
}

/// Rows of any length and layout.
pub(in crate::ops) const fn backward_long(name: &'static str, center: bool) -> Kernel<back::Problem> {
    Kernel::cuda(name, if center { &LAYER_BACKWARD_LONG } else { &RMS_BACKWARD_LONG }, run_backward_long)
        .when(|p, _| addressable(p.hidden, p.num_rows))
        .configured(|p, info| {
            let t = backward_long_tiling(p);
            format!("{} threads a row, {} groups of rows", t.block.lanes, t.groups(p.num_rows, info))
        })
        .with_workspace(|p, info| workspace(p, info, &backward_long_tiling(p)))
        .and(&column_sum::cuda::DEVICE)
}

/// Sums over rows that the kernel forms if any is wanted: of dweight, and of dbias for layer_norm.
fn num_partials(p: &back::Problem) -> usize {
    if p.num_sums() == 0 { 0 } else { 1 + p.center as usize }
}

fn workspace(p: &back::Problem, info: &DeviceInfo, tiling: &BackwardTiling) -> usize {
    num_partials(p) * tiling.groups(p.num_rows, info) * p.hidden * size_of::<f32>()
}

fn run_backward_row(launch: &Launch<'_, back::Problem>) -> Result<()> {
    run_backward(launch, &backward_tiling(launch.problem, launch.info).expect("`supports` has passed"))
}

fn run_backward_split(launch: &Launch<'_, back::Problem>) -> Result<()> {
    run_backward(launch, &backward_split_tiling(launch.problem, launch.info).expect("`supports` has passed"))
}

fn run_backward_long(launch: &Launch<'_, back::Problem>) -> Result<()> {
    run_backward(launch, &backward_long_tiling(launch.problem))
}

fn run_backward(launch: &Launch<'_, back::Problem>, tiling: &BackwardTiling) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let groups = tiling.groups(p.num_rows, launch.info);
    let [x_step, dout_step, dx_step, dsum_step, weight_step, _, _] = p.steps.map(|s| s as i64);
    if groups > 0 {
        let params = NormBackwardParams {
            x: at(back::X),
            weight: at(back::WEIGHT),
            dout: at(back::DOUT),
            dsum: at(back::DSUM),
            dx: at(back::DX),
            partial: launch.workspace as u64,
            num_rows: p.num_rows as i64,
            num_groups: groups as i64,
            hidden: p.hidden as i32,
            eps: f32::from_bits(p.eps_bits),
            x_step,
            dout_step,
            dx_step,
            dsum_step,
            weight_step,
            rows: Rows::new(&p.rows),
        };
        let defines = tiling.defines(p.dtype, p.center, p.num_sums() > 0);
        let mut config = tiling.block.launch(groups * tiling.split)?;
        config.shared_bytes = tiling.shared_bytes(groups, launch.info) as u32;
        config.cluster = (tiling.split > 1).then_some([tiling.split as u32, 1, 1]);
        // SAFETY: `check` bound shapes and strides to the parameters, the tiling covers the row, and the
        // workspace holds the partial sums of every group.
        unsafe { launch.record(&defines, &config, &params)? };
    }
    if p.num_sums() == 0 {
        return Ok(());
    }
    // Both sums of layer_norm are formed if either is wanted; a null target is passed over.
    let target = |index: usize, step| (launch.args.address(index), step);
    let targets = [target(back::DWEIGHT, p.steps[5]), target(back::DBIAS, p.steps[6])];
    // SAFETY: as above; the workspace holds the partial sums of `num_partials` gradients.
    unsafe { column_sum::cuda::add(launch, groups, p.hidden, p.dtype, &targets[..num_partials(p)]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tiling_of_every_row_is_listed() {
        for center in [false, true] {
            let (all, long) = (RowTiling::all(table(center)), long_tilings(table(center)));
            for hidden in (1..3000).chain([4096, 8192, 12345, 16384, 32768]) {
                for dtype in FLOATS {
                    let tiling = RowTiling::new(hidden, dtype, table(center));
                    assert!(tiling.is_none_or(|t| all.contains(&t)), "{tiling:?} for {hidden} {dtype}");
                    assert!(long.contains(&long_tiling(hidden, dtype, table(center))), "{hidden} {dtype}");
                }
            }
        }
    }

    #[test]
    fn rows_of_clusters_have_the_threads_that_rows_of_blocks_have() {
        for dtype in FLOATS {
            for hidden in (4097..9000).chain([12_345, 16_384, 19_200, 32_768]) {
                let block = RowTiling::new(hidden, dtype, backward_table(dtype));
                let cluster = RowTiling::new(hidden, dtype, split_table(dtype)).expect("long enough");
                if let Some(t) = block.filter(|t| t.lanes > SPLIT_LANES) {
                    assert_eq!((t.lanes, t.items), (cluster.lanes, cluster.items), "{hidden} {dtype}");
                }
            }
        }
    }
}
