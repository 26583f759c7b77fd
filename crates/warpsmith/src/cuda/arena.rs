//! Workspace: one piece of memory per stream, which its calls use one after the other.
//!
//! Work on a stream runs in order, so the next call can use the memory at once. A graph captured on the stream uses the
//! same memory and keeps it; when the arena grows later, the graph keeps what it was recorded with.

use super::memory::Allocation;
use super::order::Access;
use super::stream::Stream;
use crate::error::Result;
use std::sync::Arc;

/// Arenas grow by at least this much, so that calls of slightly different size do not make it grow each time.
const STEP: usize = 1 << 20;

/// The memory of one stream's workspaces.
#[derive(Default)]
pub struct Arena {
    memory: Option<Arc<Allocation>>,
}

impl Arena {
    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }

    /// At least `bytes` bytes for work on `stream`, ordered after whatever used them before.
    pub(super) fn take(&mut self, stream: &Stream, bytes: usize) -> Result<&Arc<Allocation>> {
        if self.len() < bytes {
            // Freed in the order of the stream: calls that were given the old memory are done before it is reused.
            self.memory = None;
            self.memory = Some(Allocation::new(stream, bytes.next_multiple_of(STEP))?);
        }
        let memory = self.memory.as_ref().expect("made above");
        memory.order(stream, Access::Write)?;
        Ok(memory)
    }
}

impl Stream {
    /// Calls `work` with the address of `bytes` bytes of workspace; no other work that uses them is enqueued on the
    /// stream meanwhile.
    ///
    /// A capture of ours records the stream's own workspace, which the graph keeps. A capture that someone else began gets
    /// memory of its own, for good: its graph may replay at any time and on any stream.
    pub fn with_workspace<R>(&self, bytes: usize, work: impl FnOnce(usize) -> Result<R>) -> Result<R> {
        if bytes == 0 {
            return work(0);
        }
        let ctx = self.context();
        let capture = if self.may_be_captured() { self.capture_id()? } else { None };
        if let Some(id) = capture.filter(|&id| !ctx.captures.is_open(id)) {
            let mut lent = super::context::lock(&ctx.lent);
            let arena = lent.entry(id).or_default();
            let grown = arena.len() < bytes;
            let kept = arena.memory.take().filter(|_| !grown);
            arena.memory = Some(match kept {
                Some(memory) => memory,
                None => Allocation::lasting(ctx, bytes.next_multiple_of(STEP))?,
            });
            return work(arena.memory.as_ref().expect("set above").address());
        }
        let mut arena = self.arena();
        let memory = arena.take(self, bytes)?.clone();
        if let Some(id) = capture {
            ctx.captures.keep(id, memory.clone(), Access::Write);
        }
        let result = work(memory.address());
        memory.note(self, Access::Write);
        drop(arena);
        result
    }

    /// Whether the stream can be under capture at all: a cheap test that avoids a driver call.
    pub(super) fn may_be_captured(&self) -> bool {
        !self.is_owned() || self.context().captures.any()
    }
}
