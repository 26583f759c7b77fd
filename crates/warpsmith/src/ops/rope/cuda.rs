//! `rope` and its gradient on CUDA devices: host half.

use super::angles;
use super::{COS, OUT, POSITIONS, Problem, Rotation, SIN, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{Rows, element, flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, Bits64, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::tensor::DType;

const SOURCE: Source = Source { name: "rope", code: include_str!("kernel.cu") };
/// Threads of a block, as in the device code.
pub(in crate::ops) const THREADS: usize = 256;
/// Frequencies that travel with the parameters. Heads with more pairs take several launches.
pub(in crate::ops) const MAX_PAIRS: usize = 256;
/// Blocks per multiprocessor from which each thread takes several tokens: below, more blocks matter more than more
/// loads in flight.
const FULL_BLOCKS: usize = 8;
/// Tokens a thread takes then.
pub(in crate::ops) const ITEMS: usize = 2;
/// Blocks on a multiprocessor up to which those with the same tokens share their heads.
const SPARE_BLOCKS: usize = 1;

kernel_params! {
    /// What `rotate_tokens` of `rope.cuh` is told: heads, how threads share them out, and angles.
    pub(in crate::ops) struct Rotary {
        cos: u64, sin: u64,
        num_tokens: i64, max_pos: i64,
        x_head_stride: i64, x_step: i64,
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
        lane_bits: i32, head_bits: i32, head_tiles: i32, pair_bits: i32, backward: i32,
        frequencies: [Bits64; MAX_PAIRS],
    }
}

impl Rotary {
    /// Nothing is rotated.
    pub const NONE: Rotary = {
        // SAFETY: plain numbers, for which zero is a value.
        unsafe { std::mem::zeroed() }
    };
}

kernel_params! {
    struct RopeParams {
        x: u64, positions: u64, out: u64,
        out_head_stride: i64, out_step: i64,
        rotary: Rotary,
        tokens: Rows,
    }
}

static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: RopeParams::prelude,
    function: "rope",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
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
    Kernel::cuda(name, &DEVICE, run)
        .configured(|p, info| Shape::new(Heads::new(p, false), info).to_string())
        .when(|p, _| {
            let most = i32::MAX as usize / 2;
            match p.num_heads.max(p.head_dim) > most {
                true => Err(format!("more than {most} heads or elements of a head")),
                false => Ok(()),
            }
        })
}

/// The heads of a call that rotates.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Heads {
    pub rotation: Rotation,
    pub num_tokens: usize,
    pub num_heads: usize,
    pub head_dim: usize,
    /// Elements of a piece if heads can be moved in 16-byte pieces, else one.
    pub piece: usize,
    /// Elements between heads, and between elements of a head.
    pub strides: [isize; 2],
    /// Whether the unrotated part is in place already.
    pub in_place: bool,
}

impl Heads {
    fn new(p: &Problem, in_place: bool) -> Heads {
        let piece = if p.vector_rows { 16 / p.dtype.size() } else { 1 };
        let Problem { rotation, num_tokens, num_heads, head_dim, .. } = *p;
        let strides = [p.head_strides[0], p.steps[0]];
        Heads { rotation, num_tokens, num_heads, head_dim, piece, strides, in_place }
    }

    fn copied(&self) -> usize {
        if self.in_place { 0 } else { self.head_dim - self.rotation.rotary_dim }
    }
}

/// How the work is divided among threads. Every element is computed on its own, so none of this affects the bits.
pub(in crate::ops) struct Shape {
    heads: Heads,
    /// Elements of a piece.
    piece: usize,
    lane_bits: u32,
    head_bits: u32,
    /// Blocks that share the heads of their tokens.
    head_tiles: usize,
    pub items: usize,
}

impl Shape {
    pub fn new(heads: Heads, info: &DeviceInfo) -> Shape {
        let pairs = heads.rotation.pairs();
        // A slice of the pairs is not what the 16-byte pieces of both layouts are cut from.
        let piece = if pairs <= MAX_PAIRS { heads.piece } else { 1 };
        let columns = (pairs.min(MAX_PAIRS) + heads.copied()).div_ceil(piece);
        let power = |n: usize| n.max(1).next_power_of_two();
        let lanes = power(columns).min(THREADS);
        let at_once = power(heads.num_heads).min(THREADS / lanes);
        let blocks = heads.num_tokens.div_ceil(THREADS / (lanes * at_once));
        let items = if blocks >= FULL_BLOCKS * ITEMS * info.units { ITEMS } else { 1 };
        // A block that processes heads in turn waits for memory each time; with few tokens there are enough blocks.
        let turns = heads.num_heads.div_ceil(at_once).max(1);
        let head_tiles = (SPARE_BLOCKS * info.units / blocks.max(1)).clamp(1, turns);
        let [lane_bits, head_bits] = [lanes, at_once].map(usize::trailing_zeros);
        Shape { heads, piece, lane_bits, head_bits, head_tiles, items }
    }

