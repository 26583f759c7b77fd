//! A job in the hands of a thread.

use super::call::Call;
use super::memory::{Memory, Space};
use super::plan::Job;

/// A job in the hands of a thread: all that is the same for its blocks.
pub(super) struct Work<'a> {
    pub call: &'a Call<'a>,
    pub job: &'a Job,
    pub space: Space,
    pub memory: Memory,
}

impl<'a> Work<'a> {
    /// Lays a job out from `scratch` on; see [`Memory::new`].
    pub fn new(
        call: &'a Call<'a>,
        job: &'a Job,
        space: Space,
        scratch: *mut f32,
        partial: Option<*mut f32>,
    ) -> Work<'a> {
        let memory = Memory::new(&space, scratch, partial);
        Work { call, job, space, memory }
    }
}
