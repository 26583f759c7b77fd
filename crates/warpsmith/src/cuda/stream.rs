//! Streams and events.

use super::arena::Arena;
use super::context::{Context, cu, lock};
use super::driver::{CAPTURE_IMPLICIT, NOT_READY, SUCCESS};
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUevent, CUevent_flags, CUgraphNode, CUstream, CUstream_flags, CUstreamCaptureMode,
};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A queue of work on a device. Cloning gives another handle to the same queue.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    ctx: &'static Context,
    raw: CUstream,
    owned: bool,
    /// Unique in the process and never zero. A driver's handle may be given to another stream later.
    id: u64,
    /// Counts the noted uses of memory on this stream.
    ticks: AtomicU64,
    /// By id, the ticks of other streams that this one has waited for.
    passed: Mutex<Vec<(u64, u64)>>,
    arena: Mutex<Arena>,
}

// SAFETY: a stream handle may be used from any thread; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Stream {
    /// A new stream that is not ordered with the legacy default stream.
    pub fn new(ctx: &'static Context) -> Result<Stream> {
        let mut raw: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes one handle.
        unsafe { cu!(ctx, cuStreamCreate(&mut raw, flags)) }?;
        Ok(Stream(Arc::new(Inner::new(ctx, raw, true))))
    }

    /// The legacy default stream, which waits for, and is waited for by, every blocking stream of the context.
    pub fn legacy(ctx: &'static Context) -> Stream {
        ctx.borrowed_stream(0, || Stream(Arc::new(Inner::new(ctx, std::ptr::null_mut(), false))))
    }

    /// A stream that belongs to someone else, such as PyTorch's current stream. Zero is the legacy default.
    ///
    /// # Safety
    /// `raw` must be a `CUstream` of this context, and must outlive the result, its clones, and every buffer
    /// allocated or used on it.
    pub unsafe fn from_raw(ctx: &'static Context, raw: u64) -> Stream {
        ctx.borrowed_stream(raw, || Stream(Arc::new(Inner::new(ctx, raw as usize as CUstream, false))))
    }

    /// Whether the handle was made by this library.
    pub(super) fn is_owned(&self) -> bool {
        self.0.owned
    }

    /// Unique in the process and never zero.
    pub(super) fn id(&self) -> u64 {
        self.0.id
    }

    /// Counts a use of memory whose work the stream has been given.
    pub(super) fn tick(&self) -> u64 {
        self.0.ticks.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Makes later work of this stream wait for the work on `other` up to its use number `tick`, unless it has already.
    pub(super) fn wait_past(&self, other: &Stream, tick: u64) -> Result<()> {
        if self.id() == other.id() {
            return Ok(());
        }
        let mut passed = lock(&self.0.passed);
        let known = passed.iter().position(|(id, _)| *id == other.id());
        if known.is_some_and(|at| passed[at].1 >= tick) {
            return Ok(());
        }
        // Uses are counted after their work was given to the stream, so an event recorded from here on covers them.
        let now = other.0.ticks.load(Ordering::Acquire);
        let (captured, other_captured) = (self.capture_id()?, other.capture_id()?);
        if captured == other_captured {
            self.wait_for(other)?;
        } else if other_captured.is_none() {
            // A capture cannot depend on work outside of it, and a replay comes later anyway.
            let _relaxed = RelaxedCapture::enter(self.context())?;
            other.synchronize()?;
        } else {
            let expected = "memory that no stream under capture has to be waited for";
            return Err(Error::argument("stream order", "stream", expected, "work recorded by a capture"));
        }
        match known {
            // Inside a capture the wait holds for the graph alone.
            _ if captured.is_some() && other_captured.is_some() => {}
            Some(at) => passed[at].1 = now,
            None => passed.push((other.id(), now)),
        }
        Ok(())
    }

    /// The stream's workspace, locked: launches that share it must not interleave with another call's.
    pub(super) fn arena(&self) -> std::sync::MutexGuard<'_, Arena> {
        lock(&self.0.arena)
    }

    /// Bytes of workspace the stream holds for its calls and the graphs captured on it.
    pub fn workspace_bytes(&self) -> usize {
        self.arena().len()
    }

    /// The context the stream belongs to.
    pub fn context(&self) -> &'static Context {
        self.0.ctx
    }

    /// The `CUstream` as a number, for other libraries.
    pub fn raw(&self) -> u64 {
        self.0.raw as usize as u64
    }

    /// Whether this is the legacy default stream, which cannot be captured.
    pub fn is_legacy(&self) -> bool {
        self.0.raw.is_null()
    }

    pub(super) fn handle(&self) -> CUstream {
        self.0.raw
    }

    /// Waits until everything given to the stream is done.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive as long as `self`.
        unsafe { cu!(self.context(), cuStreamSynchronize(self.handle())) }
    }

    /// Marks the present end of the stream with `event`.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        unsafe { cu!(self.context(), cuEventRecord(event.raw, self.handle())) }
    }

    /// Makes all later work of the stream wait until `event` is reached. The host does not wait.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive; the flags must be zero.
        unsafe { cu!(self.context(), cuStreamWaitEvent(self.handle(), event.raw, 0)) }
    }

    /// Makes all later work of the stream wait for everything given to `other` so far.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        if self == other {
            return Ok(());
        }
        // An event may be destroyed while it is waited for; the driver keeps what it needs.
        let event = Event::new(other.context(), false)?;
        other.record(&event)?;
        self.wait(&event)
    }

    /// Makes all later work of the stream wait for everything that any stream of the device was given so far: for memory whose
    /// last user is a stream that may not exist any more. A capture that goes on meanwhile is made invalid, because what it
    /// records has no end to wait for. With drivers before CUDA 12.5 the host waits.
    pub fn wait_for_device(&self) -> Result<()> {
        let ctx = self.context();
        let Some(record) = ctx.api().cuCtxRecordEvent else { return ctx.synchronize() };
        let event = Event::new(ctx, false)?;
        ctx.bind()?;
        // SAFETY: both handles are alive.
        ctx.check_code("cuCtxRecordEvent", unsafe { record(ctx.raw(), event.raw) })?;
        self.wait(&event)
    }

    /// Whether work given to the stream is recorded into a graph instead of running.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_id()?.is_some())
    }

    /// A number for the capture the stream takes part in, if it does: its own, or one it joined by waiting for
    /// an event of a capturing stream. A capture that was invalidated counts until it is ended.
    pub(super) fn capture_id(&self) -> Result<Option<u64>> {
        let ctx = self.context();
        ctx.bind()?;
        let (mut status, mut id) = (0u32, 0u64);
        // SAFETY: the driver writes a 32-bit status (kept as a number, for values this binding may not know) and
        // an id; the other outputs may be null.
        let code = unsafe {
            (ctx.api().cuStreamGetCaptureInfo_v2)(
                self.handle(),
                (&raw mut status).cast(),
                &mut id,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        if code == CAPTURE_IMPLICIT {
            return Ok(None);
        }
        ctx.check_code("cuStreamGetCaptureInfo", code)?;
        Ok((status != 0).then_some(id))
    }

    /// The capture that the stream takes part in and the node that it recorded last, if there is one such node.
    pub(super) fn last_captured(&self) -> Result<Option<(u64, CUgraphNode)>> {
        let ctx = self.context();
        ctx.bind()?;
        let (mut status, mut id, mut count) = (0u32, 0u64, 0usize);
        let mut nodes: *const CUgraphNode = std::ptr::null();
        // SAFETY: as above; the driver also writes a list that it keeps, and its length.
        let code = unsafe {
            (ctx.api().cuStreamGetCaptureInfo_v2)(
                self.handle(),
                (&raw mut status).cast(),
                &mut id,
                std::ptr::null_mut(),
                &mut nodes,
                &mut count,
            )
        };
        ctx.check_code("cuStreamGetCaptureInfo", code)?;
        let is_one = status != 0 && count == 1 && !nodes.is_null();
        // SAFETY: the list has one node, and lives until the stream records again.
        Ok(is_one.then(|| (id, unsafe { *nodes })))
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Stream) -> bool {
        self.id() == other.id()
            || (std::ptr::eq(self.context(), other.context()) && self.handle() == other.handle())
    }
}

impl Eq for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:#x} on {})", self.raw(), self.context().name())
    }
}

