//! Both norms on CUDA devices: host half. That of their gradients is `backward/cuda.rs`.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X};
use crate::cuda::LaunchConfig;
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

const SOURCE: Source = Source { name: "norm", code: include_str!("kernel.cu") };
const ANY_ARCH: Arch = Arch::new(6, 0, false);

/// Forward: one row in registers, twice with a residual. With one reduction per row, more threads with fewer chunks
/// each are faster; with two, fewer warps are better, except for rows that eight warps hold. With a mean to subtract,
/// blocks of 1024 threads have too few registers.
const fn table(center: bool) -> RowTable {
    match center {
        false => ONE_REDUCTION,
        true => &[(16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (256, 2), (256, 4), (512, 3), (512, 4)],
    }
}

kernel_params! {
    struct NormParams {
        x: u64, weight: u64, bias: u64, residual: u64, out: u64, sum: u64,
        num_rows: i64, hidden: i32, eps: f32,
        x_step: i64, out_step: i64, residual_step: i64, sum_step: i64, weight_step: i64, bias_step: i64,
        is_large: i32, blocks_ahead: i32,
        rows: Rows,
    }
}

/// The compile-time choices of the forward pass besides tiling and type.
#[derive(Clone, Copy)]
struct Features {
    vector: u8,
    center: bool,
    residual: bool,
    prefetch: bool,
    /// Of dense rows in shared memory.
    stages: usize,
    /// Weight or bias are strided, rows are dense.
    apart: bool,
}

fn defines(tiling: &RowTiling, dtype: DType, features: Features) -> Defines {
    let mut defines = tiling.defines();
    defines.extend([
        element(dtype),
        ("VECTOR", features.vector.to_string()),
        flag("CENTER", features.center),
        flag("HAS_RESIDUAL", features.residual),
        flag("PREFETCH", features.prefetch),
        ("STAGES", features.stages.to_string()),
        flag("APART", features.apart),
    ]);
    defines
}

fn variants(center: bool, tilings: &[RowTiling], vectors: &[u8], choices: &[(bool, usize)]) -> Vec<Defines> {
    let mut all = Vec::new();
    for tiling in tilings {
        for dtype in FLOATS {
            for &vector in vectors {
                for &(prefetch, stages) in choices.iter().filter(|c| !c.0 || can_prefetch(tiling, vector)) {
                    let residuals = [false, true].into_iter().filter(|&with| has_room(tiling, vector, with));
                    let plain = residuals.map(|residual| Features {
                        vector,
                        center,
                        residual,
                        prefetch,
                        stages,
                        apart: false,
                    });
                    let both = plain.flat_map(|plain| [plain, Features { apart: vector >= DENSE, ..plain }]);
                    all.extend(both.map(|features| defines(tiling, dtype, features)));
                }
            }
        }
    }
    all.dedup();
    all
}

/// Of rows in registers, aligned or staged in shared memory.
fn row_variants(center: bool) -> Vec<Defines> {
    let (many, all) = (RowTiling::all_of_many(table(center)), RowTiling::all(table(center)));
    let spread = RowTiling::all_of_many_spread(table(center));
    let mut found = variants(center, &many, &[1, 2], &[(false, 0), (true, 0)]);
    found.extend(variants(center, &spread, &[SPREAD], &[(false, 0), (true, 0)]));
    found.extend(variants(center, &all, &[DENSE], &[(false, 1), (false, 2)]));
    found
}

/// Whether weight and bias are loaded with the row instead of when they are needed: that saves an L2 round trip where
/// there are not enough other rows to hide it. Where there are, registers are better spent on those.
fn prefetches(p: &Problem, tiling: &RowTiling, units: usize) -> bool {
    can_prefetch(tiling, vector_level(p))
        && p.num_rows.div_ceil(tiling.block_rows()) <= BLOCKS_THAT_HIDE * units
}

/// The largest blocks have no registers to spare, those that load many elements one by one have not either, and very many
/// rows share the loads of their block.
fn can_prefetch(tiling: &RowTiling, vector: u8) -> bool {
    let many = vector == SPREAD && tiling.lanes >= 512 && tiling.items >= 3;
    tiling.lanes < 1024 && tiling.batch == 1 && !many
}

/// Blocks of a multiprocessor from which on they hide each other's latency.
const BLOCKS_THAT_HIDE: usize = 4;

/// The tiling of a kernel that goes over a row several times: the threads of the one that keeps it in registers, so
/// that both add in the same order and give the same bits. A warp whose upper half is empty adds like half a warp.
pub(super) fn long_tiling(hidden: usize, dtype: DType, table: RowTable) -> RowTiling {
    let longest = table.last().expect("a table has rows").0;
    let lanes = RowTiling::new(hidden, dtype, table).map_or(longest, |t| t.lanes.max(32));
    RowTiling { rows: 1, ..RowTiling::alone(lanes, 1) }
}

pub(super) fn long_tilings(table: RowTable) -> Vec<RowTiling> {
    let mut lanes: Vec<usize> = table.iter().map(|&(lanes, _)| lanes.max(32)).collect();
    lanes.dedup();
    lanes.into_iter().map(|lanes| RowTiling { rows: 1, ..RowTiling::alone(lanes, 1) }).collect()
}

pub(super) const fn device(
    source: Source,
    prelude: fn() -> String,
    function: &'static str,
    variants: fn() -> Vec<Defines>,
) -> CudaKernel {
    CudaKernel { source, prelude, function, min_arch: ANY_ARCH, fast_math: false, overlaps: true, variants }
}

/// A kernel that keeps rows in registers. The compiler spills on the oldest GPUs, which use the other kernels.
const fn in_registers(device: CudaKernel) -> CudaKernel {
    CudaKernel { min_arch: Arch::new(7, 0, false), ..device }
}

/// Rows of any length and layout.
const LONG_VECTORS: [u8; 5] = [0, 1, DENSE, SPREAD, SPREAD_ANY];

static RMS_ROW: CudaKernel =
    in_registers(device(SOURCE, NormParams::prelude, "norm_row", || row_variants(false)));
static LAYER_ROW: CudaKernel =
    in_registers(device(SOURCE, NormParams::prelude, "norm_row", || row_variants(true)));
static RMS_LONG: CudaKernel = device(SOURCE, NormParams::prelude, "norm_long", || {
    variants(false, &long_tilings(table(false)), &LONG_VECTORS, &[(false, 0)])
});
static LAYER_LONG: CudaKernel = device(SOURCE, NormParams::prelude, "norm_long", || {
    variants(true, &long_tilings(table(true)), &LONG_VECTORS, &[(false, 0)])
});

/// A row in the registers of a block or warp.
pub(in crate::ops) const fn row(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_ROW } else { &RMS_ROW }, run_row)
        .when(|p, info| {
            let room = |t: &RowTiling| {
                has_room(t, vector_level(p), p.has_residual)
                    && (vector_level(p) != DENSE || staged(p, t, info).is_some())
            };
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
    let alone = RowTiling::new(p.hidden, p.dtype, table(p.center))?;
    Some(match vector_level(p) {
        DENSE => alone,
        SPREAD => alone.of_many(p.num_rows, info.units).unbatched(),
        _ => alone.of_many(p.num_rows, info.units),
    })
}

/// How rows that begin anywhere go through shared memory, if they do.
fn staged(p: &Problem, tiling: &RowTiling, info: &DeviceInfo) -> Option<StagedRows> {
    let (inputs, vectors) = (1 + p.has_residual as usize, p.has_weight as usize + p.has_bias as usize);
    StagedRows::new(tiling, p.num_rows, inputs, vectors, info)
}

/// Of the rows, as far as weight and bias go along with it.
fn row_kind(p: &Problem) -> RowKind {
    RowKind::new(&p.steps[..4], p.vector_rows && p.vector_weights)
}

/// Whether weight and bias are gathered for rows that are dense.
fn is_apart(p: &Problem) -> bool {
    row_kind(p) == RowKind::Dense && p.steps[4..].iter().any(|&step| step != 1)
}

/// Of kernels that check whether a chunk exists.
fn vector_level(p: &Problem) -> u8 {
    row_kind(p).row_level(p.hidden, p.dtype)
}

/// Whether rows can be kept in registers.
pub(super) fn fits(
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
            Err("the row, which is not aligned, does not fit a block".into())
        }
        Some(_) => addressable(hidden, num_rows),
    }
}

