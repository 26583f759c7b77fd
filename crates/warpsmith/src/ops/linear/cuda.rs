//! `linear` on CUDA devices: what its kernels share on the host, and the two that run anywhere: `generic` and `sm80`.

use super::problem::{Dequant, FP8, INPUTS, Order, Part};
use super::{Gate, Problem};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::flag;
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

kernel_params! {
    /// The parameters of every kernel of `linear`; what is absent is zero. Strides count elements.
    pub(in crate::ops) struct LinearParams {
        x: u64, w: u64, bias: u64, residual: u64, out: u64, x_scale: u64, w_scale: u64,
        m: i32, n: i32, k: i32, batch: i32,
        x_batch: i64, x_row: i64, x_col: i64,
        w_batch: i64, w_row: i64, w_col: i64,
        out_batch: i64, out_row: i64, out_col: i64,
        residual_batch: i64, residual_row: i64, residual_col: i64,
        x_scale_batch: i64, x_scale_row: i64, x_scale_col: i64,
        w_scale_batch: i64, w_scale_row: i64, w_scale_col: i64,
        bias_step: i64,
        scale: f32,
    }
}

impl LinearParams {
    /// The parameters of one part of a problem.
    pub(in crate::ops) fn new(p: &Problem, part: &Part) -> Self {
        LinearParams {
            x: part.x as u64,
            w: part.w as u64,
            bias: part.bias as u64,
            residual: part.residual as u64,
            out: part.out as u64,
            x_scale: part.x_scale as u64,
            w_scale: part.w_scale as u64,
            m: p.m as i32,
            n: p.n as i32,
            k: p.k as i32,
            batch: p.batch as i32,
            x_batch: p.x.batch as i64,
            x_row: p.x.row as i64,
            x_col: p.x.col as i64,
            w_batch: p.w.batch as i64,
            w_row: p.w.row as i64,
            w_col: p.w.col as i64,
            out_batch: p.out.batch as i64,
            out_row: p.out.row as i64,
            out_col: p.out.col as i64,
            residual_batch: p.residual.batch as i64,
            residual_row: p.residual.row as i64,
            residual_col: p.residual.col as i64,
            x_scale_batch: p.x_scale.batch as i64,
            x_scale_row: p.x_scale.row as i64,
            x_scale_col: p.x_scale.col as i64,
            w_scale_batch: p.w_scale.batch as i64,
            w_scale_row: p.w_scale.row as i64,
            w_scale_col: p.w_scale.col as i64,
            bias_step: p.bias_step as i64,
            scale: p.scale(),
        }
    }
}

/// What `linear.cuh` is compiled for.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Epilogue {
    pub x: DType,
    pub w: DType,
    pub out: DType,
    pub activation: Option<Kind>,
    pub gate: Gate,
    pub dequant: Dequant,
    pub bias: bool,
    pub residual: bool,
}

impl Epilogue {
    /// That of a problem.
    pub(in crate::ops) fn of(p: &Problem) -> Self {
        Epilogue {
            x: p.x_dtype,
            w: p.w_dtype,
            out: p.out_dtype,
            activation: p.activation,
            gate: p.gate,
            dequant: p.dequant,
            bias: p.has_bias,
            residual: p.has_residual,
        }
    }

    /// The plain product of a type.
    pub(in crate::ops) fn plain(dtype: DType) -> Self {
        let out = if FP8.contains(&dtype) { DType::BF16 } else { dtype };
        Epilogue {
            x: dtype,
            w: dtype,
            out,
            activation: None,
            gate: Gate::None,
            dequant: Dequant::None,
            bias: false,
            residual: false,
        }
    }

    /// The defines `linear.cuh` asks for.
    pub(in crate::ops) fn defines(&self) -> Defines {
        let activation = match self.activation {
            None => 0,
            Some(Kind::Gelu) => 1,
            Some(Kind::GeluTanh) => 2,
            Some(Kind::Silu) => 3,
            Some(Kind::Relu) => 4,
            Some(other) => unreachable!("`linear` has no option {other:?}"),
        };
        vec![
            ("X_T", self.x.name().into()),
            ("W_T", self.w.name().into()),
            ("OUT_T", self.out.name().into()),
            ("ACTIVATION", activation.to_string()),
            ("GATE", (self.gate as u8).to_string()),
            ("SCALING", (self.dequant as u8).to_string()),
            flag("HAS_BIAS", self.bias),
            flag("HAS_RESIDUAL", self.residual),
        ]
    }

