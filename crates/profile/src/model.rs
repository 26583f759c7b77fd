//! The data of a profile. Times are nanoseconds since the profile began.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A run, in one or more phases.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// What ran, and where.
    pub about: About,
    /// Its phases in turn, such as prompt and decode.
    pub phases: Vec<Phase>,
}

/// What ran, and where.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// A few words: an op with its sizes, or a model.
    pub title: String,
    /// The command that made the profile.
    pub command: String,
    /// The program and its version.
    pub program: String,
    /// The machine: names and values.
    pub machine: Vec<(String, String)>,
    /// The measured rates of the device.
    pub ceilings: Ceilings,
}

/// The measured rates of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// GB/s of a copy, bytes read and written counted; zero if unknown.
    pub copy_gbps: f64,
    /// GB/s of a sweep that only reads.
    pub read_gbps: Option<f64>,
    /// TFLOP/s of products, by what is multiplied.
    pub products: Vec<(String, f64)>,
}

/// A part of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// The step that it repeats, timed with and without the profile.
    pub step: Option<Step>,
    /// The names of the host's threads, by number.
    pub threads: Vec<String>,
    /// Threads that a call on the CPU could use.
    pub cpu_threads: usize,
    /// What calls ran, without repetition.
    pub forms: Vec<Form>,
    /// Calls of ops, by when they began.
    pub calls: Vec<Call>,
    /// What GPUs did, by when it began.
    pub work: Vec<Work>,
    /// How its times were taken.
    pub clock: Clock,
    /// Loops that were divided over the CPU's threads, by when they began.
    pub loops: Vec<Loop>,
    /// What each thread did in them.
    pub parts: Vec<Part>,
    /// Named spans.
    pub spans: Vec<Span>,
    /// Memory of tensors that was allocated and freed.
    pub memory: Vec<Memory>,
    /// What is missing or was done in another way, for people.
    pub notes: Vec<String>,
}

/// A step that a phase repeats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Steps in the phase.
    pub count: usize,
    /// Nanoseconds of a step while the profile was recorded.
    pub traced_ns: f64,
    /// Nanoseconds of a step without: the median of all runs.
    pub untraced_ns: f64,
    /// Runs without a profile.
    pub runs: usize,
}

/// How times of kernels were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// The host's clock around each call.
    #[default]
    Host,
    /// Events around each call.
    Events,
    /// The GPU's own records.
    Activity,
}

impl Clock {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Clock::Host => "the host's clock around each call",
            Clock::Events => "events around each call (a graph counts as one)",
            Clock::Activity => "the GPU's activity records (CUPTI)",
        }
    }
}

/// What limits an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Moving its bytes.
    #[default]
    Memory,
    /// Multiplying.
    Products,
}

/// What a call runs: the op, its kernel, its arguments, and the least that it costs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Form {
    /// The op.
    pub op: String,
    /// The kernel that was chosen.
    pub kernel: String,
    /// The device.
    pub device: String,
    /// Types and shapes.
    pub args: String,
    /// The fewest bytes that can be moved.
    pub bytes: f64,
    /// Arithmetic operations.
    pub flops: f64,
    /// What is multiplied.
    pub products: Option<String>,
    /// The least nanoseconds by the measured limits.
    pub limit_ns: Option<f64>,
    /// What takes them.
    pub bound: Bound,
    /// Whether its tensors are few enough to be in the caches when it begins. Its limit takes that into account.
    pub in_cache: bool,
}

/// A call of an op.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its number among all calls; [`Work::call`] refers to it.
    pub id: u64,
    /// The place of its form in [`Phase::forms`].
    pub form: usize,
    /// The thread.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Something that a GPU did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The kernel as the program names it, `graph`, or a copy.
    pub name: String,
    /// The call that it was done for, if that is known.
    pub call: Option<u64>,
    /// The place of that call's form.
    pub form: Option<usize>,
    /// The device.
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
    pub block_threads: u32,
    /// The launch.
    pub correlation: u32,
    /// The node of a graph.
    pub graph_node: u64,
}

