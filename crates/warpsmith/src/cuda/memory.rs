//! Device memory: stream-ordered buffers from a pool of our own.

use super::context::{Context, cu, lock};
use super::driver::OUT_OF_MEMORY;
use super::graph::Resource;
use super::stream::{RelaxedCapture, Stream};
use crate::error::{Error, Result};
use cudarc::driver::sys::CUdeviceptr;
use std::sync::{Arc, Mutex};

/// Device memory. Allocated and freed in the order of a stream, so neither waits for the device.
///
/// The stream it was allocated on may use it freely. Every other stream that uses it must be noted with
/// [`DeviceBuffer::note_use`]; dropping the buffer then frees it after all of them. A buffer noted on a stream
/// that is being captured, or allocated for one, is kept alive by the graph. Cloning shares the memory.
#[derive(Clone)]
pub struct DeviceBuffer(Arc<Allocation>);

/// The memory behind a buffer; shared with the graphs that use it.
pub(super) struct Allocation {
    ptr: CUdeviceptr,
    len: usize,
    stream: Stream,
    uses: Mutex<Vec<Stream>>,
}

/// Memory that was dropped while one of its streams was captured and waits for the capture to end.
pub(super) struct Parked {
    ptr: CUdeviceptr,
    stream: Stream,
    uses: Vec<Stream>,
}

impl DeviceBuffer {
    /// Allocates `len` bytes, aligned to at least 256, with arbitrary content. Zero bytes hold no memory.
    ///
    /// On a stream that is being captured the memory is real and at hand at once, and lives as long as the graph.
    pub fn alloc(stream: &Stream, len: usize) -> Result<DeviceBuffer> {
        let ctx = stream.context();
        let capture = stream.capture_id()?;
        if len == 0 {
            return Ok(DeviceBuffer(Arc::new(Allocation::new(0, 0, stream.clone()))));
        }
        ctx.collect_parked();
        let Some(id) = capture else {
            let ptr = allocate(ctx, stream, len)?;
            return Ok(DeviceBuffer(Arc::new(Allocation::new(ptr, len, stream.clone()))));
        };
        // On the captured stream the driver would record an allocation node, whose memory exists only while the
        // graph runs. The side stream allocates now; waiting for it orders the memory before every replay.
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let side = ctx.side_stream();
        let ptr = allocate(ctx, side, len)?;
        let allocation = Arc::new(Allocation::new(ptr, len, side.clone()));
        allocation.note(stream);
        side.synchronize()?;
        ctx.captures.keep(id, allocation.clone());
        Ok(DeviceBuffer(allocation))
    }

    /// The device address; zero if the buffer is empty.
    pub fn ptr(&self) -> u64 {
        self.0.ptr
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The stream the memory was allocated on.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// The context the memory belongs to.
    pub fn context(&self) -> &'static Context {
        self.0.stream.context()
    }

    /// Says that work given to `stream` uses the buffer: it is not freed before that work is done, and if the
    /// stream is being captured, not before the graph is dropped.
    pub fn note_use(&self, stream: &Stream) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        self.0.note(stream);
        let captures = &self.context().captures;
        if captures.any()
            && let Some(id) = stream.capture_id()?
        {
            captures.keep(id, self.0.clone());
        }
        Ok(())
    }
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({:#x}, {} bytes on {})", self.0.ptr, self.0.len, self.context().name())
    }
}

impl Allocation {
    fn new(ptr: CUdeviceptr, len: usize, stream: Stream) -> Allocation {
        Allocation { ptr, len, stream, uses: Mutex::default() }
    }
}

impl Resource for Allocation {
    fn note(&self, stream: &Stream) {
        if *stream == self.stream {
            return;
        }
        let mut uses = lock(&self.uses);
        if !uses.contains(stream) {
            uses.push(stream.clone());
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let ctx = self.stream.context();
        if self.ptr == 0 || ctx.is_poisoned() {
            return;
        }
        let uses = std::mem::take(&mut *lock(&self.uses));
        let memory = Parked { ptr: self.ptr, stream: self.stream.clone(), uses };
        match memory.capture() {
            Ok(None) => ctx.defer(memory.free()),
            // One of our captures: the graph may use the memory, so it becomes the graph's.
            Ok(Some(id)) if ctx.captures.is_open(id) => {
                let Parked { ptr, stream, uses } = memory;
                let allocation = Allocation { ptr, len: self.len, stream, uses: Mutex::new(uses) };
                ctx.captures.keep(id, Arc::new(allocation));
            }
            Ok(Some(_)) => lock(&ctx.parked).push(memory),
            Err(error) => {
                ctx.defer(Err(error));
                lock(&ctx.parked).push(memory);
            }
        }
    }
}

impl Parked {
    /// The capture that one of the streams takes part in. While there is one, recording an event or freeing
    /// there would become part of the graph instead of happening.
    fn capture(&self) -> Result<Option<u64>> {
        for stream in std::iter::once(&self.stream).chain(&self.uses) {
            if let Some(id) = stream.capture_id()? {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Frees the memory on its stream after everything the other streams were given so far.
    fn free(&self) -> Result<()> {
        for user in &self.uses {
            self.stream.wait_for(user)?;
        }
        // SAFETY: nobody holds the buffer any more, and every stream that used it was waited for above.
        unsafe { cu!(self.stream.context(), cuMemFreeAsync(self.ptr, self.stream.handle())) }
    }
}

impl Context {
    /// Frees parked memory whose captures have ended.
    pub(super) fn collect_parked(&self) {
        let mut parked = lock(&self.parked);
        parked.retain(|memory| match memory.capture() {
            Ok(None) => {
                self.defer(memory.free());
                false
            }
            _ => true,
        });
    }
}

/// Allocates from the context's pool. When memory is short, gives back what the pool caches and tries once more.
fn allocate(ctx: &'static Context, stream: &Stream, len: usize) -> Result<CUdeviceptr> {
    let out_of_memory = || {
        let memory = ctx.memory()?;
        let (requested, free, total) = (len as u64, memory.free, memory.total);
        Err(Error::OutOfMemory { device: ctx.name(), requested, free, total })
    };
    if len as u64 > ctx.info().total_memory {
        return out_of_memory();
    }
    for attempt in 0..2 {
        let mut ptr: CUdeviceptr = 0;
        ctx.bind()?;
        // SAFETY: the driver writes one address; pool and stream belong to the bound context.
        let code = unsafe { (ctx.api().cuMemAllocFromPoolAsync)(&mut ptr, len, ctx.pool(), stream.handle()) };
        if code != OUT_OF_MEMORY {
            ctx.check_code("cuMemAllocFromPoolAsync", code)?;
            return Ok(ptr);
        }
        if attempt == 0 {
            // Frees that the stream has not reached yet count as used until it has.
            stream.synchronize()?;
            ctx.trim(0)?;
        }
    }
    out_of_memory()
}
