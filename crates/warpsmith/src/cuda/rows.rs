//! What the CUDA row kernels share on the host: where rows are, and how many threads work on each.

use super::LaunchConfig;
use crate::device::DeviceInfo;
use crate::error::{Error, Result};
use crate::jit::Defines;
use crate::kernel_params;
use crate::tensor::{DType, MAX_RANK, Space};

kernel_params! {
    /// Where the rows of up to four tensors start: the C twin of a merged [`Space`].
    pub struct Rows {
        /// Number of merged leading dimensions, at least one.
        rank: i32,
        /// Their sizes.
        sizes: [i64; MAX_RANK],
        /// Their strides in elements, for each tensor.
        strides: [[i64; MAX_RANK]; 4],
    }
}

impl Rows {
    /// The rows of `space`.
    pub fn new(space: &Space<4>) -> Self {
        Rows {
            rank: space.rank as i32,
            sizes: space.sizes.map(|n| n as i64),
            strides: space.strides.map(|s| s.map(|n| n as i64)),
        }
    }
}

/// What is known about the rows of all tensors of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RowKind {
    /// Neighbours need not be adjacent.
    Any,
    /// Dense, but start and length are arbitrary.
    Dense,
    /// Dense, 16-byte aligned and multiples of 16 bytes long.
    Aligned,
}

impl RowKind {
    /// Of rows whose neighbours are `steps` apart.
    pub fn new(steps: &[isize], are_vectors: bool) -> RowKind {
        match steps.iter().all(|&step| step == 1) {
            _ if are_vectors => RowKind::Aligned,
            true => RowKind::Dense,
            false => RowKind::Any,
        }
    }

    /// `VECTOR` of kernels that check whether a chunk exists: see `vec.cuh`.
    pub fn vector_level(self) -> u8 {
        match self {
            RowKind::Any => 0,
            RowKind::Aligned => 1,
            RowKind::Dense => DENSE,
        }
    }

    /// The same for kernels that know rows of which no vector divides the length: see `spread.cuh`.
    pub fn row_level(self, hidden: usize, dtype: DType) -> u8 {
        match ((hidden * dtype.size()).is_multiple_of(16), self) {
            (false, RowKind::Any) => SPREAD_ANY,
            (false, _) => SPREAD,
            (true, _) => self.vector_level(),
        }
    }
}

/// `VECTOR` of rows at any alignment whose length is a multiple of a vector: see `dense.cuh`.
pub const DENSE: u8 = 3;
/// `VECTOR` of rows whose length is no multiple of a vector, dense and strided: see `spread.cuh`.
pub const SPREAD: u8 = 4;
/// See [`SPREAD`].
pub const SPREAD_ANY: u8 = 5;

/// How rows are divided: the C side has these as defines. Threads and chunks of a row depend on its length and type
/// alone, because its bits depend on them; how many rows a block processes may depend on anything.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowTiling {
    /// Threads that work on one row.
    pub lanes: usize,
    /// 16-byte chunks of a row that each thread keeps in registers.
    pub items: usize,
    /// Rows that a block works on side by side.
    pub rows: usize,
    /// How many of them each thread works on at once.
    pub batch: usize,
}

/// Threads of a row and chunks of each thread, for rising lengths: a row gets the first that hold it. Enough chunks for
/// loads in flight that hide the latency of memory, few enough registers for many blocks on a multiprocessor.
pub type RowTable = &'static [(usize, usize)];

/// For kernels that keep a row in registers and reduce it once: more threads with fewer chunks each are faster.
pub const ONE_REDUCTION: RowTable =
    &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (256, 2), (512, 2), (512, 3), (1024, 2), (1024, 4)];

/// How many short rows share a block where there are very many: threads, chunks, rows side by side, batch. A block then
/// has 16 KiB of its input in flight; with less, blocks finish as fast as they can be started. Longer rows fill a
/// block.
const CROWDED: &[(usize, usize, usize, usize)] =
    &[(16, 1, 16, 4), (32, 1, 8, 4), (32, 2, 8, 2), (32, 4, 8, 1), (64, 2, 4, 2), (64, 4, 4, 1)];

