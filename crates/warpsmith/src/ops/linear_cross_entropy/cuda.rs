//! `linear_cross_entropy` on CUDA devices: host half.
//!
//! Each part of the rows is up to four launches: the product that gives its logits, the pass from those to losses and gradients,
//! and the products with these, by the kernels of `linear`. A last launch adds up the losses.

use super::backward::{self, Pair};
use super::{COUNT, DW, DX, LOSS, Part, Problem, Product, Reduction, TARGETS, W, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::linear::cuda::{
    GENERIC_DEVICE, SM80_DEVICE, addressable, run_generic, run_sm80, sm80_supports,
};
use crate::ops::linear::problem::Part as Operands;
use crate::ops::linear::{align, bf16x3, sm90};
use crate::tensor::DType;

/// Threads of a block, as in the device code.
const THREADS: u32 = 512;
const BACKWARD_THREADS: usize = 256;

kernel_params! {
    struct LinearCrossEntropyParams {
        /// Of the part.
        logits: u64,
        targets: u64,
        /// Of all rows.
        losses: u64,
        /// Zero where it is not wanted.
        count: u64,
        loss: u64,
        /// The first row of the part.
        first: i64,
        vocab: i64, num_rows: i64,
        /// From one row of logits to the next.
        pitch: i64,
        ignore_index: i64,
        softcap: f32, smoothing: f32, z_loss: f32,
        wide_targets: i32,
        is_mean: i32, unused: i32,
        rows: Rows,
    }
}

kernel_params! {
    struct LinearCrossEntropyBackwardParams {
        from: u64, to: u64, count: u64, dloss: u64,
        num_rows: i64, hidden: i64, from_step: i64, to_step: i64,
        lane_bits: i32, is_mean: i32,
        rows: Rows,
    }
}

const SOURCE: Source = Source { name: "linear_cross_entropy", code: include_str!("kernel.cu") };
const BACKWARD_SOURCE: Source =
    Source { name: "linear_cross_entropy_backward", code: include_str!("backward.cu") };

static ROWS: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: LinearCrossEntropyParams::prelude,
    function: "linear_cross_entropy_rows",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [[false, false], [false, true], [true, false], [true, true]];
        let of = |dtype| {
            flags.into_iter().flat_map(move |flags| [false, true].map(|wanted| defines(dtype, flags, wanted)))
        };
        FLOATS.into_iter().flat_map(of).collect()
    },
};

static SUM: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: LinearCrossEntropyParams::prelude,
    function: "linear_cross_entropy_sum",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || vec![defines(DType::F32, [false; 2], false)],
};

static SCALE: CudaKernel = CudaKernel {
    source: BACKWARD_SOURCE,
    prelude: LinearCrossEntropyBackwardParams::prelude,
    function: "linear_cross_entropy_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.iter().flat_map(|&dtype| [false, true].map(|v| scale_defines(dtype, v))).collect(),
};

fn defines(dtype: DType, [capped, smooth]: [bool; 2], gradients: bool) -> Defines {
    vec![element(dtype), flag("CAPPED", capped), flag("SMOOTH", smooth), flag("GRADIENTS", gradients)]
}

fn scale_defines(dtype: DType, vector: bool) -> Defines {
    vec![element(dtype), flag("VECTOR", vector)]
}

/// Where things begin in the scratch memory, after the logits: losses of rows, and copies that products need. At multiples of 256
/// bytes.
struct Scratch {
    losses: usize,
    copies: usize,
}

impl Scratch {
    fn of(p: &Problem) -> Scratch {
        let losses = p.logits_bytes().next_multiple_of(256);
        Scratch { losses, copies: (losses + p.rows * size_of::<f32>()).next_multiple_of(256) }
    }
}

/// The products of the first part, which is the largest, and of the last.
fn products(p: &Problem) -> impl Iterator<Item = Product> {
    let p = *p;
    let ends = [p.parts().next(), p.parts().last()];
    ends.into_iter().flatten().flat_map(move |part| {
        let logits = (part.rows > 0).then(|| p.product_of_logits(part));
        [logits, p.product_of_dx(part), p.product_of_dw(part)].into_iter().flatten()
    })
}

