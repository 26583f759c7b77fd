//! What steps bring, told to requests on a thread of its own: the engine's thread goes on with the next step meanwhile.
//!
//! Waking the task of a stream takes microseconds, mostly in the kernel, and a step may have a token for each of hundreds of
//! streams. So the engine's thread hands over all events of a step at once, and everything that is done for each of them is
//! done here: mailboxes, figures, times.

use super::look::{History, Look, Times};
use super::{Shared, broken};
use crate::keys::Scope;
use crate::mailbox::{Mailbox, Token};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use warpsmith_engine::{Event, EventKind, RequestId, Salt, Stats, View};

/// What the engine's thread hands over. Everything is told in this order.
pub(super) enum News {
    /// The engine has taken a request.
    Taken(RequestId, Live),
    /// A step has ended.
    Step(Step),
    /// Somebody looks at the engine.
    Look { scope: Scope, at: Instant, view: View, stats: Stats },
    /// Nothing more comes, for this reason.
    Over(String),
}

/// A step that has ended.
pub(super) struct Step {
    pub began: Instant,
    pub ended: Instant,
    /// Tokens that it computed.
    pub computed: u64,
    /// Requests whose first step it was.
    pub started: Vec<RequestId>,
    pub events: Vec<Event>,
}

/// A request that has outputs to come.
pub(super) struct Live {
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
    /// Its client is too slow, which the engine's thread knows.
    is_slow: bool,
    salt: Option<Salt>,
}

impl Live {
    /// A request of a ticket with `n` outputs, whose numbers begin at `offset`.
    pub fn new(
        ticket: u64,
        mailbox: Arc<Mailbox>,
        (offset, n): (usize, usize),
        arrived: Instant,
        salt: Option<Salt>,
    ) -> Live {
        Live {
            ticket,
            mailbox,
            offset,
            open: n,
            arrived,
            started: None,
            last: vec![None; n],
            firsts: vec![None; n],
            counted: false,
            is_slow: false,
            salt,
        }
    }

    fn times(&self, index: usize) -> Times {
        Times {
            arrived: self.arrived,
            started: self.started,
            first: self.firsts.get(index).copied().flatten(),
        }
    }
}

/// The engine's side.
pub(super) struct Outbox {
    news: Sender<News>,
    slow: Receiver<u64>,
    thread: JoinHandle<()>,
}

impl Outbox {
    /// Starts the thread.
    ///
    /// # Errors
    /// If there can be none.
    pub fn open(shared: &Arc<Shared>) -> Result<Outbox, String> {
        let (news, inbox) = mpsc::channel();
        let (tell_slow, slow) = mpsc::channel();
        let shared = shared.clone();
        let post = Post { shared, live: HashMap::new(), history: History::default(), slow: tell_slow };
        let thread = std::thread::Builder::new().name("post".into()).spawn(move || post.run(&inbox));
        let thread = thread.map_err(|error| format!("no thread to tell requests: {error}"))?;
        Ok(Outbox { news, slow, thread })
    }

    /// Hands something over.
    ///
    /// # Errors
    /// If nobody tells it any more.
    pub fn send(&self, news: News) -> Result<(), String> {
        self.news.send(news).map_err(|_| "the thread that tells requests has ended".into())
    }

    /// Tickets whose clients are too slow.
    pub fn slow(&self) -> impl Iterator<Item = u64> {
        self.slow.try_iter()
    }

    /// Tells all that is left, and waits until that is done.
    pub fn close(self, why: String) {
        // If nobody tells it any more, requests were told so.
        let _ = self.news.send(News::Over(why));
        let _ = self.thread.join();
    }
}

/// The side that tells.
struct Post {
    shared: Arc<Shared>,
    live: HashMap<RequestId, Live>,
    /// Outputs that have ended, for those who look.
    history: History,
    slow: Sender<u64>,
}

impl Drop for Post {
    /// Nobody waits for what never comes, whatever ended the thread.
    fn drop(&mut self) {
        self.live.values().for_each(|live| live.mailbox.break_off(broken("the server has failed")));
    }
}

impl Post {
    fn run(mut self, inbox: &Receiver<News>) {
        while let Ok(news) = inbox.recv() {
            match news {
                News::Taken(id, live) => {
                    self.live.insert(id, live);
                }
                News::Step(step) => self.step(step),
                News::Look { scope, at, view, stats } => {
                    let times = |sequence: &warpsmith_engine::SequenceView| {
                        self.live.get(&sequence.request).map(|live| live.times(sequence.index))
                    };
                    let times = view.sequences.iter().map(times).collect();
                    let past = self.history.of(&scope);
                    self.shared.looked(&scope, Look { at, view, times, past, stats });
                }
                News::Over(why) => {
                    self.live.drain().for_each(|(_, live)| live.mailbox.break_off(broken(&why)));
                    return;
                }
            }
        }
    }

    fn step(&mut self, step: Step) {
        let Step { began, ended, computed, started, events } = step;
        if computed > 0 {
            self.shared.metrics.step(computed);
        }
        for id in started {
            if let Some(live) = self.live.get_mut(&id) {
                // The whole step is part of their prefill.
                live.started = Some(began);
                self.shared.metrics.admitted(began.saturating_duration_since(live.arrived));
            }
        }
        for event in events {
            self.tell(event, ended);
        }
    }

    /// Tells a request what happened.
    fn tell(&mut self, event: Event, now: Instant) {
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
                let has_room =
                    live.mailbox.push(number, |chunk| chunk.tokens.push(token), bytes, shared.room);
                if !has_room && !std::mem::replace(&mut live.is_slow, true) {
                    // An engine that has ended needs to know nothing.
                    let _ = self.slow.send(live.ticket);
                }
            }
            EventKind::Finished { reason, text, usage } => {
                let decode = live.firsts[index].map_or(Duration::ZERO, |first| now - first);
                metrics.end(&reason, &usage, !live.counted, now - live.arrived, decode);
                live.counted = true;
                self.history.add((id.0, index), (&reason, &usage), (live.times(index), now), live.salt);
                live.open -= 1;
                // Its place is free before the client can know that it has ended.
                shared.open.fetch_sub(1, Ordering::Relaxed);
                live.mailbox.push(
                    number,
                    |chunk| {
                        chunk.rest = text;
                        chunk.end = Some((reason, usage));
                    },
                    0,
                    shared.room,
                );
                if live.open == 0 {
                    self.live.remove(&id);
                }
            }
        }
    }
}