    /// A covering set of the epilogues of `dtype`, with each value of each define: all combinations would be thousands.
    /// Others are compiled at first use.
    pub(in crate::ops) fn covering(dtype: DType) -> Vec<Self> {
        let plain = Epilogue::plain(dtype);
        let mut all = vec![plain, Epilogue { bias: true, ..plain }, Epilogue { residual: true, ..plain }];
        for out in FLOATS {
            all.push(Epilogue { out, ..plain });
        }
        for kind in [Kind::Gelu, Kind::GeluTanh, Kind::Silu, Kind::Relu] {
            all.push(Epilogue { activation: Some(kind), bias: true, ..plain });
        }
        for gate in [Gate::Halves, Gate::Interleaved] {
            all.push(Epilogue { activation: Some(Kind::Silu), gate, ..plain });
            all.push(Epilogue { activation: Some(Kind::Gelu), gate, bias: true, residual: true, ..plain });
        }
        if FP8.contains(&dtype) {
            for dequant in [Dequant::Whole, Dequant::Blocks] {
                all.push(Epilogue { dequant, ..plain });
                all.push(Epilogue { dequant, gate: Gate::Halves, activation: Some(Kind::Silu), ..plain });
            }
            let other = if dtype == FP8[0] { FP8[1] } else { FP8[0] };
            all.push(Epilogue { w: other, dequant: Dequant::Whole, ..plain });
        }
        all
    }
}

/// Rows, columns and K are counted in 32 bits, with headroom for a tile past the end.
pub(in crate::ops) fn addressable(p: &Problem) -> std::result::Result<(), String> {
    let most = 1 << 30;
    for (name, size) in [("m", p.m), ("n", p.n), ("k", p.k), ("batch", p.batch)] {
        if size > most {
            return Err(format!("{name} = {size} is more than 2^30"));
        }
    }
    Ok(())
}

/// The launch of a block for each tile of `rows` x `columns` of the result.
pub(in crate::ops) fn tiles(p: &Problem, rows: usize, columns: usize) -> Result<u32> {
    let count = p.m.div_ceil(rows) * p.n.div_ceil(columns) * p.batch;
    let limit = i32::MAX as u64;
    u32::try_from(count).ok().filter(|&n| n <= i32::MAX as u32).ok_or(Error::Launch {
        kernel: "linear".into(),
        what: "number of blocks",
        got: count as u64,
        limit,
    })
}

/// How a kernel moves a tile of `x` or `w`, as the device code numbers it.
pub(super) fn load_mode(order: Order) -> usize {
    match order {
        Order::Any => 0,
        Order::Rows => 1,
        Order::Columns => 2,
    }
}

const GENERIC_SOURCE: Source = Source { name: "linear_generic", code: include_str!("generic.cu") };
const SM80_SOURCE: Source = Source { name: "linear_sm80", code: include_str!("sm80.cu") };
const THREADS: u32 = 256;

pub(in crate::ops) static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: GENERIC_SOURCE,
    prelude: LinearParams::prelude,
    function: "linear_generic",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in INPUTS {
            let covering = Epilogue::covering(dtype);
            all.extend(covering.iter().map(|e| generic_defines(e, generic_tile(e, usize::MAX), [1, 1])));
            all.extend(covering[..1].iter().map(|e| generic_defines(e, 64, [0, 0])));
        }
        all
    },
};

/// Rows and rows of `w` of a block's tile. Each element is summed in the same order in tiles of either size.
fn generic_tile(epilogue: &Epilogue, blocks: usize) -> usize {
    // Sums over blocks of K need twice the registers.
    if epilogue.dequant == Dequant::Blocks || blocks < 1 { 64 } else { 128 }
}

fn generic_defines(epilogue: &Epilogue, tile: usize, [x, w]: [usize; 2]) -> Defines {
    let mut defines = epilogue.defines();
    defines.extend([("TILE", tile.to_string()), ("LOAD_X", x.to_string()), ("LOAD_W", w.to_string())]);
    defines
}

/// Columns of the result in a tile of `rows` rows of `w`.
pub(super) fn columns(p: &Problem, rows: usize) -> usize {
    if p.gate == Gate::None { rows } else { rows / 2 }
}

fn generic_tiling(p: &Problem, info: &DeviceInfo) -> usize {
    let large = p.m.div_ceil(128) * p.n.div_ceil(columns(p, 128)) * p.batch;
    generic_tile(&Epilogue::of(p), large / info.units.max(1))
}

/// Any type and layout, on any device, without tensor cores.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("linear_generic", &GENERIC_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        // SAFETY: the parts are those of the call's own tensors.
        p.parts(launch.args).try_for_each(|part| unsafe { run_generic(launch, p, &part) })
    })
    .when(|p, _| addressable(p))
    .configured(|p, info| {
        let tile = generic_tiling(p, info);
        format!("{}, tiles of {tile} x {}", p.arithmetic(), columns(p, tile))
    });

