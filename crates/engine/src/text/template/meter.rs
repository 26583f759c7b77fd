//! What a template takes while it is parsed and rendered: memory, time, nesting.
//!
//! Each rendering has a thread of its own, so the count is the thread's. Memory is counted when a value is made and never
//! given back, so the count is at least what the template holds.

use super::MAX_VALUE;
use minijinja::{Error, ErrorKind};
use std::cell::RefCell;
use std::time::{Duration, Instant};

/// The count of one rendering.
struct Meter {
    /// Bytes that may still be made.
    left: usize,
    room: usize,
    start: Instant,
    time: Duration,
    /// The first limit that was exceeded, and what it is.
    exceeded: Option<(&'static str, u64)>,
}

thread_local! {
    static METER: RefCell<Option<Meter>> = const { RefCell::new(None) };
}

/// Starts to count on this thread.
pub fn start(room: usize, time: Duration) {
    let meter = Meter { left: room, room, start: Instant::now(), time, exceeded: None };
    METER.with_borrow_mut(|current| *current = Some(meter));
}

/// Ends the count, and says which limit was exceeded.
pub fn finish() -> Option<(&'static str, u64)> {
    METER.with_borrow_mut(|current| current.take()?.exceeded)
}

/// The error of a limit. That it was this one is found in the end, however others wrap the error.
pub fn exceed(what: &'static str, limit: u64) -> Error {
    METER.with_borrow_mut(|current| {
        if let Some(meter) = current {
            meter.exceeded.get_or_insert((what, limit));
        }
    });
    Error::new(ErrorKind::InvalidOperation, format!("its {what} is over the limit of {limit}"))
}

/// Counts bytes that are about to be made, and looks at the clock.
pub fn charge(bytes: usize) -> Result<(), Error> {
    let exceeded = METER.with_borrow_mut(|current| {
        let meter = current.as_mut()?;
        match meter.left.checked_sub(bytes) {
            Some(left) => meter.left = left,
            None => return Some(("memory in bytes", meter.room as u64)),
        }
        let is_late = meter.start.elapsed() > meter.time;
        is_late.then_some(("time in milliseconds", meter.time.as_millis() as u64))
    });
    exceeded.map_or(Ok(()), |(what, limit)| Err(exceed(what, limit)))
}

/// Refuses a value that would be too large.
pub fn fits(bytes: usize) -> Result<(), Error> {
    if bytes > MAX_VALUE {
        return Err(exceed("largest value in bytes", MAX_VALUE as u64));
    }
    Ok(())
}
