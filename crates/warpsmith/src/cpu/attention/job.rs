//! Jobs: the rows of a job meet each block of keys and values, band by band.

use super::attend::Attend;
use super::band::Band;
use super::cache::Block;
use super::call::{Call, SEGMENT};
use super::in_place::InPlace;
use super::memory::{Partials, Space, Strategy};
use super::packed::Packed;
use super::plan::{Job, keys_of};
use super::work::Work;
use crate::cpu::gemm::{Blocks, Isa};
use crate::cpu::scratch::{Need, Region};
use crate::cpu::{CpuElement, Simd, Task};
use crate::tensor::DType;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use {
    super::direct::{self, Direct},
    super::split::{Few, Split},
    crate::cpu::Tier,
};

/// Computes jobs.
pub(super) struct Compute<'a, T> {
    pub call: &'a Call<'a>,
    pub jobs: &'a [Job],
    pub partials: Partials,
    pub extent: Extent,
    pub region: Region<'a>,
    pub t: PhantomData<T>,
}

/// The size of the largest of some jobs.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Floats it works in.
    pub floats: usize,
    pub bands: usize,
    /// Floats of the states of all bands.
    pub states: usize,
}

impl Extent {
    pub fn of(call: &Call<'_>, blocks: &Blocks, jobs: &[Job]) -> Extent {
        let mut extent = Extent { floats: 0, bands: 0, states: 0 };
        for job in jobs {
            let space = space_of(call, blocks, job);
            extent.floats = extent.floats.max(space.total());
            extent.bands = extent.bands.max(space.bands);
            extent.states = extent.states.max(space.states());
        }
        extent
    }

    /// What a thread that computes or merges jobs needs.
    pub fn need(&self) -> Need {
        Need::of::<f32>(self.floats).and::<Band<'_>>(self.bands)
    }
}

impl<T: CpuElement> Task for Compute<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        let scratch = self.region.slice(self.extent.floats).as_mut_ptr();
        let mut bands = self.region.list(self.extent.bands);
        for job in self.jobs {
            let partial = job.partial.map(|index| self.partials.at(index));
            // SAFETY: the scratch holds the space; jobs write different rows of the outputs, and different partials.
            unsafe {
                let space = space_of(self.call, &blocks, job);
                let work = Work::new(self.call, job, space, scratch, partial);
                bands.clear();
                bands.extend((0..work.space.bands).map(|index| Band::new(&work, index)));
                work.attend::<T, S>(s, &mut blocks, &mut bands);
                if partial.is_none() {
                    for band in bands.iter() {
                        band.finish::<T, S>(s, work.memory.scratch.at(0));
                    }
                }
            }
        }
    }
}

/// The sizes of a job.
pub(super) fn space_of(call: &Call<'_>, blocks: &Blocks, job: &Job) -> Space {
    let mut space = Space::new(call, blocks, job);
    space.staging = match space.strategy {
        #[cfg(target_arch = "x86_64")]
        Strategy::Direct => direct::staging(&space),
        #[cfg(target_arch = "x86_64")]
        Strategy::Split => Split::staging(&space),
        #[cfg(target_arch = "x86_64")]
        Strategy::Few => Few::staging(&space),
        _ => 0,
    };
    space
}

impl Work<'_> {
    /// Processes all keys of the job with the strategy it was laid out for.
    ///
    /// # Safety
    /// The memory must be the caller's, and hold what the space says; the bands be the job's. `T` must be the call's type.
    #[inline(always)]
    unsafe fn attend<T: CpuElement, S: Simd>(&self, s: S, blocks: &mut Blocks, bands: &mut [Band<'_>]) {
        // Constants rule out the types and tiers that a strategy is never chosen for: nothing is compiled for those.
        // SAFETY: passed on; the strategy is the work's own, and tiles imply the instructions of the highest tier.
        unsafe {
            match self.space.strategy {
                Strategy::Packed => self.walk::<Packed<'_, T>, S>(s, blocks, bands),
                Strategy::InPlace { .. } if const { matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<InPlace<'_>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Strategy::Direct if const { on_highest::<S>() && !matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<Direct<'_, T>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Strategy::Split if const { on_highest::<S>() && matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<Split<'_>, S>(s, blocks, bands);
                }
                #[cfg(target_arch = "x86_64")]
                Strategy::Few if const { on_highest::<S>() && matches!(T::DTYPE, DType::F32) } => {
                    self.walk::<Few<'_>, S>(s, blocks, bands);
                }
                _ => unreachable!("a strategy that this type or tier does not have"),
            }
        }
    }

    /// Processes all keys of the job, block by block.
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
        let mut strategy = unsafe { W::begin(self, blocks, bands) };
        let seen = keys_of(call, &job.request, &job.queries);
        // With many rows there is a whole block of time to prefetch. With few, prefetch what comes soon.
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
                    unsafe { strategy.block(s, bands, &Block { request: &job.request, keys, ahead }) };
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
