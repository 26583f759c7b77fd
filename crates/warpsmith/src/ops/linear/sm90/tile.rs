//! Which tile a problem gets.
//!
//! Every tile sums an element over K in the same order into one accumulator: the choice, which depends on M too,
//! affects the time but never the bits of a row.

use super::super::problem::{Dequant, Order, SCALE_BLOCK};
use super::super::{Gate, Problem};
use super::config::{LONG_K, STAGE_ROW};
use crate::ops::elementwise::function::Kind;

/// How the consumers of a block share the tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Schedule {
    /// A single one.
    Single,
    /// Two, each with half the rows of a tile.
    Cooperative,
    /// Two that take tiles in turn: the epilogue of one runs under the products of the other.
    PingPong,
}

/// Blocks that share what they load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cluster {
    /// None do.
    None,
    /// So many blocks along M, which share `w`.
    M(usize),
    /// So many blocks along N, which share `x`.
    N(usize),
}

/// A tile of the result, and who computes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tile {
    pub schedule: Schedule,
    pub m: usize,
    /// Rows of `w`: with a gate twice the columns of the result.
    pub n: usize,
    /// Rows of `x` that are loaded: fewer than `m` where M is.
    pub x_rows: usize,
    /// Pieces of 128 bytes of K in a stage.
    pub pieces: usize,
    pub cluster: Cluster,
    pub blocks_per_unit: usize,
    /// Whether `w` is the first operand of the products, whose rows the consumers divide in blocks of 64, instead of
    /// `x`.
    pub exchanged: bool,
}

const fn tile(schedule: Schedule, m: usize, n: usize, cluster: Cluster) -> Tile {
    Tile { schedule, m, n, x_rows: m, pieces: 1, cluster, blocks_per_unit: 1, exchanged: false }
}

/// Expands heights, widths and clusters to tiles, in their order.
const fn tiles<const N: usize>(
    groups: &[(Schedule, &[usize], &[usize], Cluster)],
    exchanged: bool,
) -> [Tile; N] {
    let (mut all, mut len, mut g) = ([tile(Single, 64, 64, Cluster::None); N], 0, 0);
    while g < groups.len() {
        let (schedule, heights, widths, cluster) = groups[g];
        let mut i = 0;
        while i < heights.len() * widths.len() {
            let (m, n) = (heights[i / widths.len()], widths[i % widths.len()]);
            all[len] = Tile { exchanged, ..tile(schedule, m, n, cluster) };
            (len, i) = (len + 1, i + 1);
        }
        g += 1;
    }
    assert!(len == N);
    all
}

use Schedule::{Cooperative, PingPong, Single};

/// The tiles for M > 64. Of those that cost the same the first is taken. More widths give multiprocessors more equal shares
/// of the columns; 64 rows are for small M; clusters save loads where the result is large.
pub(super) const TILES: [Tile; 34] = tiles(
    &[
        (PingPong, &[128], &[128], Cluster::None),
        (Cooperative, &[128], &[256], Cluster::None),
        (Cooperative, &[256], &[128], Cluster::None),
        (Cooperative, &[128], &[208, 192, 160, 144, 128, 96, 80, 64], Cluster::None),
        (PingPong, &[128], &[112, 96], Cluster::None),
        (PingPong, &[64], &[256, 224, 192, 128], Cluster::None),
        (Single, &[64], &[128, 96, 64, 48, 32], Cluster::None),
        (PingPong, &[128], &[128], Cluster::N(2)),
        (Cooperative, &[128], &[256], Cluster::M(2)),
        (Cooperative, &[256], &[128], Cluster::N(2)),
        (Cooperative, &[128], &[224, 192], Cluster::M(2)),
        (Cooperative, &[128], &[128], Cluster::N(4)),
        (PingPong, &[128], &[96], Cluster::M(2)),
        (PingPong, &[64], &[256, 192], Cluster::M(2)),
        (Single, &[64], &[128, 96, 64], Cluster::M(2)),
    ],
    false,
);

