//! `linear` on Hopper: host half. The device half is `sm90.cu`.

use super::cuda::{Epilogue, LinearParams, addressable};
use super::problem::{Dequant, INPUTS, Order, Part, SCALE_BLOCK, Strides};
use super::{Gate, Problem};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled, kernel};
use crate::device::DeviceInfo;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::jit::{Arch, Source};
use crate::kernel_params;
use crate::registry::{CudaKernel, Defines, Kernel, Launch};

/// Bytes of K in a stage, which the copy engine swizzles.
const STAGE_ROW: usize = 128;
/// Bytes of a slice of the output between a consumer and the copy engine.
const SLICE: usize = 64 * 128;
/// Shared memory of a block on Hopper.
const SHARED: usize = 232_448;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

kernel_params! {
    struct Sm90Params {
        x_map: TensorMap, w_map: TensorMap, out_map: TensorMap,
        linear: LinearParams,
        k_tiles: i32, m_tiles: u32, n_tiles: u32, band: u32,
    }
}

/// How the consumers of a block share the tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Schedule {
    /// A single one.
    Single,
    /// Two, each with half the rows of a tile.
    Cooperative,
    /// Two that take tiles in turn: the epilogue of one runs under the products of the other.
    PingPong,
}

/// A tile of the result (with a gate `n` counts rows of `w`), and who computes it.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tile {
    schedule: Schedule,
    m: usize,
    n: usize,
    /// What the tensor cores reach with it, relative to the best.
    speed: f64,
}

const fn tile(schedule: Schedule, m: usize, n: usize, speed: f64) -> Tile {
    Tile { schedule, m, n, speed }
}

/// The tiles to choose from. Each sums an element in the same order, so the choice never shows in the bits.
const TILES: [Tile; 10] = [
    tile(Schedule::PingPong, 128, 128, 1.0),
    tile(Schedule::Cooperative, 128, 256, 0.98),
    tile(Schedule::Cooperative, 256, 128, 0.98),
    tile(Schedule::PingPong, 128, 96, 0.93),
    tile(Schedule::Cooperative, 128, 192, 0.95),
    tile(Schedule::Cooperative, 128, 128, 0.9),
    tile(Schedule::PingPong, 64, 256, 0.85),
    tile(Schedule::Single, 64, 128, 0.7),
    tile(Schedule::Single, 64, 64, 0.6),
    tile(Schedule::Single, 64, 32, 0.35),
];

impl Tile {
    fn consumers(self) -> usize {
        if self.schedule == Schedule::Single { 1 } else { 2 }
    }

    /// Columns of the result.
    fn columns(self, gate: Gate) -> usize {
        if gate == Gate::None { self.n } else { self.n / 2 }
    }

    /// Whether the device code takes it for this problem.
    fn suits(self, p: &Problem) -> bool {
        let columns = self.columns(p.gate);
        let blocks = self.m / 64 / if self.schedule == Schedule::Cooperative { 2 } else { 1 };
        let transposed = p.w_order == Order::Columns && !self.n.is_multiple_of(64);
        let scales = p.dequant == Dequant::Blocks
            && (blocks * self.n > 128
                || !SCALE_BLOCK.is_multiple_of(if p.gate == Gate::Interleaved { self.n } else { columns })
                || (p.gate == Gate::Halves && !p.n.is_multiple_of(columns)));
        !transposed && !scales && columns.is_multiple_of(16)
    }

    /// An estimate of the time a problem takes, in arbitrary units: waves of tiles, each with its products and what it
    /// costs to start and finish one.
    fn cost(self, p: &Problem, units: usize) -> f64 {
        let tiles = p.m.div_ceil(self.m) * p.n.div_ceil(self.columns(p.gate)) * p.batch;
        let waves = tiles.div_ceil(units.max(1)) as f64;
        // The start of a tile is hidden where another consumer computes meanwhile.
        let start = if self.schedule == Schedule::PingPong { 32.0 } else { 160.0 };
        waves * (self.m * self.n) as f64 * (p.k as f64 + start) / self.speed
    }

    fn choose(p: &Problem, units: usize) -> Option<Tile> {
        let suitable = TILES.into_iter().filter(|tile| tile.suits(p));
        suitable.min_by(|a, b| a.cost(p, units).total_cmp(&b.cost(p, units)))
    }
}

/// Everything about a launch that is compiled in.
#[derive(Clone, Copy)]
struct Config {
    tile: Tile,
    epilogue: Epilogue,
    x_columns: bool,
    w_columns: bool,
    tma_store: bool,
    residual_rows: bool,
}

