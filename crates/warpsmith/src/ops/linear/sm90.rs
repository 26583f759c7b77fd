//! `linear` on Hopper: host half. The device half is `sm90.cu`.

#[cfg(test)]
mod tests;
mod tile;

use super::align;
use super::cuda::{Epilogue, LinearParams, addressable};
use super::finish::{self, Parts};
use super::problem::{Dequant, INPUTS, Order, Part, Strides};
use super::{Gate, Problem};
use crate::cuda::rows::flag;
use crate::cuda::{LaunchConfig, Swizzle, TensorMap, Tiled};
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::{Arch, CudaKernel, Defines, Source};
use crate::kernel_params;
use crate::op::{Kernel, Launch};
use crate::ops::elementwise::function::Kind;
use crate::tensor::DType;
use tile::{BLOCKS, Cluster, DIRECT_PAIR, EXCHANGED, SKINNY, Schedule, TILES, Tile};

/// Bytes of K in a piece of a stage, which the copy engine swizzles.
const STAGE_ROW: usize = 128;
/// Bytes of the slices of the output, one of each warp, between a consumer and the copy engine.
const SLICES: usize = 4 * SLICE_ROWS * 128;
const SLICE_ROWS: usize = 16;
/// Slices that a warp stores at a time.
const STORED_SLICES: usize = 2;
/// With exchanged operands a consumer hands over boxes of as many rows of 128 bytes, so many at a time.
const BOX_ROWS: usize = 8;
const STORED_BOXES: usize = 12;
/// Bytes of K from which on the products of a tile take longer than a long epilogue.
const LONG_K: usize = 2048;
/// Tiles from which on every consumer has several: the epilogue of its last is hidden by nothing.
const MANY_TILES: usize = 512;
/// Shared memory of a multiprocessor, of which every block takes some for the system.
const SHARED: usize = 233_472;
const SHARED_RESERVED: usize = 1024;
/// Bytes of `w` that a block brings to L2 while the kernel before it ends, and for M <= 64 and narrow tiles.
const AHEAD: usize = 32 << 10;
const AHEAD_NARROW: usize = 64 << 10;
const NARROW: usize = 48;
/// Bytes of `w` from which on it is worth it for M > 64.
const AHEAD_WEIGHTS: usize = 8 << 20;
/// Rows of `x` up to which a block takes the shared memory of its multiprocessor, used or not.
const FEW_ROWS: usize = 8;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

kernel_params! {
    struct Sm90Params {
        x_map: TensorMap, w_map: TensorMap, out_map: TensorMap,
        x_edge: Edge, w_edge: Edge,
        linear: LinearParams,
        k_tiles: i32, ahead: i32, early: i32, tiles: u32,
        per_batch: Divisor, per_band: Divisor, band: Divisor, last_band: Divisor,
    }
}

kernel_params! {
    /// The boxes of an operand's last tile, where that has fewer rows than the others.
    struct Edge { map: TensorMap, box_rows: i32 }
}

kernel_params! {
    /// A divisor of numbers below 2^31, with what turns the division into a multiplication: `n / value` is the upper half
    /// of `n * factor`, plus `n`, shifted right.
    pub(super) struct Divisor { value: u32, factor: u32, shift: u32 }
}

impl Divisor {
    pub(super) fn new(value: usize) -> Divisor {
        let shift = value.next_power_of_two().trailing_zeros();
        let factor = ((1u64 << 32) * ((1u64 << shift) - value as u64)) / value as u64 + 1;
        Divisor { value: value as u32, factor: factor as u32, shift }
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
    /// Whether rows of `out` that the copy engine cannot store are stored from shared memory.
    line_store: bool,
    residual_rows: bool,
    scale: bool,
    /// Whether the epilogue goes in small steps: it then has fewer registers in use and disturbs the products of the other
    /// consumer less, but takes longer.
    small_steps: bool,
    /// Stages of the ring.
    stages: usize,
    /// Whether `w` is loaded before the kernel before has ended.
    early: bool,
    /// Whether threads load `w`, and not the copy engine.
    direct: bool,
}

impl Config {
    fn of(p: &Problem, tile: Tile, units: usize) -> Config {
        let config = Config {
            tile,
            epilogue: Epilogue::of(p),
            x_columns: p.x_order == Order::Columns,
            w_columns: p.w_order == Order::Columns,
            tma_store: p.out_order == Order::Rows,
            line_store: p.out_order != Order::Rows && p.out.col == 1 && p.out_dtype.size() >= 2,
            residual_rows: p.residual_order == Order::Rows,
            scale: p.scale() != 1.0,
            small_steps: Self::takes_small_steps(p, tile),
            stages: 0,
            early: loads_early(p),
            direct: p.direct_w,
        };
        let mut stages = config.most_stages();
        if config.early && tile.x_rows > FEW_ROWS {
            // What a block does not need leaves room for the next kernel, which loads its own weights there. With very few rows
            // the next kernel would gather on the multiprocessors that are done first.
            let needed = (tile.k_tiles(p) * tile.rounds(p, units)).max(2);
            stages = (needed..stages).find(|&stages| config.holds_rows_of_x(stages)).unwrap_or(stages);
        }
        Config { stages, ..config }
    }

