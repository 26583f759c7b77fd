//! The loop of the engine's thread.

mod embed;

use super::look::{self, History, Times};
use super::{Command, Embed, Facts, Job, Shared, Snapshot, State, broken};
use crate::mailbox::{Broken, Mailbox, Token};
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use warpsmith_engine::{Engine, Event, EventKind, FinishReason, Request, RequestId, Salt, SamplingParams};

/// A request that has outputs to come.
struct Live {
    ticket: u64,
    mailbox: Arc<Mailbox>,
    offset: usize,
    open: usize,
    arrived: Instant,
    started: Option<Instant>,
    /// When the last token of each output came.
    last: Vec<Option<Instant>>,
    firsts: Vec<Option<Instant>>,
    counted: bool,
    salt: Option<Salt>,
}

impl Live {
    fn times(&self, index: usize) -> Times {
        Times {
            arrived: self.arrived,
            started: self.started,
            first: self.firsts.get(index).copied().flatten(),
        }
    }
}

/// The engine and its requests.
pub(super) struct Worker {
    engine: Engine,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    live: HashMap<RequestId, Live>,
    /// The requests of each ticket.
    tickets: HashMap<u64, Vec<RequestId>>,
    /// Those who wait for embeddings.
    embeds: VecDeque<Embed>,
    /// When everything must have ended.
    deadline: Option<Instant>,
    computed: u64,
    /// Outputs that have ended, for those who look.
    history: History,
}

impl Worker {
    pub fn new(engine: Engine, inbox: Receiver<Command>, shared: Arc<Shared>) -> Worker {
        let (live, tickets) = (HashMap::new(), HashMap::new());
        Worker {
            engine,
            inbox,
            shared,
            live,
            tickets,
            embeds: VecDeque::new(),
            deadline: None,
            computed: 0,
            history: History::default(),
        }
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
        self.shared.state.send_replace(ended);
        self.live.values().for_each(|live| live.mailbox.break_off(broken(&why)));
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
            let computed = self.engine.stats().computed_tokens;
            if computed > self.computed {
                self.shared.metrics.step(computed - self.computed);
                self.computed = computed;
            }
            let now = Instant::now();
            for id in self.engine.started() {
                if let Some(live) = self.live.get_mut(id) {
                    // The whole step is part of their prefill.
                    live.started = Some(began);
                    self.shared.metrics.admitted(began.saturating_duration_since(live.arrived));
                }
            }
            let mut slow = Vec::new();
            for event in events {
                self.tell(event, now, &mut slow);
            }
            for id in slow {
                self.engine.cancel(id).map_err(|error| error.to_string())?;
            }
            self.publish();
            if let Some(fault) = self.engine.fault() {
                return Err(fault.to_string());
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
                    let ids: Vec<RequestId> = self.live.keys().copied().collect();
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
                let times = |id, index| self.live.get(&id).map(|live| live.times(index));
                let look = look::take(&self.engine, times, &self.history, &scope);
                self.shared.looked(&scope, look);
                Ok(())
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
                    let live = Live {
                        ticket,
                        mailbox: mailbox.clone(),
                        offset,
                        open: n,
                        arrived,
                        started: None,
                        last: vec![None; n],
                        firsts: vec![None; n],
                        counted: false,
                        salt,
                    };
                    self.live.insert(id, live);
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

    /// Tells a request what happened.
    fn tell(&mut self, event: Event, now: Instant, slow: &mut Vec<RequestId>) {
        let Event { request: id, index, kind } = event;
        let (shared, metrics) = (&self.shared, &self.shared.metrics);
        let Some(live) = self.live.get_mut(&id) else { return };
        let number = live.offset + index;
        match kind {
            EventKind::Token { token, text, logprob, top_logprobs } => {
                let started = *live.started.get_or_insert(live.arrived);
                match live.last[index].replace(now) {
                    Some(last) => metrics.next(now - last),
                    None => {
                        live.firsts[index] = Some(now);
                        metrics.first(now - live.arrived, now - started);
                    }
                }
                let bytes = 64 + text.len() + 16 * top_logprobs.len();
                let token = Token { id: token, text, logprob, top: top_logprobs };
                if !live.mailbox.push(number, |chunk| chunk.tokens.push(token), bytes, shared.room)
                    && !slow.contains(&id)
                {
                    slow.push(id);
                }
            }
            EventKind::Finished { reason, text, usage } => {
                let decode = live.firsts[index].map_or(Duration::ZERO, |first| now - first);
                metrics.end(&reason, &usage, !live.counted, now - live.arrived, decode);
                live.counted = true;
                self.history.add((id.0, index), (&reason, &usage), (live.times(index), now), live.salt);
                live.open -= 1;
                live.mailbox.push(
                    number,
                    |chunk| {
                        chunk.rest = text;
                        chunk.end = Some((reason, usage));
                    },
                    0,
                    shared.room,
                );
                shared.open.fetch_sub(1, Ordering::Relaxed);
                if live.open == 0 {
                    let ticket = live.ticket;
                    self.live.remove(&id);
                    if let Some(ids) = self.tickets.get_mut(&ticket) {
                        ids.retain(|other| *other != id);
                        if ids.is_empty() {
                            self.tickets.remove(&ticket);
                        }
                    }
                }
            }
        }
    }

    fn publish(&self) {
        let num_pages = self.engine.options().num_pages;
        let snapshot = Snapshot { stats: self.engine.stats(), num_pages, arriving: 0 };
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
