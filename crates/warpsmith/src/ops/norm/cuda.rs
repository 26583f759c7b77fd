//! Both norms on CUDA devices: host half.

use super::{BIAS, OUT, Problem, RESIDUAL, SUM, WEIGHT, X, backward as back};
use crate::cuda::kernel;
use crate::cuda::rows::{RowLimits, RowTiling, Rows, element, flag};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::Result;
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::ops::{FLOATS, column_sum};
use crate::registry::{CudaKernel, Defines, Kernel, Launch};

const SOURCE: Source = Source { name: "norm", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source = Source { name: "norm_backward", code: include_str!("backward.cu") };
const ANY_ARCH: Arch = Arch::new(6, 0, false);

/// Forward: one row in registers.
const LIMITS: RowLimits = RowLimits { wanted_items: 4, max_items: 8, max_lanes: 1024 };
/// Threads of the kernels for rows of any length.
const LONG_LANES: usize = 1024;

/// Backward: x, dout, weight and two sums in f32, so fewer elements a thread; as many for each type.
const fn backward_limits(dtype: DType) -> RowLimits {
    let max_items = if dtype.size() == 4 { 4 } else { 2 };
    RowLimits { wanted_items: 2, max_items, max_lanes: 512 }
}

kernel_params! {
    struct NormParams {
        x: u64, weight: u64, bias: u64, residual: u64, out: u64, sum: u64,
        num_rows: i64, hidden: i32, eps: f32,
        x_step: i64, out_step: i64, residual_step: i64, sum_step: i64, weight_step: i64, bias_step: i64,
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

/// The compile-time choices of a forward kernel besides the tiling.
#[derive(Clone, Copy)]
struct Flags {
    dtype: DType,
    vector: bool,
    center: bool,
    weight: bool,
    bias: bool,
    residual: bool,
}

impl Flags {
    fn of(p: &Problem) -> Flags {
        Flags {
            dtype: p.dtype,
            vector: p.vector_rows,
            center: p.center,
            weight: p.has_weight,
            bias: p.has_bias,
            residual: p.has_residual,
        }
    }

    fn defines(self, tiling: &RowTiling) -> Defines {
        let mut defines = tiling.defines();
        defines.extend([
            element(self.dtype),
            flag("VECTOR", self.vector),
            flag("CENTER", self.center),
            flag("HAS_WEIGHT", self.weight),
            flag("HAS_BIAS", self.bias),
            flag("HAS_RESIDUAL", self.residual),
        ]);
        defines
    }
}

fn variants(center: bool, tilings: &[RowTiling]) -> Vec<Defines> {
    let mut all = Vec::new();
    for tiling in tilings {
        for dtype in FLOATS {
            for bits in 0..16 {
                let [vector, weight, residual, bias] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
                if !bias || center {
                    all.push(Flags { dtype, vector, center, weight, bias, residual }.defines(tiling));
                }
            }
        }
    }
    all
}

const LONG_TILING: RowTiling = RowTiling { lanes: LONG_LANES, rows: 1, items: 1 };

const fn device(
    source: Source,
    prelude: fn() -> String,
    function: &'static str,
    variants: fn() -> Vec<Defines>,
) -> CudaKernel {
    CudaKernel { source, prelude, function, min_arch: ANY_ARCH, fast_math: false, variants }
}

static RMS_ROW: CudaKernel =
    device(SOURCE, NormParams::prelude, "norm_row", || variants(false, &RowTiling::all(LIMITS)));
static LAYER_ROW: CudaKernel =
    device(SOURCE, NormParams::prelude, "norm_row", || variants(true, &RowTiling::all(LIMITS)));
static RMS_LONG: CudaKernel =
    device(SOURCE, NormParams::prelude, "norm_long", || variants(false, &[LONG_TILING]));
static LAYER_LONG: CudaKernel =
    device(SOURCE, NormParams::prelude, "norm_long", || variants(true, &[LONG_TILING]));

/// A row in the registers of a block or warp.
pub(in crate::ops) const fn row(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_ROW } else { &RMS_ROW }, run_row)
        .when(|p, _| match RowTiling::new(p.hidden, p.dtype, LIMITS) {
            Some(_) => Ok(()),
            None => Err("the row does not fit the registers of a block".into()),
        })
        .configured(|p, _| {
            RowTiling::new(p.hidden, p.dtype, LIMITS).map(|t| t.to_string()).unwrap_or_default()
        })
}

/// A row of any length.
pub(in crate::ops) const fn long(name: &'static str, center: bool) -> Kernel<Problem> {
    Kernel::cuda(name, if center { &LAYER_LONG } else { &RMS_LONG }, run_long)
        .when(|p, _| addressable(p.hidden))
        .configured(|_, _| format!("{LONG_LANES} threads a row"))
}

/// Columns are counted in `int`, with room for a step past the end.
fn addressable(hidden: usize) -> std::result::Result<(), String> {
    if hidden <= 1 << 30 { Ok(()) } else { Err(format!("rows of {hidden} elements are longer than 2^30")) }
}

fn params(launch: &Launch<'_, Problem>) -> NormParams {
    let p = launch.problem;
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
        rows: Rows::new(&p.rows),
    }
}

fn run_row(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = RowTiling::new(p.hidden, p.dtype, LIMITS).expect("`supports` has passed");
    run_tiled(launch, &tiling)
}

fn run_long(launch: &Launch<'_, Problem>) -> Result<()> {
    run_tiled(launch, &LONG_TILING)
}