/// Whether the forward kernel has registers for rows of this kind: those that begin anywhere must be arranged.
fn has_room(tiling: &RowTiling, vector: u8, residual: bool) -> bool {
    let largest = tiling.lanes == 1024 && tiling.items == 4;
    vector < DENSE || !residual || !largest
}

/// Columns are counted in `int`, with headroom for a step past the end, and rows in 32 bits.
pub(super) fn addressable(hidden: usize, num_rows: usize) -> std::result::Result<(), String> {
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
    if vector != DENSE {
        let prefetch = prefetches(p, &tiling, launch.info.units);
        return run_tiled(launch, &tiling, tiling.launch(p.num_rows)?, vector, prefetch, 0);
    }
    let staged = staged(p, &tiling, launch.info).expect("`supports` has passed");
    run_tiled(launch, &tiling, staged.launch(&tiling)?, vector, false, staged.stages)
}

fn run_long(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = long_tiling(p.hidden, p.dtype, table(p.center));
    run_tiled(launch, &tiling, tiling.launch(p.num_rows)?, vector_level(p), false, 0)
}

fn run_tiled(
    launch: &Launch<'_, Problem>,
    tiling: &RowTiling,
    config: LaunchConfig,
    vector: u8,
    prefetch: bool,
    stages: usize,
) -> Result<()> {
    let p = launch.problem;
    let features =
        Features { vector, center: p.center, residual: p.has_residual, prefetch, stages, apart: is_apart(p) };
    let defines = defines(tiling, p.dtype, features);
    // SAFETY: `check` bound shapes and strides to the parameters, the tiling covers the row, and shared memory holds
    // the rows that are staged.
    unsafe { launch.record(&defines, &config, &params(launch, tiling)) }
}

#[cfg(feature = "tests")]
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
}
