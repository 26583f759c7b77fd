//! `rope` and its gradient on CUDA devices: host half.

use super::angles;
use super::{COS, OUT, POSITIONS, Problem, SIN, X};
use crate::cuda::rows::{Rows, element, flag};
use crate::cuda::{LaunchConfig, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::ops::FLOATS;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};

const SOURCE: Source = Source { name: "rope", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
const THREADS: usize = 256;
/// Frequencies that travel with the parameters. Heads with more pairs take several launches.
const MAX_PAIRS: usize = 256;
/// Blocks on a multiprocessor from which on each thread takes several tokens: before, more blocks count more than
/// more loads in flight.
const FULL_BLOCKS: usize = 8;
/// Tokens a thread takes then.
const ITEMS: usize = 2;

kernel_params! {
    struct RopeParams {
        x: u64, positions: u64, cos: u64, sin: u64, out: u64,
        num_tokens: i64, max_pos: i64,
        x_head_stride: i64, out_head_stride: i64, x_step: i64, out_step: i64,
        /// Rows and columns.
        cos_strides: [i64; 2],
        /// Rows and columns.
        sin_strides: [i64; 2],
        /// Elements from the first piece of a column to the second.
        second: i64,
        num_heads: i32, rotary_dim: i32,
        /// Of this launch.
        num_pairs: i32, first_pair: i32,
        /// Columns of a head in this launch, and those of them that are rotated.
        columns: i32, rotate_columns: i32,
        /// Elements between columns, and before the first.
        first_stride: i32, first_offset: i32,
        lane_bits: i32, head_bits: i32, pair_bits: i32, backward: i32,
        tokens: Rows,
        frequencies: [u64; MAX_PAIRS],
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: RopeParams::prelude,
    function: "rope",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    variants,
};

fn defines(
    dtype: DType,
    position: DType,
    interleaved: bool,
    vector: bool,
    tables: bool,
    items: usize,
) -> Defines {
    vec![
        element(dtype),
        ("POSITION", position.name().into()),
        flag("INTERLEAVED", interleaved),
        flag("VECTOR", vector),
        flag("HAS_TABLES", tables),
        ("ITEMS", items.to_string()),
    ]
}

fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        for position in [DType::I64, DType::I32] {
            for bits in 0..8 {
                let [interleaved, vector, tables] = [1, 2, 4].map(|bit| bits & bit != 0);
                for items in [1, ITEMS] {
                    all.push(defines(dtype, position, interleaved, vector, tables, items));
                }
            }
        }
    }
    all
}

pub(super) const fn kernel(name: &'static str) -> Kernel<Problem> {
    Kernel::cuda(name, &DEVICE, run).configured(|p, info| Shape::new(p, info, false).to_string()).when(
        |p, _| {
            let most = i32::MAX as usize / 2;
            match p.num_heads.max(p.head_dim) > most {
                true => Err(format!("more than {most} heads or elements of a head")),
                false => Ok(()),
            }
        },
    )
}

/// How the work is shared out over threads. Every element is computed alone, so nothing of this shows in the bits.
struct Shape {
    vector: bool,
    /// Elements of a piece.
    piece: usize,
    lane_bits: u32,
    head_bits: u32,
    items: usize,
}

impl Shape {
    fn new(p: &Problem, info: &DeviceInfo, in_place: bool) -> Shape {
        // A slice of the pairs is not what the 16-byte pieces of both layouts are cut from.
        let vector = p.vector_rows && p.pairs() <= MAX_PAIRS;
        let piece = if vector { 16 / p.dtype.size() } else { 1 };
        let copied = if in_place { 0 } else { p.head_dim - p.rotary_dim };
        let columns = (p.pairs().min(MAX_PAIRS) + copied).div_ceil(piece);
        let power = |n: usize| n.max(1).next_power_of_two();
        let lanes = power(columns).min(THREADS);
        let heads = power(p.num_heads).min(THREADS / lanes);
        let blocks = p.num_tokens.div_ceil(THREADS / (lanes * heads));
        let items = if blocks >= FULL_BLOCKS * ITEMS * info.units { ITEMS } else { 1 };
        Shape { vector, piece, lane_bits: lanes.trailing_zeros(), head_bits: heads.trailing_zeros(), items }
    }