/// Further tiles for M > 64 and 16-bit types, with any multiple of 8 rows of `x`: where M is no multiple of 64 or 128, a
/// few of these waste less of the last round. Which heights are worth compiling was chosen by the estimate over many M.
pub(super) const EXCHANGED: [Tile; 14] = tiles(
    &[
        (Cooperative, &[136, 96, 112, 120, 184], &[256], Cluster::None),
        (PingPong, &[136, 152, 168], &[128], Cluster::None),
        (Cooperative, &[72, 112, 136, 152, 200, 216], &[128], Cluster::None),
    ],
    true,
);

/// The most rows of `x` for which [`EXCHANGED`] tiles are considered: with more, the last round matters less than what the
/// estimate may err.
const EXCHANGED_ROWS: usize = 2048;

/// The tile of the covering set for scales by blocks of K, whose partial sums need registers of their own.
pub(super) const BLOCKS: Tile = tile(Cooperative, 128, 64, Cluster::None);

/// Columns of the tiles for M <= 64, whose time is that of reading `w`: multiprocessors must get equal shares of it.
pub(super) const SKINNY: [usize; 8] = [128, 112, 96, 80, 64, 48, 32, 16];

/// The most rows of `w` in a tile of which two blocks of a multiprocessor have registers for what their threads load.
pub(super) const DIRECT_PAIR: usize = 96;

// The device model behind the estimate of a tile's cycles. Fitted to the times of all tiles on some fifty shapes, so
// that the choice is near the best; no figure is exact by itself.

/// Cycles of the products of a stage over those of tensor cores that never wait.
const PRODUCTS: f64 = 1.15;
/// Bytes that a multiprocessor gets from L2 in a cycle, and where the rows of an operand start at odd multiples of 16
/// bytes, so that they straddle sectors; and bytes that all get from memory.
const LOADED: f64 = 111.2;
const LOADED_RAGGED: f64 = 33.0;
const MEMORY: f64 = 2500.0;
/// Cycles that a block takes for a stage if its threads load `w`, and for each row of it: from the times of three shapes.
const DIRECT: f64 = 480.0;
const DIRECT_ROW: f64 = 12.5;
/// Cycles of the epilogue for a thread's element, for its activation, for a tile; and of the start of the kernel.
const EPILOGUE: f64 = 18.34;
const ACTIVATION: f64 = 24.0;
const EPILOGUE_START: f64 = 500.0;
const START: f64 = 178.0;
/// What the blocks of a cluster lose by waiting for each other.
const CLUSTER: f64 = 1.085;
/// What blocks without a cluster lose on rows of the result that are longer than this many bytes.
const WIDE: f64 = 1.1;
const WIDE_BYTES: usize = 1 << 17;

/// The tile of long products, under which the device lowers its clock: consumers in turn then lose less than two on one
/// tile. From this many multiplications on, and up to so many bytes of K: with more they lose too much while it is cool.
const STEADY: Tile = tile(PingPong, 128, 128, Cluster::N(2));
const STEADY_PRODUCTS: f64 = 2.5e11;
const STEADY_K: usize = 8192;

impl Tile {
    /// A tile for M <= 64, of `n` rows of `w`, with up to `pieces` in a stage. `many`: there are more of them than
    /// multiprocessors.
    pub(super) fn skinny(m: usize, n: usize, pieces: usize, many: bool) -> Tile {
        let x_rows = m.next_power_of_two().clamp(8, 64);
        // A consumer waits for a barrier in every stage, and the products of a small tile take no longer than that.
        let most = match n {
            ..=16 => 4,
            17..=64 => 2,
            _ => 1,
        };
        // Where tiles are small two rings of stages keep more loads in flight than one, which waits for its products. With a
        // tile for each multiprocessor the second place would go to the next kernel's blocks, which would bring their
        // weights to L2 long before they need them.
        let blocks_per_unit = if many && n == 32 && x_rows <= 16 { 2 } else { 1 };
        Tile { x_rows, pieces: pieces.min(most), blocks_per_unit, ..tile(Single, 64, n, Cluster::None) }
    }

