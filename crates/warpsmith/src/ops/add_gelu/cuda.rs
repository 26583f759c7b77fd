//! `add_gelu` on CUDA devices.

use super::run::{self, Run};
use super::{BIAS, DBIAS, DOUT, DX, KINDS, OUT, Problem, X, backward as back};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::column_sum::cuda as column_sum;
use crate::ops::elementwise::cuda::{Signature, describe, device, run as run_elementwise, variants};
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "add_gelu", code: include_str!("kernel.cu") };
const VALUE: Signature = Signature { inputs: 2, outputs: 1, shared: true, pairs: false };

pub(super) fn own(kind: Kind) -> Defines {
    vec![("FUNCTION", kind.device_name().into())]
}

static VALUE_DEVICE: CudaKernel = device(SOURCE, "add_gelu", || variants(VALUE, &KINDS.map(own)));

pub(super) const FORWARD: Kernel<Problem> =
    Kernel::cuda("add_gelu_cuda", &VALUE_DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let at = [X, BIAS, OUT].map(|index| launch.args.address(index));
        // SAFETY: `check` made the grid of these tensors.
        unsafe { run_elementwise(launch, &VALUE_DEVICE, &p.grid, VALUE, &at, own(p.kind)) }
    })
    .configured(|p, info| describe(&p.grid, VALUE, info));

// ---- backward ----

pub(super) const THREADS: usize = 256;
/// Units a thread loads before it computes: of rows, or of the single run that all rows form.
pub(super) const ITEMS: usize = 2;
/// Blocks of a multiprocessor: enough loads in flight, few enough partial sums.
pub(super) const BLOCKS_PER_UNIT: usize = 4;
/// Columns of a thread where they cannot be loaded as vectors; the device half says the same.
const COLUMNS: usize = 4;
/// The fewest rows of a group: what a thread loads at once. With fewer, partial sums would cost more than the rows.
const ROWS_OF_GROUP: usize = ITEMS;

kernel_params! {
    struct AddGeluBackwardParams {
        x: u64, bias: u64, dout: u64, dx: u64, partial: u64, dbias: u64,
        num_rows: i64, num_groups: i64, hidden: i64,
        x_step: i64, dout_step: i64, dx_step: i64, bias_step: i64, dbias_step: i64,
        column_tiles: u32, lanes_log2: u32,
        rows: Rows,
    }
}

/// What happens to the rows of sums that are left: `SUMS` of the device code.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// They are not needed.
    None,
    /// `column_sum` adds them up.
    Partial,
    /// They are the gradient of the bias: there is one row.
    Final,
}

impl Sums {
    fn new(p: &back::Problem, rows: usize) -> Sums {
        match (p.has_dbias, rows) {
            (false, _) => Sums::None,
            (true, 1) => Sums::Final,
            (true, _) => Sums::Partial,
        }
    }
}

fn backward_defines(dtype: DType, vector: bool, sums: Sums, kind: Kind) -> Defines {
    let own = own(kind);
    [
        vec![
            element(dtype),
            ("ITEMS", ITEMS.to_string()),
            flag("VECTOR", vector),
            ("SUMS", (sums as u8).to_string()),
        ],
        own,
    ]
    .concat()
}

static BACKWARD_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "add_gelu_backward", code: include_str!("backward.cu") },
    prelude: AddGeluBackwardParams::prelude,
    function: "add_gelu_backward",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let mut all = Vec::new();
        for dtype in FLOATS {
            for kind in KINDS {
                for sums in [Sums::None, Sums::Partial, Sums::Final] {
                    all.extend([false, true].map(|vector| backward_defines(dtype, vector, sums, kind)));
                }
            }
        }
        all
    },
};

/// How rows and columns are divided that are not one run.
struct Tiling {
    lanes_log2: u32,
    column_tiles: usize,
    row_tiles: usize,
    num_groups: usize,
}

