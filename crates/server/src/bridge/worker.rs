//! The loop of the engine's thread.

mod embed;

use super::look;
use super::post::{Live, News, Outbox, Step};
use super::{Command, Embed, Facts, Job, Shared, Snapshot, State, broken};
use crate::mailbox::{Broken, Mailbox};
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use warpsmith_engine::{Engine, Event, EventKind, FinishReason, Request, RequestId, SamplingParams};

/// The engine and its requests.
pub(super) struct Worker {
    engine: Engine,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    /// What requests are told goes here.
    outbox: Outbox,
    /// The ticket of each request that has not ended, and its outputs that have not.
    open: HashMap<RequestId, (u64, usize)>,
    /// The requests of each ticket.
    tickets: HashMap<u64, Vec<RequestId>>,
    /// Those who wait for embeddings.
    embeds: VecDeque<Embed>,
    /// When everything must have ended.
    deadline: Option<Instant>,
    computed: u64,
    /// When the last step ended, if there is more to do.
    last: Option<Instant>,
    /// Time in steps, and between two of them.
    busy: [Duration; 2],
}

impl Worker {
    /// # Errors
    /// If there can be no thread that tells requests what comes.
    pub fn new(engine: Engine, inbox: Receiver<Command>, shared: Arc<Shared>) -> Result<Worker, String> {
        Ok(Worker {
            engine,
            inbox,
            outbox: Outbox::open(&shared)?,
            shared,
            open: HashMap::new(),
            tickets: HashMap::new(),
            embeds: VecDeque::new(),
            deadline: None,
            computed: 0,
            last: None,
            busy: [Duration::ZERO; 2],
        })
    }

    /// Serves until it is told to end, or cannot go on.
    pub fn run(mut self) {
        let ended = match catch_unwind(AssertUnwindSafe(|| self.warm_up().and_then(|()| self.serve()))) {
            Ok(Ok(())) => State::Ended,
            Ok(Err(why)) => State::Failed(why),
            Err(panic) => State::Failed(format!("the engine panicked: {}", message(&*panic))),
        };
        let why = match &ended {
            State::Failed(why) => why.clone(),
            _ => "the server has ended".into(),
        };
        self.shared.step.store(0, Ordering::Relaxed);
        // No request may find a healthy face once another has learned of a failure. Without one, all is told first.
        if matches!(ended, State::Failed(_)) {
            self.shared.state.send_replace(ended.clone());
        }
        self.outbox.close(why.clone());
        self.shared.state.send_replace(ended);
        // Those who came meanwhile. Later ones find the channel closed.
        while let Ok(command) = self.inbox.try_recv() {
            if let Command::Submit { mailbox, .. } = command {
                mailbox.break_off(broken(&why));
            }
        }
        self.shared.open.store(0, Ordering::Relaxed);
    }

    /// Generates two tokens: whoever is told that the server is ready can rely on it.
    fn warm_up(&mut self) -> Result<(), String> {
        let length = if self.engine.room() > 2 { 2 } else { 1 };
        let params =
            SamplingParams { max_tokens: Some(length), ignore_eos: true, ..SamplingParams::greedy() };
        let request = Request { prompt: vec![0], params, ..Request::default() };
        self.engine.add_request(request).map_err(|error| error.to_string())?;
        while self.engine.has_work() {
            for event in self.engine.step().map_err(|error| error.to_string())? {
                if let EventKind::Finished { reason: FinishReason::Failed(why), .. } = event.kind {
                    return Err(format!("the model cannot generate a token: {why}"));
                }
            }
        }
        self.engine.clear_prefix_cache();
        let _ = self.shared.facts.set(Facts::from(&self.engine));
        self.publish();
        self.shared.state.send_if_modified(|state| {
            let was_loading = *state == State::Loading;
            if was_loading {
                *state = State::Ready;
            }
            was_loading
        });
        Ok(())
    }

    fn serve(&mut self) -> Result<(), String> {
        loop {
            if !self.receive()? {
                return Ok(());
            }
            self.embed_next()?;
            if !self.engine.has_work() {
                self.last = None;
                self.publish();
                continue;
            }
            let began = Instant::now();
            let since = began.saturating_duration_since(self.shared.start);
            self.shared.step.store(since.as_millis() as u64 + 1, Ordering::Relaxed);
            let events = self.engine.step().map_err(|error| error.to_string())?;
            self.shared.step.store(0, Ordering::Relaxed);
            if let Some(fault) = self.engine.fault() {
                // Before anybody learns of it from an answer: no request may find a healthy face after that.
                self.shared.state.send_replace(State::Failed(fault.to_string()));
            }
            let ended = Instant::now();
            self.busy[0] += ended - began;
            self.busy[1] += self.last.map_or(Duration::ZERO, |last| began.saturating_duration_since(last));
            self.last = Some(ended);
            let computed = self.engine.stats().computed_tokens;
            let step = Step {
                began,
                ended,
                computed: computed - self.computed,
                started: self.engine.started().to_vec(),
                events,
            };
            self.computed = computed;
            self.note_ends(&step.events);
            // The figures are those of the step before anybody learns of it.
            self.publish();
            self.outbox.send(News::Step(step))?;
            if let Some(fault) = self.engine.fault() {
                return Err(fault.to_string());
            }
            let slow: Vec<u64> = self.outbox.slow().collect();
            for ticket in slow {
                self.cancel(ticket)?;
            }
        }
    }