    /// A tile for a problem with M <= 64, of `n` rows of `w`.
    fn skinny_for(p: &Problem, n: usize, units: usize) -> Tile {
        // The rows of a transposed x are always loaded in blocks of 64.
        let rows = if p.x_order == Order::Columns { 64 } else { p.m };
        let rows_of_both = p.x_order == Order::Rows && p.w_order == Order::Rows && !p.direct_w;
        let along_k = rows_of_both && p.dequant != Dequant::Blocks;
        // Stages are whole, or K ends inside of a piece: then every tile adds zeros, and further zeros change no bit, unless
        // tensor cores cut the sum once more for them, as they do with 8-bit types. They take time, so they must be few.
        let bytes = p.k * p.x_dtype.size();
        let fits = |&pieces: &usize| match bytes.next_multiple_of(pieces * STAGE_ROW) - bytes {
            0 => true,
            past => p.x_dtype.size() > 1 && !bytes.is_multiple_of(STAGE_ROW) && past <= bytes / 16,
        };
        let pieces = [4, 2].into_iter().find(|pieces| along_k && fits(pieces)).unwrap_or(1);
        let many = p.weight_rows().div_ceil(n) * p.batch > units;
        if !p.direct_w {
            return Tile::skinny(rows, n, pieces, many);
        }
        // Threads wait for their loads of `w`; a second block's threads load meanwhile, if there are registers for
        // both.
        let two = many && n <= DIRECT_PAIR && rows <= 16;
        Tile { blocks_per_unit: 1 + two as usize, ..Tile::skinny(rows, n, pieces, false) }
    }

    pub(super) fn consumers(self) -> usize {
        if self.schedule == Single { 1 } else { 2 }
    }

    /// Blocks of a cluster along M and along N.
    pub(super) fn cluster_m(self) -> usize {
        if let Cluster::M(blocks) = self.cluster { blocks } else { 1 }
    }
    pub(super) fn cluster_n(self) -> usize {
        if let Cluster::N(blocks) = self.cluster { blocks } else { 1 }
    }
    pub(super) fn cluster_blocks(self) -> usize {
        self.cluster_m() * self.cluster_n()
    }

    /// Columns of the result.
    pub(super) fn columns(self, gate: Gate) -> usize {
        if gate == Gate::None { self.n } else { self.n / 2 }
    }

    /// Rows of the first and of the second operand of the products.
    pub(super) fn operand_rows(self) -> [usize; 2] {
        if self.exchanged { [self.n, self.m] } else { [self.m, self.n] }
    }

    /// Blocks of 64 rows of the first operand that one consumer multiplies.
    pub(super) fn row_blocks(self) -> usize {
        self.operand_rows()[0] / 64 / if self.schedule == Cooperative { 2 } else { 1 }
    }

    /// Tiles of clusters that the result of a problem consists of, along M and along N.
    pub(super) fn grid(self, p: &Problem) -> [usize; 2] {
        let columns = self.columns(p.gate);
        [p.m.div_ceil(self.m * self.cluster_m()), p.n.div_ceil(columns * self.cluster_n())]
    }

    /// Stages of K.
    pub(super) fn k_tiles(self, p: &Problem) -> usize {
        p.k.div_ceil(self.pieces * STAGE_ROW / p.x_dtype.size())
    }

    /// Clusters that run at the same time. Those of more than two blocks find no place on some of the multiprocessors,
    /// which come in groups of up to 18.
    pub(super) fn resident(self, units: usize) -> usize {
        let blocks = self.cluster_blocks();
        let units = if blocks > 2 && units > 18 { units - units / 11 } else { units };
        (units * self.blocks_per_unit / blocks).max(1)
    }

    /// Blocks of the launch.
    pub(super) fn blocks(self, p: &Problem, units: usize) -> usize {
        let tiles = self.grid(p).iter().product::<usize>() * p.batch;
        tiles.min(self.resident(units)) * self.cluster_blocks()
    }