    fn takes_small_steps(p: &Problem, tile: Tile) -> bool {
        let many = tile.grid(p).iter().product::<usize>() * p.batch >= MANY_TILES;
        let hidden = tile.schedule == Schedule::PingPong && p.k * p.x_dtype.size() >= LONG_K && many;
        let long_gelu = hidden && p.activation == Some(Kind::Gelu) && !tile.exchanged;
        // What is loaded of a residual needs registers, which a gate and stores by themselves need too.
        let crowded = p.has_residual && (p.gate != Gate::None || p.out_order != Order::Rows);
        long_gelu || crowded
    }

    /// Shared memory besides the ring of stages.
    fn fixed_bytes(&self) -> usize {
        if self.tile.exchanged {
            return self.tile.consumers() * STORED_BOXES * BOX_ROWS * STAGE_ROW;
        }
        let terms = self.epilogue.bias as usize + (self.epilogue.dequant == Dequant::Whole) as usize;
        let stores = if self.tma_store || self.line_store { STORED_SLICES * SLICES } else { 0 };
        self.tile.consumers() * (stores + terms * self.tile.n * 4)
    }

    fn stage_bytes(&self) -> usize {
        // Two barriers beside the operands.
        (self.tile.x_rows + self.tile.n) * self.tile.pieces * STAGE_ROW + 16
    }

    fn most_stages(&self) -> usize {
        let most = if self.tile.n > 32 { 12 } else { 24 };
        let shared = SHARED / self.tile.blocks_per_unit - SHARED_RESERVED;
        ((shared - self.fixed_bytes()) / self.stage_bytes()).min(most)
    }

    /// Products read all rows of a tile from the place of `x` in the last stage on: they must lie in shared memory.
    fn holds_rows_of_x(&self, stages: usize) -> bool {
        let x_before = (stages * self.tile.pieces - 1) * self.tile.x_rows;
        (x_before + self.tile.m) * STAGE_ROW <= self.fixed_bytes() + stages * self.stage_bytes()
    }

    fn with_all_stages(self) -> Config {
        Config { stages: self.most_stages(), ..self }
    }

    /// Stages of `w` that a block brings to L2 while the kernel before it ends. More would keep its first loads waiting: of a
    /// tile with little K it is half.
    fn ahead(&self, p: &Problem, units: usize) -> usize {
        let tile = self.tile;
        // On idle multiprocessors blocks are in place long before they need their weights.
        let busy = tile.blocks(p, units) > units / 2;
        let stage = tile.n * tile.pieces * STAGE_ROW / tile.cluster_m();
        let weights = p.weight_rows() * p.k * p.w_dtype.size();
        match p.m {
            _ if !busy || p.constant_w || p.copied_w => 0,
            ..=64 => {
                let most = if tile.n <= NARROW { AHEAD_NARROW } else { AHEAD };
                (most / tile.blocks_per_unit / stage).min(tile.k_tiles(p).div_ceil(2))
            }
            _ if weights < AHEAD_WEIGHTS => 0,
            _ => (AHEAD / stage).min(tile.k_tiles(p)),
        }
    }

    /// Stages of which a block loads `w` before the kernel before it has ended.
    fn early(&self, p: &Problem, units: usize) -> usize {
        let stages = self.tile.k_tiles(p) * self.tile.rounds(p, units);
        if self.early { self.stages.min(stages) } else { 0 }
    }

