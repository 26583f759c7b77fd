//! Lists of records, one for each thread, and the session that collects them.

use super::graph::{GraphCalls, Launches};
use super::records::{
    Call, CallForm, Clock, DeviceWork, Kind, LoopPart, LoopRecord, MemoryEvent, Records, SpanRecord,
};
use super::{ON, RANGES, Range, is_on, now};
use crate::error::{Error, Result};
use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Records that a thread keeps at most: some hundred megabytes. The rest is counted.
const MOST_RECORDS: usize = 1 << 21;

/// What runs a call, and can say what that is when the session has ended.
pub(crate) trait Called: Send + Sync {
    fn form(&self) -> CallForm;
}

/// Work of a GPU whose time is known when it is done.
pub(crate) trait Measured: Send + Sync {
    /// None if the device cannot say.
    fn work(&self) -> Option<DeviceWork>;
}

/// What keeps records of GPUs.
pub(crate) trait DeviceSource: Sync {
    /// Begins with empty records, or says why there will be none.
    fn start(&self) -> std::result::Result<(), String>;
    /// Waits for all work. What fails shows in the next call.
    fn wait(&self);
    /// What was done until now.
    fn take(&self) -> Vec<DeviceWork>;
}

static DEVICE: OnceLock<&'static dyn DeviceSource> = OnceLock::new();

/// Has sessions ask there for what GPUs did. The first one stays.
#[cfg(feature = "cuda")]
pub(crate) fn register_device(source: &'static dyn DeviceSource) {
    let _ = DEVICE.set(source);
}

/// Has GPUs keep records from now on, and not only from the first session: graphs that are made before keep none, and what
/// they recorded is not known. It costs time in each launch until the process ends.
///
/// # Errors
/// Why there are none: sessions then take times by events.
pub fn prepare() -> std::result::Result<(), String> {
    DEVICE.get().map_or_else(|| Err("no GPU is in use".into()), |device| device.start())?;
    PREPARED.store(true, Ordering::SeqCst);
    ON.store(true, Ordering::SeqCst);
    Ok(())
}

enum Entry {
    Call {
        called: Arc<dyn Called>,
        id: u64,
        data: u64,
        start: u64,
        end: u64,
        captured: bool,
    },
    Device {
        call: Option<u64>,
        work: Box<dyn Measured>,
    },
    // Without CUDA there are no graphs.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Launch {
        id: u64,
        calls: Arc<GraphCalls>,
    },
    Loop {
        id: u64,
        threads: u32,
        start: u64,
        end: u64,
    },
    Part {
        id: u64,
        start: u64,
        end: u64,
    },
    Span {
        kind: Kind,
        name: String,
        track: Option<u64>,
        start: u64,
        end: u64,
    },
    Memory {
        device: Option<u32>,
        address: u64,
        bytes: i64,
        at: u64,
    },
}

/// The list of a thread.
struct Sink {
    thread: u32,
    name: String,
    entries: Mutex<Vec<Entry>>,
}

/// The lists of all threads that have recorded, and how many there were.
static SINKS: Mutex<(Vec<Arc<Sink>>, u32)> = Mutex::new((Vec::new(), 0));
static DROPPED: AtomicU64 = AtomicU64::new(0);
/// Numbers of calls and loops. Zero is none.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// Whether a session lives.
static IN_SESSION: AtomicBool = AtomicBool::new(false);
/// Whether it records.
static RECORDS: AtomicBool = AtomicBool::new(false);
/// Whether graphs note their calls without a session, too.
static PREPARED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static SINK: OnceCell<Arc<Sink>> = const { OnceCell::new() };
}