impl Config {
    fn of(p: &Problem, tile: Tile) -> Config {
        Config {
            tile,
            epilogue: Epilogue::of(p),
            x_columns: p.x_order == Order::Columns,
            w_columns: p.w_order == Order::Columns,
            tma_store: p.out_order == Order::Rows,
            residual_rows: p.residual_order == Order::Rows,
        }
    }

    /// Slices of the output that a consumer may have on their way.
    const STORE_BUFFERS: usize = 2;

    /// Shared memory besides the ring of stages.
    fn fixed_bytes(&self) -> usize {
        let terms = self.epilogue.bias as usize + (self.epilogue.dequant == Dequant::Whole) as usize;
        let stores = if self.tma_store { Self::STORE_BUFFERS * SLICE } else { 0 };
        self.tile.consumers() * (stores + terms * self.tile.n * 4)
    }

    fn stage_bytes(&self) -> usize {
        // Two barriers beside the operands.
        (self.tile.m + self.tile.n) * STAGE_ROW + 16
    }

    fn stages(&self) -> usize {
        ((SHARED - self.fixed_bytes()) / self.stage_bytes()).min(12)
    }

    fn shared_bytes(&self) -> usize {
        self.fixed_bytes() + self.stages() * self.stage_bytes()
    }

    fn defines(&self) -> Defines {
        let mut defines = self.epilogue.defines();
        defines.extend([
            ("BLOCK_M", self.tile.m.to_string()),
            ("BLOCK_N", self.tile.n.to_string()),
            ("STAGES", self.stages().to_string()),
            ("CONSUMERS", self.tile.consumers().to_string()),
            flag("PINGPONG", self.tile.schedule == Schedule::PingPong),
            ("CLUSTER_M", "1".into()),
            ("CLUSTER_N", "1".into()),
            flag("X_MAJOR_MN", self.x_columns),
            flag("W_MAJOR_MN", self.w_columns),
            flag("TMA_STORE", self.tma_store),
            ("STORE_BUFFERS", Self::STORE_BUFFERS.to_string()),
            flag("RESIDUAL_ROWS", self.residual_rows),
        ]);
        defines
    }
}

const SOURCE: Source = Source { name: "linear_sm90", code: include_str!("sm90.cu") };

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: Sm90Params::prelude,
    function: "linear_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    variants,
};

