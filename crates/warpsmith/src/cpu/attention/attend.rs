//! What the strategies have in common.

use super::band::Band;
use super::cache::Block;
use super::work::Work;
use crate::cpu::Simd;
use crate::cpu::gemm::Blocks;

/// Lets blocks of keys go past the bands of a job: one implementation for each [`Strategy`](super::memory::Strategy).
pub(super) trait Attend<'a> {
    /// Packs the queries of the bands as the strategy needs them.
    ///
    /// # Safety
    /// The work must be laid out for the strategy; its memory be the caller's, and hold what the space says; the bands be the job's.
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self;

    /// Adds what the bands see of a block to their sums.
    ///
    /// Must be `#[inline(always)]`, to be compiled for the tier.
    ///
    /// # Safety
    /// The bands must be those of [`Self::begin`], the keys the request's.
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>);
}
