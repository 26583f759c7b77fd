//! CUDA graphs: recording the work given to a stream and replaying it.

use super::activity::{ForCall, node_number};
use super::context::{Context, cu, lock};
use super::order::Access;
use super::stream::Stream;
use super::timing::Timing;
use crate::error::{Error, Result};
use crate::profile::{self, Called, GraphCalls};
use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Memory a graph keeps alive.
pub(super) trait Resource: Send + Sync {
    /// Before a replay on `stream`: makes it wait for what must come first.
    fn order(&self, stream: &Stream, access: Access) -> Result<()>;
    /// After the replay was given to `stream`.
    fn note(&self, stream: &Stream, access: Access);
}

/// What must live as long as a graph, and what the graph does with it.
type Kept = Vec<(Arc<dyn Resource>, Access)>;

/// An active capture: what its graph will keep, and the calls that it has recorded, for profiles.
struct Capture {
    id: u64,
    kept: Kept,
    calls: GraphCalls,
}

/// The active captures of a context.
#[derive(Default)]
pub(super) struct Captures {
    open: Mutex<Vec<Capture>>,
    count: AtomicUsize,
}

impl Captures {
    /// Whether any of our captures is active: a cheap test that avoids a driver call.
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Whether capture `id` is one of ours and active.
    pub fn is_open(&self, id: u64) -> bool {
        lock(&self.open).iter().any(|open| open.id == id)
    }

    /// Keeps `resource` for the graph of capture `id`. A capture that is not ours keeps nothing.
    pub fn keep(&self, id: u64, resource: Arc<dyn Resource>, access: Access) {
        let mut open = lock(&self.open);
        let Some(Capture { kept, .. }) = open.iter_mut().find(|open| open.id == id) else { return };
        let same = |other: &Arc<dyn Resource>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&resource));
        match kept.iter_mut().find(|(other, _)| same(other)) {
            Some((_, known)) if access == Access::Write => *known = Access::Write,
            Some(_) => {}
            None => kept.push((resource, access)),
        }
    }

    fn begin(&self, id: u64) {
        lock(&self.open).push(Capture { id, kept: Vec::new(), calls: GraphCalls::default() });
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    fn end(&self, id: u64) -> (Kept, GraphCalls) {
        let mut open = lock(&self.open);
        let Some(at) = open.iter().position(|open| open.id == id) else { return Default::default() };
        self.count.fetch_sub(1, Ordering::AcqRel);
        let Capture { kept, calls, .. } = open.swap_remove(at);
        (kept, calls)
    }
}

/// Notes that a call was recorded on a stream that is being captured, if the device can say later which kernels are its own.
#[cold]
pub(super) fn note_call(stream: &Stream, called: Arc<dyn Called>, data: u64) {
    let last = || {
        let (id, node) = stream.last_captured().ok()??;
        Some((id, node_number(node)?))
    };
    let Some((id, node)) = last() else { return };
    let mut open = lock(&stream.context().captures.open);
    if let Some(capture) = open.iter_mut().find(|open| open.id == id) {
        capture.calls.note(node, called, data);
    }
}

/// Recorded work.
pub struct Graph {
    ctx: &'static Context,
    raw: CUgraph,
    kept: Arc<Kept>,
    calls: Arc<GraphCalls>,
}

// SAFETY: a graph is only read after its capture; the driver allows that from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` gives to `stream` instead of running it. If `work` fails, the capture is ended and its
    /// error returned; the stream works as before.
    ///
    /// The graph keeps the buffers that were allocated, dropped or noted on the stream meanwhile.
    pub fn capture(stream: &Stream, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let refuse = |got: &str| {
            Err(Error::argument(
                "Graph::capture",
                "stream",
                "a stream of its own, not yet being captured",
                got,
            ))
        };
        if stream.is_legacy() {
            return refuse("the legacy default stream");
        }
        if stream.is_capturing()? {
            return refuse("a stream that is being captured");
        }
        let ctx = stream.context();
        // Relaxed: `work` may allocate and load modules, which the library orders itself.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive; `Recording` ends the capture on every path, unwinding included.
        unsafe { cu!(ctx, cuStreamBeginCapture_v2(stream.handle(), mode)) }?;
        let mut recording = Recording { stream, id: None };
        let id = stream.capture_id()?.unwrap_or(0);
        recording.id = Some(id);
        ctx.captures.begin(id);
        let outcome = work(stream);
        let graph = recording.finish();
        outcome?;
        graph
    }

    /// Number of nodes: kernels, copies, fills.
    pub fn node_count(&self) -> Result<usize> {
        let mut count = 0usize;
        // SAFETY: a null list asks for the number alone.
        unsafe { cu!(self.ctx, cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut count)) }?;
        Ok(count)
    }

    /// Makes the graph ready to run.
    pub fn instantiate(&self) -> Result<GraphExec> {
        let mut raw: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the graph is alive and complete; the driver writes one handle.
        unsafe { cu!(self.ctx, cuGraphInstantiateWithFlags(&mut raw, self.raw, 0)) }?;
        let (kept, calls) = (self.kept.clone(), self.calls.clone());
        Ok(GraphExec { ctx: self.ctx, raw, kept, calls, launching: Mutex::default() })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.ctx.is_poisoned() {
            // SAFETY: the only handle; executable graphs made from it are independent of it.
            self.ctx.defer(unsafe { cu!(self.ctx, cuGraphDestroy(self.raw)) });
        }
    }
}

