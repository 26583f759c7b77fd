//! Keys and values that few rows cannot split in place.

use crate::cpu::attention::cache::Run;
use crate::cpu::attention::heads::Heads;
use crate::cpu::attention::tiles::{Tile, Tiles};
use crate::cpu::attention::work::Work;
use crate::cpu::gemm::{Blocks, Matrix, Piece};
use crate::cpu::prefetch::fetch_near;
use crate::tensor::DType;

const PANEL: usize = Blocks::PANEL;

/// Where the keys or values of a unit are copied to.
pub(super) struct Stage<'a> {
    pub work: &'a Work<'a>,
    pub blocks: &'a Blocks,
    /// Room for a panel of rows, [`Blocks::ROW`] floats apart.
    pub rows: *mut f32,
}

impl Stage<'_> {
    /// The keys or values of a tile, in f32 and whole panels; copied where they are not.
    ///
    /// # Safety
    /// The tile must be one of these, and the stage and the work's memory be the caller's.
    #[inline(always)]
    pub unsafe fn piece(&self, heads: &Heads, tiles: &Tiles<'_>, tile: &Tile) -> Piece {
        let (cache, head_dim) = (tiles.cache, self.work.call.head_dim);
        let direct = cache.dtype == DType::F32 && head_dim.is_multiple_of(PANEL) && heads.dim == 1;
        if direct && !cache.is_gathered() {
            let Tile { address, count, ahead, .. } = *tile;
            return Piece { data: address as *const f32, row: heads.token, count, ahead };
        }
        // SAFETY: passed on.
        unsafe { self.copy(heads, tiles, tile) }
    }

    /// # Safety
    /// As for [`Self::piece`].
    #[inline(never)]
    unsafe fn copy(&self, heads: &Heads, tiles: &Tiles<'_>, tile: &Tile) -> Piece {
        let (cache, head_dim) = (tiles.cache, self.work.call.head_dim);
        let rows = self.rows.wrapping_add(tile.from % PANEL * Blocks::ROW);
        let piece = Piece { data: rows, row: Blocks::ROW as isize, count: tile.count, ahead: 0 };
        if tile.count == 0 {
            return piece;
        }
        // SAFETY: the keys are the request's, and the stage has room for a tile.
        unsafe {
            let run = if cache.is_gathered() {
                let of = tiles.block.of_head(tiles.kv_heads.start + tile.head);
                let (key, to) = (tiles.block.keys.start + tile.from, self.work.memory.gathered);
                cache.gather(heads, head_dim, &of, key, to.cast())
            } else {
                let (data, at) = (tile.address as *const u8, 0..tile.count);
                Run { data, token: heads.token, dim: heads.dim, at, ahead: tile.ahead }
            };
            let matrix = Matrix {
                data: run.data,
                dtype: cache.dtype,
                rows: tile.count,
                k: head_dim,
                row_stride: run.token,
                k_stride: run.dim,
            };
            if run.dim == 1 {
                let size = cache.dtype.size();
                for row in 0..tile.count as isize {
                    let row = run.data.wrapping_offset(row * run.token * size as isize);
                    fetch_near(row.wrapping_offset(run.ahead), head_dim * size);
                }
            }
            self.blocks.pack_rows(&matrix, 0..tile.count, rows.cast());
        }
        piece
    }
}
