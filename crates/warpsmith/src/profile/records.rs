//! What a session has recorded. Times are nanoseconds of [`now`](super::now).

use std::sync::Arc;

/// Everything that a session recorded.
#[derive(Debug, Default)]
pub struct Records {
    /// When the session began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Calls of ops, by when they began.
    pub calls: Vec<Call>,
    /// Work of GPUs, by when it began.
    pub device: Vec<DeviceWork>,
    /// Loops of the CPU's threads.
    pub loops: Vec<LoopRecord>,
    /// What each thread did in them.
    pub parts: Vec<LoopPart>,
    /// Named spans.
    pub spans: Vec<SpanRecord>,
    /// Memory that was allocated (positive) and freed (negative).
    pub memory: Vec<MemoryEvent>,
    /// The names of the threads, by number.
    pub threads: Vec<String>,
    /// How the times of work on a GPU were taken.
    pub clock: Clock,
    /// Why they were not taken in the best way.
    pub clock_note: Option<String>,
    /// Records that found no room.
    pub dropped: u64,
}

/// How the times of work on a GPU were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Clock {
    /// No work on a GPU was seen.
    #[default]
    None,
    /// By events around each call: calls inside graphs cannot be told apart.
    Events,
    /// By the GPU's own activity records.
    Activity,
}

/// What a plan runs: the same for all calls with it.
#[derive(Debug, Clone, PartialEq)]
pub struct CallForm {
    /// The op.
    pub op: &'static str,
    /// The kernel that its plan chose.
    pub kernel: &'static str,
    /// The device, as it is named on the command line.
    pub device: String,
    /// The arguments, with their types and shapes.
    pub args: String,
    /// The fewest bytes that the op can move; zero, as are its operations, where that depends on values.
    pub bytes: f64,
    /// The bytes among them that are written.
    pub written: f64,
    /// Arithmetic operations.
    pub flops: f64,
    /// What is multiplied, where the operations can be the limit.
    pub products: Option<&'static str>,
    /// Bytes of all tensors.
    pub tensor_bytes: f64,
}

/// A call of an op.
#[derive(Debug, Clone)]
pub struct Call {
    /// What was run.
    pub form: Arc<CallForm>,
    /// A number that no other call of the process has; [`DeviceWork::call`] refers to it.
    pub id: u64,
    /// A number for the tensor that it moves most of: calls of one form with different numbers have different data.
    pub data: u64,
    /// When the host began it.
    pub start: u64,
    /// When the host was done with it.
    pub end: u64,
    /// The thread that called.
    pub thread: u32,
    /// Whether a graph recorded the call instead of running it.
    pub captured: bool,
}

/// Something that a GPU did.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceWork {
    /// The kernel's name in the program, `graph`, or the name of a copy.
    pub name: String,
    /// The call that launched it, if it is known. In the work of a graph, each call has a number of its own in each launch.
    pub call: Option<u64>,
    /// What the graph that launched it had recorded for it.
    pub recorded: Option<Recorded>,
    /// The device's number.
    pub device: u32,
    /// The stream's number.
    pub stream: u64,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Registers of a thread; zero, as below, where that is unknown.
    pub registers: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks.
    pub blocks: u64,
    /// Threads of a block.
    pub threads: u32,
    /// The launch that it belongs to.
    pub correlation: u32,
    /// Its node in a graph.
    pub graph_node: u64,
}

/// A call that a graph recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorded {
    /// What was recorded.
    pub form: Arc<CallForm>,
    /// As in [`Call`].
    pub data: u64,
}

/// A loop that was divided over threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopRecord {
    /// A number that no other loop of the process has.
    pub id: u64,
    /// Threads that were meant to take part.
    pub threads: u32,
    /// The calling thread.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When all threads were done.
    pub end: u64,
}

/// What one thread did in a loop, from its first part to its last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopPart {
    /// The loop.
    pub id: u64,
    /// The thread.
    pub thread: u32,
    /// When it began its first part.
    pub start: u64,
    /// When it found no more.
    pub end: u64,
}

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Part of the life of a request. They overlap: each request has a track of its own.
    Request,
    /// A step of the engine.
    Step,
    /// A layer of a model.
    Layer,
    /// What the host does between calls.
    Host,
    /// Whatever a program names.
    User,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Request => "request",
            Kind::Step => "step",
            Kind::Layer => "layer",
            Kind::Host => "host",
            Kind::User => "span",
        }
    }
}

/// A named span of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanRecord {
    /// What it is about.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The request, if it is about one; else it is about its thread.
    pub track: Option<u64>,
    /// The thread.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Memory of tensors that was allocated or freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryEvent {
    /// The GPU's number; none for the host.
    pub device: Option<u32>,
    /// Its address.
    pub address: u64,
    /// Negative where it was freed.
    pub bytes: i64,
    /// The thread that did so.
    pub thread: u32,
    /// When.
    pub at: u64,
}