/// A loop that was divided over threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loop {
    /// Its number.
    pub id: u64,
    /// Threads that were meant to take part.
    pub threads: u32,
    /// The thread that called.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// What one thread did in a loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The loop's number.
    pub id: u64,
    /// The thread.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// What a span is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpanKind {
    /// Part of the life of a request.
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

/// A named span of time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// What it is about.
    pub kind: SpanKind,
    /// Its name.
    pub name: String,
    /// The request, if it is about one.
    pub track: Option<u64>,
    /// The thread.
    pub thread: u32,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Memory of tensors that was allocated or freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// The GPU's number; none for the host.
    pub device: Option<u32>,
    /// Its address.
    pub address: u64,
    /// Negative where it was freed.
    pub bytes: i64,
    /// The thread.
    pub thread: u32,
    /// When.
    pub at: u64,
}

impl Phase {
    /// Nanoseconds of the whole phase.
    pub fn wall(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// What computed: the work of GPUs if there is any, else the calls, which are the CPU's kernels.
    pub fn kernels(&self) -> Vec<Kernel<'_>> {
        if self.work.is_empty() {
            return self.calls.iter().map(|call| self.of_call(call)).collect();
        }
        let mut known = HashSet::new();
        let of_work = |work: &Work| Kernel {
            is_first: work.call.is_none_or(|call| known.insert(call)),
            name: work.form.map_or(work.name.clone(), |form| self.forms[form].kernel.clone()),
            form: work.form.map(|form| (form, &self.forms[form])),
            start: work.start,
            end: work.end,
        };
        // Ops on tensors of the host take their time, too.
        let on_host = |call: &&Call| self.forms[call.form].device == "cpu";
        let calls = self.calls.iter().filter(on_host).map(|call| self.of_call(call));
        self.work.iter().map(of_work).chain(calls).collect()
    }

    /// How long each work took, from the end of the one before on its stream: kernels may be launched while the one before
    /// still runs, and wait for it inside.
    pub fn work_times(&self) -> Vec<u64> {
        let mut ends: HashMap<(u32, u64), u64> = HashMap::new();
        let own = |work: &Work| {
            let end = ends.entry((work.device, work.stream)).or_default();
            let own = work.end.saturating_sub(work.start.max(*end));
            *end = work.end.max(*end);
            own
        };
        self.work.iter().map(own).collect()
    }

    /// The calls of each thread, by when they began.
    pub fn calls_by_thread(&self) -> BTreeMap<u32, Vec<usize>> {
        let mut threads: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (at, call) in self.calls.iter().enumerate() {
            threads.entry(call.thread).or_default().push(at);
        }
        threads
    }

    /// For each loop, the innermost call that it is part of.
    pub fn calls_of_loops(&self) -> Vec<Option<usize>> {
        let threads = self.calls_by_thread();
        let around = |one: &Loop| {
            let calls = threads.get(&one.thread)?;
            let before = calls.partition_point(|&at| self.calls[at].start <= one.start);
            // Calls hardly nest: the one that began last is nearly always the one.
            let near = calls[before.saturating_sub(8)..before].iter().rev();
            near.copied().find(|&at| self.calls[at].end >= one.end)
        };
        self.loops.iter().map(around).collect()
    }

    fn of_call(&self, call: &Call) -> Kernel<'_> {
        let form = &self.forms[call.form];
        let form_at = Some((call.form, form));
        Kernel { name: form.kernel.clone(), form: form_at, is_first: true, start: call.start, end: call.end }
    }
}

/// An interval of computing.
#[derive(Debug, Clone)]
pub struct Kernel<'a> {
    /// Its name in tables.
    pub name: String,
    /// What it computed, with its place, if that is known.
    pub form: Option<(usize, &'a Form)>,
    /// Whether it is the first of its call: what the op states counts once, however many kernels it takes.
    pub is_first: bool,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}
