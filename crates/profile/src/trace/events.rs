//! The events of a timeline.

use crate::intervals::lanes;
use crate::memory::{devices, live};
use crate::model::{Form, Phase, Profile, SpanKind};
use crate::text::amount;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;

/// Processes of the timeline: the phases, the host, requests, and from here on the GPUs.
const PHASES: u32 = 0;
const HOST: u32 = 1;
const REQUESTS: u32 = 2;
const GPUS: u32 = 10;

/// A track: process, and thread, request or stream in it.
type Track = (u32, u64);

/// What happened on a track for some time.
struct Slice {
    start: u64,
    end: u64,
    category: &'static str,
    name: String,
    /// The members of `args`, as JSON.
    args: String,
    /// The arrow that begins or ends here.
    flow: Option<Flow>,
}

#[derive(Clone, Copy)]
enum Flow {
    From(u64),
    To(u64),
}

/// The events of a profile, by track.
#[derive(Default)]
pub struct Events {
    slices: BTreeMap<Track, Vec<Slice>>,
    names: BTreeMap<Track, String>,
    counters: Vec<(u32, String, u64, i64)>,
}

impl Events {
    /// Adds all that happened in a phase.
    pub fn phase(&mut self, number: usize, phase: &Phase) {
        let whole = Slice::new("phase", &phase.name, phase.start, phase.end);
        self.add((PHASES, 0), "phases", whole);
        for (thread, name) in phase.threads.iter().enumerate() {
            self.names.entry((HOST, thread as u64)).or_insert_with(|| name.clone());
        }
        self.spans(phase);
        self.calls(phase);
        self.loops(phase);
        self.work(phase);
        for device in devices(phase) {
            let (process, name) = device.map_or((HOST, "host".into()), |n| (GPUS + n, format!("cuda:{n}")));
            for (at, bytes) in live(phase, device) {
                self.counters.push((process, format!("memory of {name}, phase {number}"), at, bytes));
            }
        }
    }

    fn add(&mut self, track: Track, name: &str, slice: Slice) {
        self.names.entry(track).or_insert_with(|| name.into());
        self.slices.entry(track).or_default().push(slice);
    }

    fn thread(&mut self, phase: &Phase, thread: u32, slice: Slice) {
        let name = phase.threads.get(thread as usize).cloned().unwrap_or_else(|| format!("thread {thread}"));
        self.add((HOST, thread.into()), &name, slice);
    }

    fn spans(&mut self, phase: &Phase) {
        for span in &phase.spans {
            let category = match span.kind {
                SpanKind::Request => "request",
                SpanKind::Step => "step",
                SpanKind::Layer => "layer",
                SpanKind::Host => "host",
                SpanKind::User => "span",
            };
            let slice = Slice::new(category, &span.name, span.start, span.end);
            match span.track {
                Some(track) => self.add((REQUESTS, track), &format!("request {track}"), slice),
                None => self.thread(phase, span.thread, slice),
            }
        }
    }

    fn calls(&mut self, phase: &Phase) {
        let launched: HashSet<u64> = phase.work.iter().filter_map(|work| work.call).collect();
        for call in &phase.calls {
            let form = &phase.forms[call.form];
            let mut slice = Slice::new("op", &form.op, call.start, call.end);
            // On a GPU the call only gives the work to a stream.
            let on_host = form.device == "cpu";
            slice.args = form_args(form, on_host.then(|| call.end.saturating_sub(call.start)));
            slice.flow = launched.contains(&call.id).then_some(Flow::From(call.id));
            self.thread(phase, call.thread, slice);
        }
    }

    fn loops(&mut self, phase: &Phase) {
        let loops: HashMap<u64, _> = phase.loops.iter().map(|one| (one.id, one)).collect();
        let of_call = |call: Option<usize>| {
            call.map_or("loop".into(), |call| phase.forms[phase.calls[call].form].op.clone())
        };
        let calls = phase.calls_of_loops().into_iter().map(of_call);
        let known: HashMap<u64, String> = phase.loops.iter().map(|one| one.id).zip(calls).collect();
        for part in &phase.parts {
            let Some(one) = loops.get(&part.id) else { continue };
            self.thread(phase, part.thread, Slice::new("work", &known[&part.id], part.start, part.end));
            if part.thread == one.thread && part.end < one.end {
                self.thread(phase, part.thread, Slice::new("wait", "wait for threads", part.end, one.end));
            }
        }
    }

    fn work(&mut self, phase: &Phase) {
        let called: HashSet<u64> = phase.calls.iter().map(|call| call.id).collect();
        // A call's limit is that of all its kernels together.
        let mut took: HashMap<u64, u64> = HashMap::new();
        let times = phase.work_times();
        for (work, time) in phase.work.iter().zip(&times) {
            if let Some(call) = work.call {
                *took.entry(call).or_default() += time;
            }
        }
        for (work, time) in phase.work.iter().zip(times) {
            let form = work.form.map(|form| &phase.forms[form]);
            let mut slice = Slice::new("kernel", &work.name, work.start, work.end);
            let time = work.call.map_or(time, |call| took[&call]);
            slice.args = form.map_or(String::new(), |form| form_args(form, Some(time)));
            let numbers = [
                ("stream", work.stream),
                ("correlation", work.correlation.into()),
                ("graph node", work.graph_node),
                ("registers per thread", work.registers.into()),
                ("shared bytes per block", work.shared_bytes.into()),
                ("blocks", work.blocks),
                ("threads per block", work.block_threads.into()),
            ];
            for (name, value) in numbers.into_iter().filter(|(_, value)| *value > 0) {
                member(&mut slice.args, name, &value.to_string());
            }
            slice.flow = work.call.filter(|call| called.contains(call)).map(Flow::To);
            self.names
                .entry((GPUS + work.device, work.stream))
                .or_insert_with(|| format!("stream {}", work.stream));
            self.slices.entry((GPUS + work.device, work.stream)).or_default().push(slice);
        }
    }