impl Inner {
    fn new(ctx: &'static Context, raw: CUstream, owned: bool) -> Inner {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Inner {
            ctx,
            raw,
            owned,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            ticks: AtomicU64::new(0),
            passed: Mutex::default(),
            arena: Mutex::default(),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.owned || self.ctx.is_poisoned() {
            return;
        }
        // SAFETY: this is the last handle to a stream we created; the driver finishes its work first.
        self.ctx.defer(unsafe { cu!(self.ctx, cuStreamDestroy_v2(self.raw)) });
    }
}

/// A mark in a stream.
pub struct Event {
    ctx: &'static Context,
    raw: CUevent,
}

// SAFETY: an event handle may be used from any thread; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A new event. One without timing is cheaper to record and to wait for.
    pub fn new(ctx: &'static Context, timing: bool) -> Result<Event> {
        let flags =
            if timing { CUevent_flags::CU_EVENT_DEFAULT } else { CUevent_flags::CU_EVENT_DISABLE_TIMING };
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { cu!(ctx, cuEventCreate(&mut raw, flags as u32)) }?;
        Ok(Event { ctx, raw })
    }

    /// Marks the present end of `stream`.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.record(self)
    }

    /// Waits until the mark is reached.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        unsafe { cu!(self.ctx, cuEventSynchronize(self.raw)) }
    }

    /// Whether the mark is reached. True if it was never recorded.
    pub fn query(&self) -> Result<bool> {
        self.ctx.bind()?;
        // SAFETY: the handle is alive.
        match unsafe { (self.ctx.api().cuEventQuery)(self.raw) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => self.ctx.check_code("cuEventQuery", code).map(|()| true),
        }
    }

    /// Milliseconds of device time between two events that were made with timing and have been reached.
    pub fn elapsed_ms(start: &Event, end: &Event) -> Result<f32> {
        let mut milliseconds = 0f32;
        // SAFETY: both handles are alive and the driver writes one float.
        unsafe { cu!(end.ctx, cuEventElapsedTime(&mut milliseconds, start.raw, end.raw)) }?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.ctx.is_poisoned() {
            return;
        }
        // SAFETY: the only handle; the driver allows destroying an event that is still waited for.
        self.ctx.defer(unsafe { cu!(self.ctx, cuEventDestroy_v2(self.raw)) });
    }
}

/// While it lives, the calling thread may allocate and load although a stream is being captured, by this library or by
/// someone else. Without it, such calls fail and invalidate the capture.
pub(super) struct RelaxedCapture<'a> {
    ctx: &'a Context,
    before: u32,
}

impl RelaxedCapture<'_> {
    pub fn enter(ctx: &Context) -> Result<RelaxedCapture<'_>> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: the driver reads and writes a 32-bit enum, kept as a number here.
        unsafe { cu!(ctx, cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())) }?;
        Ok(RelaxedCapture { ctx, before: mode })
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        if self.ctx.is_poisoned() {
            return;
        }
        let mut mode = self.before;
        // SAFETY: as above, with the value the driver gave us.
        self.ctx.defer(unsafe { cu!(self.ctx, cuThreadExchangeStreamCaptureMode((&raw mut mode).cast())) });
    }
}
