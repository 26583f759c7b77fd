//! What the engine says to a request, between the engine's thread and those of HTTP.
//!
//! The engine never waits: what nobody has taken yet is merged with what comes next, and a request whose client takes nothing
//! is ended when too much has come together.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use warpsmith_engine::{FinishReason, TokenLogprob, Usage};

/// A token that was generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The token.
    pub id: i32,
    /// Text that is certain with it.
    pub text: String,
    /// Its log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, if asked for.
    pub top: Vec<TokenLogprob>,
}

/// What came for one output since the last time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chunk {
    /// The tokens.
    pub tokens: Vec<Token>,
    /// Text without a token of its own: what was held back until the end.
    pub rest: String,
    /// Why it ended, and its counts.
    pub end: Option<(FinishReason, Usage)>,
}

/// Why nothing more comes although outputs have not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Broken {
    /// The client took nothing for too long, or too much came together.
    Slow,
    /// The engine cannot go on.
    Engine(String),
    /// The engine refused the request.
    Refused(String),
}

/// The mailbox of a request.
#[derive(Debug, Default)]
pub struct Mailbox {
    inner: Mutex<Inner>,
    notify: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    chunks: BTreeMap<usize, Chunk>,
    bytes: usize,
    /// When the oldest of it came.
    since: Option<Instant>,
    broken: Option<Broken>,
    /// Outputs that have not ended.
    open: usize,
}

/// What a mailbox may hold.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Bytes, counted roughly.
    pub bytes: usize,
    /// Time that the oldest may lie there.
    pub time: Duration,
}

impl Mailbox {
    /// For a request with this many outputs.
    pub fn new(outputs: usize) -> Mailbox {
        Mailbox { inner: Mutex::new(Inner { open: outputs, ..Inner::default() }), notify: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing is left half done where a panic could be.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds what came for an output. `false` if there is no room: the request must end.
    pub fn push(&self, index: usize, add: impl FnOnce(&mut Chunk), bytes: usize, room: Room) -> bool {
        let mut inner = self.lock();
        if inner.broken.is_some() {
            return false;
        }
        let since = *inner.since.get_or_insert_with(Instant::now);
        inner.bytes += bytes;
        if inner.bytes > room.bytes || since.elapsed() > room.time {
            inner.broken = Some(Broken::Slow);
        } else {
            let chunk = inner.chunks.entry(index).or_default();
            add(chunk);
            if chunk.end.is_some() {
                inner.open -= 1;
            }
        }
        let has_room = inner.broken.is_none();
        drop(inner);
        self.notify.notify_one();
        has_room
    }

    /// Nothing more will come.
    pub fn break_off(&self, why: Broken) {
        let mut inner = self.lock();
        if inner.open > 0 {
            inner.broken.get_or_insert(why);
        }
        drop(inner);
        self.notify.notify_one();
    }

    /// Whether all outputs have ended, or never will.
    pub fn is_over(&self) -> bool {
        let inner = self.lock();
        inner.open == 0 || inner.broken.is_some()
    }

    /// Waits for what comes next, by output. `None` after the end of the last output.
    ///
    /// # Errors
    /// If nothing more will come, although outputs have not ended.
    pub async fn next(&self) -> Result<Option<BTreeMap<usize, Chunk>>, Broken> {
        loop {
            {
                let mut inner = self.lock();
                if let Some(broken) = &inner.broken {
                    return Err(broken.clone());
                }
                if !inner.chunks.is_empty() {
                    (inner.bytes, inner.since) = (0, None);
                    return Ok(Some(std::mem::take(&mut inner.chunks)));
                }
                if inner.open == 0 {
                    return Ok(None);
                }
            }
            self.notify.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: i32, text: &str) -> Token {
        Token { id, text: text.into(), logprob: None, top: Vec::new() }
    }

    const ROOM: Room = Room { bytes: 100, time: Duration::from_secs(60) };

    #[tokio::test]
    async fn what_nobody_takes_is_merged_and_then_refused() {
        let mailbox = Mailbox::new(2);
        for (index, text) in [(0, "a"), (1, "x"), (0, "b")] {
            assert!(mailbox.push(index, |chunk| chunk.tokens.push(token(7, text)), 10, ROOM));
        }
        let taken = mailbox.next().await.unwrap().unwrap();
        let text = |index: usize| taken[&index].tokens.iter().map(|t| t.text.as_str()).collect::<String>();
        assert_eq!((text(0), text(1)), ("ab".into(), "x".into()));
        let end = |chunk: &mut Chunk| chunk.end = Some((FinishReason::Stop, Usage::default()));
        assert!(mailbox.push(1, end, 0, ROOM));
        assert!(mailbox.next().await.unwrap().unwrap()[&1].end.is_some());
        assert!(mailbox.push(0, end, 0, ROOM));
        assert!(mailbox.next().await.unwrap().is_some());
        assert_eq!(mailbox.next().await, Ok(None));
        mailbox.break_off(Broken::Slow);
        assert_eq!(mailbox.next().await, Ok(None), "it was complete");

        let mailbox = Mailbox::new(1);
        assert!(mailbox.push(0, |chunk| chunk.tokens.push(token(7, "a")), 60, ROOM));
        assert!(!mailbox.push(0, |chunk| chunk.tokens.push(token(7, "b")), 60, ROOM));
        assert_eq!(mailbox.next().await, Err(Broken::Slow));
        let impatient = Room { time: Duration::ZERO, ..ROOM };
        let mailbox = Mailbox::new(1);
        std::thread::sleep(Duration::from_millis(2));
        assert!(mailbox.push(0, |_| (), 1, ROOM));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!mailbox.push(0, |_| (), 1, impatient));
    }
}