impl Tiling {
    fn new(p: &back::Problem, info: &DeviceInfo) -> Tiling {
        let units = p.hidden.div_ceil(if p.vector_rows { 16 / p.dtype.size() } else { COLUMNS }).max(1);
        let lanes = units.next_power_of_two().min(THREADS);
        let (column_tiles, down) = (units.div_ceil(lanes), THREADS / lanes);
        let at_once = (info.units * BLOCKS_PER_UNIT).div_ceil(column_tiles);
        let num_groups = (at_once * down).min(p.num_rows.div_ceil(ROWS_OF_GROUP));
        Tiling { lanes_log2: lanes.ilog2(), column_tiles, row_tiles: num_groups.div_ceil(down), num_groups }
    }

    /// Records the launch.
    ///
    /// # Safety
    /// `check` must have made the problem of the call's tensors, and its scratch memory must hold a row of sums for each
    /// group.
    unsafe fn record(&self, launch: &Launch<'_, back::Problem>, sums: Sums) -> Result<()> {
        let p = launch.problem;
        let at = |index| launch.args.address(index) as u64;
        let [x_step, dout_step, dx_step, bias_step, dbias_step] = p.steps;
        let params = AddGeluBackwardParams {
            x: at(X),
            bias: at(BIAS),
            dout: at(DOUT),
            dx: at(DX),
            partial: launch.workspace as u64,
            dbias: at(DBIAS),
            num_rows: p.num_rows as i64,
            num_groups: self.num_groups as i64,
            hidden: p.hidden as i64,
            x_step: x_step as i64,
            dout_step: dout_step as i64,
            dx_step: dx_step as i64,
            bias_step: bias_step as i64,
            dbias_step: dbias_step as i64,
            column_tiles: self.column_tiles as u32,
            lanes_log2: self.lanes_log2,
            rows: Rows::new(&p.rows),
        };
        let blocks = (self.column_tiles * self.row_tiles) as u32;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        let defines = backward_defines(p.dtype, p.vector_rows, sums, p.kind);
        // SAFETY: passed on; the tiling covers all columns.
        unsafe { launch.record(&defines, &config, &params) }
    }
}

/// How a call is divided.
enum Plan {
    Run(Run),
    Rows(Tiling),
}

impl Plan {
    fn new(p: &back::Problem, info: &DeviceInfo) -> Plan {
        Run::new(p, info).map_or_else(|| Plan::Rows(Tiling::new(p, info)), Plan::Run)
    }

    /// Rows of sums that are left.
    fn rows_of_sums(&self) -> usize {
        match self {
            Plan::Run(run) => run.rows_of_sums,
            Plan::Rows(tiling) => tiling.num_groups,
        }
    }
}

fn run_backward(launch: &Launch<'_, back::Problem>) -> Result<()> {
    let p = launch.problem;
    let plan = Plan::new(p, launch.info);
    let rows_of_sums = plan.rows_of_sums();
    let sums = Sums::new(p, rows_of_sums);
    // SAFETY: `check` bound shapes and strides to the problem, and the workspace holds the rows of sums.
    unsafe {
        match plan {
            Plan::Run(run) => run.record(launch, sums)?,
            Plan::Rows(tiling) if tiling.num_groups > 0 => tiling.record(launch, sums)?,
            Plan::Rows(_) => {}
        }
        if sums != Sums::Partial {
            return Ok(());
        }
        let target = (launch.args.address(DBIAS), p.steps[4]);
        column_sum::add(launch, rows_of_sums, p.hidden, p.dtype, &[target])
    }
}

pub(super) const BACKWARD: Kernel<back::Problem> =
    Kernel::cuda("add_gelu_backward_cuda", &BACKWARD_DEVICE, run_backward)
        .configured(|p, info| match Plan::new(p, info) {
            Plan::Run(run) => format!("one run, {} threads, {} rows of sums", run.threads, run.rows_of_sums),
            Plan::Rows(t) => {
                format!("{} threads a row, {} groups of rows", t.column_tiles << t.lanes_log2, t.num_groups)
            }
        })
        .with_workspace(|p, info| {
            let rows = Plan::new(p, info).rows_of_sums();
            if Sums::new(p, rows) == Sums::Partial { rows * p.hidden * size_of::<f32>() } else { 0 }
        })
        .and(&run::DEVICE)
        .and(&column_sum::DEVICE);
