//! Device memory: from a pool of our own in the order of a stream, or somebody else's with a deleter.

use super::context::{Context, cu, lock};
use super::driver::OUT_OF_MEMORY;
use super::graph::Resource;
use super::order::{Access, Uses};
use super::stream::{Event, RelaxedCapture, Stream};
use crate::error::{Error, Result};
use crate::profile;
use cudarc::driver::sys::CUdeviceptr;
use std::sync::{Arc, Mutex};

/// Returns foreign memory to its owner.
pub(crate) type Deleter = Box<dyn FnOnce() + Send>;

/// A piece of device memory, shared by the tensors and graphs that use it. Dropping the last handle frees it after all work
/// that was noted as using it.
pub(crate) struct Allocation {
    ctx: &'static Context,
    ptr: CUdeviceptr,
    len: usize,
    uses: Uses,
    origin: Origin,
}

/// Who owns the memory.
enum Origin {
    /// Our pool, which allocates and frees in the order of this stream.
    Pool(Stream),
    /// Nobody frees it.
    Lasting,
    /// A foreign owner, whose own work with it is on this stream, if that is known.
    Foreign { home: Option<Stream>, deleter: Mutex<Option<Deleter>> },
}

/// Memory that was dropped and cannot be given back yet.
pub(super) enum Parked {
    /// Of the pool, while one of its streams is captured: freeing would become part of the graph.
    Pool { ptr: CUdeviceptr, stream: Stream, uses: Vec<Stream> },
    /// Of somebody else, until the device has passed the marks.
    Foreign { marks: Vec<Event>, unmarked: Vec<Stream>, deleter: Deleter },
}

impl Allocation {
    /// Memory from the pool, aligned to at least 256 bytes, with arbitrary content. Zero bytes hold no memory.
    ///
    /// On a stream that is being captured the memory is real and at hand at once, and lives as long as the graph.
    pub fn new(stream: &Stream, len: usize) -> Result<Arc<Allocation>> {
        let ctx = stream.context();
        let pool = |ptr, stream: &Stream| {
            let origin = Origin::Pool(stream.clone());
            Arc::new(Allocation { ctx, ptr, len, uses: Uses::of(stream), origin })
        };
        if len == 0 {
            return Ok(pool(0, stream));
        }
        ctx.collect_parked();
        let capture = if stream.may_be_captured() { stream.capture_id()? } else { None };
        let Some(id) = capture else {
            return Ok(pool(allocate(ctx, stream, len)?, stream));
        };
        if !ctx.captures.is_open(id) {
            let expected = "a stream that no other library is capturing: its graph would not keep the memory alive. \
                            Allocate before the capture, or capture with `Graph::capture`";
            return Err(Error::argument("allocation", "stream", expected, "such a stream"));
        }
        // On the captured stream the driver would record an allocation node, whose memory exists only while the
        // graph runs. The side stream allocates now; waiting for it orders the memory before every replay.
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let side = ctx.side_stream();
        let ptr = allocate(ctx, side, len)?;
        side.synchronize()?;
        let origin = Origin::Pool(side.clone());
        let allocation = Arc::new(Allocation { ctx, ptr, len, uses: Uses::none(), origin });
        ctx.captures.keep(id, allocation.clone(), Access::Write);
        Ok(allocation)
    }

    /// Memory that is never freed, ready for every stream.
    pub fn lasting(ctx: &'static Context, len: usize) -> Result<Arc<Allocation>> {
        let _relaxed = RelaxedCapture::enter(ctx)?;
        let side = ctx.side_stream();
        let ptr = allocate(ctx, side, len)?;
        side.synchronize()?;
        Ok(Arc::new(Allocation { ctx, ptr, len, uses: Uses::none(), origin: Origin::Lasting }))
    }