/// Launches the generic kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run_generic<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = generic_tiling(p, launch.info);
    let vector = |order: Order| (order == Order::Rows) as usize;
    let defines = generic_defines(&Epilogue::of(p), tile, [vector(p.x_order), vector(p.w_order)]);
    let blocks = tiles(p, tile, columns(p, tile))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1], 0);
    // SAFETY: the caller vouches for the tensors; the blocks cover every tile.
    unsafe { launch.record_part(&GENERIC_DEVICE, &defines, &config, &LinearParams::new(p, part)) }
}

/// Rows of `w` of a block's tile, bytes of K in a stage, and stages, as in the device code.
const SM80_TILE_N: usize = 128;
const SM80_STAGE_BYTES: usize = 64;
const SM80_STAGES: usize = 4;

pub(in crate::ops) static SM80_DEVICE: CudaKernel = CudaKernel {
    source: SM80_SOURCE,
    prelude: LinearParams::prelude,
    function: "linear_sm80",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            let covering = Epilogue::covering(dtype);
            all.extend(covering.iter().map(|e| sm80_defines(e, 128, [1, 1], true)));
            let transposed = if dtype.size() == 2 { 2 } else { 0 };
            for tile in [32, 64, 128] {
                for loads in [[0, 0], [1, transposed], [transposed, transposed], [transposed, 1]] {
                    all.extend(covering[..1].iter().map(|e| sm80_defines(e, tile, loads, false)));
                }
            }
        }
        all
    },
};

fn sm80_defines(epilogue: &Epilogue, tile: usize, [x, w]: [usize; 2], pairs: bool) -> Defines {
    let mut defines = epilogue.defines();
    defines.extend([
        ("TILE_M", tile.to_string()),
        ("LOAD_X", x.to_string()),
        ("LOAD_W", w.to_string()),
        flag("OUT_PAIRS", pairs),
    ]);
    defines
}

/// Rows of a tile: as many as there are, unless that leaves multiprocessors without work. Each element is summed in the
/// same order in tiles of any size.
fn sm80_tiling(p: &Problem, info: &DeviceInfo) -> usize {
    let blocks = |tile: usize| p.m.div_ceil(tile) * p.n.div_ceil(columns(p, SM80_TILE_N)) * p.batch;
    [128, 64].into_iter().find(|&tile| p.m > tile / 2 && blocks(tile) >= info.units).unwrap_or(32)
}

/// Tensor cores through `mma.sync`: 16-bit types, and f32 as TF32.
pub(super) const SM80: Kernel<Problem> =
    Kernel::cuda("linear_sm80", &SM80_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        // SAFETY: the parts are those of the call's own tensors.
        p.parts(launch.args).try_for_each(|part| unsafe { run_sm80(launch, p, &part) })
    })
    .when(sm80_supports)
    .configured(|p, info| {
        let tile = sm80_tiling(p, info);
        format!("{}, tiles of {tile} x {}", p.tensor_arithmetic(), columns(p, SM80_TILE_N))
    });

pub(in crate::ops) fn sm80_supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    match p.x_dtype {
        DType::F32 if !p.tf32 => Err("f32 in full precision would have to be split".into()),
        dtype if FP8.contains(&dtype) => Err("8-bit types are not for these tensor cores".into()),
        _ => addressable(p),
    }
}

/// Launches the tensor-core kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run_sm80<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = sm80_tiling(p, launch.info);
    let mode = |order: Order, scattered: bool| match load_mode(order) {
        // Elements of four bytes cannot be transposed while they are loaded to registers.
        2 if scattered || p.x_dtype.size() != 2 => 0,
        mode => mode,
    };
    // The gate's blocks of rows need not start where 16 bytes do.
    let loads = [mode(p.x_order, false), mode(p.w_order, p.gate != Gate::None)];
    let pairs = p.out_order == Order::Rows && (!p.has_residual || p.residual_order == Order::Rows);
    let defines = sm80_defines(&Epilogue::of(p), tile, loads, pairs);
    let blocks = tiles(p, tile, columns(p, SM80_TILE_N))?;
    let shared = (SM80_STAGES * (tile + SM80_TILE_N) * SM80_STAGE_BYTES) as u32;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1], shared);
    // SAFETY: the caller vouches for the tensors; the blocks cover every tile.
    unsafe { launch.record_part(&SM80_DEVICE, &defines, &config, &LinearParams::new(p, part)) }
}