/// Blocks per multiprocessor from which short rows share blocks like that. With fewer, more blocks are better.
const CROWDED_BLOCKS: usize = 4;

impl RowTiling {
    /// A row a block, or a few short ones; `items` chunks of each thread in flight.
    pub const fn alone(lanes: usize, items: usize) -> RowTiling {
        RowTiling { lanes, items, rows: if lanes <= 32 { 128 / lanes } else { 1 }, batch: 1 }
    }

    /// The tiling for rows of `hidden` elements; `None` if such a row does not fit the registers of one block.
    pub fn new(hidden: usize, dtype: DType, table: RowTable) -> Option<RowTiling> {
        let holds = |&&(lanes, items): &&(usize, usize)| lanes * items * 16 >= hidden * dtype.size();
        table.iter().find(holds).map(|&(lanes, items)| RowTiling::alone(lanes, items))
    }

    /// The same for `num_rows` rows on a device of `units` multiprocessors: very many short ones share blocks.
    pub fn of_many(self, num_rows: usize, units: usize) -> RowTiling {
        let shared = self.crowded().filter(|t| num_rows >= t.rows * t.batch * CROWDED_BLOCKS * units);
        shared.unwrap_or(self)
    }

    /// The same with as many rows side by side, each alone in the registers of its threads: elements that are loaded one
    /// by one take more of those.
    pub fn unbatched(self) -> RowTiling {
        RowTiling { batch: 1, ..self }
    }

    fn crowded(self) -> Option<RowTiling> {
        let found = CROWDED.iter().find(|&&(lanes, items, _, _)| (lanes, items) == (self.lanes, self.items));
        found.map(|&(_, _, rows, batch)| RowTiling { rows, batch, ..self })
    }

    /// Every tiling that [`RowTiling::new`] gives for this table.
    pub fn all(table: RowTable) -> Vec<RowTiling> {
        table.iter().map(|&(lanes, items)| RowTiling::alone(lanes, items)).collect()
    }

    /// The same, and what [`RowTiling::of_many`] makes of them.
    pub fn all_of_many(table: RowTable) -> Vec<RowTiling> {
        RowTiling::all(table).into_iter().flat_map(|t| [Some(t), t.crowded()]).flatten().collect()
    }

    /// The same for rows that are [`SPREAD`].
    pub fn all_of_many_spread(table: RowTable) -> Vec<RowTiling> {
        RowTiling::all_of_many(table).into_iter().map(RowTiling::unbatched).collect()
    }

    /// What the device code may assume about rows of this tiling: see `VECTOR` in `vec.cuh`.
    pub fn vector_level(&self, hidden: usize, dtype: DType, kind: RowKind) -> u8 {
        match kind {
            RowKind::Aligned if hidden * dtype.size() == self.lanes * self.items * 16 => 2,
            _ => kind.row_level(hidden, dtype),
        }
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        (self.lanes * self.rows) as u32
    }

    /// Rows of a block.
    pub fn block_rows(&self) -> usize {
        self.rows * self.batch
    }

    /// The launch that covers `count` rows.
    pub fn launch(&self, count: usize) -> Result<LaunchConfig> {
        let blocks = grid_blocks("a row kernel", count.div_ceil(self.block_rows()))?;
        Ok(LaunchConfig::new([blocks, 1, 1], [self.threads(), 1, 1], 0))
    }

    /// The defines the device code expects.
    pub fn defines(&self) -> Defines {
        vec![
            ("LANES", self.lanes.to_string()),
            ("ROWS", self.rows.to_string()),
            ("ITEMS", self.items.to_string()),
            ("BATCH", self.batch.to_string()),
        ]
    }
}