    /// Tiles of the block with the most.
    pub(super) fn rounds(self, p: &Problem, units: usize) -> usize {
        let tiles = self.grid(p).iter().product::<usize>() * p.batch;
        tiles.div_ceil(tiles.min(self.resident(units)).max(1))
    }

    /// Rows of tiles whose tiles follow each other column by column, to share operands in L2. A last row of tiles that is
    /// mostly outside of M costs less than the others and should come last, when not all multiprocessors have work.
    pub(super) fn band(self, p: &Problem) -> usize {
        const MOST: usize = 16;
        let [rows, _] = self.grid(p);
        let whole = rows.saturating_sub(1);
        let last = p.m - whole * self.m * self.cluster_m();
        if !self.exchanged && whole > 1 && self.cluster_m() == 1 && self.m > 64 && last <= self.m / 2 {
            let divides = |&band: &usize| whole.is_multiple_of(band);
            if let Some(band) = (MOST / 4..=MOST.min(whole)).rev().find(divides) {
                return band;
            }
        }
        // A few more at once save a second band.
        if rows <= MOST + MOST / 2 { rows } else { MOST }
    }

    /// Whether the device code takes it for this problem.
    fn suits(self, p: &Problem) -> bool {
        let columns = self.columns(p.gate);
        let transposed = p.w_order == Order::Columns && !self.n.is_multiple_of(64);
        let scales = p.dequant == Dequant::Blocks
            && (self.row_blocks() * self.n > 128
                || !SCALE_BLOCK.is_multiple_of(if p.gate == Gate::Interleaved { self.n } else { columns })
                || (p.gate == Gate::Halves && !p.n.is_multiple_of(columns)));
        let share = if p.gate == Gate::None { 8 } else { 16 } * self.cluster_m();
        let exchangeable = p.m <= EXCHANGED_ROWS
            && p.x_dtype.size() == 2
            && p.out_dtype.size() == 2
            && p.gate == Gate::None
            && [p.x_order, p.w_order, p.out_order] == [Order::Rows; 3]
            && (!p.has_residual || p.residual_order == Order::Rows);
        !transposed
            && !scales
            && columns.is_multiple_of(16)
            && self.n.is_multiple_of(share)
            && (!self.exchanged || exchangeable)
    }

    /// Tiles along the first operand of the products, of which the last counts for less if it has fewer blocks of 64
    /// rows, and along the second.
    fn operand_tiles(self, p: &Problem) -> (f64, usize) {
        let [rows, columns] = self.grid(p);
        let (size, tiles, others) = if self.exchanged { (p.n, columns, rows) } else { (p.m, rows, columns) };
        let along = match self.cluster {
            Cluster::M(_) => tiles as f64,
            _ => (size.div_ceil(64) * 64) as f64 / self.operand_rows()[0] as f64,
        };
        (along, others)
    }

    /// Tiles of the block that has the most to do. Blocks take tiles in turn, partial ones last, so that a block with
    /// one more whole tile may get a partial one too.
    fn longest(self, p: &Problem, resident: usize, rounds: f64) -> f64 {
        let (counted, others) = self.operand_tiles(p);
        let along = counted.ceil();
        let share = counted + 1.0 - along;
        let even = rounds.ceil();
        if p.batch > 1 || share >= 1.0 {
            return even;
        }
        let all = (along as usize * others).div_ceil(resident);
        let whole = ((along as usize - 1) * others).div_ceil(resident);
        even.max(whole as f64 + (all - whole) as f64 * share)
    }

