//! What the strategies share.

use super::band::Band;
use super::cache::Block;
use super::work::Work;
use crate::cpu::Simd;
use crate::cpu::gemm::Blocks;

/// Processes the bands of a job against blocks of keys: one implementation for each
/// [`Strategy`](super::memory::Strategy).
pub(super) trait Attend<'a> {
    /// Packs the queries of the bands as the strategy needs them.
    ///
    /// # Safety
    /// The work must be laid out for the strategy, the memory must belong to the caller and be as large as the space
    /// says, and the bands must be those of the job.
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self;

    /// Adds what the bands see of a block to their sums.
    ///
    /// Must be `#[inline(always)]`, to be compiled for the tier.
    ///
    /// # Safety
    /// The bands must be those of [`Self::begin`], the keys the request's.
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>);
}
