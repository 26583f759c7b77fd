//! Whether a timeline is one that viewers show as it is meant.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a timeline holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Slices by category.
    pub slices: BTreeMap<String, usize>,
    /// The names of all tracks that hold slices.
    pub tracks: Vec<String>,
    /// Arrows.
    pub flows: usize,
    /// Values of counters.
    pub counters: usize,
}

impl Seen {
    /// Slices of a category.
    pub fn slices_of(&self, category: &str) -> usize {
        self.slices.get(category).copied().unwrap_or(0)
    }
}

/// What is wrong with a timeline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{what}", .event.map(|event| format!("event {event}: ")).unwrap_or_default())]
pub struct Fault {
    /// The event, by its place.
    pub event: Option<usize>,
    /// What is wrong.
    pub what: String,
}

type Track = (u64, u64);
/// An end of an arrow: its time, its track, and the place of its event.
type End = (u64, Track, usize);

/// An event, and its place among all.
struct Event<'a>(usize, &'a Value);

impl Event<'_> {
    fn fault(&self, what: impl Into<String>) -> Fault {
        Fault { event: Some(self.0), what: what.into() }
    }

    fn text(&self, member: &str) -> Result<&str, Fault> {
        let text = self.1[member].as_str().filter(|text| !text.is_empty());
        text.ok_or_else(|| self.fault(format!("`{member}` is no text")))
    }

    fn number(&self, member: &str) -> Result<u64, Fault> {
        self.1[member].as_u64().ok_or_else(|| self.fault(format!("`{member}` is no number")))
    }

    /// A time in nanoseconds. Its text has microseconds with three decimals.
    fn time(&self, member: &str) -> Result<u64, Fault> {
        let time = self.1[member].as_f64().filter(|time| *time >= 0.0);
        let time = time.ok_or_else(|| self.fault(format!("`{member}` is no time from the start on")))?;
        Ok((time * 1e3).round() as u64)
    }

    fn track(&self) -> Result<Track, Fault> {
        Ok((self.number("pid")?, self.number("tid")?))
    }
}

/// Checks a timeline: every event is known and complete; slices of a track nest; tracks and processes have names; each
/// arrow begins and ends in a slice, and not before it began.
///
/// # Errors
/// Says what is wrong first.
pub fn check(json: &str) -> Result<Seen, Fault> {
    let fault = |what: String| Fault { event: None, what };
    let root: Value = serde_json::from_str(json).map_err(|error| fault(error.to_string()))?;
    if root["displayTimeUnit"] != "ns" {
        return Err(fault("`displayTimeUnit` is not ns".into()));
    }
    let events = root["traceEvents"].as_array().ok_or_else(|| fault("no `traceEvents`".into()))?;
    let mut seen = Seen::default();
    let mut slices: BTreeMap<Track, Vec<(u64, u64, usize)>> = BTreeMap::new();
    let mut names: HashMap<Track, String> = HashMap::new();
    let mut processes: BTreeSet<u64> = BTreeSet::new();
    let mut arrows: HashMap<u64, [Vec<End>; 2]> = HashMap::new();
    for (place, event) in events.iter().enumerate() {
        let event = Event(place, event);
        match event.text("ph")? {
            "M" => match event.text("name")? {
                "process_name" => drop(processes.insert(event.number("pid")?)),
                "thread_name" => {
                    let name = event.1["args"]["name"].as_str().unwrap_or_default();
                    names.insert(event.track()?, name.into());
                }
                "process_sort_index" | "thread_sort_index" => {}
                other => return Err(event.fault(format!("unknown metadata `{other}`"))),
            },
            "X" => {
                event.text("name")?;
                let (start, time) = (event.time("ts")?, event.time("dur")?);
                *seen.slices.entry(event.text("cat")?.into()).or_default() += 1;
                slices.entry(event.track()?).or_default().push((start, start + time, place));
            }
            "C" => {
                event.time("ts")?;
                seen.counters += 1;
            }
            kind @ ("s" | "f") => {
                if kind == "f" && event.1["bp"] != "e" {
                    return Err(event.fault("the end of an arrow is not bound to the slice around it"));
                }
                let end = (event.time("ts")?, event.track()?, place);
                arrows.entry(event.number("id")?).or_default()[usize::from(kind == "f")].push(end);
            }
            other => return Err(event.fault(format!("unknown kind `{other}`"))),
        }
    }
    for (track, slices) in &mut slices {
        nest(slices)?;
        let name = names.get(track).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| fault(format!("track {track:?} has no name")))?;
        if !processes.contains(&track.0) {
            return Err(fault(format!("process {} has no name", track.0)));
        }
        seen.tracks.push(name.clone());
    }
    for (id, [starts, ends]) in &arrows {
        let [start] = &starts[..] else {
            return Err(fault(format!("arrow {id} begins {} times", starts.len())));
        };
        for end in ends.iter().chain([start]) {
            let inside = |slices: &Vec<(u64, u64, usize)>| {
                slices.iter().any(|(from, to, _)| (*from..=*to).contains(&end.0))
            };
            if !slices.get(&end.1).is_some_and(inside) || end.0 < start.0 {
                return Err(Event(end.2, &Value::Null).fault(format!("arrow {id} is not in a slice")));
            }
        }
        seen.flows += ends.len();
    }
    Ok(seen)
}

