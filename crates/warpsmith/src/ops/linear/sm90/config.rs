//! The compile-time choices of a launch of `linear` on Hopper.

use super::super::cuda::Epilogue;
use super::super::problem::{Dequant, Order};
use super::super::{Gate, Problem};
use super::tile::{Cluster, Schedule, Tile};
use crate::cuda::rows::flag;
use crate::jit::Defines;
use crate::ops::elementwise::function::Kind;

// What the kernel and the device fix.

/// Bytes of K in a piece of a stage, which the copy engine swizzles.
pub(super) const STAGE_ROW: usize = 128;
/// Rows of an output slice of 128 bytes, and bytes of the slices, one per warp, that a consumer hands to the copy engine.
pub(super) const SLICE_ROWS: usize = 16;
const SLICES: usize = 4 * SLICE_ROWS * 128;
/// Slices that a warp stores at a time.
const STORED_SLICES: usize = 2;
/// With exchanged operands a consumer hands over boxes of as many rows of 128 bytes, so many at a time.
pub(super) const BOX_ROWS: usize = 8;
const STORED_BOXES: usize = 12;
/// Shared memory of a multiprocessor, of which every block takes some for the system.
const SHARED: usize = 233_472;
const SHARED_RESERVED: usize = 1024;

// What was chosen by times on an H200; docs/learned/linear.md has them. No result depends on these.

/// Bytes of K from which the products of a tile take longer than a long epilogue.
pub(super) const LONG_K: usize = 2048;
/// Tiles from which every consumer has several; nothing hides the epilogue of its last.
const MANY_TILES: usize = 512;
/// Bytes of `w` that a block prefetches to L2 while the kernel before it ends; and the same for M <= 64 and narrow
/// tiles.
const AHEAD: usize = 32 << 10;
const AHEAD_NARROW: usize = 64 << 10;
const NARROW: usize = 48;
/// Bytes of `w` from which this pays for M > 64.
const AHEAD_WEIGHTS: usize = 8 << 20;
/// The most rows of `x` for which a block reserves all shared memory of its multiprocessor.
const FEW_ROWS: usize = 8;

/// The compile-time part of a launch.
#[derive(Clone, Copy)]
pub(super) struct Config {
    pub tile: Tile,
    pub epilogue: Epilogue,
    pub x_columns: bool,
    pub w_columns: bool,
    pub tma_store: bool,
    /// Whether rows of `out` that the copy engine cannot store are stored from shared memory.
    pub line_store: bool,
    pub residual_rows: bool,
    pub scale: bool,
    /// Whether the epilogue goes in small steps: it then uses fewer registers and disturbs the products of the other
    /// consumer less, but takes longer.
    pub small_steps: bool,
    /// Stages of the ring.
    pub stages: usize,
    /// Whether `w` is loaded before the previous kernel has ended.
    pub early: bool,
    /// Whether threads load `w`, and not the copy engine.
    pub direct: bool,
}

impl Config {
    pub fn of(p: &Problem, tile: Tile, units: usize) -> Config {
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
            // Unused shared memory leaves room for the next kernel to load its weights. With very few rows, though, the
            // next kernel's blocks would pile up on the multiprocessors that finish first.
            let needed = (tile.k_tiles(p) * tile.rounds(p, units)).max(2);
            stages = (needed..stages).find(|&stages| config.holds_rows_of_x(stages)).unwrap_or(stages);
        }
        Config { stages, ..config }
    }

    fn takes_small_steps(p: &Problem, tile: Tile) -> bool {
        let many = tile.grid(p).iter().product::<usize>() * p.batch >= MANY_TILES;
        let hidden = tile.schedule == Schedule::PingPong && p.k * p.x_dtype.size() >= LONG_K && many;
        let long_gelu = hidden && p.activation == Some(Kind::Gelu) && !tile.exchanged;
        // A loaded residual needs registers, which a gate and direct stores need too.
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

    /// Products read all rows of a tile starting at `x` in the last stage: they must be inside shared memory.
    fn holds_rows_of_x(&self, stages: usize) -> bool {
        let x_before = (stages * self.tile.pieces - 1) * self.tile.x_rows;
        (x_before + self.tile.m) * STAGE_ROW <= self.fixed_bytes() + stages * self.stage_bytes()
    }

    pub fn with_all_stages(self) -> Config {
        Config { stages: self.most_stages(), ..self }
    }

    /// Stages of `w` that a block prefetches to L2 while the kernel before it ends. More would delay its first loads;
    /// for a tile with little K it is half.
    pub fn ahead(&self, p: &Problem, units: usize) -> usize {
        let tile = self.tile;
        // On idle multiprocessors blocks start long before they need their weights.
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

    /// Stages whose `w` a block loads before the kernel before it has ended.
    pub fn early(&self, p: &Problem, units: usize) -> usize {
        let stages = self.tile.k_tiles(p) * self.tile.rounds(p, units);
        if self.early { self.stages.min(stages) } else { 0 }
    }

    pub fn shared_bytes(&self) -> usize {
        self.fixed_bytes() + self.stages * self.stage_bytes()
    }

    pub fn defines(&self) -> Defines {
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

    /// As text.
    pub fn describe(&self) -> String {
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

/// Whether weights are loaded before the kernel before has ended. With more rows products take longer than loads.
fn loads_early(p: &Problem) -> bool {
    p.constant_w && p.m <= 64
}
