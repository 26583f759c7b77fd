//! The engine on a thread of its own, and how the rest of the server talks to it.
//!
//! HTTP never waits for the engine: requests go through a channel, answers come into a [`Mailbox`]. The engine never waits
//! for HTTP. A request whose [`Ticket`] is dropped ends, whatever the reason: so a client that leaves frees its pages.

mod look;
mod post;
mod worker;

use crate::keys::Scope;
use crate::mailbox::{Broken, Mailbox, Room};
use crate::metrics::Metrics;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot, watch};
use warpsmith_engine::text::{ChatTemplate, Tokenizer};
use warpsmith_engine::{Engine, Pooling, Request, Stats};

pub use look::{Look, Past, Times};

/// What the server is able to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The model is being loaded.
    Loading,
    /// Requests are served.
    Ready,
    /// Running requests end, new ones are refused.
    Draining,
    /// Nothing can be served any more.
    Failed(String),
    /// The engine has ended as it was told to.
    Ended,
}

/// What requests need to know about the model.
pub struct Facts {
    /// Text to tokens and back.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// From a chat to a text.
    pub template: Option<Arc<ChatTemplate>>,
    /// Tokens that exist.
    pub vocab_size: usize,
    /// The longest context, and the most tokens of a request by context and pages.
    pub context: usize,
    /// The most tokens, prompt and output together.
    pub room: usize,
    /// The most tokens that can be embedded.
    pub longest_input: usize,
    /// Numbers of an embedding.
    pub hidden_size: usize,
    /// Tokens that end an output.
    pub end_ids: Vec<i32>,
    /// The family of the model.
    pub architecture: String,
    /// Outputs that are generated at the same time.
    pub max_running: usize,
    /// Pages, tokens of a page.
    pub pages: (usize, usize),
    /// The most tokens of a step.
    pub max_batch_tokens: usize,
    /// Where it runs, and the type of its activations.
    pub device: String,
    /// The type of the activations.
    pub dtype: String,
    /// Whether prefixes are kept.
    pub prefix_cache: bool,
}

/// The engine's figures at some moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Snapshot {
    /// The engine's own.
    pub stats: Stats,
    /// Pages of the pool.
    pub num_pages: usize,
    /// Outputs that the engine has not seen yet.
    pub arriving: usize,
    /// Time that the engine's thread has spent in steps, and between two of them while there was more to do.
    pub busy: [Duration; 2],
}

/// One request to the engine, whose outputs come under numbers from `offset` on.
pub struct Job {
    /// The request.
    pub request: Request,
    /// The number of its first output.
    pub offset: usize,
}

/// Why requests are not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// Too many wait already.
    Busy,
    /// The server is not ready, or not any more.
    State(State),
}

/// Why there are no embeddings.
#[derive(Debug)]
pub(crate) enum EmbedFailure {
    /// They took longer than they may.
    Late,
    /// They could not be computed.
    Failed(String),
}

/// Vectors in the order of the inputs.
type Embeddings = Result<Vec<Vec<f32>>, EmbedFailure>;

/// A request for embeddings, which counts as one output that has not ended.
struct Embed {
    inputs: Vec<Vec<i32>>,
    pooling: Pooling,
    adapter: Option<String>,
    deadline: Option<Instant>,
    /// Those of the first inputs.
    vectors: Vec<Vec<f32>>,
    /// Closed if nobody waits any more.
    answer: oneshot::Sender<Embeddings>,
    place: Place,
}

impl Embed {
    /// Answers. Its place is free before the client can know it.
    fn end(self, answer: Embeddings) {
        drop(self.place);
        let _ = self.answer.send(answer);
    }
}

/// One of the outputs that have not ended, until it is dropped.
struct Place(Arc<Shared>);