/// Requires the slices of a track to nest.
fn nest(slices: &mut [(u64, u64, usize)]) -> Result<(), Fault> {
    slices.sort_by_key(|(start, end, _)| (*start, std::cmp::Reverse(*end)));
    let mut open: Vec<(u64, usize)> = Vec::new();
    for &(start, end, place) in slices.iter() {
        while open.last().is_some_and(|(outer, _)| *outer <= start) {
            open.pop();
        }
        if let Some((outer, other)) = open.last()
            && end > *outer
        {
            let what = format!("it overlaps event {other} of its track in part");
            return Err(Fault { event: Some(place), what });
        }
        open.push((end, place));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(events: &str) -> String {
        let names = r#"{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"p"}},
            {"ph":"M","name":"thread_name","pid":1,"tid":2,"args":{"name":"t"}}"#;
        format!(r#"{{"traceEvents":[{names},{events}],"displayTimeUnit":"ns"}}"#)
    }

    fn slice(start: f64, time: f64) -> String {
        format!(r#"{{"ph":"X","name":"a","cat":"op","pid":1,"tid":2,"ts":{start},"dur":{time}}}"#)
    }

    #[test]
    fn what_viewers_would_show_wrongly_is_refused() {
        let nested = [slice(0.0, 10.0), slice(1.0, 2.5), slice(3.5, 6.5)].join(",");
        let seen = check(&timeline(&nested)).unwrap();
        assert_eq!((seen.slices_of("op"), seen.tracks), (3, vec!["t".to_string()]));
        let arrow =
            |kind: &str, at: f64| format!(r#"{{"ph":"{kind}","bp":"e","id":5,"pid":1,"tid":2,"ts":{at}}}"#);
        let arrows = [slice(0.0, 10.0), slice(20.0, 1.0), arrow("s", 1.0), arrow("f", 20.0)].join(",");
        assert_eq!(check(&timeline(&arrows)).unwrap().flows, 1);
        for (events, told) in [
            ([slice(0.0, 10.0), slice(5.0, 10.0)].join(","), "overlaps event 2"),
            (slice(-1.0, 10.0), "no time from the start"),
            (slice(0.0, 10.0).replace("\"tid\":2", "\"tid\":3"), "has no name"),
            (slice(0.0, 10.0).replace("\"a\"", "\"\""), "`name` is no text"),
            (slice(0.0, 10.0).replace("\"X\"", "\"Q\""), "unknown kind"),
            ([slice(0.0, 10.0), arrow("s", 11.0), arrow("f", 12.0)].join(","), "not in a slice"),
            ([slice(0.0, 10.0), arrow("f", 5.0)].join(","), "begins 0 times"),
            ([slice(0.0, 10.0), arrow("s", 5.0), arrow("f", 4.0)].join(","), "not in a slice"),
        ] {
            let fault = check(&timeline(&events)).unwrap_err().to_string();
            assert!(fault.contains(told), "{fault:?} instead of {told:?}");
        }
        assert!(check("[]").is_err() && check("{").is_err());
    }
}