type Supports = fn(&Product, &DeviceInfo) -> std::result::Result<(), String>;

fn supports(p: &Problem, info: &DeviceInfo, product: Supports) -> std::result::Result<(), String> {
    products(p).try_for_each(|problem| product(&problem, info))
}

/// The products on Hopper's tensor cores, with copies of what the copy engine cannot load.
pub(super) const SM90: Kernel<Problem> = Kernel::cuda("linear_cross_entropy_sm90", &ROWS, |launch| {
    let scratch = launch.workspace..launch.workspace + Scratch::of(launch.problem).losses;
    let copies = launch.workspace + Scratch::of(launch.problem).copies;
    run(launch, |product, operands| {
        // SAFETY: passed on; the scratch memory has the size that was asked for, and products follow each other.
        unsafe {
            let copied = align::run(launch, [(*product, *operands)], copies)?;
            copied.iter().try_for_each(|(product, operands)| match scratch.contains(&operands.out) {
                true => sm90::run_for_scratch(launch, product, operands),
                false => sm90::run(launch, product, operands),
            })
        }
    })
})
.and(&SUM)
.and(&sm90::DEVICE)
.and(&align::DEVICE)
.with_workspace(|p, _| {
    Scratch::of(p).copies + products(p).map(|product| align::bytes(&product)).max().unwrap_or(0)
})
.when(|p, info| supports(p, info, |product, info| sm90::supports(&align::aligned(product), info)))
.configured(|p, _| describe(p));

/// The products on tensor cores.
pub(super) const SM80: Kernel<Problem> = Kernel::cuda("linear_cross_entropy_sm80", &ROWS, |launch| {
    // SAFETY: passed on.
    run(launch, |product, operands| unsafe { run_sm80(launch, product, operands) })
})
.and(&SUM)
.and(&SM80_DEVICE)
.with_workspace(|p, _| Scratch::of(p).copies)
.when(|p, info| supports(p, info, sm80_supports))
.configured(|p, _| describe(p));

/// The products of f32 at full precision on tensor cores.
pub(super) const BF16X3: Kernel<Problem> = Kernel::cuda("linear_cross_entropy_bf16x3", &ROWS, |launch| {
    // SAFETY: passed on.
    run(launch, |product, operands| unsafe { bf16x3::run(launch, product, operands) })
})
.and(&SUM)
.and(&bf16x3::DEVICE)
.with_workspace(|p, _| Scratch::of(p).copies)
.when(|p, info| supports(p, info, bf16x3::supports))
.configured(|p, _| describe(p));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<Problem> = Kernel::cuda("linear_cross_entropy_generic", &ROWS, |launch| {
    // SAFETY: passed on.
    run(launch, |product, operands| unsafe { run_generic(launch, product, operands) })
})
.and(&SUM)
.and(&GENERIC_DEVICE)
.with_workspace(|p, _| Scratch::of(p).copies)
.when(|p, info| supports(p, info, |product, _| addressable(product)))
.configured(|p, _| describe(p));

fn describe(p: &Problem) -> String {
    let rows = super::part_rows(p.vocab);
    format!("{} parts of {rows} rows, {} MiB of logits", p.parts().count(), p.logits_bytes() >> 20)
}

/// Records the launches of a call. `multiply` records that of a product, whose operands the caller vouches for.
fn run(launch: &Launch<'_, Problem>, multiply: impl Fn(&Product, &Operands) -> Result<()>) -> Result<()> {
    let p = launch.problem;
    for part in p.parts() {
        let x = p.row_at(launch.args.address(X), &p.x, part.first);
        let (w, logits) = (launch.args.address(W), launch.workspace);
        if part.rows > 0 {
            multiply(&p.product_of_logits(part), &Operands::product(x, w, logits))?;
            record_rows(launch, part)?;
        }
        if let (Some(product), Some(matrix)) = (p.product_of_dx(part), &p.dx) {
            let dx = p.row_at(launch.args.address(DX), matrix, part.first);
            multiply(&product, &Operands::product(logits, w, dx))?;
        }
        if let Some(product) = p.product_of_dw(part) {
            let operands = Operands::product(logits, x, launch.args.address(DW));
            multiply(&product, &if product.has_residual { operands.adding() } else { operands })?;
        }
    }
    let config = LaunchConfig::new([1, 1, 1], [THREADS, 1, 1], 0);
    let all = Part { first: 0, rows: p.rows };
    // SAFETY: the launches before it wrote the losses of all rows.
    unsafe {
        launch.record_part(&SUM, &defines(DType::F32, [false; 2], false), &config, &params(launch, all))
    }
}

