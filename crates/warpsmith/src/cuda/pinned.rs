//! Page-locked host memory, which the device copies from and to at full speed and without the host waiting.
//!
//! Locking pages takes milliseconds, so freed buffers are cached by size, in powers of two.

use super::context::{Context, cu, lock};
use super::driver::OUT_OF_MEMORY;
use super::graph::Resource;
use super::order::Access;
use super::stream::{Event, RelaxedCapture, Stream};
use crate::device::Memory;
use crate::error::Result;
use cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Cached buffers are kept up to this many bytes; more are freed.
const CACHE_LIMIT: usize = 256 << 20;
/// The smallest buffer: one page.
const SMALLEST: usize = 4096;

/// Page-locked host memory of a context, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedStats {
    /// Held by buffers, or waiting for the device to be done with a dropped one.
    pub used: usize,
    /// Free and kept for reuse.
    pub cached: usize,
    /// Allocations that asked the driver.
    pub misses: usize,
    /// Allocations served from the cache.
    pub hits: usize,
}

/// A page-locked host buffer. When dropped, it is reused only after the streams it was noted on have reached
/// that point.
pub struct PinnedBuffer {
    memory: Arc<Pinned>,
    len: usize,
}

/// The memory behind a buffer; shared with the graphs that use it.
struct Pinned {
    ctx: &'static Context,
    block: Block,
    uses: Mutex<Vec<Stream>>,
}

/// A raw page-locked block of `size` bytes, a size that [`size_class`] returns.
struct Block {
    ptr: *mut c_void,
    size: usize,
}

// SAFETY: owned host memory, reachable from any thread.
unsafe impl Send for Block {}
// SAFETY: shared access only reads the address.
unsafe impl Sync for Block {}

impl PinnedBuffer {
    /// A buffer of `len` bytes. New memory is zero; reused memory has its former content.
    pub fn alloc(ctx: &'static Context, len: usize) -> Result<PinnedBuffer> {
        let block = ctx.pinned.take(ctx, len)?;
        Ok(PinnedBuffer { memory: Arc::new(Pinned { ctx, block, uses: Mutex::default() }), len })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The context it was allocated for.
    pub fn context(&self) -> &'static Context {
        self.memory.ctx
    }

    /// The bytes. What a copy in progress writes shows only after its stream was synchronised.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the block has at least `len` bytes, which the driver zeroed when it allocated them; those who
        // start device copies promise that nobody looks meanwhile.
        unsafe { std::slice::from_raw_parts(self.memory.block.ptr.cast(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only buffer over this block.
        unsafe { std::slice::from_raw_parts_mut(self.memory.block.ptr.cast(), self.len) }
    }

    /// Says that work given to `stream` uses the buffer: its memory is not reused before that work is done, and
    /// if the stream is being captured, not before the graph is dropped.
    pub fn note_use(&self, stream: &Stream) -> Result<()> {
        self.memory.note(stream, Access::Write);
        let captures = &stream.context().captures;
        if captures.any()
            && let Some(id) = stream.capture_id()?
        {
            captures.keep(id, self.memory.clone(), Access::Write);
        }
        Ok(())
    }

    pub(super) fn address(&self) -> *mut c_void {
        self.memory.block.ptr
    }
}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedBuffer({:p}, {} bytes)", self.address(), self.len)
    }
}

impl Resource for Pinned {
    fn order(&self, _: &Stream, _: Access) -> Result<()> {
        Ok(())
    }

    fn note(&self, stream: &Stream, _: Access) {
        let mut uses = lock(&self.uses);
        if !uses.contains(stream) {
            uses.push(stream.clone());
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.ctx.is_poisoned() {
            return;
        }
        let uses = std::mem::take(&mut *lock(&self.uses));
        let block = Block { ptr: self.block.ptr, size: self.block.size };
        self.ctx.defer(self.ctx.pinned.give_back(self.ctx, block, uses));
    }
}

/// The page-locked memory of one context.
#[derive(Default)]
pub(super) struct PinnedPool(Mutex<State>);

#[derive(Default)]
struct State {
    free: FreeLists<Block>,
    pending: Vec<Pending>,
    stats: PinnedStats,
}

/// A dropped block and what the device has still to reach before it can be reused.
struct Pending {
    block: Block,
    marks: Vec<Event>,
    /// Streams whose end could not be marked, because they were being captured.
    unmarked: Vec<Stream>,
}

impl Pending {
    /// Marks the ends of the streams that can be marked.
    fn mark(&mut self) -> Result<()> {
        for stream in std::mem::take(&mut self.unmarked) {
            if stream.is_capturing()? {
                self.unmarked.push(stream);
            } else {
                let mark = Event::new(stream.context(), false)?;
                stream.record(&mark)?;
                self.marks.push(mark);
            }
        }
        Ok(())
    }

