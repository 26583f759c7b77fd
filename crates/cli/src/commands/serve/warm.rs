//! What happens before a server on a GPU is ready: all kernels of the model are compiled and loaded, and its graphs captured, so
//! that no request waits for that.

use crate::ahead::{compile_missing, missing};
use crate::source::Source;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use warpsmith::Device;
use warpsmith_engine::{Engine, OpenOptions, Result};

/// Time between two lines that tell how far it is.
const INTERVAL: Duration = Duration::from_secs(5);

/// Opens the model, and on a GPU prepares all that requests will need unless that is to be skipped. Kernels are compiled while the
/// weights are loaded.
pub fn open(source: &Source, options: OpenOptions, skips: bool) -> Result<Engine> {
    if skips || options.device() == Device::Cpu {
        return source.open_with(options);
    }
    let goes_on = AtomicBool::new(true);
    let mut engine = std::thread::scope(|scope| {
        let kernels = scope.spawn(|| kernels(source, &options, &goes_on));
        let engine = source.open_with(options.clone());
        // Without a model nobody needs them.
        goes_on.store(engine.is_ok(), Ordering::Relaxed);
        if kernels.join().is_err() {
            eprintln!(
                "warning: compiling kernels ahead of time failed; they are compiled when they are needed"
            );
        }
        engine
    })?;
    let (log, began) = (Log::new("captured", "graphs of decode steps"), Instant::now());
    engine.warm_up(&mut |done, all| log.tell(done, all))?;
    match engine.graph_failure() {
        Some(why) => eprintln!("warning: steps run call by call, because graphs cannot be captured: {why}"),
        None => eprintln!(
            "captured {} graphs of decode steps in {:.1} s",
            engine.stats().graphs,
            began.elapsed().as_secs_f64()
        ),
    }
    Ok(engine)
}

/// Compiles and loads what the model needs. What fails here is told, and fails again where it is needed.
fn kernels(source: &Source, options: &OpenOptions, goes_on: &AtomicBool) {
    let (device, began) = (options.device(), Instant::now());
    // Where this fails, opening the model says why.
    let Ok(info) = device.info() else { return };
    let Some(arch) = info.arch else { return };
    let Ok(needed) = source.needed_kernels(options, info) else { return };
    let missing = missing(needed.clone(), arch);
    if !missing.is_empty() {
        eprintln!("{} kernels are needed, {} of them to be compiled", needed.len(), missing.len());
    }
    let (log, done) = (Log::new("compiled", "kernels"), AtomicUsize::new(0));
    let tick = || log.tell(done.fetch_add(1, Ordering::Relaxed) + 1, missing.len());
    compile_missing(&missing, arch, None, &|| goes_on.load(Ordering::Relaxed), &tick);
    let mut failures = Vec::new();
    for needed in &needed {
        if !goes_on.load(Ordering::Relaxed) {
            return;
        }
        if let Err(error) = needed.load(device) {
            failures.push(error.to_string());
        }
    }
    if let Some(first) = failures.first() {
        eprintln!(
            "warning: {} of {} kernels are not there, the first because: {first}",
            failures.len(),
            needed.len()
        );
    }
    let (seconds, loaded) = (began.elapsed().as_secs_f64(), needed.len() - failures.len());
    eprintln!("loaded {loaded} kernels in {seconds:.1} s, {} of them compiled now", missing.len());
}

/// Tells how far something is, now and then: a log that is read later has a few lines, not one for each.
struct Log {
    done: &'static str,
    what: &'static str,
    last: Mutex<Instant>,
}

impl Log {
    fn new(done: &'static str, what: &'static str) -> Log {
        Log { done, what, last: Mutex::new(Instant::now()) }
    }

    fn tell(&self, done: usize, all: usize) {
        let mut last = self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if last.elapsed() >= INTERVAL && done < all {
            *last = Instant::now();
            eprintln!("{} {done} of {all} {}", self.done, self.what);
        }
    }
}