    /// Forgets requests that have ended.
    fn note_ends(&mut self, events: &[Event]) {
        for event in events.iter().filter(|event| matches!(event.kind, EventKind::Finished { .. })) {
            let Some((ticket, open)) = self.open.get_mut(&event.request) else { continue };
            *open -= 1;
            if *open > 0 {
                continue;
            }
            let ticket = *ticket;
            self.open.remove(&event.request);
            if let Some(ids) = self.tickets.get_mut(&ticket) {
                ids.retain(|other| *other != event.request);
                if ids.is_empty() {
                    self.tickets.remove(&ticket);
                }
            }
        }
    }

    /// Takes what has arrived; waits if there is nothing else to do. `false` if everything has ended.
    fn receive(&mut self) -> Result<bool, String> {
        loop {
            let is_idle = !self.engine.has_work() && self.embeds.is_empty();
            if let Some(deadline) = self.deadline {
                if is_idle {
                    return Ok(false);
                }
                if Instant::now() >= deadline {
                    self.embeds.clear();
                    let ids: Vec<RequestId> = self.open.keys().copied().collect();
                    for id in ids {
                        self.engine.cancel(id).map_err(|error| error.to_string())?;
                    }
                }
            }
            let command = if is_idle {
                match self.inbox.recv_timeout(Duration::from_secs(3600)) {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return Ok(false),
                }
            } else {
                match self.inbox.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(true),
                }
            };
            self.handle(command)?;
        }
    }

    fn handle(&mut self, command: Command) -> Result<(), String> {
        match command {
            Command::Submit { ticket, jobs, mailbox, arrived } => {
                if self.deadline.is_some() {
                    self.shared.open.fetch_sub(outputs(&jobs), Ordering::Relaxed);
                    mailbox.break_off(broken("the server is ending"));
                    return Ok(());
                }
                self.submit(ticket, jobs, &mailbox, arrived)
            }
            Command::Embed(embed) => {
                self.take_embed(embed);
                Ok(())
            }
            Command::Cancel(ticket) => self.cancel(ticket),
            Command::Flush(answer) => {
                self.engine.clear_prefix_cache();
                self.publish();
                let _ = answer.send(self.engine.stats().cached_pages);
                Ok(())
            }
            Command::Look(scope) => {
                let (at, view) = (Instant::now(), look::view(&self.engine, &scope));
                self.outbox.send(News::Look { scope, at, view, stats: self.engine.stats() })
            }
            Command::End { deadline } => {
                self.deadline = Some(deadline);
                Ok(())
            }
        }
    }

    fn submit(
        &mut self,
        ticket: u64,
        jobs: Vec<Job>,
        mailbox: &Arc<Mailbox>,
        arrived: Instant,
    ) -> Result<(), String> {
        let mut left = outputs(&jobs);
        let mut ids = Vec::with_capacity(jobs.len());
        for Job { request, offset } in jobs {
            let (n, salt) = (request.params.n, request.salt);
            match self.engine.add_request(request) {
                Ok(id) => {
                    let live = Live::new(ticket, mailbox.clone(), (offset, n), arrived, salt);
                    self.open.insert(id, (ticket, n));
                    self.outbox.send(News::Taken(id, live))?;
                    ids.push(id);
                    left -= n;
                }
                Err(error) => {
                    // The rest of the jobs go with it: their answers would come to nobody.
                    mailbox.break_off(Broken::Refused(error.to_string()));
                    self.shared.open.fetch_sub(left, Ordering::Relaxed);
                    self.tickets.insert(ticket, ids);
                    return self.cancel(ticket);
                }
            }
        }
        self.tickets.insert(ticket, ids);
        Ok(())
    }

    fn cancel(&mut self, ticket: u64) -> Result<(), String> {
        for id in self.tickets.get(&ticket).cloned().unwrap_or_default() {
            self.engine.cancel(id).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn publish(&self) {
        let num_pages = self.engine.options().num_pages;
        let snapshot = Snapshot { stats: self.engine.stats(), num_pages, arriving: 0, busy: self.busy };
        *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = snapshot;
    }
}

fn outputs(jobs: &[Job]) -> usize {
    jobs.iter().map(|job| job.request.params.n).sum()
}

/// What a panic said.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