impl Place {
    fn new(shared: &Arc<Shared>) -> Place {
        shared.open.fetch_add(1, Ordering::Relaxed);
        Place(shared.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // An engine that has ended has counted it already.
        let less = |open: usize| open.checked_sub(1);
        let _ = self.0.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

enum Command {
    Embed(Embed),
    Submit { ticket: u64, jobs: Vec<Job>, mailbox: Arc<Mailbox>, arrived: Instant },
    Cancel(u64),
    Flush(oneshot::Sender<usize>),
    End { deadline: Instant },
    Look(Scope),
}

/// What both sides see.
struct Shared {
    state: watch::Sender<State>,
    facts: OnceLock<Facts>,
    snapshot: Mutex<Snapshot>,
    /// Outputs that have not ended.
    open: AtomicUsize,
    /// Requests that were handed to the engine.
    submitted: AtomicU64,
    next_ticket: AtomicU64,
    start: Instant,
    /// When the present step began, in milliseconds since `start` and one; 0 outside of steps.
    step: AtomicU64,
    room: Room,
    max_waiting: usize,
    metrics: Metrics,
    /// What was seen last, by those who may see the same.
    seen: Mutex<Vec<look::Seen>>,
    /// Tells those who wait that something was seen.
    looked: Notify,
}

impl Shared {
    fn state(&self) -> State {
        self.state.borrow().clone()
    }
}

/// The way to the engine. Clones lead to the same.
#[derive(Clone)]
pub struct Bridge {
    shared: Arc<Shared>,
    commands: Sender<Command>,
}

impl Bridge {
    /// Starts a thread that opens the engine and then runs it.
    pub fn start<F>(open: F, metrics: Metrics, room: Room, max_waiting: usize) -> Bridge
    where
        F: FnOnce() -> Result<Engine, warpsmith_engine::Error> + Send + 'static,
    {
        Bridge::start_in(|work| work(), open, metrics, room, max_waiting)
    }

    /// As [`Bridge::start`]; `around` runs the work of the thread, such as with a number of CPU threads.
    pub fn start_in<A, F>(around: A, open: F, metrics: Metrics, room: Room, max_waiting: usize) -> Bridge
    where
        A: FnOnce(&mut dyn FnMut()) + Send + 'static,
        F: FnOnce() -> Result<Engine, warpsmith_engine::Error> + Send + 'static,
    {
        let shared = Arc::new(Shared {
            state: watch::Sender::new(State::Loading),
            facts: OnceLock::new(),
            snapshot: Mutex::default(),
            open: AtomicUsize::new(0),
            submitted: AtomicU64::new(0),
            next_ticket: AtomicU64::new(0),
            start: Instant::now(),
            step: AtomicU64::new(0),
            room,
            max_waiting,
            metrics,
            seen: Mutex::default(),
            looked: Notify::new(),
        });
        let (commands, inbox) = mpsc::channel();
        let bridge = Bridge { shared: shared.clone(), commands };
        let work = move || {
            let (mut open, mut inbox) = (Some(open), Some(inbox));
            around(&mut || {
                if let (Some(open), Some(inbox)) = (open.take(), inbox.take()) {
                    run(open, inbox, &shared);
                }
            });
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(work);
        if let Err(error) = thread {
            bridge.shared.state.send_replace(State::Failed(format!("no thread for the engine: {error}")));
        }
        bridge
    }

    /// What the server is able to do.
    pub fn state(&self) -> State {
        self.shared.state()
    }

    /// Changes of it.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.shared.state.subscribe()
    }

    /// About the model; `None` until it is loaded.
    pub fn facts(&self) -> Option<&Facts> {
        self.shared.facts.get()
    }

    /// The engine's figures after its last step.
    pub fn snapshot(&self) -> Snapshot {
        let mut now = *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = now.stats.running + now.stats.waiting;
        now.arriving = self.shared.open.load(Ordering::Relaxed).saturating_sub(seen);
        now
    }

    /// The figures for Prometheus.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Requests that were handed to the engine so far.
    pub fn submitted(&self) -> u64 {
        self.shared.submitted.load(Ordering::Relaxed)
    }

    /// Outputs that have not ended.
    pub fn open_outputs(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// For how long the present step has been running.
    pub fn step_time(&self) -> Duration {
        match self.shared.step.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            began => self.shared.start.elapsed().saturating_sub(Duration::from_millis(began - 1)),
        }
    }

    /// Whether `outputs` more can be taken now.
    ///
    /// # Errors
    /// If not.
    pub fn check(&self, outputs: usize) -> Result<(), Refusal> {
        match self.state() {
            State::Ready => {}
            other => return Err(Refusal::State(other)),
        }
        let most = self.facts().map_or(0, |facts| facts.max_running) + self.shared.max_waiting;
        match self.open_outputs() + outputs <= most {
            true => Ok(()),
            false => Err(Refusal::Busy),
        }
    }

    /// Hands requests to the engine, all or none of them.
    ///
    /// # Errors
    /// If too many wait already, or the engine does not serve.
    pub fn submit(&self, jobs: Vec<Job>, arrived: Instant) -> Result<Ticket, Refusal> {
        let outputs = jobs.iter().map(|job| job.request.params.n).sum();
        self.check(outputs)?;
        // Two that come at the same time may exceed the limit together: it need not be exact.
        self.shared.open.fetch_add(outputs, Ordering::Relaxed);
        self.shared.submitted.fetch_add(jobs.len() as u64, Ordering::Relaxed);
        let number = self.shared.next_ticket.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::new(outputs));
        let command = Command::Submit { ticket: number, jobs, mailbox: mailbox.clone(), arrived };
        if self.commands.send(command).is_err() {
            self.shared.open.fetch_sub(outputs, Ordering::Relaxed);
            return Err(Refusal::State(self.state()));
        }
        Ok(Ticket { number, mailbox, commands: self.commands.clone() })
    }

    /// Asks for embeddings. They are not computed if nobody waits for them any more.
    ///
    /// # Errors
    /// If too many requests wait already, or the engine does not serve.
    pub(crate) fn embed(
        &self,
        inputs: Vec<Vec<i32>>,
        pooling: Pooling,
        adapter: Option<String>,
        deadline: Option<Instant>,
    ) -> Result<oneshot::Receiver<Embeddings>, Refusal> {
        self.check(1)?;
        self.shared.submitted.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let place = Place::new(&self.shared);
        let embed = Embed { inputs, pooling, adapter, deadline, vectors: Vec::new(), answer, place };
        match self.commands.send(Command::Embed(embed)) {
            Ok(()) => Ok(answered),
            Err(_) => Err(Refusal::State(self.state())),
        }
    }

    /// Forgets prefixes that nobody uses. The number of pages that still hold some.
    pub async fn flush(&self) -> Option<usize> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(Command::Flush(answer)).ok()?;
        answered.await.ok()
    }

    /// What the engine is doing, as far as this scope may see it; `None` if it is not known yet. The engine is asked between two
    /// steps, a few times a second at most. If a step takes long, the answer is the last known state.
    pub(crate) async fn look(&self, scope: Scope) -> Option<Arc<Look>> {
        look::look(&self.shared, &self.commands, scope).await
    }

    /// When the server began.
    pub fn start_time(&self) -> Instant {
        self.shared.start
    }

    /// Refuses new requests, lets the others end until the deadline, and ends the engine.
    pub fn end(&self, deadline: Instant) {
        self.shared.state.send_if_modified(|state| {
            let drains = matches!(state, State::Loading | State::Ready);
            if drains {
                *state = State::Draining;
            }
            drains
        });
        let _ = self.commands.send(Command::End { deadline });
    }
}

/// The right to the answers of a request. Whoever drops it ends the request.
pub struct Ticket {
    number: u64,
    mailbox: Arc<Mailbox>,
    commands: Sender<Command>,
}

impl Ticket {
    /// Where the answers come.
    pub fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.mailbox.is_over() {
            let _ = self.commands.send(Command::Cancel(self.number));
        }
    }
}