    /// Foreign memory. `deleter` is called exactly once, when no work uses it any more.
    ///
    /// With a `home`, the memory is made and freed in that stream's order, as frameworks do: the deleter may then be
    /// called while work is still running, after `home` was made to wait for it.
    ///
    /// # Safety
    /// `ptr` must be `len` bytes of device memory of the context until the deleter is called, and other users' writes must be
    /// ordered before the work given to streams from now on (by `home`, or because they are done).
    pub unsafe fn foreign(
        ctx: &'static Context,
        ptr: u64,
        len: usize,
        home: Option<Stream>,
        deleter: Deleter,
    ) -> Arc<Allocation> {
        let uses = home.as_ref().map_or_else(Uses::none, Uses::of);
        let origin = Origin::Foreign { home, deleter: Mutex::new(Some(deleter)) };
        Arc::new(Allocation { ctx, ptr, len, uses, origin })
    }

    /// The device address; zero if there are no bytes.
    pub fn address(&self) -> usize {
        self.ptr as usize
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The context the memory belongs to.
    pub fn context(&self) -> &'static Context {
        self.ctx
    }

    /// Called before work that uses the memory is enqueued on `stream`.
    pub fn order(&self, stream: &Stream, access: Access) -> Result<()> {
        self.uses.order(stream, access)
    }

    /// Called after the work was enqueued, even if only part of it could be.
    pub fn note(&self, stream: &Stream, access: Access) {
        self.uses.note(stream, access);
    }

    /// As [`Allocation::order`], for work that a capture may record: the graph then keeps the memory.
    pub fn order_and_keep(self: &Arc<Self>, stream: &Stream, access: Access, capture: Capture) -> Result<()> {
        match capture {
            Capture::None => self.order(stream, access),
            Capture::Ours(id) => {
                self.order(stream, access)?;
                self.ctx.captures.keep(id, self.clone(), access);
                Ok(())
            }
            Capture::Foreign => match self.origin {
                // Its owner captures, and keeps it for the graph.
                Origin::Foreign { .. } | Origin::Lasting => Ok(()),
                Origin::Pool(_) if self.len == 0 => Ok(()),
                Origin::Pool(_) => Err(Error::argument(
                    "capture",
                    "stream",
                    "tensors of the library that captures, since its graph does not keep others alive \
                     (or a capture by `Graph::capture`)",
                    "a tensor of this library on a stream that another one is capturing",
                )),
            },
        }
    }

    /// Whether somebody else owns it.
    pub fn is_foreign(&self) -> bool {
        matches!(self.origin, Origin::Foreign { .. })
    }

    /// Waits until all work that uses the memory is done.
    pub fn wait_for_uses(&mut self) -> Result<()> {
        self.uses.streams().iter().try_for_each(Stream::synchronize)
    }

    /// The stream that used the memory last, if that is known.
    pub fn last_stream(&self) -> Option<Stream> {
        self.uses.last()
    }
}

/// What a stream's work is recorded by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    /// It runs.
    None,
    /// A capture of this library.
    Ours(u64),
    /// A capture that somebody else began.
    Foreign,
}

impl Stream {
    /// What the stream's work is recorded by now.
    pub(crate) fn capture(&self) -> Result<Capture> {
        if !self.may_be_captured() {
            return Ok(Capture::None);
        }
        Ok(match self.capture_id()? {
            None => Capture::None,
            Some(id) if self.context().captures.is_open(id) => Capture::Ours(id),
            Some(_) => Capture::Foreign,
        })
    }
}

impl Resource for Allocation {
    fn order(&self, stream: &Stream, access: Access) -> Result<()> {
        self.uses.order(stream, access)
    }

