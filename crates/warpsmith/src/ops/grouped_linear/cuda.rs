//! `grouped_linear` on CUDA devices: host half. The counts are on the device alone, so a launch has blocks for as many tiles as there
//! can be; blocks find their tiles by the counts, and those that have none end.

use super::{BIAS, COUNTS, Gate, INDEX, OUT, Problem, RESIDUAL, ROW_SCALE, W, X};
use crate::cuda::LaunchConfig;
use crate::cuda::rows::{flag, grid_blocks};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::FLOATS;
use crate::ops::linear::cuda::{Epilogue, LinearParams};
use crate::ops::linear::problem::{Part, Problem as Product, Strides};
use crate::tensor::DType;

kernel_params! {
    /// The parameters of every kernel of `grouped_linear`; what is absent is zero. Strides count elements.
    pub(in crate::ops) struct GroupedLinearParams {
        /// Its batch are the groups, and only `w` has a distance between them.
        linear: LinearParams,
        counts: u64, index: u64, row_scale: u64,
        counts_step: i64, index_step: i64, row_scale_step: i64, bias_group: i64,
        rows: i32, groups: i32, x_rows: i32,
        wide_index: i32, wide_row_scale: i32,
        /// Whether rows that belong to no group are written.
        clears: i32,
    }
}

/// Where the tensors of a call are; zero for what is absent.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Operands {
    pub x: usize,
    pub w: usize,
    pub counts: usize,
    pub index: usize,
    pub bias: usize,
    pub row_scale: usize,
    pub residual: usize,
    pub out: usize,
}

impl Operands {
    /// Of nothing.
    pub const NONE: Operands =
        Operands { x: 0, w: 0, counts: 0, index: 0, bias: 0, row_scale: 0, residual: 0, out: 0 };

    /// The call's own tensors.
    pub(super) fn of(launch: &Launch<'_, Problem>) -> Operands {
        let at = |index: usize| launch.args.address(index);
        Operands {
            x: at(X),
            w: at(W),
            counts: at(COUNTS),
            index: at(INDEX),
            bias: at(BIAS),
            row_scale: at(ROW_SCALE),
            residual: at(RESIDUAL),
            out: at(OUT),
        }
    }
}

impl GroupedLinearParams {
    pub(super) fn new(p: &Problem, at: &Operands) -> Self {
        let product = Product {
            m: p.rows,
            batch: p.groups,
            w: Strides { batch: p.w.group, row: p.w.row, col: p.w.col },
            ..p.product
        };
        let part = Part { bias: at.bias, residual: at.residual, ..Part::product(at.x, at.w, at.out) };
        GroupedLinearParams {
            linear: LinearParams::new(&product, &part),
            counts: at.counts as u64,
            index: at.index as u64,
            row_scale: at.row_scale as u64,
            counts_step: p.counts_step as i64,
            index_step: p.index.map_or(0, |index| index.step as i64),
            row_scale_step: p.row_scale.map_or(0, |scale| scale.step as i64),
            bias_group: p.bias.map_or(0, |[apart, _]| apart as i64),
            rows: p.rows as i32,
            groups: p.groups as i32,
            x_rows: p.x_rows as i32,
            wide_index: p.index.is_some_and(|index| index.dtype == DType::I64) as i32,
            wide_row_scale: p.row_scale.is_some_and(|scale| scale.dtype == DType::F32) as i32,
            clears: p.clears as i32,
        }
    }
}

/// Rows, columns and K are counted in 32 bits, with headroom for sums of two and for a tile past the end.
pub(in crate::ops) fn addressable(p: &Problem) -> std::result::Result<(), String> {
    let rows = [("rows", p.rows), ("x_rows", p.x_rows), ("groups", p.groups)];
    for (name, size) in rows.into_iter().chain([("n", p.product.n), ("k", p.product.k)]) {
        if size >= 1 << 30 {
            return Err(format!("{name} = {size} is not below 2^30"));
        }
    }
    Ok(())
}

/// Rows of an average group.
pub(super) fn mean_rows(p: &Problem) -> usize {
    p.rows.div_ceil(p.groups.max(1))
}

/// The most tiles of `tile` rows that groups can have, whatever their counts are: see `grouped_tiles.cuh`.
pub(super) fn most_row_tiles(p: &Problem, tile: usize) -> usize {
    most_tiles(p.rows, p.groups, tile)
}

fn most_tiles(rows: usize, groups: usize, tile: usize) -> usize {
    rows / tile + rows.min(groups + 1)
}