    /// An estimate of the cycles that a problem takes.
    fn cost(self, p: &Problem, units: usize) -> f64 {
        let [m, n, x_rows] = [self.m, self.n, self.x_rows].map(|size| size as f64);
        let [a, b] = self.operand_rows().map(|rows| rows as f64);
        let (along, others) = self.operand_tiles(p);
        let stages = (p.k * p.x_dtype.size()).div_ceil(STAGE_ROW) as f64;
        // Two blocks of a multiprocessor take as long together as one after the other.
        let resident = self.resident(units).div_ceil(self.blocks_per_unit);
        let rounds = along * (others * p.batch) as f64 / resident as f64;
        // A stage takes as long as its products, its transfer from memory and L2, or its transfers into and out of
        // shared memory, whichever is longest.
        let products = PRODUCTS * m * n / 32.0;
        let bytes = (x_rows / self.cluster_n() as f64 + n / self.cluster_m() as f64) * STAGE_ROW as f64;
        let operands = ((p.m * p.batch + p.weight_rows()) * p.k * p.x_dtype.size()) as f64;
        let stages_in_all = stages * if rounds < 4.0 { rounds.ceil() } else { rounds };
        let loads =
            bytes / if ragged(p) { LOADED_RAGGED } else { LOADED } + operands / MEMORY / stages_in_all;
        let direct = if p.direct_w { (DIRECT + DIRECT_ROW * n) / self.blocks_per_unit as f64 } else { 0.0 };
        // Each group of 64 rows reads both operands itself.
        let shared = x_rows + n + a / 64.0 * (64.0 + b);
        let main = stages * products.max(loads).max(shared).max(direct);
        let results = if self.exchanged { self.m } else { self.columns(p.gate) };
        let elements = (self.row_blocks() * 64 * results) as f64 / 128.0;
        let step = match p.activation {
            None | Some(Kind::Relu) => EPILOGUE,
            Some(_) => EPILOGUE + ACTIVATION,
        };
        let epilogue = step * elements + EPILOGUE_START;
        // Multiprocessors that idle in the last of many rounds leave power to the others.
        let waves = rounds + (self.longest(p, resident, rounds) - rounds).max(0.0) * (8.0 / rounds).min(1.0);
        let cycles = START
            + match self.schedule {
                PingPong => waves * main.max((main + epilogue) / 2.0) + epilogue,
                Single | Cooperative => waves * (main + epilogue),
            };
        match self.cluster {
            Cluster::None if p.n * p.out_dtype.size() > WIDE_BYTES => cycles * WIDE,
            Cluster::None => cycles,
            _ => cycles * CLUSTER,
        }
    }

    /// The fastest tile, by the estimate.
    pub(super) fn choose(p: &Problem, units: usize) -> Option<Tile> {
        let cheapest = |tiles: &mut dyn Iterator<Item = Tile>| {
            tiles.filter(|tile| tile.suits(p)).min_by(|a, b| a.cost(p, units).total_cmp(&b.cost(p, units)))
        };
        if p.m <= 64 {
            let parts = if p.gate == Gate::None { 1 } else { 2 };
            cheapest(&mut SKINNY.into_iter().map(|columns| Tile::skinny_for(p, parts * columns, units)))
        } else if lowers_clock(p) {
            Some(STEADY)
        } else {
            cheapest(&mut TILES.into_iter().chain(EXCHANGED))
        }
    }
}

/// Whether [`STEADY`] is for this problem.
fn lowers_clock(p: &Problem) -> bool {
    let products = [p.batch, p.m, p.n, p.k].map(|size| size as f64).iter().product::<f64>();
    let plain = p.gate == Gate::None && p.dequant != Dequant::Blocks;
    let rows = p.x_order == Order::Rows && p.w_order == Order::Rows && !ragged(p);
    let k = LONG_K..=STEADY_K;
    products >= STEADY_PRODUCTS && k.contains(&(p.k * p.x_dtype.size())) && plain && rows
}

/// Whether rows of an operand start at odd multiples of 16 bytes, where the copy engine loads them.
fn ragged(p: &Problem) -> bool {
    let w = (!p.direct_w).then_some((p.w, p.w_order));
    [Some((p.x, p.x_order)), w].into_iter().flatten().any(|(strides, order)| {
        let pitch = if order == Order::Columns { strides.col } else { strides.row };
        !(pitch.unsigned_abs() * p.x_dtype.size()).is_multiple_of(32)
    })
}