/// The pass over the logits of a part.
fn record_rows(launch: &Launch<'_, Problem>, part: Part) -> Result<()> {
    let p = launch.problem;
    let blocks = grid_blocks("linear_cross_entropy", part.rows)?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS, 1, 1], 0);
    let flags = [p.options.softcap() != 0.0, p.options.label_smoothing() != 0.0];
    // SAFETY: the scratch memory has room for the logits of a part, in rows of the pitch, and for the losses of all rows; targets
    // that are no columns are not used as such.
    unsafe { launch.record(&defines(p.dtype, flags, p.has_gradients()), &config, &params(launch, part)) }
}

fn params(launch: &Launch<'_, Problem>, part: Part) -> LinearCrossEntropyParams {
    let p = launch.problem;
    LinearCrossEntropyParams {
        logits: launch.workspace as u64,
        targets: launch.args.address(TARGETS) as u64,
        losses: (launch.workspace + Scratch::of(p).losses) as u64,
        count: launch.args.address(COUNT) as u64,
        loss: launch.args.address(LOSS) as u64,
        first: part.first as i64,
        vocab: p.vocab as i64,
        num_rows: p.rows as i64,
        pitch: p.pitch() as i64,
        ignore_index: p.options.ignore_index,
        softcap: p.options.softcap(),
        smoothing: p.options.label_smoothing(),
        z_loss: p.options.z_loss(),
        wide_targets: (p.target_dtype == DType::I64) as i32,
        is_mean: (p.options.reduction == Reduction::Mean) as i32,
        unused: 0,
        rows: Rows::new(&p.targets),
    }
}

pub(super) const BACKWARD: Kernel<backward::Problem> =
    Kernel::cuda("linear_cross_entropy_backward_generic", &SCALE, |launch| {
        let p = launch.problem;
        scale(launch, &p.dx, [backward::DX_SUM, backward::DX])?;
        p.dw.map_or(Ok(()), |dw| scale(launch, &dw, [backward::DW_SUM, backward::DW]))
    })
    .when(|p, _| {
        let most = p.dx.num_rows.max(p.dw.map_or(0, |dw| dw.num_rows));
        if most > i32::MAX as usize { Err("more rows than a grid can have".into()) } else { Ok(()) }
    });

fn scale(launch: &Launch<'_, backward::Problem>, pair: &Pair, [from, to]: [usize; 2]) -> Result<()> {
    let p = launch.problem;
    if pair.num_rows * p.hidden == 0 {
        return Ok(());
    }
    let chunks = (p.hidden * p.dtype.size()).div_ceil(16);
    let lanes = chunks.next_power_of_two().min(BACKWARD_THREADS);
    let at = |index: usize| launch.args.address(index) as u64;
    let params = LinearCrossEntropyBackwardParams {
        from: at(from),
        to: at(to),
        count: at(backward::COUNT),
        dloss: at(backward::DLOSS),
        num_rows: pair.num_rows as i64,
        hidden: p.hidden as i64,
        from_step: pair.steps[0] as i64,
        to_step: pair.steps[1] as i64,
        lane_bits: lanes.trailing_zeros() as i32,
        is_mean: p.is_mean as i32,
        rows: Rows::new(&pair.rows),
    };
    let blocks =
        grid_blocks("linear_cross_entropy_backward", pair.num_rows.div_ceil(BACKWARD_THREADS / lanes))?;
    let config = LaunchConfig::new([blocks, 1, 1], [BACKWARD_THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound rows to the tensors; each element is read by the thread that writes it, before it does.
    unsafe { launch.record_part(&SCALE, &scale_defines(p.dtype, pair.vector_rows), &config, &params) }
}