/// Columns of the result in a tile of `rows` rows of `w`. Never zero: experts without hidden units have products without columns.
pub(super) fn columns(p: &Problem, rows: usize) -> usize {
    columns_of(rows, p.product.n, p.product.weight_rows())
}

/// Columns that `rows` of all the `weight_rows` behind `n` columns make.
fn columns_of(rows: usize, n: usize, weight_rows: usize) -> usize {
    (rows * n / weight_rows.max(1)).max(1)
}

pub(super) const THREADS: u32 = 256;

/// The launch of a block for each tile of `rows` rows by `w_rows` rows of `w`.
fn config(name: &str, p: &Problem, [rows, w_rows]: [usize; 2], shared: usize) -> Result<LaunchConfig> {
    let tiles = most_row_tiles(p, rows) * p.product.n.div_ceil(columns(p, w_rows));
    Ok(LaunchConfig::new([grid_blocks(name, tiles)?, 1, 1], [THREADS, 1, 1], shared as u32))
}

/// What the covering sets have of epilogues: results are of the type of `x`, or f32 for `moe_ffn`.
pub(super) fn epilogues(dtype: DType) -> impl Iterator<Item = Epilogue> {
    Epilogue::covering(dtype).into_iter().filter(move |e| e.out == dtype || e.out == DType::F32)
}

pub(in crate::ops) static GENERIC_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "grouped_linear_generic", code: include_str!("generic.cu") },
    prelude: GroupedLinearParams::prelude,
    function: "grouped_linear_generic",
    min_arch: Arch::new(6, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let of = |dtype| {
            let wide = epilogues(dtype).map(|e| generic_defines(&e, 128, [1, 1]));
            let plain = Epilogue::plain(dtype);
            let tiles = [16, 64, 128].map(|tile| generic_defines(&plain, tile, [0, 0]));
            wide.chain(tiles).collect::<Vec<_>>()
        };
        FLOATS.into_iter().flat_map(of).collect()
    },
};

/// Rows and rows of `w` of a block's tile. Each element is summed in the same order in tiles of any size.
fn generic_tile(p: &Problem, info: &DeviceInfo) -> [usize; 2] {
    let of = |rows: usize| [rows, if rows == 128 { 128 } else { 64 }];
    let blocks =
        |[rows, w_rows]: [usize; 2]| p.rows.div_ceil(rows) * p.product.n.div_ceil(columns(p, w_rows));
    match mean_rows(p) {
        ..=16 => of(16),
        65.. if blocks(of(128)) >= info.units => of(128),
        _ => of(64),
    }
}

fn generic_defines(epilogue: &Epilogue, tile: usize, [x, w]: [usize; 2]) -> Defines {
    let mut defines = epilogue.defines();
    defines.extend([
        ("TILE_M", tile.to_string()),
        ("TILE_N", if tile == 128 { 128 } else { 64 }.to_string()),
        ("LOAD_X", x.to_string()),
        ("LOAD_W", w.to_string()),
    ]);
    defines
}

/// Any type and layout, on any device, without tensor cores.
pub(super) const GENERIC: Kernel<Problem> =
    Kernel::cuda("grouped_linear_generic", &GENERIC_DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own.
        unsafe { run_generic(launch, launch.problem, &Operands::of(launch)) }
    })
    .when(|p, _| addressable(p))
    .configured(describe_generic);

pub(in crate::ops) fn describe_generic(p: &Problem, info: &DeviceInfo) -> String {
    let [rows, w_rows] = generic_tile(p, info);
    format!("{}, tiles of {rows} x {}", p.product.arithmetic(), columns(p, w_rows))
}

/// Launches the generic kernel.
///
/// # Safety
/// `at` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run_generic<P>(
    launch: &Launch<'_, P>,
    p: &Problem,
    at: &Operands,
) -> Result<()> {
    let tile = generic_tile(p, launch.info);
    let loads = [p.x_pieces, p.w_pieces].map(usize::from);
    let defines = generic_defines(&Epilogue::of(&p.product), tile[0], loads);
    let config = config("grouped_linear_generic", p, tile, 0)?;
    // SAFETY: the caller vouches for the tensors; the blocks cover every tile, and counts and indices that are beyond the tensors
    // are not used as such.
    unsafe { launch.record_part(&GENERIC_DEVICE, &defines, &config, &GroupedLinearParams::new(p, at)) }
}

/// Rows of `w` of a block's tile, bytes of K in a stage, and stages, as in `grouped_mma.cuh`.
pub(super) const SM80_TILE_N: usize = 128;
const SM80_STAGE_BYTES: usize = 64;
const SM80_STAGES: usize = 4;
/// Rows of a tile.
const SM80_TILES: [usize; 4] = [16, 32, 64, 128];

