//! Jobs: blocks of keys and values go past the rows of a job, band by band.

use super::band::Band;
use super::cache::Block;
use super::in_place::InPlace;
use super::memory::{Memory, Space, Way};
use super::packed::Packed;
use super::plan::{Job, keys_of};
use super::{Call, Partials, SEGMENT};
use crate::cpu::gemm::{Blocks, Isa};
use crate::cpu::{CpuElement, Simd, Task};
use crate::tensor::DType;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use {
    super::direct::Direct,
    super::split::{Few, Split},
    crate::cpu::Tier,
};

/// Computes jobs.
pub(super) struct Compute<'a, T> {
    pub call: &'a Call<'a>,
    pub jobs: &'a [Job],
    pub partials: Partials,
    /// The space of the largest job.
    pub scratch: *mut f32,
    pub t: PhantomData<T>,
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        for job in self.jobs {
            let partial = job.partial.map(|index| self.partials.at(index));
            // SAFETY: the scratch holds the space; jobs write different rows of the outputs, and different partials.
            unsafe {
                let work = Work::new(self.call, job, &blocks, self.scratch, partial);
                let mut bands = work.bands();
                work.attend::<T, S>(s, &mut blocks, &mut bands);
                if partial.is_none() {
                    for band in &bands {
                        band.finish::<T, S>(s, work.memory.scratch.at(0));
                    }
                }
            }
        }
    }
}

/// A job in the hands of a thread: all that is the same for its blocks.
pub(super) struct Work<'a> {
    pub call: &'a Call<'a>,
    pub job: &'a Job,
    pub space: Space,
    pub memory: Memory,
}

/// A way to let blocks of keys go past the bands of a job: one for each [`Way`].
pub(super) trait Attend<'a> {
    /// Packs the queries of the bands as this way needs them.
    ///
    /// # Safety
    /// The work must be laid out for this way; its memory be the caller's, and hold what the space says; the bands be the job's.
    unsafe fn begin(work: &'a Work<'a>, blocks: &'a mut Blocks, bands: &[Band<'_>]) -> Self;

    /// Adds what the bands see of a block to their sums.
    ///
    /// Must be `#[inline(always)]`, to be compiled for the tier.
    ///
    /// # Safety
    /// The bands must be those of [`Self::begin`], the keys the request's.
    unsafe fn block<S: Simd>(&mut self, s: S, bands: &mut [Band<'_>], block: &Block<'_>);
}

impl<'a> Work<'a> {
    /// Lays a job out from `scratch` on; see [`Memory::new`].
    pub fn new(
        call: &'a Call<'a>,
        job: &'a Job,
        blocks: &Blocks,
        scratch: *mut f32,
        partial: Option<*mut f32>,
    ) -> Work<'a> {
        let space = Space::new(call, blocks, job);
        let memory = Memory::new(&space, scratch, partial);
        Work { call, job, space, memory }
    }

    /// The bands of the job, which have seen nothing yet.
    ///
    /// # Safety
    /// The memory must be the caller's, and hold what the space says.
    pub unsafe fn bands(&self) -> Vec<Band<'a>> {
        // SAFETY: passed on.
        (0..self.space.bands).map(|index| unsafe { Band::new(self, index) }).collect()
    }

    /// Lets all keys of the job go past its bands, in the way it was laid out for.
    ///
    /// # Safety
    /// The memory must be the caller's, and hold what the space says; the bands be the job's. `T` must be the call's type.
    #[inline(always)]
    unsafe fn attend<T: CpuElement, S: Simd>(&self, s: S, blocks: &mut Blocks, bands: &mut [Band<'_>]) {
        // Constants rule out the types and tiers that a way is never chosen for: nothing is compiled for those.
        // SAFETY: passed on; the way is the work's own, and tiles imply the instructions of the highest tier.
        unsafe {
            match self.space.way {
                Way::Packed => self.walk::<Packed<'_, T>, S>(s, blocks, bands),
                Way::InPlace { .. } if const { matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<InPlace<'_>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Way::Direct if const { on_highest::<S>() && matches!(T::DTYPE, DType::BF16) } => {
                    self.walk::<Direct<'_>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Way::Split if const { on_highest::<S>() && matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<Split<'_>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Way::Few if const { on_highest::<S>() && matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<Few<'_>, S>(s, blocks, bands);
                }
                _ => unreachable!("a way that this type or tier does not have"),
            }
        }
    }

    /// Lets all keys of the job go past its bands, block by block.
    ///
    /// # Safety
    /// As for [`Attend::begin`].
    #[inline(always)]
    unsafe fn walk<'w, W: Attend<'w>, S: Simd>(
        &'w self,
        s: S,
        blocks: &'w mut Blocks,
        bands: &mut [Band<'_>],
    ) {
        let Work { call, job, ref space, .. } = *self;
        // SAFETY: passed on.
        let mut way = unsafe { W::begin(self, blocks, bands) };
        let seen = keys_of(call, &job.request, &job.queries);
        // Many rows keep memory waiting for a whole block. For few, what is asked for should be near.
        let ahead = if space.head_bands == 1 { Blocks::TILE / 2 } else { space.block_keys };
        for segment in job.segments.clone() {
            for band in bands.iter_mut() {
                // SAFETY: the states are the band's own.
                unsafe { band.begin() };
            }
            let end = ((segment + 1) * SEGMENT).min(seen.end);
            for first in (segment * SEGMENT..end).step_by(space.block_keys) {
                let next = (first + space.block_keys).min((segment + 1) * SEGMENT);
                let keys = first..next.min(job.request.kv_len);
                if keys.end > seen.start {
                    // SAFETY: passed on; the keys are the request's.
                    unsafe { way.block(s, bands, &Block { request: &job.request, keys, ahead }) };
                }
            }
            for band in bands.iter_mut() {
                // SAFETY: the states are the band's own.
                unsafe { band.end(s) };
            }
        }
    }
}

/// Whether these are the vectors that tiles come with.
#[cfg(target_arch = "x86_64")]
const fn on_highest<S: Simd>() -> bool {
    matches!(S::TIER, Tier::Avx512)
}
