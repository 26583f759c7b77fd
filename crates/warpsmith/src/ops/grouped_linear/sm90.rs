//! `grouped_linear` on Hopper: host half. The device half is `sm90.cu`.

use super::cuda::{
    GroupedLinearParams, Operands, addressable, columns, epilogues, mean_rows, most_row_tiles,
};
use super::{Gate, Problem};
use crate::cuda::rows::{flag, grid_blocks};
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled};
use crate::device::DeviceInfo;
use crate::error::Result;
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::linear::cuda::Epilogue;
use crate::tensor::DType;

kernel_params! {
    struct GroupedSm90Params {
        x_map: TensorMap, w_map: TensorMap, out_map: TensorMap, grouped: GroupedLinearParams, k_tiles: i32,
    }
}

/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Bytes of K in a stage, which the copy engine swizzles.
const STAGE_ROW: usize = 128;
/// Bytes of the slices through which a consumer's warps store.
const SLICES: usize = 4 * 2 * 16 * 128;
/// Shared memory of a block, and the most stages.
const SHARED: usize = 232_448;
const MOST_STAGES: usize = 12;
/// Bytes of K from which two consumers on one tile lose less by their epilogue than they save loads.
const LONG_K: usize = 6144;

/// A tile of the result, and who computes it.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tile {
    m: usize,
    /// Rows of `w`: with a gate twice the columns of the result.
    n: usize,
    /// Rows of `x`: fewer than `m` where groups have few.
    x_rows: usize,
    consumers: usize,
    /// Whether the consumers take tiles in turn, so that the epilogue of one runs under the products of the other.
    ping_pong: bool,
}

const WIDE: Tile = Tile { m: 128, n: 256, x_rows: 128, consumers: 2, ping_pong: false };
const PING_PONG: Tile = Tile { m: 128, n: 128, x_rows: 128, consumers: 2, ping_pong: true };
/// For groups of few rows, whose time is that of reading their matrices.
const FEW: [Tile; 3] = [few(16), few(32), few(64)];

const fn few(x_rows: usize) -> Tile {
    Tile { m: 64, n: 128, x_rows, consumers: 1, ping_pong: false }
}

impl Tile {
    /// That of a problem. Each element is summed in the same order in all.
    fn of(p: &Problem) -> Tile {
        if let Some(&tile) = FEW.iter().find(|tile| tile.x_rows >= mean_rows(p)) {
            return tile;
        }
        let (product, long) = (&p.product, p.product.k * p.product.x_dtype.size() >= LONG_K);
        // These need registers that consumers in turn do not have.
        let crowded = product.has_residual || (product.has_bias && product.gate == Gate::None);
        if crowded || (long && product.weight_rows() > PING_PONG.n) { WIDE } else { PING_PONG }
    }
}

/// The compile-time part of a launch.
#[derive(Clone, Copy)]
struct Config {
    tile: Tile,
    epilogue: Epilogue,
    gathers: bool,
    /// Whether rows of `w` lie side by side, and K across them.
    across: bool,
    scale: bool,
}

impl Config {
    fn of(p: &Problem) -> Config {
        let scale = p.product.scale() != 1.0;
        let (gathers, across) = (p.index.is_some(), !p.w_pieces);
        Config { tile: Tile::of(p), epilogue: Epilogue::of(&p.product), gathers, across, scale }
    }

    fn fixed_bytes(&self) -> usize {
        self.tile.consumers * (SLICES + self.epilogue.bias as usize * self.tile.n * size_of::<f32>())
    }

    fn stage_bytes(&self) -> usize {
        // Two barriers beside the operands.
        (self.tile.x_rows + self.tile.n) * STAGE_ROW + 16
    }

    fn stages(&self) -> usize {
        ((SHARED - self.fixed_bytes()) / self.stage_bytes()).min(MOST_STAGES)
    }

    fn shared_bytes(&self) -> usize {
        self.fixed_bytes() + self.stages() * self.stage_bytes()
    }

    fn defines(&self) -> Defines {
        let Tile { m, n, x_rows, consumers, ping_pong } = self.tile;
        let mut defines = self.epilogue.defines();
        defines.extend([
            ("BLOCK_M", m.to_string()),
            ("BLOCK_N", n.to_string()),
            ("X_ROWS", x_rows.to_string()),
            ("STAGES", self.stages().to_string()),
            ("CONSUMERS", consumers.to_string()),
            flag("PINGPONG", ping_pong),
            flag("GATHER", self.gathers),
            flag("W_ACROSS", self.across),
            flag("HAS_SCALE", self.scale),
            flag("TMA_STORE", true),
            flag("LINE_STORE", false),
            flag("RESIDUAL_ROWS", true),
            // A residual needs the registers of a large step.
            flag("SMALL_STEPS", self.epilogue.residual),
        ]);
        defines
    }
}

