//! How long work on a stream took, by events around it: for profiles, where the device's own records cannot be had.
//!
//! The driver gives the time between two events as an `f32` of milliseconds. So times are counted from a mark that is
//! renewed each second, each mark from the one before, and the first from the host's clock.

use super::activity::{self, ForCall};
use super::context::{Context, lock};
use super::graph::note_call;
use super::stream::{Event, Stream};
use crate::profile::{self, Called, DeviceWork, Measured};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Nanoseconds after which times are counted from a new mark.
const RENEWED: u64 = 1_000_000_000;

/// Work on a stream that has begun.
pub(crate) struct Timing {
    stream: Stream,
    captured: bool,
    begun: Option<(Arc<Mark>, Event)>,
    /// Where the device keeps records itself.
    _for_call: Option<ForCall>,
}

/// An event whose time on the host's clock is known, or follows from an earlier one.
struct Mark {
    event: Event,
    origin: Origin,
    /// When the host made it.
    made: u64,
}

enum Origin {
    At(u64),
    After(Arc<Mark>),
}

impl Mark {
    /// Nanoseconds on the host's clock.
    fn time(&self) -> Option<u64> {
        match &self.origin {
            Origin::At(time) => Some(*time),
            Origin::After(mark) => Some(mark.time()? + between(&mark.event, &self.event)?),
        }
    }

    /// The mark that times on `stream` are counted from now.
    fn recent(stream: &Stream) -> Option<Arc<Mark>> {
        static RECENT: Mutex<Option<HashMap<u32, Arc<Mark>>>> = Mutex::new(None);
        let ctx: &'static Context = stream.context();
        let mut recent = lock(&RECENT);
        let recent = recent.get_or_insert_default();
        let (now, known) = (profile::now(), recent.get(&ctx.ordinal()));
        if let Some(mark) = known.filter(|mark| now.saturating_sub(mark.made) < RENEWED) {
            return Some(mark.clone());
        }
        let event = Event::new(ctx, true).ok()?;
        event.record(stream).ok()?;
        // A long chain would be followed by recursion: after a pause it begins anew.
        let origin = match known.filter(|mark| now.saturating_sub(mark.made) < 10 * RENEWED) {
            Some(mark) => Origin::After(mark.clone()),
            None => {
                event.synchronize().ok()?;
                Origin::At(profile::now())
            }
        };
        let mark = Arc::new(Mark { event, origin, made: now });
        recent.insert(ctx.ordinal(), mark.clone());
        Some(mark)
    }
}

/// Nanoseconds between two events that were reached.
fn between(start: &Event, end: &Event) -> Option<u64> {
    end.synchronize().ok()?;
    let milliseconds = Event::elapsed_ms(start, end).ok()?;
    Some((f64::from(milliseconds) * 1e6).max(0.0) as u64)
}

impl Timing {
    /// Marks the present end of a stream, unless the device keeps records itself. Nothing is marked while it is captured: such
    /// events have no time.
    pub fn begin(stream: &Stream, call: Option<u64>) -> Timing {
        let captured = stream.is_capturing().unwrap_or(true);
        let marked = || {
            let mark = Mark::recent(stream)?;
            let event = Event::new(stream.context(), true).ok()?;
            event.record(stream).ok()?;
            Some((mark, event))
        };
        let begun = if captured || activity::is_on() { None } else { marked() };
        Timing { stream: stream.clone(), captured, begun, _for_call: call.and_then(ForCall::begin) }
    }

    /// Whether the work is recorded into a graph instead of running.
    pub fn is_captured(&self) -> bool {
        self.captured
    }

    /// Has the graph that recorded the work know what it was.
    pub fn note(&self, called: Arc<dyn Called>, data: u64) {
        if self.captured {
            note_call(&self.stream, called, data);
        }
    }

    /// Marks the end of the work, which gets this name.
    pub fn end(self, name: &'static str) -> Option<Box<dyn Measured>> {
        let (mark, start) = self.begun?;
        let end = Event::new(self.stream.context(), true).ok()?;
        end.record(&self.stream).ok()?;
        Some(Box::new(Between { name, stream: self.stream, mark, start, end }))
    }
}

/// Work between two events.
struct Between {
    name: &'static str,
    stream: Stream,
    mark: Arc<Mark>,
    start: Event,
    end: Event,
}

impl Measured for Between {
    fn work(&self) -> Option<DeviceWork> {
        let start = self.mark.time()? + between(&self.mark.event, &self.start)?;
        Some(DeviceWork {
            name: self.name.into(),
            device: self.stream.context().ordinal(),
            stream: self.stream.id(),
            start,
            end: start + between(&self.start, &self.end)?,
            ..DeviceWork::default()
        })
    }
}