    /// All events as one JSON object.
    pub fn into_json(mut self, profile: &Profile) -> String {
        let mut out = String::from("{\"traceEvents\":[\n");
        let mut begin = "";
        let mut event = |line: std::fmt::Arguments<'_>| {
            let _ = write!(out, "{begin}{line}");
            begin = ",\n";
        };
        let mut processes: Vec<u32> = self.names.keys().map(|(process, _)| *process).collect();
        processes.extend(self.counters.iter().map(|(process, ..)| *process));
        processes.sort_unstable();
        processes.dedup();
        for process in processes {
            let name = match process {
                PHASES => "phases".into(),
                HOST => "host".into(),
                REQUESTS => "requests".into(),
                gpu => format!("cuda:{}", gpu - GPUS),
            };
            let name = text(&name);
            event(format_args!(
                r#"{{"ph":"M","name":"process_name","pid":{process},"tid":0,"args":{{"name":{name}}}}}"#
            ));
            event(format_args!(
                r#"{{"ph":"M","name":"process_sort_index","pid":{process},"tid":0,"args":{{"sort_index":{process}}}}}"#
            ));
        }
        // Numbers of further tracks lie beyond all that exist.
        let mut further = self.names.keys().map(|(_, thread)| *thread).max().unwrap_or(0) + 1;
        for (&(process, thread), name) in &self.names {
            let mut slices = self.slices.remove(&(process, thread)).unwrap_or_default();
            slices.sort_by_key(|slice| (slice.start, std::cmp::Reverse(slice.end)));
            let intervals: Vec<_> = slices.iter().map(|slice| (slice.start, slice.end)).collect();
            let lane_of = lanes(&intervals);
            let count = lane_of.iter().max().map_or(1, |last| last + 1);
            let mut tracks = vec![thread];
            tracks.extend(further..further + count as u64 - 1);
            further += count as u64 - 1;
            for (lane, track) in tracks.iter().enumerate() {
                let name = if lane == 0 { name.clone() } else { format!("{name}, overlapping {lane}") };
                let name = text(&name);
                event(format_args!(
                    r#"{{"ph":"M","name":"thread_name","pid":{process},"tid":{track},"args":{{"name":{name}}}}}"#
                ));
                event(format_args!(
                    r#"{{"ph":"M","name":"thread_sort_index","pid":{process},"tid":{track},"args":{{"sort_index":{thread}}}}}"#
                ));
            }
            for (slice, lane) in slices.iter().zip(lane_of) {
                slice.write(process, tracks[lane], &mut event);
            }
        }
        for (process, name, at, bytes) in &self.counters {
            let (name, at) = (text(name), micros(*at));
            event(format_args!(
                r#"{{"ph":"C","name":{name},"pid":{process},"tid":0,"ts":{at},"args":{{"bytes":{bytes}}}}}"#
            ));
        }
        let (title, command) = (text(&profile.about.title), text(&profile.about.command));
        let _ = write!(
            out,
            "\n],\"displayTimeUnit\":\"ns\",\"baseTimeNanoseconds\":0,\"otherData\":{{\"title\":{title},\"command\":{command}}}}}\n"
        );
        out
    }
}

impl Slice {
    fn new(category: &'static str, name: &str, start: u64, end: u64) -> Slice {
        let name = if name.is_empty() { category } else { name };
        Slice { start, end: end.max(start), category, name: name.into(), args: String::new(), flow: None }
    }

    fn write(&self, process: u32, track: u64, event: &mut impl FnMut(std::fmt::Arguments<'_>)) {
        let (name, category) = (text(&self.name), self.category);
        let (start, time) = (micros(self.start), micros(self.end - self.start));
        let args = &self.args;
        event(format_args!(
            r#"{{"ph":"X","name":{name},"cat":"{category}","pid":{process},"tid":{track},"ts":{start},"dur":{time},"args":{{{args}}}}}"#
        ));
        match self.flow {
            Some(Flow::From(id)) => event(format_args!(
                r#"{{"ph":"s","name":"launch","cat":"ac2g","id":{id},"pid":{process},"tid":{track},"ts":{start}}}"#
            )),
            Some(Flow::To(id)) => event(format_args!(
                r#"{{"ph":"f","bp":"e","name":"launch","cat":"ac2g","id":{id},"pid":{process},"tid":{track},"ts":{start}}}"#
            )),
            None => {}
        }
    }
}

/// What is known of a form, with the part of its limit that `taken` nanoseconds are.
fn form_args(form: &Form, taken: Option<u64>) -> String {
    let mut args = String::new();
    member(&mut args, "kernel", &text(&form.kernel));
    member(&mut args, "args", &text(&form.args));
    member(&mut args, "bytes", &text(&amount(form.bytes, "B")));
    if form.flops > 0.0 {
        member(&mut args, "operations", &text(&amount(form.flops, "")));
    }
    if let (Some(limit), Some(taken)) = (form.limit_ns, taken.filter(|taken| *taken > 0)) {
        member(&mut args, "of limit", &text(&format!("{:.0} %", 100.0 * limit / taken as f64)));
    }
    args
}

/// Adds a member to an object. `value` is JSON.
fn member(object: &mut String, name: &str, value: &str) {
    if !object.is_empty() {
        object.push(',');
    }
    let _ = write!(object, "{}:{value}", text(name));
}

/// A text as JSON.
fn text(text: &str) -> String {
    serde_json::to_string(text).expect("texts are JSON")
}

/// Nanoseconds as microseconds, exactly.
fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}