impl std::fmt::Display for RowTiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} threads x {} chunks a row, {} rows a block",
            self.lanes,
            self.items,
            self.block_rows()
        )?;
        if self.batch > 1 { write!(f, ", {} at once", self.batch) } else { Ok(()) }
    }
}

/// How dense rows that begin anywhere go through shared memory: see `shared_row.cuh`. Blocks process several rows in
/// turn; that changes when a row is computed, never its bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagedRows {
    /// Rows of which a thread has a part in shared memory: with two, the next is copied while one is computed.
    pub stages: usize,
    /// Blocks of the grid.
    pub blocks: usize,
    /// Dynamic shared memory of each.
    pub shared_bytes: usize,
}

impl StagedRows {
    /// Shared memory of a block beside the rows: the kernel's own and the system's.
    const RESERVED: usize = 2048;

    /// For `count` rows of `inputs` tensors and `vectors` that all rows of a block share; `None` if there is no room.
    pub fn new(
        tiling: &RowTiling,
        count: usize,
        inputs: usize,
        vectors: usize,
        info: &DeviceInfo,
    ) -> Option<StagedRows> {
        let row = (tiling.lanes * tiling.items + 2) * 16;
        let bytes = |stages: usize| (stages * inputs * tiling.rows + vectors) * row;
        let fits = |stages: usize| bytes(stages) + Self::RESERVED <= info.shared_per_block;
        let threads = tiling.threads() as usize;
        // As many as registers allow: `staged_blocks` in the device code.
        let by_registers = if tiling.items <= 2 || threads >= 512 { 1024 } else { 640 } / threads;
        let at_once =
            |stages: usize| by_registers.min(info.shared_per_block / (bytes(stages) + Self::RESERVED)).max(1);
        let needed = count.div_ceil(tiling.rows);
        // A second block hides more than a second stage.
        let two = needed > at_once(1) * info.units && fits(2) && at_once(2) == at_once(1);
        let stages = 1 + two as usize;
        fits(stages).then(|| StagedRows {
            stages,
            blocks: needed.min(at_once(stages) * info.units),
            shared_bytes: bytes(stages),
        })
    }

    /// The launch of all blocks.
    pub fn launch(&self, tiling: &RowTiling) -> Result<LaunchConfig> {
        let blocks = grid_blocks("a row kernel", self.blocks)?;
        Ok(LaunchConfig::new([blocks, 1, 1], [tiling.threads(), 1, 1], self.shared_bytes as u32))
    }
}

/// The number of blocks of a one-dimensional grid, if a grid can have that many.
pub fn grid_blocks(kernel: &str, blocks: usize) -> Result<u32> {
    let limit = i32::MAX as u32;
    u32::try_from(blocks).ok().filter(|&n| n <= limit).ok_or_else(|| Error::Launch {
        kernel: kernel.into(),
        what: "number of blocks",
        got: blocks as u64,
        limit: limit as u64,
    })
}

/// Whether a tensor of this size exceeds L2, as the flag that kernels take: see `l2.cuh`.
pub fn is_large(info: &DeviceInfo, elements: usize, dtype: DType) -> i32 {
    (elements * dtype.size() > info.cache_bytes) as i32
}

/// How many blocks, of `block_bytes` of input each, prefetch it before they wait for the kernel before: see
/// `prefetch_chunk` in `l2.cuh`. For a tensor that fits in L2 all do. For a large one only those that start first: more
/// would prefetch what is evicted before they load it, or what they load at once anyway.
pub fn blocks_ahead(info: &DeviceInfo, is_large: i32, block_bytes: usize) -> i32 {
    const BYTES_OF_UNIT: usize = 32 << 10;
    if is_large == 0 {
        return i32::MAX;
    }
    (info.units * BYTES_OF_UNIT / block_bytes.max(1)) as i32
}

/// The define for an element type.
pub fn element(dtype: DType) -> (&'static str, String) {
    ("ELEM", dtype.name().into())
}