    fn is_done(&self) -> Result<bool> {
        for mark in &self.marks {
            if !mark.query()? {
                return Ok(false);
            }
        }
        Ok(self.unmarked.is_empty())
    }
}

impl PinnedPool {
    fn take(&self, ctx: &Context, len: usize) -> Result<Block> {
        let out_of_memory = || Memory::of_host().exceeded("page-locked host memory", len as u64);
        let size = size_class(len).ok_or_else(out_of_memory)?;
        // Event queries and allocations are forbidden during anyone's capture, unless the thread declares that it
        // knows.
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let mut state = lock(&self.0);
        state.reclaim(ctx)?;
        if let Some(block) = state.free.take(size) {
            state.stats.hits += 1;
            state.stats.used += size;
            return Ok(block);
        }
        let mut ptr: *mut c_void = std::ptr::null_mut();
        for attempt in 0..2 {
            ctx.bind()?;
            // SAFETY: the driver writes one address.
            let code = unsafe { (ctx.api().cuMemHostAlloc)(&mut ptr, size, CU_MEMHOSTALLOC_PORTABLE) };
            match code {
                OUT_OF_MEMORY if attempt == 0 => state.free_cached(ctx)?,
                OUT_OF_MEMORY => return Err(out_of_memory()),
                code => {
                    ctx.check_code("cuMemHostAlloc", code)?;
                    break;
                }
            }
        }
        // SAFETY: `size` fresh bytes; a reference to them must not see uninitialised memory.
        unsafe { std::ptr::write_bytes(ptr.cast::<u8>(), 0, size) };
        state.stats.misses += 1;
        state.stats.used += size;
        Ok(Block { ptr, size })
    }

    fn give_back(&self, ctx: &Context, block: Block, uses: Vec<Stream>) -> Result<()> {
        let mut dropped = Pending { block, marks: Vec::new(), unmarked: uses };
        dropped.mark()?;
        let mut state = lock(&self.0);
        if dropped.marks.is_empty() && dropped.unmarked.is_empty() {
            return state.recycle(ctx, dropped.block);
        }
        state.pending.push(dropped);
        Ok(())
    }

    /// Frees what is cached.
    pub fn trim(&self, ctx: &Context) -> Result<()> {
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let mut state = lock(&self.0);
        state.reclaim(ctx)?;
        state.free_cached(ctx)
    }

    fn stats(&self) -> PinnedStats {
        let state = lock(&self.0);
        PinnedStats { cached: state.free.bytes, ..state.stats }
    }
}

impl State {
    /// Takes back the dropped blocks the device is done with.
    fn reclaim(&mut self, ctx: &Context) -> Result<()> {
        for mut dropped in std::mem::take(&mut self.pending) {
            // After an error the device's progress is unknown: the block is given up rather than reused.
            dropped.mark()?;
            if dropped.is_done()? {
                self.recycle(ctx, dropped.block)?;
            } else {
                self.pending.push(dropped);
            }
        }
        Ok(())
    }

    fn recycle(&mut self, ctx: &Context, block: Block) -> Result<()> {
        self.stats.used -= block.size;
        match self.free.put(block.size, block) {
            None => Ok(()),
            Some(refused) => free(ctx, &refused),
        }
    }

    fn free_cached(&mut self, ctx: &Context) -> Result<()> {
        self.free.drain().iter().try_for_each(|block| free(ctx, block))
    }
}

fn free(ctx: &Context, block: &Block) -> Result<()> {
    // SAFETY: the block came from cuMemHostAlloc, nobody holds it and the device is done with it.
    unsafe { cu!(ctx, cuMemFreeHost(block.ptr)) }
}

impl Context {
    /// How much page-locked memory there is.
    pub fn pinned_stats(&self) -> PinnedStats {
        self.pinned.stats()
    }
}

/// Bytes to allocate for `len`: a power of two of at least a page. None if there is no such number.
fn size_class(len: usize) -> Option<usize> {
    len.max(SMALLEST).checked_next_power_of_two()
}

/// Free blocks by size, up to [`CACHE_LIMIT`] bytes in all.
struct FreeLists<B> {
    by_size: BTreeMap<usize, Vec<B>>,
    bytes: usize,
}

impl<B> Default for FreeLists<B> {
    fn default() -> Self {
        FreeLists { by_size: BTreeMap::new(), bytes: 0 }
    }
}

impl<B> FreeLists<B> {
    fn take(&mut self, size: usize) -> Option<B> {
        let block = self.by_size.get_mut(&size)?.pop()?;
        self.bytes -= size;
        Some(block)
    }

    /// Keeps `block`, or gives it back if the cache is full.
    fn put(&mut self, size: usize, block: B) -> Option<B> {
        if size > CACHE_LIMIT - self.bytes {
            return Some(block);
        }
        self.by_size.entry(size).or_default().push(block);
        self.bytes += size;
        None
    }

    fn drain(&mut self) -> Vec<B> {
        self.bytes = 0;
        std::mem::take(&mut self.by_size).into_values().flatten().collect()
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_a_power_of_two_of_at_least_a_page() {
        for (len, size) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), ((4 << 20) + 1, 8 << 20)] {
            assert_eq!(size_class(len), Some(size), "{len}");
        }
        assert_eq!(size_class(usize::MAX), None);
    }

    #[test]
    fn a_free_block_is_reused_for_its_size_alone() {
        let mut lists = FreeLists::default();
        assert_eq!(lists.put(4096, 'a'), None);
        assert_eq!(lists.put(8192, 'b'), None);
        assert_eq!(lists.bytes, 12288);
        assert_eq!(lists.take(16384), None);
        assert_eq!(lists.take(4096), Some('a'));
        assert_eq!(lists.take(4096), None);
        assert_eq!(lists.bytes, 8192);
        assert_eq!(lists.drain(), ['b']);
        assert_eq!((lists.bytes, lists.take(8192)), (0, None));
    }

    #[test]
    fn a_full_cache_refuses_blocks() {
        let mut lists = FreeLists::default();
        assert_eq!(lists.put(CACHE_LIMIT, 1), None);
        assert_eq!(lists.put(4096, 2), Some(2));
        assert_eq!(lists.take(CACHE_LIMIT), Some(1));
        assert_eq!(lists.put(4096, 2), None);
        assert_eq!(lists.put(CACHE_LIMIT, 1), Some(1));
    }
}