    fn shared_bytes(&self) -> usize {
        self.fixed_bytes() + self.stages * self.stage_bytes()
    }

    fn defines(&self) -> Defines {
        let mut defines = self.epilogue.defines();
        defines.extend([
            ("BLOCK_M", self.tile.m.to_string()),
            ("BLOCK_N", self.tile.n.to_string()),
            ("STAGES", self.stages.to_string()),
            ("PIECES", self.tile.pieces.to_string()),
            ("CONSUMERS", self.tile.consumers().to_string()),
            flag("PINGPONG", self.tile.schedule == Schedule::PingPong),
            flag("EXCHANGED", self.tile.exchanged),
            ("X_ROWS", self.tile.x_rows.to_string()),
            ("BLOCKS_PER_SM", self.tile.blocks_per_unit.to_string()),
            ("CLUSTER_M", self.tile.cluster_m().to_string()),
            ("CLUSTER_N", self.tile.cluster_n().to_string()),
            flag("X_MAJOR_MN", self.x_columns),
            flag("W_MAJOR_MN", self.w_columns),
            flag("TMA_STORE", self.tma_store),
            flag("LINE_STORE", self.line_store),
            flag("RESIDUAL_ROWS", self.residual_rows),
            flag("HAS_SCALE", self.scale),
            flag("SMALL_STEPS", self.small_steps),
            flag("EARLY", self.early),
            flag("DIRECT", self.direct),
        ]);
        defines
    }