    fn note(&self, stream: &Stream, access: Access) {
        self.uses.note(stream, access);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let ctx = self.ctx;
        match &self.origin {
            Origin::Lasting => {}
            Origin::Pool(_) if self.ptr == 0 || ctx.is_poisoned() => {}
            Origin::Pool(stream) => {
                profile::memory(Some(ctx.ordinal()), self.ptr, -(self.len as i64));
                let uses = self.uses.streams().into_iter().filter(|user| user != stream).collect();
                let memory = Parked::Pool { ptr: self.ptr, stream: stream.clone(), uses };
                ctx.park(memory);
            }
            Origin::Foreign { home, deleter } => {
                let Some(deleter) = lock(deleter).take() else { return };
                let unmarked: Vec<Stream> =
                    self.uses.streams().into_iter().filter(|user| Some(user) != home.as_ref()).collect();
                if unmarked.is_empty() || ctx.is_poisoned() {
                    return deleter();
                }
                // In the order of its home the owner may reuse the memory: the home waits for everybody else.
                if let Some(home) = home
                    && unmarked.iter().all(|user| home.wait_for(user).is_ok())
                {
                    return deleter();
                }
                ctx.park(Parked::Foreign { marks: Vec::new(), unmarked, deleter });
            }
        }
    }
}

impl Parked {
    /// Gives the memory back if that can be done now; else what is left to do.
    fn settle(self) -> Result<Option<Parked>> {
        match self {
            Parked::Pool { ptr, stream, uses } => {
                for user in std::iter::once(&stream).chain(&uses) {
                    if user.may_be_captured() && user.is_capturing()? {
                        return Ok(Some(Parked::Pool { ptr, stream, uses }));
                    }
                }
                for user in &uses {
                    stream.wait_for(user)?;
                }
                // SAFETY: nobody holds the memory any more, and every stream that used it was waited for above.
                unsafe { cu!(stream.context(), cuMemFreeAsync(ptr, stream.handle())) }?;
                Ok(None)
            }
            Parked::Foreign { mut marks, unmarked, deleter } => {
                let mut left = Vec::new();
                for stream in unmarked {
                    if stream.may_be_captured() && stream.is_capturing()? {
                        left.push(stream);
                    } else {
                        let mark = Event::new(stream.context(), false)?;
                        stream.record(&mark)?;
                        marks.push(mark);
                    }
                }
                let reached = marks.iter().all(|mark| mark.query().unwrap_or(false));
                if left.is_empty() && reached {
                    deleter();
                    return Ok(None);
                }
                Ok(Some(Parked::Foreign { marks, unmarked: left, deleter }))
            }
        }
    }
}

impl Context {
    /// Gives memory back now, or when that becomes possible.
    fn park(&self, memory: Parked) {
        match memory.settle() {
            Ok(None) => {}
            Ok(Some(memory)) => lock(&self.parked).push(memory),
            Err(error) => self.defer(Err(error)),
        }
    }

    /// Gives back parked memory that can be by now.
    pub(super) fn collect_parked(&self) {
        let parked = std::mem::take(&mut *lock(&self.parked));
        if parked.is_empty() {
            return;
        }
        // Event queries are forbidden during anyone's capture, unless the thread declares that it knows.
        let relaxed = RelaxedCapture::enter(self);
        for memory in parked {
            self.park(memory);
        }
        drop(relaxed);
    }
}

/// Device memory of its own, outside of any tensor.
pub struct DeviceBuffer(Arc<Allocation>);

impl DeviceBuffer {
    /// Allocates `len` bytes in the order of `stream`, aligned to at least 256, with arbitrary content.
    pub fn alloc(stream: &Stream, len: usize) -> Result<DeviceBuffer> {
        Allocation::new(stream, len).map(DeviceBuffer)
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

    /// The context the memory belongs to.
    pub fn context(&self) -> &'static Context {
        self.0.ctx
    }

    /// Gives `stream` work that uses the buffer, ordered with all other uses of it.
    pub(super) fn with<R>(
        &self,
        stream: &Stream,
        access: Access,
        work: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.0.order_and_keep(stream, access, stream.capture()?)?;
        let result = work();
        self.0.note(stream, access);
        result
    }
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({:#x}, {} bytes on {})", self.0.ptr, self.0.len, self.context().name())
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
            profile::memory(Some(ctx.ordinal()), ptr, len as i64);
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