/// Locks, ignoring poison: lists are whole between two pushes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that no other call or loop of the process has.
pub(crate) fn next_call() -> u64 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cold]
fn push(entry: Entry) {
    if !RECORDS.load(Ordering::Relaxed) {
        return;
    }
    // A thread that is ending has no list any more: what its destructors free is not recorded.
    let _ = SINK.try_with(|sink| {
        let mut entries = lock(&sink.get_or_init(new_sink).entries);
        if entries.len() < MOST_RECORDS {
            entries.push(entry);
        } else {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    });
}

fn new_sink() -> Arc<Sink> {
    let mut sinks = lock(&SINKS);
    let thread = sinks.1;
    sinks.1 += 1;
    let name = std::thread::current().name().map_or_else(|| format!("thread {thread}"), str::to_owned);
    let sink = Arc::new(Sink { thread, name, entries: Mutex::default() });
    sinks.0.push(sink.clone());
    sink
}

/// Takes the time before a call, if anybody listens.
#[inline]
pub(crate) fn begin_call() -> Option<u64> {
    if is_on() { Some(now()) } else { None }
}

/// Records a call that began at `start`, with what the GPU did for it.
#[cold]
pub(crate) fn end_call(
    called: Arc<dyn Called>,
    id: u64,
    data: u64,
    start: u64,
    captured: bool,
    work: Option<Box<dyn Measured>>,
) {
    let end = now();
    push(Entry::Call { called, id, data, start, end, captured });
    if let Some(work) = work {
        push(Entry::Device { call: Some(id), work });
    }
}

/// Records work of a GPU that no call stands for: the launch of a graph.
#[cold]
#[cfg(feature = "cuda")]
pub(crate) fn device_work(work: Option<Box<dyn Measured>>) {
    if let Some(work) = work {
        push(Entry::Device { call: None, work });
    }
}

/// Records that a graph with these calls was launched, under a number of [`next_call`].
#[cold]
#[cfg(feature = "cuda")]
pub(crate) fn graph_launch(id: u64, calls: Arc<GraphCalls>) {
    push(Entry::Launch { id, calls });
}

/// A loop that is recorded.
#[derive(Clone, Copy)]
pub(crate) struct Loop {
    id: u64,
    start: u64,
}

impl Loop {
    /// Begins a loop, if anybody listens.
    #[inline]
    pub fn begin() -> Option<Loop> {
        if is_on() { Some(Loop { id: next_call(), start: now() }) } else { None }
    }

    /// The loop has ended on all threads.
    #[cold]
    pub fn end(self, threads: usize) {
        push(Entry::Loop { id: self.id, threads: threads as u32, start: self.start, end: now() });
    }
}

/// Records what this thread did in a loop since `start`.
#[cold]
pub(crate) fn part(of: Loop, start: u64) {
    push(Entry::Part { id: of.id, start, end: now() });
}

/// Notes memory that was allocated (positive) or freed (negative) on the host or a GPU.
#[inline]
pub(crate) fn memory(device: Option<u32>, address: u64, bytes: i64) {
    if is_on() {
        push(Entry::Memory { device, address, bytes, at: now() });
    }
}

/// A span that ends when it is dropped.
#[must_use = "a span lasts as long as this value"]
pub struct Span(Option<Open>);

/// A span that has begun, and its range for a tool.
struct Open {
    kind: Kind,
    name: String,
    start: u64,
    _range: Option<Range>,
}

/// Begins a span on this thread. `name` is evaluated only if anybody listens.
#[inline]
pub fn span(kind: Kind, name: impl FnOnce() -> String) -> Span {
    Span(if is_on() { Some(open(kind, name())) } else { None })
}

#[cold]
fn open(kind: Kind, name: String) -> Open {
    Open { kind, _range: Range::begin(&name), name, start: now() }
}

impl Span {
    /// Gives it another name: one that was not known when it began. `name` is evaluated only if the span is recorded.
    #[inline]
    pub fn rename(&mut self, name: impl FnOnce() -> String) {
        if let Some(open) = &mut self.0 {
            open.name = name();
        }
    }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if let Some(Open { kind, name, start, _range }) = self.0.take() {
            push(Entry::Span { kind, name, track: None, start, end: now() });
        }
    }
}

/// Records a span that does not belong to a thread, as it has happened: on the track of a request.
pub fn emit(kind: Kind, name: String, track: u64, start: u64, end: u64) {
    if is_on() {
        push(Entry::Span { kind, name, track: Some(track), start, end });
    }
}

/// Records everything in this process until it is stopped or dropped. There is one at a time.
pub struct Session {
    start: u64,
    /// Whether GPUs keep records, or why not.
    device: Option<std::result::Result<(), String>>,
}