    /// For people.
    fn describe(&self) -> String {
        let Tile { schedule, m, n, x_rows, pieces, cluster, blocks_per_unit, exchanged } = self.tile;
        let mut text = format!(
            "tiles of {} x {n}, {}",
            m.min(x_rows),
            match schedule {
                Schedule::Single => "one consumer",
                Schedule::Cooperative => "two consumers",
                Schedule::PingPong => "consumers in turn",
            }
        );
        if exchanged {
            text += ", operands exchanged";
        }
        match cluster {
            Cluster::None => {}
            Cluster::M(blocks) => text += &format!(", clusters of {blocks} along M"),
            Cluster::N(blocks) => text += &format!(", clusters of {blocks} along N"),
        }
        if blocks_per_unit > 1 {
            text += &format!(", {blocks_per_unit} blocks per multiprocessor");
        }
        text += &format!(", {} stages", self.stages);
        if pieces > 1 {
            text += &format!(" of {} bytes of K", pieces * STAGE_ROW);
        }
        if self.direct {
            text += ", w through registers";
        }
        text
    }
}

const SOURCE: Source = Source { name: "linear_sm90", code: include_str!("sm90.cu") };

pub(in crate::ops) static DEVICE: CudaKernel = CudaKernel {
    source: SOURCE,
    prelude: Sm90Params::prelude,
    function: "linear_sm90",
    min_arch: Arch::new(9, 0, true),
    fast_math: false,
    overlaps: true,
    variants,
};

/// A covering set, as for the other kernels of `linear`: each epilogue with one tile, each tile with the plain epilogue
/// of one type.
fn variants() -> Vec<Defines> {
    let mut all = Vec::new();
    for dtype in INPUTS {
        let plain = Config {
            tile: TILES[0],
            epilogue: Epilogue::plain(dtype),
            x_columns: false,
            w_columns: false,
            tma_store: true,
            line_store: false,
            residual_rows: true,
            scale: false,
            small_steps: false,
            stages: 0,
            early: false,
            direct: false,
        };
        for epilogue in Epilogue::covering(dtype) {
            let tile = if epilogue.dequant == Dequant::Blocks { BLOCKS } else { TILES[0] };
            let small_steps = epilogue.residual && epilogue.gate != Gate::None;
            all.push(Config { epilogue, tile, small_steps, ..plain }.with_all_stages().defines());
        }
        if dtype == DType::BF16 {
            all.extend(TILES.map(|tile| Config { tile, ..plain }.with_all_stages().defines()));
            all.extend(EXCHANGED.map(|tile| Config { tile, ..plain }.with_all_stages().defines()));
            for early in [false, true] {
                let plain = Config { early, ..plain };
                let tiles = [8, 64].map(|m| Tile::skinny(m, 64, 4, false));
                all.extend(tiles.map(|tile| Config { tile, ..plain }.with_all_stages().defines()));
            }
            for m in [8, 16, 32, 64] {
                all.extend(SKINNY.map(|n| {
                    Config { tile: Tile::skinny(m, n, 4, false), ..plain }.with_all_stages().defines()
                }));
            }
            let direct = Config { direct: true, ..plain };
            for m in [8, 64] {
                all.extend(SKINNY.map(|n| {
                    Config { tile: Tile::skinny(m, n, 1, false), ..direct }.with_all_stages().defines()
                }));
            }
            let activation = Some(Kind::Silu);
            for gate in [Gate::Halves, Gate::Interleaved] {
                let epilogue = Epilogue { activation, gate, bias: true, residual: true, ..plain.epilogue };
                let gated = Config {
                    epilogue,
                    tma_store: false,
                    line_store: true,
                    residual_rows: false,
                    small_steps: true,
                    ..direct
                };
                all.extend(SKINNY.map(|n| {
                    Config { tile: Tile::skinny(64, 2 * n, 1, false), ..gated }.with_all_stages().defines()
                }));
                for n in SKINNY.into_iter().filter(|n| 2 * n <= DIRECT_PAIR) {
                    let tile = Tile { blocks_per_unit: 2, ..Tile::skinny(16, 2 * n, 1, false) };
                    all.push(Config { tile, ..gated }.with_all_stages().defines());
                }
            }
            for n in SKINNY.into_iter().filter(|n| *n <= DIRECT_PAIR) {
                let tile = Tile { blocks_per_unit: 2, ..Tile::skinny(16, n, 1, false) };
                all.push(Config { tile, ..direct }.with_all_stages().defines());
            }
            all.push(Config { tile: Tile::skinny(8, 32, 4, true), ..plain }.with_all_stages().defines());
            all.extend(
                [16, 32].map(|n| {
                    Config { tile: Tile::skinny(8, n, 1, false), ..plain }.with_all_stages().defines()
                }),
            );
        }
        for line_store in [false, true] {
            let config = Config { tma_store: false, line_store, residual_rows: false, ..plain };
            all.push(config.with_all_stages().defines());
        }
        all.push(Config { scale: true, ..plain }.with_all_stages().defines());
        all.push(Config { small_steps: true, ..plain }.with_all_stages().defines());
        if dtype.size() == 2 {
            let activation = Some(Kind::Gelu);
            let epilogue = Epilogue { activation, bias: true, residual: true, ..plain.epilogue };
            all.extend(
                EXCHANGED
                    .map(|tile| Config { tile, epilogue, scale: true, ..plain }.with_all_stages().defines()),
            );
            for [x_columns, w_columns] in [[true, false], [false, true], [true, true]] {
                all.push(Config { x_columns, w_columns, ..plain }.with_all_stages().defines());
            }
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Tensor cores through `wgmma`, fed by the copy engine: everything that engine can load, and aligned copies of what it
/// cannot. The products of a call follow each other, so that their copies can use the same memory.
pub(super) const SM90: Kernel<Problem> =
    Kernel::cuda("linear_sm90", &DEVICE, |launch: &Launch<'_, Problem>| {
        let p = launch.problem;
        let copies = launch.workspace + Parts::bytes(p);
        p.parts(launch.args).try_for_each(|part| {
            // SAFETY: the parts are those of the call's own tensors; the scratch memory has the size that was asked for.
            unsafe {
                let products = align::run(launch, [(*p, part)], copies)?;
                products.iter().try_for_each(|(product, part)| match Parts::of(product) {
                    Some(parts) => parts.run(launch, product, part, launch.workspace, run_for_scratch),
                    None => run(launch, product, part),
                })
            }
        })
    })
    .and(&align::DEVICE)
    .and(&finish::DEVICE)
    .with_workspace(|p, _| Parts::bytes(p) + align::bytes(p))
    .when(|p, info| supports(&align::aligned(p), info))
    .configured(|p, info| {
        let product = Parts::longest(&align::aligned(p));
        let Some(tile) = Tile::choose(&product, info.units) else { return String::new() };
        let config = Config::of(&product, tile, info.units).describe();
        let (parts, copies) = (Parts::describe(p), align::describe(p));
        format!("{}, {config}{parts}{copies}", p.tensor_arithmetic())
    });

/// Whether it takes a product as it is, without copies.
pub(in crate::ops) fn supports(p: &Problem, info: &DeviceInfo) -> std::result::Result<(), String> {
    if info.arch.is_none_or(|arch| (arch.major, arch.minor) != (9, 0)) {
        return Err("its instructions are those of sm_90a alone".into());
    }
    if p.x_dtype == DType::F32 && !p.tf32 {
        return Err("f32 in full precision would have to be split".into());
    }
    if p.full && p.x_dtype.size() == 1 {
        return Err("tensor cores add 8-bit products with fewer bits than f32 has".into());
    }
    if p.k == 0 {
        return Err("there is nothing to load".into());
    }
    if p.x_dtype.size() != p.w_dtype.size() {
        return Err("x and w have types of different size".into());
    }
    for (name, order, strides, rows, gated) in
        [("x", p.x_order, p.x, p.m, false), ("w", p.w_order, p.w, p.weight_rows(), p.gate != Gate::None)]
    {
        let reason = match order {
            Order::Any => {
                "has lines that do not start at multiples of 16 bytes, and is too large to be copied"
            }
            Order::Columns if p.x_dtype.size() != 2 => "is transposed, which only 16-bit types can be",
            Order::Columns if gated => "is transposed, which it cannot be with a gate",
            _ if rows > 1 && strides.row <= 0 || p.k > 1 && strides.col <= 0 => "repeats elements",
            _ if name == "x" && p.batch > 1 && strides.batch <= 0 => "repeats matrices",
            _ => continue,
        };
        return Err(format!("`{name}` {reason}"));
    }
    if Tile::choose(p, info.units).is_none() {
        return Err("no tile has its columns in one block of scales".into());
    }
    addressable(p)
}

/// Whether weights are loaded before the kernel before has ended. With more rows products take longer than loads.
fn loads_early(p: &Problem) -> bool {
    p.constant_w && p.m <= 64
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
    /// The boxes of tiles of `rows` rows, and those of the last one. With a gate the rows of gate and up are two parts.
    /// Each of `share` blocks loads its part of every box.
    fn maps<P>(
        &self,
        launch: &Launch<'_, P>,
        k: usize,
        rows: usize,
        share: usize,
        gate: Gate,
    ) -> Result<(TensorMap, Edge)> {
        let parts = if gate == Gate::None { 1 } else { 2 };
        let whole = rows / parts / share;
        let left = self.rows / parts % (rows / parts);
        // The parts of several blocks start where the pattern in shared memory does.
        let box_rows = if share == 1 { left } else { left.div_ceil(8 * share) * 8 };
        let map = self.map(launch, k, whole, share, gate)?;
        let edge = if left == 0 { map } else { self.map(launch, k, box_rows, share, gate)? };
        Ok((map, Edge { map: edge, box_rows: box_rows as i32 }))
    }

    /// The map of boxes of `rows` rows and a stage of K, or if columns are dense of a share of a stage.
    fn map<P>(
        &self,
        launch: &Launch<'_, P>,
        k: usize,
        rows: usize,
        share: usize,
        gate: Gate,
    ) -> Result<TensorMap> {
        let size = self.dtype.size();
        let bytes =
            |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
        let stage = (STAGE_ROW / size) as u32;
        let batch = bytes(self.strides.batch, self.batch);
        let (sizes, strides, extents);
        if self.columns {
            sizes = [self.rows, k, 1, self.batch];
            strides = [bytes(self.strides.col, k), 16, batch];
            extents = [64, stage / share as u32, 1, 1];
        } else {
            let row = bytes(self.strides.row, self.rows);
            let parts = if gate == Gate::None { 1 } else { 2 };
            sizes = [k, self.rows / parts, parts, self.batch];
            strides = match gate {
                Gate::None => [row, 16, batch],
                Gate::Halves => [row, row * (self.rows / 2) as u64, batch],
                Gate::Interleaved => [2 * row, row, batch],
            };
            extents = [stage, rows as u32, 1, 1];
        }
        launch.tensor_map(&Tiled {
            address: self.address as u64,
            dtype: self.dtype,
            sizes: &sizes.map(|n| n as u64),
            strides: &strides,
            extents: &extents,
            swizzle: Swizzle::B128,
        })
    }
}

/// The map of boxes of the output: the rows of a warp, and as many columns as divide every slice of a tile. With exchanged
/// operands the columns of a block of 64 rows of `w`.
fn out_map<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part, tile: Tile) -> Result<TensorMap> {
    let size = p.out_dtype.size();
    let slice = STAGE_ROW / size;
    let columns = tile.columns(p.gate);
    let width = [slice, slice / 2, slice / 4].into_iter().find(|w| columns.is_multiple_of(*w));
    let width = width.expect("columns are a multiple of 16");
    let rows = if tile.exchanged { BOX_ROWS } else { SLICE_ROWS };
    let bytes = |stride: isize, count: usize| if count > 1 { (stride as usize * size) as u64 } else { 16 };
    launch.tensor_map(&Tiled {
        address: part.out as u64,
        dtype: p.out_dtype,
        sizes: &[p.n as u64, p.m as u64, p.batch as u64],
        strides: &[bytes(p.out.row, p.m), bytes(p.out.batch, p.batch)],
        extents: &[width as u32, rows as u32, 1],
        swizzle: match width * size {
            128 => Swizzle::B128,
            64 => Swizzle::B64,
            _ => Swizzle::B32,
        },
    })
}

/// Launches the kernel on a product whose result is scratch memory. Threads store it, and not the copy engine: tools that look
/// for reads of what nobody wrote do not see what that writes.
///
/// # Safety
/// As for [`run`].
pub(super) unsafe fn run_for_scratch<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    // SAFETY: passed on.
    unsafe { run(launch, &Problem { out_order: Order::Any, ..*p }, part) }
}

/// Launches the kernel on a product.
///
/// # Safety
/// `part` must hold the tensors of `p`, until the work on the stream is done.
pub(in crate::ops) unsafe fn run<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part) -> Result<()> {
    let tile = Tile::choose(p, launch.info.units).expect("`supports` has passed");
    let config = Config::of(p, tile, launch.info.units);
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
    let [m_tiles, n_tiles] = tile.grid(p);
    let tiles = m_tiles * n_tiles * p.batch;
    // The scheduler counts two rounds ahead.
    if tiles > i32::MAX as usize {
        return Err(Error::Launch {
            kernel: "linear_sm90".into(),
            what: "number of tiles",
            got: tiles as u64,
            limit: i32::MAX as u64,
        });
    }
    let band = tile.band(p);
    let (x_map, x_edge) = x.maps(launch, p.k, tile.x_rows, tile.cluster_n(), Gate::None)?;
    let (w_map, w_edge) = match config.direct {
        true => (TensorMap::UNUSED, Edge { map: TensorMap::UNUSED, box_rows: 0 }),
        false => w.maps(launch, p.k, tile.n, tile.cluster_m(), p.gate)?,
    };
    let params = Sm90Params {
        x_map,
        w_map,
        x_edge,
        w_edge,
        out_map: if config.tma_store { out_map(launch, p, part, tile)? } else { TensorMap::UNUSED },
        linear: LinearParams::new(p, part),
        k_tiles: tile.k_tiles(p) as i32,
        early: config.early(p, launch.info.units) as i32,
        ahead: config.ahead(p, launch.info.units) as i32,
        tiles: tiles as u32,
        per_batch: Divisor::new(m_tiles * n_tiles),
        per_band: Divisor::new(band * n_tiles),
        band: Divisor::new(band),
        last_band: Divisor::new(if m_tiles.is_multiple_of(band) { band } else { m_tiles % band }),
    };
    let cluster = tile.cluster_blocks();
    let blocks = tile.blocks(p, launch.info.units) as u32;
    let threads = ((1 + tile.consumers()) * WARPGROUP) as u32;
    let launch_config = LaunchConfig {
        cluster: (cluster > 1).then_some([cluster as u32, 1, 1]),
        ..LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], config.shared_bytes() as u32)
    };
    // SAFETY: the caller vouches for the tensors; the maps keep the copy engine inside them.
    unsafe { launch.record_part(&DEVICE, &config.defines(), &launch_config, &params) }
}