/// A define that is 0 or 1.
pub fn flag(name: &'static str, on: bool) -> (&'static str, String) {
    (name, (on as u8).to_string())
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    const TABLE: RowTable = &[(16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (512, 4)];

    #[test]
    fn tilings_cover_their_rows_and_are_listed() {
        let (all, of_many) = (RowTiling::all(TABLE), RowTiling::all_of_many(TABLE));
        for hidden in (1..3000).chain([4096, 8192, 12345, 16384, 32768, 65536]) {
            for dtype in [DType::F32, DType::BF16] {
                let Some(t) = RowTiling::new(hidden, dtype, TABLE) else {
                    assert!(hidden * dtype.size() > 16 * 512 * 4);
                    continue;
                };
                assert!(t.lanes * t.items * 16 >= hidden * dtype.size(), "{t} covers {hidden} {dtype}");
                assert!(all.contains(&t) && of_many.contains(&t), "{t} is listed");
            }
        }
    }

    #[test]
    fn whether_rows_are_spread_depends_on_their_length_alone() {
        for (hidden, spread) in [(8, false), (12, true), (1023, true), (1024, false)] {
            let level = |kind: RowKind| kind.row_level(hidden, DType::BF16);
            assert_eq!(
                [RowKind::Dense, RowKind::Any].map(|kind| level(kind) >= SPREAD),
                [spread; 2],
                "{hidden}"
            );
        }
        assert_eq!(RowKind::Dense.row_level(12, DType::F32), DENSE);
    }

    #[test]
    fn staged_rows_fit_shared_memory_and_have_blocks_that_run_at_once() {
        let cpu = crate::device::Device::Cpu.info().unwrap();
        let info = DeviceInfo { units: 132, shared_per_block: 227 << 10, ..cpu };
        for tiling in RowTiling::all(TABLE) {
            for (count, inputs, vectors) in [(1, 1, 0), (1000, 2, 2), (1 << 20, 1, 1), (1 << 20, 2, 0)] {
                let rows = StagedRows::new(&tiling, count, inputs, vectors, &info).unwrap();
                assert!(rows.blocks <= count.div_ceil(tiling.rows), "{tiling} {rows:?}");
                let blocks = rows.blocks.div_ceil(info.units);
                assert!(blocks * rows.shared_bytes <= info.shared_per_block, "{tiling} {rows:?}");
                assert!(blocks * tiling.threads() as usize <= 1024, "{tiling} {rows:?}");
            }
        }
        let few = StagedRows::new(&RowTiling::alone(256, 2), 100, 2, 2, &info).unwrap();
        assert_eq!((few.stages, few.blocks), (1, 100));
        let many = StagedRows::new(&RowTiling::alone(256, 2), 100_000, 2, 2, &info).unwrap();
        assert_eq!((many.stages, many.blocks), (2, 4 * 132));
        // Two blocks of one stage rather than one of two.
        let long = StagedRows::new(&RowTiling::alone(512, 4), 100_000, 2, 0, &info).unwrap();
        assert_eq!((long.stages, long.blocks), (1, 2 * 132));
        let small = DeviceInfo { shared_per_block: 48 << 10, ..info };
        assert!(StagedRows::new(&RowTiling::alone(512, 4), 1, 2, 0, &small).is_none());
    }

    #[test]
    fn very_many_short_rows_share_blocks_without_a_change_of_their_own_tiling() {
        const UNITS: usize = 100;
        for alone in RowTiling::all(TABLE) {
            let few = alone.of_many(100, UNITS);
            assert_eq!(few, alone);
            let many = alone.of_many(1 << 20, UNITS);
            assert_eq!((many.lanes, many.items), (alone.lanes, alone.items));
            assert_eq!(many.block_rows() > alone.block_rows(), alone.lanes * alone.items <= 128, "{many}");
            assert!(many.threads() <= 256 || many == alone, "{many}");
            assert!(RowTiling::all_of_many(TABLE).contains(&many));
        }
    }
}