/// An active capture. Dropping it ends the capture and discards the graph.
struct Recording<'a> {
    stream: &'a Stream,
    id: Option<u64>,
}

impl Recording<'_> {
    fn finish(self) -> Result<Graph> {
        let ctx = self.stream.context();
        let (ended, raw, (kept, calls)) = self.end();
        std::mem::forget(self);
        if raw.is_null() {
            ended?;
            return Err(Error::argument(
                "Graph::capture",
                "work",
                "work on the stream",
                "an invalid capture",
            ));
        }
        // Made before the result is checked, so that an error below destroys the graph.
        let graph = Graph { ctx, raw, kept: Arc::new(kept), calls: Arc::new(calls) };
        ended.map(|()| graph)
    }

    fn end(&self) -> (Result<()>, CUgraph, (Kept, GraphCalls)) {
        let ctx = self.stream.context();
        let mut raw: CUgraph = std::ptr::null_mut();
        // SAFETY: the driver writes a handle, or null if the capture was invalidated.
        let ended = unsafe { cu!(ctx, cuStreamEndCapture(self.stream.handle(), &mut raw)) };
        let held = self.id.map(|id| ctx.captures.end(id)).unwrap_or_default();
        (ended, raw, held)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let (_, raw, (kept, calls)) = self.end();
        if !raw.is_null() {
            let (kept, calls) = (Arc::new(kept), Arc::new(calls));
            drop(Graph { ctx: self.stream.context(), raw, kept, calls });
        }
    }
}

/// A graph that is ready to run, any number of times.
pub struct GraphExec {
    ctx: &'static Context,
    raw: CUgraphExec,
    kept: Arc<Kept>,
    /// What profiles can say of it.
    calls: Arc<GraphCalls>,
    launching: Mutex<()>,
}

// SAFETY: the handle may be used from any thread, one at a time; `launch` holds a lock.
unsafe impl Send for GraphExec {}
// SAFETY: as above.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// Copies the graph to the device now, so that the first launch is as fast as the others.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        let _one_at_a_time = lock(&self.launching);
        // SAFETY: both handles are alive.
        unsafe { cu!(self.ctx, cuGraphUpload(self.raw, stream.handle())) }
    }

    /// Gives the recorded work to `stream`, after all other work with the memory it uses. It uses the addresses it was
    /// recorded with.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _one_at_a_time = lock(&self.launching);
        self.kept.iter().try_for_each(|(resource, access)| resource.order(stream, *access))?;
        let recorded = profile::is_on().then(|| self.begin_record(stream));
        // SAFETY: both handles are alive, and the memory the graph kept lives until after its last launch.
        let launched = unsafe { cu!(self.ctx, cuGraphLaunch(self.raw, stream.handle())) };
        if let Some((timing, _for_launch)) = recorded {
            profile::device_work(timing.end("graph"));
        }
        self.kept.iter().for_each(|(resource, access)| resource.note(stream, *access));
        launched
    }

    #[cold]
    fn begin_record(&self, stream: &Stream) -> (Timing, Option<ForCall>) {
        let number = profile::next_call();
        if !self.calls.is_empty() {
            profile::graph_launch(number, self.calls.clone());
        }
        (Timing::begin(stream, None), ForCall::begin(number))
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if !self.ctx.is_poisoned() {
            // SAFETY: the only handle; the driver finishes launches in progress.
            self.ctx.defer(unsafe { cu!(self.ctx, cuGraphExecDestroy(self.raw)) });
        }
    }
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    struct Memory(#[allow(dead_code)] u8);

    impl Resource for Memory {
        fn order(&self, _: &Stream, _: Access) -> Result<()> {
            Ok(())
        }

        fn note(&self, _: &Stream, _: Access) {}
    }

    #[test]
    fn a_capture_keeps_each_resource_once_and_only_while_open() {
        let captures = Captures::default();
        assert!(!captures.any());
        captures.begin(7);
        captures.begin(9);
        assert!(captures.any() && captures.is_open(7) && !captures.is_open(8));
        let (kept, stray) = (Arc::new(Memory(1)), Arc::new(Memory(2)));
        captures.keep(7, kept.clone(), Access::Read);
        captures.keep(7, kept.clone(), Access::Write);
        captures.keep(8, stray.clone(), Access::Read);
        assert_eq!((Arc::strong_count(&kept), Arc::strong_count(&stray)), (2, 1));
        let ended = captures.end(7);
        assert!(matches!(&ended.0[..], [(_, Access::Write)]));
        drop(ended);
        assert_eq!(captures.end(7).0.len(), 0, "ended twice");
        assert!(captures.any() && captures.is_open(9));
        assert_eq!(captures.end(9).0.len(), 0);
        assert!(!captures.any());
        assert_eq!(Arc::strong_count(&kept), 1);
    }
}