/// A covering set: each epilogue with one tile, each tile with the plain epilogue.
fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        let plain = Config {
            tile: PING_PONG,
            epilogue: Epilogue::plain(dtype),
            gathers: false,
            across: false,
            scale: false,
        };
        for epilogue in epilogues(dtype) {
            let crowded = epilogue.residual || (epilogue.bias && epilogue.gate == Gate::None);
            let tile = if crowded { WIDE } else { PING_PONG };
            all.push(Config { tile, epilogue, gathers: epilogue.gate != Gate::None, ..plain });
        }
        for tile in [WIDE, PING_PONG].into_iter().chain(FEW) {
            all.extend([false, true].map(|gathers| Config { tile, gathers, ..plain }));
            all.push(Config { tile, across: true, ..plain });
        }
        let biased = Epilogue { bias: true, ..plain.epilogue };
        all.push(Config { tile: WIDE, epilogue: biased, gathers: true, ..plain });
        all.push(Config { scale: true, ..plain });
    }
    let mut all: Vec<Defines> = all.iter().map(Config::defines).collect();
    all.sort();
    all.dedup();
    all
}

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: Source { name: "grouped_linear_sm90", code: include_str!("sm90.cu") },
    prelude: GroupedSm90Params::prelude,
    function: "grouped_linear_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    overlaps: true,
    variants,
};

/// Tensor cores through `wgmma`, fed by the copy engine and, where rows are gathered, by threads.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("grouped_linear_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        // SAFETY: the tensors are the call's own.
        unsafe { run(launch, launch.problem, &Operands::of(launch)) }
    })
    .when(supports)
    .configured(describe);

pub(in crate::ops) fn describe(p: &Problem, _: &DeviceInfo) -> String {
    let config = Config::of(p);
    let Tile { n, x_rows, consumers, ping_pong, .. } = config.tile;
    let who = match (consumers, ping_pong) {
        (1, _) => "one consumer",
        (_, false) => "two consumers",
        (_, true) => "consumers in turn",
    };
    let (arithmetic, stages) = (p.product.tensor_arithmetic(), config.stages());
    format!("{arithmetic}, tiles of {x_rows} x {}, {who}, {stages} stages", columns(p, n))
}

pub(in crate::ops) fn supports(p: &Problem, _: &DeviceInfo) -> std::result::Result<(), String> {
    if p.product.x_dtype.size() != 2 {
        return Err("f32 in full precision would have to be split".into());
    }
    if p.product.k == 0 || p.groups == 0 {
        return Err("there is nothing to load".into());
    }
    if p.row_scale.is_some() {
        return Err("its epilogue has no factor for each row".into());
    }
    let w_pieces = p.w_pieces || (p.w_across && p.product.gate == Gate::None);
    for (name, pieces) in [("x", p.x_pieces), ("w", w_pieces), ("out", p.out_pieces)] {
        if !pieces {
            return Err(format!("rows of `{name}` do not consist of whole aligned pieces of 16 bytes"));
        }
    }
    let repeats = |count: usize, stride: isize| count > 1 && stride <= 0;
    if p.index.is_none() && repeats(p.x_rows, p.product.x.row) {
        return Err("`x` repeats rows".into());
    }
    if repeats(p.rows, p.product.out.row) {
        return Err("`out` has rows in descending order".into());
    }
    let lines =
        if p.w_pieces { repeats(p.product.weight_rows(), p.w.row) } else { repeats(p.product.k, p.w.col) };
    if lines || repeats(p.groups, p.w.group) {
        return Err("`w` repeats rows".into());
    }
    addressable(p)
}

