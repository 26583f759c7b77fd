//! `linear_quant` on CUDA devices: host half.
//!
//! A first launch quantises the rows of `x` into the workspace; a second multiplies them with the weights, whose blocks
//! it takes as they are in the file, and finishes the sums.

use super::format::GROUP;
use super::{BIAS, OUT, Problem, QuantFormat, QuantPrecision, RESIDUAL, W, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::elementwise::function::Kind;
use crate::ops::linear::Gate;
use crate::tensor::DType;

/// Threads of a block, columns of the result it makes, and rows of `x` it multiplies, as in the device code.
const THREADS: usize = 128;
const COLUMNS: usize = THREADS / 32;
const ROWS: usize = 8;

kernel_params! {
    struct LinearQuantParams {
        x: u64, w: u64, bias: u64, residual: u64, out: u64,
        /// In the workspace: quants, scales of 32, and sums of 16 quants.
        quants: u64, scales: u64, sums: u64,
        n: i64, k: i64,
        /// Bytes from one row of w to the next, and from one byte to the next.
        w_row: i64, w_step: i64,
        x_step: i64, out_step: i64, residual_step: i64, bias_step: i64,
        /// Row of w of column 0's up, and rows from one column to the next.
        up_row: i64, column_rows: i64,
        num_rows: u32,
        column_blocks: u32,
        act: i32,
        /// Of out, bias and residual: 0 f32, 1 f16, 2 bf16.
        out_type: i32,
        scale: f32,
        unused: i32,
        rows: Rows,
    }
}

const SOURCE: Source = Source { name: "linear_quant", code: include_str!("kernel.cu") };

static QUANTIZE: CudaKernel = CudaKernel {
    source: Source { name: "linear_quant_quantize", code: include_str!("quantize.cu") },
    prelude: LinearQuantParams::prelude,
    function: "linear_quant_quantize",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || FLOATS.map(|dtype| vec![element(dtype)]).to_vec(),
};

static MULTIPLY: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: LinearQuantParams::prelude,
    function: "linear_quant",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let flags = [(false, false), (false, true), (true, false), (true, true)];
        let all = QuantFormat::ALL
            .into_iter()
            .flat_map(|format| flags.map(|(aligned, gated)| (format, aligned, gated)));
        // Blocks of an odd number of bytes are never on even addresses alone.
        let exist = all.filter(|(format, aligned, _)| !aligned || format.block_bytes().is_multiple_of(2));
        exist.map(|(format, aligned, gated)| defines(format, aligned, gated)).collect()
    },
};

fn defines(format: QuantFormat, aligned: bool, gated: bool) -> Defines {
    vec![("FORMAT", format!("k{format:?}")), flag("ALIGNED", aligned), flag("GATED", gated)]
}

pub(super) const KERNEL: Kernel<Problem> = Kernel::cuda("linear_quant_cuda", &MULTIPLY, run)
    .and(&QUANTIZE)
    .configured(|_, _| format!("activations in 8 bits, {ROWS} rows x {COLUMNS} columns a block"))
    .with_workspace(|p, _| Workspace::of(p).bytes)
    .when(|p, _| {
        if p.precision == QuantPrecision::Full {
            return Err("it rounds activations to 8 bits; precision=full is on the CPU alone".into());
        }
        let most = i32::MAX as usize;
        let blocks = p.n.div_ceil(COLUMNS).saturating_mul(p.m.div_ceil(ROWS));
        match blocks.max(p.m.saturating_mul(p.k / GROUP)) > most {
            true => Err(format!("more than {most} blocks of results or of activations")),
            false => Ok(()),
        }
    });

/// Where the parts of the workspace begin, each on 16 bytes.
struct Workspace {
    scales: usize,
    sums: usize,
    bytes: usize,
}

impl Workspace {
    fn of(p: &Problem) -> Workspace {
        let groups = p.m * (p.k / GROUP);
        let scales = groups * GROUP;
        let sums = (scales + groups * size_of::<f32>()).next_multiple_of(16);
        Workspace { scales, sums, bytes: sums + groups * 2 * size_of::<i32>() }
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let Workspace { scales, sums, .. } = Workspace::of(p);
    let workspace = launch.workspace as u64;
    let gated = p.gate != Gate::None;
    let column_blocks = p.n.div_ceil(COLUMNS);
    let params = LinearQuantParams {
        x: at(X),
        w: at(W),
        bias: at(BIAS),
        residual: at(RESIDUAL),
        out: at(OUT),
        quants: workspace,
        scales: workspace + scales as u64,
        sums: workspace + sums as u64,
        n: p.n as i64,
        k: p.k as i64,
        w_row: p.w_strides[0] as i64,
        w_step: p.w_strides[1] as i64,
        x_step: p.x_step as i64,
        out_step: p.out_step as i64,
        residual_step: p.residual_step.unwrap_or(0) as i64,
        bias_step: p.bias_step.unwrap_or(0) as i64,
        up_row: if p.gate == Gate::Interleaved { 1 } else { p.n as i64 },
        column_rows: if p.gate == Gate::Interleaved { 2 } else { 1 },
        num_rows: p.m as u32,
        column_blocks: column_blocks as u32,
        act: match p.activation {
            Some(Kind::Gelu) => 1,
            Some(Kind::GeluTanh) => 2,
            Some(Kind::Silu) => 3,
            Some(Kind::Relu) => 4,
            _ => 0,
        },
        out_type: match p.out_dtype {
            DType::F16 => 1,
            DType::BF16 => 2,
            _ => 0,
        },
        scale: f32::from_bits(p.scale_bits),
        unused: 0,
        rows: Rows::new(&p.rows),
    };
    let groups = p.m * (p.k / GROUP);
    if groups > 0 {
        let blocks = grid_blocks("linear_quant", groups.div_ceil(COLUMNS))?;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
        // SAFETY: `check` bound x to its rows, and the workspace has room for the quants of all.
        unsafe { launch.record_part(&QUANTIZE, &vec![element(p.x_dtype)], &config, &params)? };
    }
    let blocks = grid_blocks("linear_quant", column_blocks * p.m.div_ceil(ROWS))?;
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound all tensors to these sizes and strides; the first launch wrote the workspace; a warp has each
    // column of the result. `aligned` says that all blocks are on even addresses.
    unsafe { launch.record(&defines(p.format, p.w_aligned, gated), &config, &params) }
}