pub(in crate::ops) static SM80_DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "grouped_linear_sm80", code: include_str!("sm80.cu") },
    prelude: GroupedLinearParams::prelude,
    function: "grouped_linear_sm80",
    min_arch: Arch::new(8, 0, false),
    fast_math: false,
    overlaps: true,
    variants: || {
        let of = |dtype| {
            let wide = epilogues(dtype).map(|e| sm80_defines(&e, 128, [false, true]));
            let plain = Epilogue::plain(dtype);
            let tiles = SM80_TILES.map(|tile| sm80_defines(&plain, tile, [true, false]));
            wide.chain(tiles).collect::<Vec<_>>()
        };
        [DType::F16, DType::BF16].into_iter().flat_map(of).collect()
    },
};

/// Shared memory of a block with tiles of `tile` rows.
pub(super) fn sm80_shared_bytes(tile: usize) -> usize {
    SM80_STAGES * (tile + SM80_TILE_N) * SM80_STAGE_BYTES
}

fn sm80_defines(epilogue: &Epilogue, tile: usize, [across, pairs]: [bool; 2]) -> Defines {
    let mut defines = epilogue.defines();
    defines.extend([("TILE_M", tile.to_string()), flag("W_ACROSS", across), flag("OUT_PAIRS", pairs)]);
    defines
}

/// Rows of a tile: enough for an average group, so that its matrix is read once. Each element is summed in the same order in tiles of
/// any size.
fn sm80_tile(p: &Problem) -> usize {
    SM80_TILES.into_iter().find(|&tile| tile >= mean_rows(p)).unwrap_or(128)
}

/// Tensor cores through `mma.sync`.
pub(super) const SM80: Kernel<Problem> =
    Kernel::cuda("grouped_linear_sm80", &SM80_DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own.
        unsafe { run_sm80(launch, launch.problem, &Operands::of(launch)) }
    })
    .when(sm80_supports)
    .configured(describe_sm80);

pub(in crate::ops) fn describe_sm80(p: &Problem, _: &DeviceInfo) -> String {
    let columns = columns(p, SM80_TILE_N);
    format!("{}, tiles of {} x {columns}", p.product.tensor_arithmetic(), sm80_tile(p))
}

pub(in crate::ops) fn sm80_supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    if p.product.x_dtype.size() != 2 {
        return Err("f32 in full precision would have to be split".into());
    }
    let w_pieces = p.w_pieces || (p.w_across && p.product.gate == Gate::None);
    for (name, pieces) in [("x", p.x_pieces), ("w", w_pieces)] {
        if !pieces {
            return Err(format!("rows of `{name}` do not consist of whole aligned pieces of 16 bytes"));
        }
    }
    addressable(p)
}

/// Launches the tensor-core kernel.
///
/// # Safety
/// `at` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run_sm80<P>(launch: &Launch<'_, P>, p: &Problem, at: &Operands) -> Result<()> {
    let tile = sm80_tile(p);
    let shared = sm80_shared_bytes(tile);
    let defines = sm80_defines(&Epilogue::of(&p.product), tile, [!p.w_pieces, p.out_pieces]);
    let config = config("grouped_linear_sm80", p, [tile, SM80_TILE_N], shared)?;
    // SAFETY: as for the generic kernel.
    unsafe { launch.record_part(&SM80_DEVICE, &defines, &config, &GroupedLinearParams::new(p, at)) }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;
    use crate::tensor::Random;

    /// What divides by them does not fail.
    #[test]
    fn tiles_have_columns_where_products_have_none() {
        assert_eq!([columns_of(128, 0, 0), columns_of(64, 0, 0)], [1, 1]);
        assert_eq!([columns_of(128, 5, 5), columns_of(128, 768, 1536)], [128, 64]);
    }

    /// Whatever the counts are, there are no more tiles than a launch has blocks for.
    #[test]
    fn tiles_of_all_counts_have_blocks() {
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let (rows, groups) = (random.below(400) as usize, random.below(50) as usize);
            let tile = SM80_TILES[random.below(4) as usize];
            let (mut left, mut tiles) = (rows, 0);
            for _ in 0..groups {
                let count = random.below(left as u64 + 1).min(1 + random.below(200)) as usize;
                left -= count;
                tiles += count.div_ceil(tile);
            }
            tiles += left.div_ceil(tile);
            assert!(tiles <= most_tiles(rows, groups, tile), "{rows} rows, {groups} groups, tiles of {tile}");
        }
    }
}
