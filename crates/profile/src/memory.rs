//! The memory of tensors over time, and what held it when it was most.

use crate::model::{Memory, Phase, Span};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// The most memory that lived at a time on a device, counted from the start of the phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peak {
    /// The GPU's number; none for the host.
    pub device: Option<u32>,
    /// Bytes that were allocated in the phase and lived.
    pub bytes: i64,
    /// When.
    pub at: u64,
    /// Who held them, the largest first.
    pub holders: Vec<Holder>,
    /// Allocations in the phase.
    pub allocations: usize,
}

/// Memory that was allocated in one place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Holder {
    /// Where: the span, and the op that was called next.
    pub place: String,
    /// Tensors.
    pub count: usize,
    /// Their bytes.
    pub bytes: i64,
}

/// Live bytes after each event of a device. What was allocated before the phase and freed in it is not counted.
pub fn live(phase: &Phase, device: Option<u32>) -> Vec<(u64, i64)> {
    let mut known: HashMap<u64, i64> = HashMap::new();
    let mut bytes = 0;
    let of_device = phase.memory.iter().filter(|event| event.device == device);
    let after = of_device.filter_map(|event| {
        if event.bytes > 0 {
            known.insert(event.address, event.bytes);
            bytes += event.bytes;
        } else {
            bytes -= known.remove(&event.address)?;
        }
        Some((event.at, bytes))
    });
    after.collect()
}

/// The devices that memory was allocated on.
pub fn devices(phase: &Phase) -> Vec<Option<u32>> {
    let mut devices: Vec<Option<u32>> = phase.memory.iter().map(|event| event.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// The most memory on each device.
pub fn peaks(phase: &Phase) -> Vec<Peak> {
    devices(phase).into_iter().filter_map(|device| peak(phase, device)).collect()
}

fn peak(phase: &Phase, device: Option<u32>) -> Option<Peak> {
    let live = live(phase, device);
    let &(at, bytes) = live.iter().max_by_key(|(at, bytes)| (*bytes, std::cmp::Reverse(*at)))?;
    let of_device = || phase.memory.iter().filter(|event| event.device == device);
    let mut held: HashMap<u64, &Memory> = HashMap::new();
    let mut reached = 0;
    for event in of_device() {
        match event.bytes > 0 {
            true => {
                reached += event.bytes;
                held.insert(event.address, event);
            }
            false => reached -= held.remove(&event.address).map_or(0, |event| event.bytes),
        }
        if (event.at, reached) == (at, bytes) {
            break;
        }
    }
    let mut places: BTreeMap<String, (usize, i64)> = BTreeMap::new();
    for event in held.values() {
        let entry = places.entry(place(phase, event)).or_default();
        *entry = (entry.0 + 1, entry.1 + event.bytes);
    }
    let mut holders: Vec<Holder> =
        places.into_iter().map(|(place, (count, bytes))| Holder { place, count, bytes }).collect();
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    let allocations = of_device().filter(|event| event.bytes > 0).count();
    Some(Peak { device, bytes, at, holders, allocations })
}

/// Where memory was allocated: in which span, and before the call of which op.
fn place(phase: &Phase, event: &Memory) -> String {
    let around = |span: &&Span| {
        span.track.is_none() && span.thread == event.thread && (span.start..span.end).contains(&event.at)
    };
    let span = phase.spans.iter().filter(around).min_by_key(|span| span.end - span.start);
    let of_thread = phase.calls.iter().filter(|call| call.thread == event.thread);
    let next = of_thread.filter(|call| call.end > event.at).min_by_key(|call| call.start);
    match (span, next.map(|call| &phase.forms[call.form].op)) {
        (Some(span), Some(op)) if next.is_some_and(|call| call.start < span.end) => {
            format!("{}, for {op}", span.name)
        }
        (Some(span), _) => span.name.clone(),
        (None, Some(op)) => format!("for {op}"),
        (None, None) => "after the last call".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Call, Form, SpanKind};

    #[test]
    fn the_peak_is_held_by_what_was_allocated_and_not_freed() {
        let event = |address, bytes, at| Memory { address, bytes, at, ..Memory::default() };
        let phase = Phase {
            end: 100,
            forms: vec![Form { op: "softmax".into(), ..Form::default() }],
            calls: vec![Call { start: 20, end: 30, ..Call::default() }],
            spans: vec![Span {
                kind: SpanKind::Layer,
                name: "layer 0".into(),
                track: None,
                thread: 0,
                start: 5,
                end: 60,
            }],
            memory: vec![
                event(9, -1000, 1), // allocated before the phase
                event(1, 100, 10),
                event(2, 50, 15),
                event(1, -100, 40),
                event(3, 60, 70),
            ],
            ..Phase::default()
        };
        assert_eq!(live(&phase, None), [(10, 100), (15, 150), (40, 50), (70, 110)]);
        let [peak] = &peaks(&phase)[..] else { panic!("one device") };
        assert_eq!((peak.device, peak.bytes, peak.at, peak.allocations), (None, 150, 15, 3));
        assert_eq!(peak.holders, [Holder { place: "layer 0, for softmax".into(), count: 2, bytes: 150 }]);
        assert_eq!(place(&phase, &phase.memory[4]), "after the last call");
        assert!(peaks(&Phase::default()).is_empty());
    }
}
