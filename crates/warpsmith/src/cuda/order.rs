//! The order of uses of one piece of device memory by several streams.
//!
//! Most memory is used by one stream all its life, whose order is enough: that costs one comparison. When a second stream
//! comes, it waits for what the first was given so far, and from then on each use is noted: a reader waits for the last
//! writer, a writer for the last writer and for all readers since.

use super::context::lock;
use super::stream::Stream;
use crate::error::Result;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a call does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it, and may read it.
    Write,
}

/// No stream has used the memory, or more than one has.
const NONE: u64 = 0;
const MANY: u64 = u64::MAX;

/// The streams that use a piece of memory.
pub(super) struct Uses {
    /// The id of the only stream so far.
    only: AtomicU64,
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    /// The only stream so far; once there are more, nothing.
    only: Option<Stream>,
    writer: Option<Mark>,
    readers: Vec<Mark>,
}

/// The use number `tick` of a stream.
struct Mark {
    stream: Stream,
    tick: u64,
}

impl Uses {
    /// Of memory that `stream` makes.
    pub fn of(stream: &Stream) -> Uses {
        let noted = Noted { only: Some(stream.clone()), ..Noted::default() };
        Uses { only: AtomicU64::new(stream.id()), noted: Mutex::new(noted) }
    }

    /// Of memory that is ready for every stream.
    pub fn none() -> Uses {
        Uses { only: AtomicU64::new(NONE), noted: Mutex::default() }
    }

    /// Called before work that uses the memory is enqueued on `stream`: makes the stream wait for what must come first.
    pub fn order(&self, stream: &Stream, access: Access) -> Result<()> {
        if self.only.load(Ordering::Acquire) == stream.id() {
            return Ok(());
        }
        let mut noted = lock(&self.noted);
        if let Some(only) = &noted.only {
            if only.id() == stream.id() {
                return Ok(());
            }
            // What the first stream did was not noted use by use: all of it counts as writing.
            let mark = Mark { stream: only.clone(), tick: only.tick() };
            noted.only = None;
            noted.writer = Some(mark);
            self.only.store(MANY, Ordering::Release);
        }
        if let Some(writer) = &noted.writer {
            stream.wait_past(&writer.stream, writer.tick)?;
        }
        if access == Access::Write {
            for reader in &noted.readers {
                stream.wait_past(&reader.stream, reader.tick)?;
            }
        }
        Ok(())
    }

    /// Called after the work was enqueued on `stream`, even if only part of it could be.
    pub fn note(&self, stream: &Stream, access: Access) {
        if self.only.load(Ordering::Acquire) == stream.id() {
            return;
        }
        let mut noted = lock(&self.noted);
        if noted.only.is_none() && noted.writer.is_none() && noted.readers.is_empty() {
            noted.only = Some(stream.clone());
            self.only.store(stream.id(), Ordering::Release);
            return;
        }
        if noted.only.as_ref().is_some_and(|only| only.id() == stream.id()) {
            return;
        }
        if let Some(only) = noted.only.take() {
            let tick = only.tick();
            noted.writer = Some(Mark { stream: only, tick });
            self.only.store(MANY, Ordering::Release);
        }
        let mark = Mark { stream: stream.clone(), tick: stream.tick() };
        if access == Access::Write {
            noted.writer = Some(mark);
            noted.readers.clear();
            return;
        }
        match noted.readers.iter_mut().find(|reader| reader.stream.id() == stream.id()) {
            Some(reader) => reader.tick = mark.tick,
            None => noted.readers.push(mark),
        }
    }

    /// The stream that used the memory last, if it is a single one: copies from the memory on it need not wait.
    pub fn last(&self) -> Option<Stream> {
        let noted = lock(&self.noted);
        noted.only.clone().or_else(|| noted.writer.as_ref().map(|writer| writer.stream.clone()))
    }

    /// All streams whose work may still use the memory.
    pub fn streams(&self) -> Vec<Stream> {
        let noted = lock(&self.noted);
        let marks = noted.writer.iter().chain(&noted.readers).map(|mark| &mark.stream);
        noted.only.iter().chain(marks).cloned().collect()
    }
}
