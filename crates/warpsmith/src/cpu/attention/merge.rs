//! Segments of jobs that were computed apart become results.

use super::band::Band;
use super::call::Call;
use super::job::{Extent, space_of};
use super::memory::Partials;
use super::plan::Job;
use super::state::State;
use super::work::Work;
use crate::cpu::gemm::{Blocks, Isa};
use crate::cpu::scratch::Region;
use crate::cpu::{CpuElement, Simd, Task};
use std::marker::PhantomData;

/// Merges the segments of jobs.
pub(super) struct Merge<'a, T> {
    pub call: &'a Call<'a>,
    pub jobs: &'a [Job],
    /// The first partial of each job.
    pub firsts: &'a [usize],
    pub partials: Partials,
    pub extent: Extent,
    pub region: Region<'a>,
    pub t: PhantomData<T>,
}

impl<T: CpuElement> Task for Merge<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let scratch = self.region.slice(self.extent.floats).as_mut_ptr();
        let blocks = Blocks::new(Isa::of_tier(self.call.tier), T::DTYPE);
        for (job, &first) in self.jobs.iter().zip(self.firsts) {
            let space = space_of(self.call, &blocks, job);
            let work = Work::new(self.call, job, space, scratch, None);
            for index in 0..work.space.bands {
                // SAFETY: the scratch holds the states of all bands.
                let mut band = unsafe { Band::new(&work, index) };
                for part in first..first + job.segments.len() {
                    let states = work.memory.total.elsewhere(self.partials.at(part));
                    // SAFETY: the partial was written by the job of this segment, in the same layout.
                    unsafe { band.merge(s, State::at(states.at(index), work.space.rows)) };
                }
                // SAFETY: the rows are the job's alone.
                unsafe { band.finish::<T, S>(s, work.memory.scratch.at(0)) };
            }
        }
    }
}
