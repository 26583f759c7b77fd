//! `merge_states` on CUDA devices: host half.

use super::{COUNTS, LSE, LSES, OUT, OUTS, Problem};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "merge_states", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Pieces of a row that a thread takes at once, and parts it loads at once: enough loads in flight of either.
const NARROW: [usize; 2] = [1, 4];
/// The same for few parts, where a single piece would give a thread too little work.
const WIDE: [usize; 2] = [2, 2];

kernel_params! {
    struct MergeStatesParams {
        outs: u64, lses: u64, counts: u64, out: u64, lse: u64,
        num_rows: i64, head_dim: i64,
        outs_part_stride: i64, lses_part_stride: i64, count_stride: i64,
        outs_step: i64, out_step: i64,
        num_parts: i32, num_heads: i32, lane_bits: i32, unused: i32,
        rows: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: MergeStatesParams::prelude,
    function: "merge_states",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants,
};

fn defines(from: DType, to: DType, vector: bool, [chunks, batch]: [usize; 2]) -> Defines {
    vec![
        element(from),
        ("OUT", to.name().into()),
        flag("VECTOR", vector),
        ("CHUNKS", chunks.to_string()),
        ("BATCH", batch.to_string()),
    ]
}

fn variants() -> Vec<Defines> {
    let types = FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to)));
    let forms = [(false, NARROW), (true, NARROW), (true, WIDE)];
    types.flat_map(|(from, to)| forms.map(|(vector, form)| defines(from, to, vector, form))).collect()
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run)
        .configured(|p, _| {
            let Tiling { form: [chunks, batch], lanes } = Tiling::new(p);
            let rows = THREADS / lanes;
            format!("{lanes} threads x {chunks} pieces a row, {batch} parts at once, {rows} rows a block")
        })
        .when(|p, _| {
            let most = i32::MAX as usize;
            match (p.num_tokens * p.num_heads).max(p.num_parts) > most {
                true => Err(format!("more than {most} heads of tokens, or parts")),
                false => Ok(()),
            }
        })
}

/// How a row is divided among threads. Every element is computed on its own, so none of this affects the bits.
struct Tiling {
    form: [usize; 2],
    lanes: usize,
}

impl Tiling {
    fn new(p: &Problem) -> Tiling {
        let piece = if p.vector { 16 / p.from.size() } else { 1 };
        let wide = p.vector && p.num_parts <= WIDE[1] && p.head_dim.is_multiple_of(WIDE[0] * piece);
        let form = if wide { WIDE } else { NARROW };
        let lanes = p.head_dim.div_ceil(form[0] * piece).max(1).next_power_of_two().min(THREADS);
        Tiling { form, lanes }
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let num_rows = p.num_tokens * p.num_heads;
    let Tiling { form, lanes } = Tiling::new(p);
    let blocks = grid_blocks("merge_states", num_rows.div_ceil(THREADS / lanes))?;
    let params = MergeStatesParams {
        outs: at(OUTS),
        lses: at(LSES),
        counts: at(COUNTS),
        out: at(OUT),
        lse: at(LSE),
        num_rows: num_rows as i64,
        head_dim: p.head_dim as i64,
        outs_part_stride: p.part_strides[0] as i64,
        lses_part_stride: p.part_strides[1] as i64,
        count_stride: p.counts.unwrap_or(0) as i64,
        outs_step: p.steps[0] as i64,
        out_step: p.steps[1] as i64,
        num_parts: p.num_parts as i32,
        num_heads: p.num_heads as i32,
        lane_bits: lanes.trailing_zeros() as i32,
        unused: 0,
        rows: Rows::new(&p.rows),
    };
    let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], 0);
    // SAFETY: `check` bound shapes and strides to the parameters, `supports` the numbers that are narrowed here, and the
    // grid covers every row.
    unsafe { launch.record(&defines(p.from, p.to, p.vector, form), &config, &params) }
}
