//! A look at what the engine is doing, for the page: taken between two steps, and only when somebody asks.

use super::{Command, Shared, State};
use crate::keys::Scope;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use warpsmith_engine::{FinishReason, Salt, Stats, Usage, View};

/// The engine's thread is asked at most this often, by all that look.
const INTERVAL: Duration = Duration::from_millis(250);
/// How long an answer waits for the end of the present step. Then it tells what was seen last.
const PATIENCE: Duration = Duration::from_millis(300);
/// Branches of the tree.
const MOST_BRANCHES: usize = 200;
/// Sequences that run or wait.
const MOST_SEQUENCES: usize = 256;
/// Outputs that have ended, in all.
const MOST_PAST: usize = 64;

/// When what happened to an output.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// It came to the server.
    pub arrived: Instant,
    /// Its first step.
    pub started: Option<Instant>,
    /// Its first token.
    pub first: Option<Instant>,
}

/// An output that has ended.
#[derive(Debug, Clone)]
pub struct Past {
    /// The number of the request.
    pub request: u64,
    /// Which of its outputs.
    pub index: usize,
    /// Why it ended.
    pub reason: FinishReason,
    /// Its tokens.
    pub usage: Usage,
    /// Its times.
    pub times: Times,
    /// Its end.
    pub ended: Instant,
    salt: Option<Salt>,
}

/// What was seen.
#[derive(Debug, Clone)]
pub struct Look {
    /// When.
    pub at: Instant,
    /// Pages, tree and sequences.
    pub view: View,
    /// The times of each sequence of the view.
    pub times: Vec<Option<Times>>,
    /// Outputs that have ended, the last first.
    pub past: Vec<Past>,
    /// The engine's figures.
    pub stats: Stats,
}

/// The outputs that ended last.
#[derive(Default)]
pub(super) struct History(VecDeque<Past>);

impl History {
    pub fn add(
        &mut self,
        (request, index): (u64, usize),
        (reason, usage): (&FinishReason, &Usage),
        (times, ended): (Times, Instant),
        salt: Option<Salt>,
    ) {
        self.0.truncate(MOST_PAST - 1);
        // What exactly failed is for the one who asked.
        let reason = match reason {
            FinishReason::Failed(_) => FinishReason::Failed(String::new()),
            other => other.clone(),
        };
        self.0.push_front(Past { request, index, reason, usage: *usage, times, ended, salt });
    }

    pub fn of(&self, scope: &Scope) -> Vec<Past> {
        self.0.iter().filter(|past| scope.has(past.salt.as_ref())).cloned().collect()
    }
}

/// What was seen last by those who may see the same.
pub(super) struct Seen {
    scope: Scope,
    look: Option<Arc<Look>>,
    /// When the engine's thread was asked, if it has not answered.
    asked: Option<Instant>,
}

/// The engine, as those of a scope may see it.
pub(super) fn view(engine: &warpsmith_engine::Engine, scope: &Scope) -> View {
    engine.view(MOST_BRANCHES, MOST_SEQUENCES, |salt| scope.has(salt))
}

impl Shared {
    /// A look was taken for those of a scope.
    pub(super) fn looked(&self, scope: &Scope, look: Look) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = seen.iter_mut().find(|entry| entry.scope == *scope) {
            (entry.look, entry.asked) = (Some(Arc::new(look)), None);
        }
        drop(seen);
        self.looked.notify_waiters();
    }

    /// What was seen last, and whether it is too old and the engine must be asked.
    fn last_look(&self, scope: &Scope) -> (Option<Arc<Look>>, bool, bool) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match seen.iter().position(|entry| entry.scope == *scope) {
            Some(at) => at,
            None => {
                seen.push(Seen { scope: *scope, look: None, asked: None });
                seen.len() - 1
            }
        };
        let busy = seen.iter().any(|entry| {
            let last = entry.asked.or(entry.look.as_ref().map(|look| look.at));
            last.is_some_and(|last| last.elapsed() < INTERVAL)
        });
        let entry = &mut seen[at];
        let is_fresh = entry.look.as_ref().is_some_and(|look| look.at.elapsed() < INTERVAL);
        let ask = !is_fresh && entry.asked.is_none() && !busy;
        if ask {
            entry.asked = Some(Instant::now());
        }
        (entry.look.clone(), is_fresh, ask)
    }
}

/// A look at the engine for those of a scope; `None` if none could be taken yet.
pub(super) async fn look(shared: &Shared, commands: &Sender<Command>, scope: Scope) -> Option<Arc<Look>> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        // Before reading the last look, so that no later one is missed.
        let news = shared.looked.notified();
        let (last, is_fresh, ask) = shared.last_look(&scope);
        if is_fresh || shared.state() == State::Loading {
            return last;
        }
        if ask && commands.send(Command::Look(scope)).is_err() {
            return last;
        }
        // Others may be looking: their turn is short.
        let wait = tokio::time::sleep(INTERVAL / 4);
        tokio::select! {
            () = news => {}
            () = wait => {}
            () = tokio::time::sleep_until(deadline) => return last,
        }
    }
}