/// Launches the kernel.
///
/// # Safety
/// `at` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(launch: &Launch<'_, P>, p: &Problem, at: &Operands) -> Result<()> {
    let config = Config::of(p);
    let tile = config.tile;
    let tiles = most_row_tiles(p, tile.x_rows) * p.product.n.div_ceil(columns(p, tile.n));
    // Numbers of tiles run up to two rounds past the last.
    let blocks = grid_blocks(DEVICE.function, tiles + 2 * launch.info.units)?.min(launch.info.units as u32);
    let params = GroupedSm90Params {
        x_map: if config.gathers { TensorMap::UNUSED } else { x_map(launch, p, at, tile)? },
        w_map: w_map(launch, p, at, tile)?,
        out_map: out_map(launch, p, at)?,
        grouped: GroupedLinearParams::new(p, at),
        k_tiles: (p.product.k * p.product.x_dtype.size()).div_ceil(STAGE_ROW) as i32,
    };
    let threads = ((1 + tile.consumers) * WARPGROUP) as u32;
    let blocks = blocks.min(tiles as u32).max(1);
    let shape = LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], config.shared_bytes() as u32);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them, and counts and indices that are beyond
    // them are not used as such.
    unsafe { launch.record_part(&DEVICE, &config.defines(), &shape, &params) }
}

/// Bytes between neighbours, of which there are `count`: a lone one may say anything.
fn apart(p: &Problem, stride: isize, count: usize) -> u64 {
    if count > 1 { stride as u64 * p.product.x_dtype.size() as u64 } else { 16 }
}

/// Boxes of the rows of a tile and a stage of K.
fn x_map<P>(launch: &Launch<'_, P>, p: &Problem, at: &Operands, tile: Tile) -> Result<TensorMap> {
    let row = apart(p, p.product.x.row, p.x_rows);
    launch.tensor_map(&Tiled {
        address: at.x as u64,
        dtype: p.product.x_dtype,
        sizes: &[p.product.k as u64, p.x_rows as u64, 1, 1],
        strides: &[row, 16, 16],
        extents: &[(STAGE_ROW / p.product.x_dtype.size()) as u32, tile.x_rows as u32, 1, 1],
        swizzle: Swizzle::B128,
    })
}

/// Boxes of the 16 rows of a warp and 128 bytes of columns, which divide all tiles.
fn out_map<P>(launch: &Launch<'_, P>, p: &Problem, at: &Operands) -> Result<TensorMap> {
    let size = p.product.out_dtype.size();
    let row = if p.rows > 1 { p.product.out.row as u64 * size as u64 } else { 16 };
    launch.tensor_map(&Tiled {
        address: at.out as u64,
        dtype: p.product.out_dtype,
        sizes: &[p.product.n as u64, p.rows as u64, 1],
        strides: &[row, 16],
        extents: &[(STAGE_ROW / size) as u32, 16, 1],
        swizzle: Swizzle::B128,
    })
}

/// Boxes of rows of `w` and a stage of K. Gate and up are the third dimension, and groups the fourth. Where K lies across, boxes have
/// 64 rows.
fn w_map<P>(launch: &Launch<'_, P>, p: &Problem, at: &Operands, tile: Tile) -> Result<TensorMap> {
    let (gate, rows, k) = (p.product.gate, p.product.weight_rows(), p.product.k);
    let stage = (STAGE_ROW / p.product.x_dtype.size()) as u32;
    if !p.w_pieces {
        return launch.tensor_map(&Tiled {
            address: at.w as u64,
            dtype: p.product.x_dtype,
            sizes: &[rows as u64, k as u64, 1, p.groups as u64],
            strides: &[apart(p, p.w.col, k), 16, apart(p, p.w.group, p.groups)],
            extents: &[64, stage, 1, 1],
            swizzle: Swizzle::B128,
        });
    }
    let parts = if gate == Gate::None { 1 } else { 2 };
    let (row, group) = (apart(p, p.w.row, rows), apart(p, p.w.group, p.groups));
    let [row, part] = match gate {
        Gate::None => [row, 16],
        Gate::Halves => [row, row * (rows / 2) as u64],
        Gate::Interleaved => [2 * row, row],
    };
    launch.tensor_map(&Tiled {
        address: at.w as u64,
        dtype: p.product.x_dtype,
        sizes: &[k as u64, (rows / parts) as u64, parts as u64, p.groups as u64],
        strides: &[row, part, group],
        extents: &[stage, (tile.n / parts) as u32, 1, 1],
        swizzle: Swizzle::B128,
    })
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_tile_has_stages_enough() {
        for tile in [WIDE, PING_PONG].into_iter().chain(FEW) {
            for bias in [false, true] {
                let epilogue = Epilogue { bias, ..Epilogue::plain(DType::BF16) };
                let config = Config { tile, epilogue, gathers: true, across: false, scale: false };
                assert!(config.stages() >= 4 && config.shared_bytes() <= SHARED, "{tile:?}");
            }
        }
    }
}
