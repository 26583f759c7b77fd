//! What GPUs did, from CUPTI's activity records: kernels, those of graphs too, and copies.
//!
//! The library is loaded when the first profile begins, and stays at work until the process ends: releases before 13.1
//! assign the kernels of graphs wrongly from a second start on. What it delivers between profiles is dropped. Where it
//! cannot be used, times are taken by events, and the profile says why.

mod library;
mod record;

use super::context::{Context, lock};
use crate::profile::{self, DeviceSource, DeviceWork};
use cudarc::driver::sys::CUgraphNode;
use library::Library;
use record::Record;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// Whether records are delivered.
static ON: AtomicBool = AtomicBool::new(false);
/// What was delivered and not taken yet.
static RECORDS: Mutex<Vec<Record>> = Mutex::new(Vec::new());
/// Records kept at most. What comes later is dropped.
const MOST_RECORDS: usize = 1 << 22;

static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();

/// The devices in use.
static CONTEXTS: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());

/// Has profiles ask here for what GPUs did, this one too.
pub(super) fn register(context: &'static Context) {
    lock(&CONTEXTS).push(context);
    profile::register_device(&Activity);
}

/// Whether records are delivered, so that events are not needed.
pub(super) fn is_on() -> bool {
    ON.load(Ordering::Acquire)
}

/// The number that records give a node of a graph, if there are records and the library can say.
pub(super) fn node_number(node: CUgraphNode) -> Option<u64> {
    match LIBRARY.get().filter(|_| is_on()) {
        Some(Ok(library)) => library.node_number(node),
        _ => None,
    }
}

/// While it lives, what this thread gives to a GPU is done for a call, or for the launch of a graph.
pub(super) struct ForCall(());

impl ForCall {
    pub fn begin(call: u64) -> Option<ForCall> {
        let Some(Ok(library)) = LIBRARY.get().filter(|_| is_on()) else { return None };
        library.push(call).then_some(ForCall(()))
    }
}

impl Drop for ForCall {
    fn drop(&mut self) {
        if let Some(Ok(library)) = LIBRARY.get() {
            library.pop();
        }
    }
}

/// The source of activity records.
struct Activity;

impl DeviceSource for Activity {
    fn start(&self) -> Result<(), String> {
        let library = LIBRARY.get_or_init(|| {
            let library = Library::open()?;
            ON.store(true, Ordering::Release);
            Ok(library)
        });
        let library = library.as_ref().map_err(String::clone)?;
        // What happened before the profile is not part of it.
        library.flush();
        lock(&RECORDS).clear();
        Ok(())
    }

    fn wait(&self) {
        let contexts = lock(&CONTEXTS).clone();
        for context in contexts {
            let _ = context.synchronize();
        }
    }

    fn take(&self) -> Vec<DeviceWork> {
        let Some(Ok(library)) = LIBRARY.get() else { return Vec::new() };
        // The records come on this thread or another while this waits: no lock may be held.
        library.flush();
        works(std::mem::take(&mut *lock(&RECORDS)))
    }
}

/// Keeps a record.
fn keep(record: Record) {
    let mut records = lock(&RECORDS);
    if records.len() < MOST_RECORDS {
        records.push(record);
    }
}

/// The work in records, with the calls that it was done for.
fn works(records: Vec<Record>) -> Vec<DeviceWork> {
    let mut calls: HashMap<u32, u64> = HashMap::new();
    for record in &records {
        if let Record::For { call, correlation } = record {
            calls.insert(*correlation, *call);
        }
    }
    let work = |record| match record {
        // Without times it was lost on the way.
        Record::Work(work) if work.start > 0 && work.end >= work.start => {
            // All nodes of a graph have the number of its launch.
            Some(DeviceWork { call: calls.get(&work.correlation).copied(), ..work })
        }
        _ => None,
    };
    records.into_iter().filter_map(work).collect()
}

#[cfg(feature = "tests")]
mod tests {
    use super::*;

    #[test]
    fn work_is_assigned_to_calls_and_launches() {
        let work = |correlation, graph_node, start| {
            let name = format!("kernel {correlation}");
            Record::Work(DeviceWork {
                name,
                correlation,
                graph_node,
                start,
                end: start + 5,
                ..DeviceWork::default()
            })
        };
        let found = works(vec![
            work(1, 0, 10),
            Record::For { call: 77, correlation: 1 },
            Record::For { call: 78, correlation: 2 },
            work(2, 9, 20),
            work(3, 0, 30),
            work(4, 0, 0),
        ]);
        let calls: Vec<_> = found.iter().map(|work| (work.correlation, work.call)).collect();
        assert_eq!(calls, [(1, Some(77)), (2, Some(78)), (3, None)]);
    }

    #[test]
    fn a_machine_without_the_library_says_so() {
        // Where there is one, it starts, or says what keeps it from doing so.
        if let Err(why) = Activity.start() {
            assert!(why.len() > 10, "{why}");
            assert!(!is_on() && Activity.take().is_empty() && ForCall::begin(1).is_none());
        }
    }
}
