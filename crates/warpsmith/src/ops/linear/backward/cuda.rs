//! `linear_backward` on CUDA devices: one pass over `dout`, then the products with the kernels of `linear`.

use super::super::Problem;
use super::super::cuda::{GENERIC_DEVICE, SM80_DEVICE, addressable, run_generic, run_sm80, sm80_supports};
use super::super::problem::Part;
use super::super::sm90;
use super::{BackwardProblem, DBIAS, DOUT, Z};
use crate::cuda::rows::{element, flag};
use crate::cuda::{LaunchConfig, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::Result;
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};

kernel_params! {
    struct LinearPassParams {
        dout: u64, z: u64, dz: u64, dbias: u64,
        lines: i64, n: i64,
        dout_row: i64, dout_col: i64, z_row: i64, z_col: i64, dbias_step: i64,
        scale: f32,
    }
}

/// Columns and rows of a block's threads, as in the device code.
const COLUMNS: usize = 32;
const LANES: u32 = 32;

static PASS: CudaKernel = CudaKernel {
    source: Source { name: "linear_backward", code: include_str!("kernel.cu") },
    prelude: LinearPassParams::prelude,
    function: "linear_backward_pass",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    variants: || {
        let kinds = [None, Some(Kind::Gelu), Some(Kind::GeluTanh), Some(Kind::Silu), Some(Kind::Relu)];
        let each = |dtype| {
            kinds.map(|kind| [[true, true], [true, false], [false, true]].map(|w| defines(dtype, kind, w)))
        };
        FLOATS.into_iter().flat_map(each).flatten().collect()
    },
};

fn defines(dtype: DType, kind: Option<Kind>, [dz, dbias]: [bool; 2]) -> Defines {
    vec![
        element(dtype),
        ("FUNCTION", kind.map_or("Identity", Kind::device_name).into()),
        flag("HAS_DZ", dz),
        flag("HAS_DBIAS", dbias),
    ]
}

/// The products on Hopper's tensor cores.
pub(super) const SM90: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_sm90", &PASS, |launch| run(launch, sm90::run::<BackwardProblem>))
        .and(&sm90::DEVICE)
        .with_workspace(|p, _| p.workspace())
        .when(|p, info| supports(p, info, sm90::supports));

/// The products on tensor cores.
pub(super) const SM80: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_sm80", &PASS, |launch| run(launch, run_sm80::<BackwardProblem>))
        .and(&SM80_DEVICE)
        .with_workspace(|p, _| p.workspace())
        .when(|p, info| supports(p, info, sm80_supports));

/// The products without tensor cores.
pub(super) const GENERIC: Kernel<BackwardProblem> =
    Kernel::cuda("linear_backward_generic", &PASS, |launch| run(launch, run_generic::<BackwardProblem>))
        .and(&GENERIC_DEVICE)
        .with_workspace(|p, _| p.workspace())
        .when(|p, info| supports(p, info, |p, _| addressable(p)));

type Supports = fn(&Problem, &DeviceInfo) -> std::result::Result<(), String>;

fn supports(p: &BackwardProblem, info: &DeviceInfo, product: Supports) -> std::result::Result<(), String> {
    [&p.dx, &p.dw].into_iter().flatten().try_for_each(|problem| product(problem, info))
}

type Multiply = unsafe fn(&Launch<'_, BackwardProblem>, &Problem, &Part) -> Result<()>;

fn run(launch: &Launch<'_, BackwardProblem>, multiply: Multiply) -> Result<()> {
    let p = launch.problem;
    if p.has_pass() && p.n > 0 {
        let at = |index| launch.args.address(index) as u64;
        let params = LinearPassParams {
            dout: at(DOUT),
            z: at(Z),
            dz: launch.workspace as u64,
            dbias: at(DBIAS),
            lines: p.lines as i64,
            n: p.n as i64,
            dout_row: p.dout.row as i64,
            dout_col: p.dout.col as i64,
            z_row: p.z.row as i64,
            z_col: p.z.col as i64,
            dbias_step: p.dbias_step as i64,
            scale: f32::from_bits(p.scale_bits),
        };
        let defines = defines(p.dtype, p.activation, [p.stores_dz, p.has_dbias]);
        let config = LaunchConfig::new([p.n.div_ceil(COLUMNS) as u32, 1, 1], [COLUMNS as u32, LANES, 1], 0);
        // SAFETY: `check` bound the shapes; the scratch memory has the size that was asked for.
        unsafe { kernel::run_part(launch, &PASS, &defines, &config, &params)? };
    }
    // SAFETY: `check` made the products of these tensors, and the stream has `dz` complete before them.
    p.parts(launch.args, launch.workspace)
        .try_for_each(|(product, part)| unsafe { multiply(launch, product, &part) })
}
