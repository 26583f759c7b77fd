//! What the CUDA row kernels share on the host: where rows are, and how threads are shared out over one.

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

/// How a row is shared out: the C side has these as defines. Depends on the row's length and type alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RowTiling {
    /// Threads that work on one row.
    pub lanes: usize,
    /// Rows of one block.
    pub rows: usize,
    /// 16-byte chunks each thread keeps in registers.
    pub items: usize,
}

/// Rows handled by one warp each are put into blocks of this many.
const ROWS_OF_WARPS: usize = 4;

/// What a kernel can afford for a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowLimits {
    /// Chunks a thread should have: enough loads in flight to hide the latency of memory, few enough registers
    /// for many blocks on a multiprocessor.
    pub wanted_items: usize,
    /// Most chunks a thread can keep in registers.
    pub max_items: usize,
    /// Most threads for a row: more threads leave each fewer registers.
    pub max_lanes: usize,
}

impl RowTiling {
    /// The tiling for rows of `hidden` elements; `None` if such a row does not fit the registers of one block.
    pub fn new(hidden: usize, dtype: DType, limits: RowLimits) -> Option<RowTiling> {
        let chunks = (hidden * dtype.size()).div_ceil(16).max(1);
        let lanes = chunks.div_ceil(limits.wanted_items).next_power_of_two().clamp(32, limits.max_lanes);
        let items = chunks.div_ceil(lanes).next_power_of_two();
        let rows = if lanes == 32 { ROWS_OF_WARPS } else { 1 };
        (items <= limits.max_items).then_some(RowTiling { lanes, rows, items })
    }

    /// Every tiling [`RowTiling::new`] can give under these limits.
    pub fn all(limits: RowLimits) -> Vec<RowTiling> {
        let mut all: Vec<RowTiling> = Vec::new();
        for chunks in (0..=13).flat_map(|p| [1 << p, 3 << p]) {
            if let Some(tiling) = RowTiling::new(chunks * 4, DType::F32, limits).filter(|t| !all.contains(t))
            {
                all.push(tiling);
            }
        }
        all
    }

    /// What the device code may take for granted about rows of this tiling: see `VECTOR` in `vec.cuh`.
    pub fn vector_level(&self, hidden: usize, dtype: DType, vector_rows: bool) -> u8 {
        match vector_rows {
            false => 0,
            true if hidden * dtype.size() == self.lanes * self.items * 16 => 2,
            true => 1,
        }
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        (self.lanes * self.rows) as u32
    }

    /// The launch that covers `count` rows.
    pub fn launch(&self, count: usize) -> Result<LaunchConfig> {
        let blocks = grid_blocks("a row kernel", count.div_ceil(self.rows))?;
        Ok(LaunchConfig::new([blocks, 1, 1], [self.threads(), 1, 1], 0))
    }

    /// The defines the device code expects.
    pub fn defines(&self) -> Defines {
        vec![
            ("LANES", self.lanes.to_string()),
            ("ROWS", self.rows.to_string()),
            ("ITEMS", self.items.to_string()),
        ]
    }
}

impl std::fmt::Display for RowTiling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} threads x {} chunks a row, {} rows a block", self.lanes, self.items, self.rows)
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

/// Whether a tensor of this size cannot be found in L2 as a whole, as the flag kernels take: see `l2.cuh`.
pub fn is_large(info: &DeviceInfo, elements: usize, dtype: DType) -> i32 {
    (elements * dtype.size() > info.cache_bytes) as i32
}

/// How many blocks of `block_bytes` of input each ask for it before they wait for the kernel before: see `prefetch_chunk` in
/// `l2.cuh`. Of a tensor that fits L2 all do. Of a large one those that start first: more would ask for what is evicted
/// before they load it, or what they load at once.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tilings_cover_their_rows_and_are_listed() {
        for (wanted_items, max_items, max_lanes) in [(4, 8, 1024), (2, 4, 512), (1, 1, 256)] {
            let limits = RowLimits { wanted_items, max_items, max_lanes };
            let all = RowTiling::all(limits);
            for hidden in (1..3000).chain([4096, 8192, 12345, 16384, 32768, 65536]) {
                for dtype in [DType::F32, DType::BF16] {
                    let Some(t) = RowTiling::new(hidden, dtype, limits) else {
                        assert!(hidden * dtype.size() > 16 * max_lanes * max_items);
                        continue;
                    };
                    assert!(t.lanes * t.items * 16 >= hidden * dtype.size(), "{t} covers {hidden} {dtype}");
                    assert!(t.threads() as usize <= max_lanes.max(128));
                    assert!(all.contains(&t), "{t} is listed");
                }
            }
        }
    }
}