    fn tokens_of_block(&self) -> usize {
        self.items * (THREADS >> (self.lane_bits + self.head_bits))
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (lanes, heads) = (1 << self.lane_bits, 1 << self.head_bits);
        let tokens = self.tokens_of_block();
        write!(f, "{lanes} threads a head, {heads} heads at once, {tokens} tokens a block")
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let in_place = at(X) == at(OUT);
    let shape = Shape::new(p, launch.info, in_place);
    let blocks = p.num_tokens.div_ceil(shape.tokens_of_block());
    let blocks =
        u32::try_from(blocks).ok().filter(|&n| n <= i32::MAX as u32).ok_or_else(|| Error::Launch {
            kernel: "rope".into(),
            what: "number of blocks",
            got: blocks as u64,
            limit: i32::MAX as u64,
        })?;
    let all = angles::frequencies(p.rotary_dim, f64::from_bits(p.theta_bits), f64::from_bits(p.scale_bits));
    let strides = p.tables.map_or([[0; 2]; 2], |t| t.strides).map(|s| s.map(|n| n as i64));
    let has_tables = p.tables.is_some();
    let spread = p.interleaved && !shape.vector;
    let defines = defines(p.dtype, p.position_dtype, p.interleaved, shape.vector, has_tables, shape.items);
    let mut first_pair = 0;
    loop {
        let num_pairs = (p.pairs() - first_pair).min(MAX_PAIRS);
        let last = first_pair + num_pairs == p.pairs();
        let copied = if in_place || !last { 0 } else { p.head_dim - p.rotary_dim };
        let rotate_columns = num_pairs / shape.piece;
        let mut frequencies = [0; MAX_PAIRS];
        frequencies[..num_pairs].copy_from_slice(&all[first_pair..first_pair + num_pairs]);
        let params = RopeParams {
            x: at(X),
            positions: at(POSITIONS),
            cos: at(COS),
            sin: at(SIN),
            out: at(OUT),
            num_tokens: p.num_tokens as i64,
            max_pos: p.tables.map_or(0, |t| t.max_pos as i64),
            x_head_stride: p.head_strides[0] as i64,
            out_head_stride: p.head_strides[1] as i64,
            x_step: p.steps[0] as i64,
            out_step: p.steps[1] as i64,
            cos_strides: strides[0],
            sin_strides: strides[1],
            second: if spread { 1 } else { p.pairs() as i64 },
            num_heads: p.num_heads as i32,
            rotary_dim: p.rotary_dim as i32,
            num_pairs: num_pairs as i32,
            first_pair: first_pair as i32,
            columns: (rotate_columns + copied / shape.piece) as i32,
            rotate_columns: rotate_columns as i32,
            first_stride: if spread { 2 } else { shape.piece as i32 },
            first_offset: if spread { 2 * first_pair } else { first_pair } as i32,
            lane_bits: shape.lane_bits as i32,
            head_bits: shape.head_bits as i32,
            pair_bits: num_pairs.max(1).next_power_of_two().trailing_zeros() as i32,
            backward: p.backward as i32,
            tokens: Rows::new(&p.tokens),
            frequencies,
        };
        let shared = 2 * shape.tokens_of_block() * num_pairs * size_of::<f32>();
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], shared as u32);
        // SAFETY: `check` bound shapes and strides to the parameters, the columns cover the rotated pairs and what
        // is copied, and shared memory holds both factors of every pair of the block's tokens.
        unsafe { kernel::run(launch, &defines, &config, &params)? };
        first_pair += num_pairs;
        if last {
            return Ok(());
        }
    }
}