/// A covering set, as for the other kernels of `linear`: each epilogue with one tile, each tile with the plain one.
fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in INPUTS {
        let plain = Config {
            tile: TILES[0],
            epilogue: Epilogue::plain(dtype),
            x_columns: false,
            w_columns: false,
            tma_store: true,
            residual_rows: true,
        };
        for epilogue in Epilogue::covering(dtype) {
            let tile = if epilogue.dequant == Dequant::Blocks { TILES[8] } else { TILES[0] };
            all.push(Config { epilogue, tile, ..plain }.defines());
        }
        all.extend(TILES.map(|tile| Config { tile, ..plain }.defines()));
        all.push(Config { tma_store: false, residual_rows: false, ..plain }.defines());
        if dtype.size() == 2 {
            for [x_columns, w_columns] in [[true, false], [false, true], [true, true]] {
                all.push(Config { x_columns, w_columns, ..plain }.defines());
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Tensor cores through `wgmma`, fed by the copy engine: everything that engine can load.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("linear_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        // SAFETY: the parts are those of the call's own tensors.
        p.parts(launch.args).try_for_each(|part| unsafe { run(launch, p, &part) })
    })
    .when(supports)
    .configured(|p, info| match Tile::choose(p, info.units) {
        Some(t) => {
            let stages = Config::of(p, t).stages();
            format!("{}, tiles of {} x {}, {:?}, {stages} stages", p.arithmetic(), t.m, t.n, t.schedule)
        }
        None => String::new(),
    });

pub(in crate::ops) fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if p.x_dtype == DType::F32 && !p.tf32 {
        return Err("f32 in full precision needs no tensor cores".into());
    }
    if p.full && p.x_dtype.size() == 1 {
        return Err("tensor cores add 8-bit products with fewer bits than f32 has".into());
    }
    if p.k == 0 {
        return Err("there is nothing to load".into());
    }
    for (name, order, strides, rows, gated) in
        [("x", p.x_order, p.x, p.m, false), ("w", p.w_order, p.w, p.weight_rows(), p.gate != Gate::None)]
    {
        let reason = match order {
            Order::Any => "cannot be moved in pieces of 16 bytes",
            Order::Columns if p.x_dtype.size() != 2 => "is transposed, which only 16-bit types can be",
            Order::Columns if gated => "is transposed, which it cannot be with a gate",
            _ if rows > 1 && strides.row <= 0 || p.k > 1 && strides.col <= 0 => "repeats elements",
            _ if name == "x" && p.batch > 1 && strides.batch <= 0 => "repeats matrices",
            _ => continue,
        };
        return Err(format!("`{name}` {reason}"));
    }
    if p.x_dtype.size() != p.w_dtype.size() {
        return Err("x and w have types of different size".into());
    }
    if Tile::choose(p, info.units).is_none() {
        return Err("no tile has its columns in one block of scales".into());
    }
    addressable(p)
}

/// What the copy engine must know of an operand.
struct Operand {
    address: usize,
    dtype: DType,
    strides: Strides,
    rows: usize,
    batch: usize,
    columns: bool,
}

impl Operand {
    /// The map of boxes of `rows` rows and a stage of K; with a gate the rows of gate and up are two parts.
    fn map(&self, k: usize, rows: usize, gate: Gate) -> Result<TensorMap> {
        let size = self.dtype.size();
        let bytes =
            |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
        let stage = (STAGE_ROW / size) as u32;
        let batch = bytes(self.strides.batch, self.batch);
        let (sizes, strides, extents);
        if self.columns {
            sizes = [self.rows, k, 1, self.batch];
            strides = [bytes(self.strides.col, k), 16, batch];
            extents = [64, stage, 1, 1];
        } else {
            let row = bytes(self.strides.row, self.rows);
            let parts = if gate == Gate::None { 1 } else { 2 };
            sizes = [k, self.rows / parts, parts, self.batch];
            strides = match gate {
                Gate::None => [row, 16, batch],
                Gate::Halves => [row, row * (self.rows / 2) as u64, batch],
                Gate::Interleaved => [2 * row, row, batch],
            };
            extents = [stage, (rows / parts) as u32, 1, 1];
        }
        TensorMap::encode(&Tiled {
            address: self.address as u64,
            dtype: self.dtype,
            sizes: &sizes.map(|n| n as u64),
            strides: &strides,
            extents: &extents,
            swizzle: Swizzle::B128,
        })
    }
}

/// The map of boxes of the output: 64 rows, and as many columns as divide every slice of a tile.
fn out_map(p: &Problem, part: &Part, columns: usize) -> Result<TensorMap> {
    let size = p.out_dtype.size();
    let slice = STAGE_ROW / size;
    let width = [slice, slice / 2, slice / 4].into_iter().find(|w| columns.is_multiple_of(*w));
    let width = width.expect("columns are a multiple of 16");
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    TensorMap::encode(&Tiled {
        address: part.out as u64,
        dtype: p.out_dtype,
        sizes: &[p.n as u64, p.m as u64, p.batch as u64],
        strides: &[bytes(p.out.row, p.m), bytes(p.out.batch, p.batch)],
        extents: &[width as u32, 64, 1],
        swizzle: match width * size {
            128 => Swizzle::B128,
            64 => Swizzle::B64,
            _ => Swizzle::B32,
        },
    })
}

/// Launches the kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = Tile::choose(p, launch.info.units).expect("`supports` has passed");
    let config = Config::of(p, tile);
    let columns = tile.columns(p.gate);
    let x = Operand {
        address: part.x,
        dtype: p.x_dtype,
        strides: p.x,
        rows: p.m,
        batch: p.batch,
        columns: config.x_columns,
    };
    let w = Operand {
        address: part.w,
        dtype: p.w_dtype,
        strides: p.w,
        rows: p.weight_rows(),
        batch: if p.w.batch == 0 { 1 } else { p.batch },
        columns: config.w_columns,
    };
    let (m_tiles, n_tiles) = (p.m.div_ceil(tile.m), p.n.div_ceil(columns));
    let tiles = m_tiles * n_tiles * p.batch;
    if u32::try_from(tiles).is_err() {
        return Err(Error::Launch {
            kernel: "linear_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: u32::MAX as u64,
        });
    }
    let params = Sm90Params {
        x_map: x.map(p.k, tile.m, Gate::None)?,
        w_map: w.map(p.k, tile.n, p.gate)?,
        out_map: if config.tma_store { out_map(p, part, columns)? } else { TensorMap::UNUSED },
        linear: LinearParams::new(p, part),
        k_tiles: p.k.div_ceil(STAGE_ROW / p.x_dtype.size()) as i32,
        m_tiles: m_tiles as u32,
        n_tiles: n_tiles as u32,
        band: m_tiles.min(16) as u32,
    };
    let blocks = tiles.min(launch.info.units) as u32;
    let threads = ((1 + tile.consumers()) * WARPGROUP) as u32;
    let launch_config = LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], config.shared_bytes() as u32);
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them.
    unsafe { kernel::run_part(launch, &DEVICE, &config.defines(), &launch_config, &params) }
}