    /// Whether threads move 16 bytes at once.
    pub fn vector(&self) -> bool {
        self.piece > 1
    }

    pub fn blocks(&self) -> usize {
        self.heads.num_tokens.div_ceil(self.tokens_of_block()) * self.head_tiles
    }

    /// Bytes of shared memory that hold both factors of `num_pairs` pairs for every token of a block.
    pub fn shared_bytes(&self, num_pairs: usize) -> usize {
        2 * self.tokens_of_block() * num_pairs * size_of::<f32>()
    }

    /// The parameters of a launch for the pairs from `first_pair` on, and for what is not rotated if they are the last.
    /// `tables` are the addresses of cosines and sines.
    pub fn rotary(&self, tables: [usize; 2], first_pair: usize) -> Rotary {
        let Heads { rotation, .. } = self.heads;
        let pairs = rotation.pairs();
        let num_pairs = (pairs - first_pair).min(MAX_PAIRS);
        let last = first_pair + num_pairs == pairs;
        let copied = if last { self.heads.copied() } else { 0 };
        let rotate_columns = num_pairs / self.piece;
        let [theta, scale] = [rotation.theta, rotation.scale].map(|number| number.get());
        let frequency = |i: usize| angles::frequency(first_pair + i, rotation.rotary_dim, theta, scale);
        let frequencies = std::array::from_fn(|i| Bits64(if i < num_pairs { frequency(i) } else { 0 }));
        let strides = rotation.tables.map_or([[0; 2]; 2], |t| t.strides).map(|s| s.map(|n| n as i64));
        let spread = rotation.interleaved && !self.vector();
        Rotary {
            cos: tables[0] as u64,
            sin: tables[1] as u64,
            num_tokens: self.heads.num_tokens as i64,
            max_pos: rotation.tables.map_or(0, |t| t.max_pos as i64),
            x_head_stride: self.heads.strides[0] as i64,
            x_step: self.heads.strides[1] as i64,
            cos_strides: strides[0],
            sin_strides: strides[1],
            second: if spread { 1 } else { pairs as i64 },
            num_heads: self.heads.num_heads as i32,
            rotary_dim: rotation.rotary_dim as i32,
            num_pairs: num_pairs as i32,
            first_pair: first_pair as i32,
            columns: (rotate_columns + copied / self.piece) as i32,
            rotate_columns: rotate_columns as i32,
            first_stride: if spread { 2 } else { self.piece as i32 },
            first_offset: if spread { 2 * first_pair } else { first_pair } as i32,
            lane_bits: self.lane_bits as i32,
            head_bits: self.head_bits as i32,
            head_tiles: self.head_tiles as i32,
            pair_bits: num_pairs.max(1).next_power_of_two().trailing_zeros() as i32,
            backward: rotation.backward as i32,
            frequencies,
        }
    }

    fn tokens_of_block(&self) -> usize {
        self.items * (THREADS >> (self.lane_bits + self.head_bits))
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (lanes, heads) = (1 << self.lane_bits, 1 << self.head_bits);
        let tokens = self.tokens_of_block();
        write!(f, "{lanes} threads a head, {heads} heads at once, {tokens} tokens a block")?;
        if self.head_tiles > 1 { write!(f, ", their heads in {} blocks", self.head_tiles) } else { Ok(()) }
    }
}

fn run(launch: &Launch<'_, Problem>) -> Result<()> {
    let p = launch.problem;
    let at = |index| launch.args.address(index) as u64;
    let shape = Shape::new(Heads::new(p, at(X) == at(OUT)), launch.info);
    let blocks = grid_blocks("rope", shape.blocks())?;
    let tables = p.rotation.tables.is_some();
    let defines =
        defines(p.dtype, p.position_dtype, p.rotation.interleaved, shape.vector(), tables, shape.items);
    let mut first_pair = 0;
    loop {
        let rotary = shape.rotary([COS, SIN].map(|index| launch.args.address(index)), first_pair);
        let num_pairs = rotary.num_pairs as usize;
        let params = RopeParams {
            x: at(X),
            positions: at(POSITIONS),
            out: at(OUT),
            out_head_stride: p.head_strides[1] as i64,
            out_step: p.steps[1] as i64,
            rotary,
            tokens: Rows::new(&p.tokens),
        };
        let shared = shape.shared_bytes(num_pairs) as u32;
        let config = LaunchConfig::new([blocks, 1, 1], [THREADS as u32, 1, 1], shared);
        // SAFETY: `check` bound shapes and strides to the parameters, the columns cover the rotated pairs and what
        // is copied, and shared memory holds both factors of every pair of the block's tokens.
        unsafe { launch.record(&defines, &config, &params)? };
        first_pair += num_pairs;
        if first_pair == p.rotation.pairs() {
            return Ok(());
        }
    }
}
