//! Sums over rows, in two stages: pieces of rows, whose number depends on the shape alone, then the pieces in order.

use super::moves;
use super::worker::{Job, Worker};
use crate::compiled::allocate;
use crate::error::Result;
use warpsmith::cpu::{parallel_for, parallel_for_with_scratch};

/// Most pieces.
const MAX_PIECES: usize = 32;
/// Elements of a piece, at least.
const PIECE: usize = 16_384;

/// Where pieces are summed. Each piece has its own part.
struct Pieces(*mut f32);

// SAFETY: no two threads work on one piece, nor on one result.
unsafe impl Sync for Pieces {}

impl Pieces {
    fn at(&self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

/// Runs a kernel that ends in `sums` sums, whose tensors begin at `first`.
pub(super) fn run(job: &Job<'_>, sums: usize, first: usize) -> Result<()> {
    let geometry = job.geometry;
    let columns = geometry.columns;
    let kept: usize = geometry.outer[geometry.summed..].iter().product();
    let summed: usize = geometry.outer[..geometry.summed].iter().product();
    let width = kept * columns;
    let pieces = (summed * width / PIECE).clamp(1, MAX_PIECES).min(summed.max(1));
    let mut memory = allocate((pieces * sums * width).div_ceil(2))?;
    let all = Pieces(memory.as_mut_ptr().cast());
    if width == 0 {
        return Ok(());
    }
    parallel_for_with_scratch(pieces, 1, job.need(), |part, region| {
        let mut worker = Worker::new(job, region, vec![std::ptr::null_mut(); sums]);
        for piece in part {
            worker.add_to((0..sums).map(|sum| all.at((piece * sums + sum) * width)).collect());
            let rows = summed * piece / pieces * kept..summed * (piece + 1) / pieces * kept;
            let mut row = rows.start;
            while row < rows.end {
                let count = job.rows.min(rows.end - row);
                worker.rows(row, count);
                row += count;
            }
        }
    });
    parallel_for(kept, (PIECE / columns).max(1), |part| {
        for row in part {
            for sum in 0..sums {
                let total = all.at(sum * width + row * columns);
                for piece in 1..pieces {
                    let other = all.at((piece * sums + sum) * width + row * columns);
                    // SAFETY: every piece has this many columns for each row that is kept.
                    unsafe { moves::add_to(job.tier, other, total, columns) };
                }
                let place = &geometry.places[first + sum];
                let to = place.address.wrapping_offset(geometry.row_offset(place, row));
                // SAFETY: the output has this many columns in each row that is kept; it does not move along summed ones.
                unsafe {
                    moves::store(job.tier, place.dtype, total.cast(), to, place.step, columns, false);
                }
            }
        }
    });
    Ok(())
}
