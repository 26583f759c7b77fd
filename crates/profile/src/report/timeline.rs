//! The data of the timeline that the page's script draws.

use super::escape;
use crate::intervals::lanes;
use crate::model::{Phase, Profile, SpanKind};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

/// Slices of a phase at most: those that began first. A trace has them all.
const MOST_SLICES: usize = 40_000;

/// The order of the tracks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Group {
    Requests,
    Steps,
    Layers,
    Calls,
    Work,
    Gpu,
}

/// The place of the drawing, and its controls.
pub fn figure(number: usize, phase: &Phase) -> String {
    let label = escape(&format!("Timeline of {}", phase.name));
    format!(
        r#"<h3>Timeline</h3>
<figure class="timeline" id="timeline-{number}" data-phase="{number}" hidden>
<div class="controls">
<button type="button" data-do="in">Zoom in</button>
<button type="button" data-do="out">Zoom out</button>
<button type="button" data-do="left">Earlier</button>
<button type="button" data-do="right">Later</button>
<button type="button" data-do="all">All</button>
</div>
<canvas tabindex="0" role="img" aria-label="{label}. The tables below hold the same."></canvas>
<figcaption aria-live="polite">Drag to move, pinch or turn the wheel with Ctrl to zoom;
arrow keys, + and − do the same.</figcaption>
</figure>
<noscript><p class="note">The timeline is drawn by a script; the tables do not need it.</p></noscript>
"#
    )
}

/// For each phase: names, and tracks of slices, each start and length in microseconds and the place of its name.
pub fn data(profile: &Profile) -> Value {
    json!({ "phases": profile.phases.iter().map(phase_data).collect::<Vec<_>>() })
}

/// Start, end, and the place of the name.
type Slice = (u64, u64, usize);

#[derive(Default)]
struct Tracks {
    /// With their titles.
    tracks: BTreeMap<(Group, u64), (String, Vec<Slice>)>,
    names: Vec<String>,
    places: HashMap<String, usize>,
}

impl Tracks {
    fn add(&mut self, track: (Group, u64), title: &str, name: &str, start: u64, end: u64) {
        let place = match self.places.get(name) {
            Some(place) => *place,
            None => {
                self.names.push(name.into());
                self.places.insert(name.into(), self.names.len() - 1);
                self.names.len() - 1
            }
        };
        let (_, slices) = self.tracks.entry(track).or_insert_with(|| (title.into(), Vec::new()));
        slices.push((start, end, place));
    }
}

fn phase_data(phase: &Phase) -> Value {
    let mut all = Tracks::default();
    let thread = |number: u32| phase.threads.get(number as usize).cloned().unwrap_or_default();
    for span in &phase.spans {
        let (track, title) = match (span.kind, span.track) {
            (SpanKind::Request, Some(request)) => ((Group::Requests, request), format!("request {request}")),
            (SpanKind::Step, _) => ((Group::Steps, 0), "steps".into()),
            (SpanKind::Layer, _) => ((Group::Layers, 0), "layers".into()),
            _ => ((Group::Layers, 1), "host".into()),
        };
        all.add(track, &title, &span.name, span.start, span.end);
    }
    for call in &phase.calls {
        let title = format!("calls of {}", thread(call.thread));
        let op = &phase.forms[call.form].op;
        all.add((Group::Calls, call.thread.into()), &title, op, call.start, call.end);
    }
    let of_loop: HashMap<u64, Option<usize>> =
        phase.loops.iter().map(|one| one.id).zip(phase.calls_of_loops()).collect();
    for part in &phase.parts {
        let call = of_loop.get(&part.id).copied().flatten();
        let op = call.map_or("loop", |call| &phase.forms[phase.calls[call].form].op);
        let title = format!("work of {}", thread(part.thread));
        all.add((Group::Work, part.thread.into()), &title, op, part.start, part.end);
    }
    for work in &phase.work {
        let title = format!("cuda:{} stream {}", work.device, work.stream);
        all.add(
            (Group::Gpu, (u64::from(work.device) << 32) | work.stream),
            &title,
            &work.name,
            work.start,
            work.end,
        );
    }
    let cut = all.tracks.values().map(|(_, slices)| slices.len()).sum::<usize>() > MOST_SLICES;
    let end = if cut { end_of_first(&all) } else { phase.end };
    let us = |ns: u64| ns.saturating_sub(phase.start) as f64 / 1e3;
    let tracks: Vec<Value> = all
        .tracks
        .into_values()
        .map(|(title, mut slices)| {
            slices.retain(|slice| slice.0 <= end);
            slices.sort_by_key(|(start, end, _)| (*start, std::cmp::Reverse(*end)));
            let intervals: Vec<_> = slices.iter().map(|(start, end, _)| (*start, *end)).collect();
            let slices: Vec<Value> = slices
                .iter()
                .zip(depths(&intervals))
                .map(|((start, end, name), depth)| json!([us(*start), us(*end) - us(*start), name, depth]))
                .collect();
            json!({ "title": title, "slices": slices })
        })
        .collect();
    json!({ "name": phase.name, "us": us(end), "cut": cut, "names": all.names, "tracks": tracks })
}

/// When this many slices have begun as are shown.
fn end_of_first(all: &Tracks) -> u64 {
    let mut starts: Vec<u64> =
        all.tracks.values().flat_map(|(_, slices)| slices.iter().map(|s| s.0)).collect();
    starts.sort_unstable();
    starts[MOST_SLICES - 1]
}

/// The row of each slice within its track: below what is around it, and beside what it overlaps.
fn depths(intervals: &[(u64, u64)]) -> Vec<usize> {
    let lanes = lanes(intervals);
    let mut open: Vec<(u64, usize)> = Vec::new();
    let depth = |(&(start, end), lane): (&(u64, u64), usize)| {
        open.retain(|(until, _)| *until > start);
        let used = |row: usize| open.iter().any(|(_, taken)| *taken == row);
        let row = (lane..).find(|row| !used(*row)).expect("there is always one more row");
        open.push((end, row));
        row
    };
    intervals.iter().zip(lanes).map(depth).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::sample;

    #[test]
    fn slices_are_below_what_is_around_them() {
        assert_eq!(depths(&[(0, 10), (1, 5), (2, 3), (5, 9), (10, 11)]), [0, 1, 2, 1, 0]);
        assert_eq!(depths(&[(0, 10), (5, 15)]), [0, 1]);
    }

    #[test]
    fn long_timelines_are_cut_and_say_so() {
        let mut profile = sample();
        let whole = data(&profile);
        assert_eq!(whole["phases"][1]["cut"], false);
        let call = profile.phases[1].calls[0];
        let at = |i: u64| crate::Call { start: call.start + i * 100, end: call.start + i * 100 + 50, ..call };
        profile.phases[1].calls = (0..50_000).map(at).collect();
        let cut = data(&profile);
        let tracks = cut["phases"][1]["tracks"].as_array().unwrap();
        let slices: usize = tracks.iter().map(|track| track["slices"].as_array().unwrap().len()).sum();
        assert_eq!(cut["phases"][1]["cut"], true);
        assert!((MOST_SLICES..MOST_SLICES + 10).contains(&slices), "{slices}");
    }
}