/// The work of the engine's thread, from opening the model to the end.
fn run<F>(open: F, inbox: Receiver<Command>, shared: &Arc<Shared>)
where
    F: FnOnce() -> Result<Engine, warpsmith_engine::Error>,
{
    let fail = |why: String| {
        shared.state.send_replace(State::Failed(why));
    };
    let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(open));
    let engine = match opened {
        Ok(Ok(engine)) => engine,
        Ok(Err(error)) => return fail(error.to_string()),
        Err(_) => return fail("opening the model panicked".into()),
    };
    match worker::Worker::new(engine, inbox, shared.clone()) {
        Ok(worker) => worker.run(),
        Err(why) => fail(why),
    }
}

impl From<&Engine> for Facts {
    fn from(engine: &Engine) -> Facts {
        let (tokenizer, template) = engine.text();
        let options = engine.options();
        Facts {
            tokenizer,
            template,
            vocab_size: engine.vocab_size(),
            context: engine.model().config().max_positions,
            room: engine.room(),
            longest_input: engine.longest_input(),
            hidden_size: engine.model().config().hidden_size,
            end_ids: options.end_ids.clone(),
            architecture: engine.model().config().architecture.clone(),
            max_running: options.max_running,
            pages: (options.num_pages, options.page_size),
            max_batch_tokens: options.max_batch_tokens,
            device: options.device.to_string(),
            dtype: options.dtype.name().into(),
            prefix_cache: options.prefix_cache,
        }
    }
}

/// What is told to requests when the engine fails.
fn broken(why: &str) -> Broken {
    Broken::Engine(why.to_owned())
}