impl Session {
    /// Begins to record.
    ///
    /// # Errors
    /// If another session is recording.
    pub fn start() -> Result<Session> {
        if IN_SESSION.swap(true, Ordering::AcqRel) {
            let expected = "no other profile that is being recorded in this process";
            return Err(Error::argument("profile", "session", expected, "one that has not ended"));
        }
        let mut sinks = lock(&SINKS);
        // What came late to the last session, and the lists of threads that have ended.
        sinks.0.retain(|sink| Arc::strong_count(sink) > 1);
        sinks.0.iter().for_each(|sink| lock(&sink.entries).clear());
        drop(sinks);
        DROPPED.store(0, Ordering::Relaxed);
        let device = DEVICE.get().map(|device| device.start());
        let start = now();
        RECORDS.store(true, Ordering::SeqCst);
        ON.store(true, Ordering::SeqCst);
        Ok(Session { start, device })
    }

    /// Ends the session when GPUs have done the work that they were given.
    pub fn stop(self) -> Records {
        if let Some(device) = DEVICE.get() {
            device.wait();
        }
        end();
        let (mut records, mut launches) = collect(self.start, now());
        match (&self.device, DEVICE.get()) {
            (Some(Ok(())), Some(device)) => {
                let within = |work: &DeviceWork| work.start >= records.start && work.start <= records.end;
                let mut works = device.take();
                works.retain(within);
                works.iter_mut().for_each(|work| launches.resolve(work));
                records.device = works;
                records.device.sort_by_key(|work| (work.start, work.end));
                records.clock = Clock::Activity;
            }
            (Some(Err(why)), _) => records.clock_note = Some(why.clone()),
            _ => {}
        }
        records
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        end();
        IN_SESSION.store(false, Ordering::Release);
    }
}

/// Records no more. A tool may go on listening, and graphs may go on noting their calls.
fn end() {
    RECORDS.store(false, Ordering::SeqCst);
    ON.store(RANGES.load(Ordering::SeqCst) || PREPARED.load(Ordering::SeqCst), Ordering::SeqCst);
}

fn collect(start: u64, end: u64) -> (Records, Launches) {
    let lists: Vec<(u32, String, Vec<Entry>)> = lock(&SINKS)
        .0
        .iter()
        .map(|sink| (sink.thread, sink.name.clone(), std::mem::take(&mut *lock(&sink.entries))))
        .collect();
    let mut records = Records { start, end, dropped: DROPPED.load(Ordering::Relaxed), ..Records::default() };
    let mut forms = Forms::default();
    let mut launches = Vec::new();
    // Plans are alive until all have been asked, so that an address stands for one plan.
    let mut kept = Vec::new();
    for (thread, name, entries) in lists {
        let number = thread as usize;
        if records.threads.len() <= number {
            records.threads.resize(number + 1, String::new());
        }
        records.threads[number] = name;
        for entry in entries {
            match entry {
                Entry::Call { called, id, data, start, end, captured } => {
                    let form = forms.of(&called);
                    records.calls.push(Call { form, id, data, start, end, thread, captured });
                    kept.push(called);
                }
                Entry::Device { call, work } => {
                    if let Some(work) = work.work() {
                        records.clock = Clock::Events;
                        records.device.push(DeviceWork { call, ..work });
                    }
                }
                Entry::Launch { id, calls } => launches.push((id, calls)),
                Entry::Loop { id, threads, start, end } => {
                    records.loops.push(LoopRecord { id, threads, thread, start, end });
                }
                Entry::Part { id, start, end } => records.parts.push(LoopPart { id, thread, start, end }),
                Entry::Span { kind, name, track, start, end } => {
                    records.spans.push(SpanRecord { kind, name, track, thread, start, end });
                }
                Entry::Memory { device, address, bytes, at } => {
                    records.memory.push(MemoryEvent { device, address, bytes, thread, at });
                }
            }
        }
    }
    records.calls.sort_by_key(|call| (call.start, std::cmp::Reverse(call.end)));
    records.device.sort_by_key(|work| (work.start, work.end));
    records.loops.sort_by_key(|one| one.start);
    records.parts.sort_by_key(|part| part.start);
    records.spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
    records.memory.sort_by_key(|event| event.at);
    (records, Launches::new(launches, &mut forms))
}

/// The forms of plans, each made once.
#[derive(Default)]
pub(super) struct Forms(HashMap<*const (), Arc<CallForm>>);

impl Forms {
    pub fn of(&mut self, called: &Arc<dyn Called>) -> Arc<CallForm> {
        self.0.entry(Arc::as_ptr(called).cast()).or_insert_with(|| called.form().into()).clone()
    }
}
