//! The copy engine's descriptions of the operands and the output.

use super::super::problem::{Part, Strides};
use super::super::{Gate, Problem};
use super::Edge;
use super::config::{BOX_ROWS, SLICE_ROWS, STAGE_ROW};
use super::tile::Tile;
use crate::cuda::{Swizzle, TensorMap, Tiled};
use crate::error::Result;
use crate::op::Launch;
use crate::tensor::DType;

/// What the copy engine must know about an operand.
pub(super) struct Operand {
    pub address: usize,
    pub dtype: DType,
    pub strides: Strides,
    pub rows: usize,
    pub batch: usize,
    pub columns: bool,
}

impl Operand {
    /// The boxes of tiles of `rows` rows, and those of the last one. With a gate the rows of gate and up are two parts.
    /// Each of `share` blocks loads its part of every box.
    pub fn maps<P>(
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
pub(super) fn out_map<P>(launch: &Launch<'_, P>, p: &Problem, part: &Part, tile: Tile) -> Result<TensorMap> {
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