fn run_tiled(launch: &Launch<'_, Problem>, tiling: &RowTiling) -> Result<()> {
    let defines = Flags::of(launch.problem).defines(tiling);
    let config = tiling.launch(launch.problem.num_rows)?;
    // SAFETY: `check` bound shapes and strides to the parameters, and the tiling covers the row.
    unsafe { kernel::run(launch, &defines, &config, &params(launch)) }
}

// ---- backward ----

fn backward_defines(p: &back::Problem, tiling: &RowTiling) -> Defines {
    let bits = [p.vector_rows, p.has_weight, p.has_dsum, p.has_dweight, p.has_dbias];
    backward_flags(p.dtype, p.center, bits, tiling)
}

fn backward_flags(dtype: DType, center: bool, bits: [bool; 5], tiling: &RowTiling) -> Defines {
    let mut defines = tiling.defines();
    defines.extend([element(dtype), flag("CENTER", center)]);
    let names = ["VECTOR", "HAS_WEIGHT", "HAS_DSUM", "HAS_DWEIGHT", "HAS_DBIAS"];
    defines.extend(names.into_iter().zip(bits).map(|(name, on)| flag(name, on)));
    defines
}

fn backward_variants(center: bool, tilings: fn(DType) -> Vec<RowTiling>) -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for tiling in tilings(dtype) {
            for bits in 0..32u32 {
                let bits: [bool; 5] = std::array::from_fn(|i| bits & (1 << i) != 0);
                if !bits[4] || center {
                    all.push(backward_flags(dtype, center, bits, &tiling));
                }
            }
        }
    }
    all
}

fn backward_tilings(dtype: DType) -> Vec<RowTiling> {
    RowTiling::all(backward_limits(dtype))
}

static RMS_BACKWARD: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_row", || {
        backward_variants(false, backward_tilings)
    });
static LAYER_BACKWARD: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_row", || {
        backward_variants(true, backward_tilings)
    });
static RMS_BACKWARD_LONG: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_long", || {
        backward_variants(false, |_| vec![LONG_TILING])
    });
static LAYER_BACKWARD_LONG: CudaKernel =
    device(BACKWARD_SOURCE, NormBackwardParams::prelude, "norm_backward_long", || {
        backward_variants(true, |_| vec![LONG_TILING])
    });

/// Rows in registers, sums over rows in registers too.
pub(in crate::ops) const fn backward_row(name: &'static str, center: bool) -> Kernel<back::Problem> {
    Kernel::cuda(name, if center { &LAYER_BACKWARD } else { &RMS_BACKWARD }, run_backward_row)
        .when(|p, _| match RowTiling::new(p.hidden, p.dtype, backward_limits(p.dtype)) {
            Some(_) => Ok(()),
            None => Err("the row does not fit the registers of a block".into()),
        })
        .configured(|p, info| match RowTiling::new(p.hidden, p.dtype, backward_limits(p.dtype)) {
            Some(t) => format!("{t}, {} groups of rows", groups(p, info, &t)),
            None => String::new(),
        })
        .with_workspace(|p, info| {
            RowTiling::new(p.hidden, p.dtype, backward_limits(p.dtype)).map_or(0, |t| workspace(p, info, &t))
        })
        .and(&column_sum::cuda::DEVICE)
}

/// Rows of any length.
pub(in crate::ops) const fn backward_long(name: &'static str, center: bool) -> Kernel<back::Problem> {
    Kernel::cuda(name, if center { &LAYER_BACKWARD_LONG } else { &RMS_BACKWARD_LONG }, run_backward_long)
        .when(|p, _| addressable(p.hidden))
        .configured(|p, info| {
            format!("{LONG_LANES} threads a row, {} groups of rows", groups(p, info, &LONG_TILING))
        })
        .with_workspace(|p, info| workspace(p, info, &LONG_TILING))
        .and(&column_sum::cuda::DEVICE)
}

/// Groups of threads that share out the rows: as many as run at once, so that each leaves one partial sum.
fn groups(p: &back::Problem, info: &DeviceInfo, tiling: &RowTiling) -> usize {
    const THREADS_AT_ONCE: usize = 1024;
    (info.units * (THREADS_AT_ONCE / tiling.lanes).max(1)).min(p.num_rows)
}

fn workspace(p: &back::Problem, info: &DeviceInfo, tiling: &RowTiling) -> usize {
    p.num_sums() * groups(p, info, tiling) * p.hidden * size_of::<f32>()
}

fn run_backward_row(launch: &Launch<'_, back::Problem>) -> Result<()> {
    let p = launch.problem;
    let tiling = RowTiling::new(p.hidden, p.dtype, backward_limits(p.dtype)).expect("`supports` has passed");
    run_backward(launch, &tiling)
}

fn run_backward_long(launch: &Launch<'_, back::Problem>) -> Result<()> {
    run_backward(launch, &LONG_TILING)
}

fn run_backward(launch: &Launch<'_, back::Problem>, tiling: &RowTiling) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let groups = groups(p, launch.info, tiling);
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
        let config = tiling.launch(groups)?;
        // SAFETY: `check` bound shapes and strides to the parameters, the tiling covers the row, and the
        // workspace holds one partial sum a group.
        unsafe { kernel::run(launch, &backward_defines(p, tiling), &config, &params)? };
    }
    let sums = [(p.has_dweight, back::DWEIGHT, p.steps[5]), (p.has_dbias, back::DBIAS, p.steps[6])];
    let wanted = sums.into_iter().filter(|(wanted, _, _)| *wanted);
    let targets: Vec<_> = wanted.map(|(_, index, step)| (launch.args.address(index), step)).collect();
    // SAFETY: as above.
    unsafe { column_sum::cuda::add(launch, groups, p.hidden, p.dtype, &targets) }
}
