//! `warpsmith profile`: where the time of an op or a model goes.

mod model;
mod op;

use crate::model::{ModelArgs, at_least_one};
use crate::source;
use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith::profile::{Records, Session};
use warpsmith::{Device, Result};
use warpsmith_profile::capture::{Limits, about, phase};
use warpsmith_profile::summary::Summary;
use warpsmith_profile::{Phase, Profile, Step, memory_peaks, report, text, trace};

/// Show where the time of an op or a model goes
///
/// For each kernel: its time and share, calls, the bytes and operations that its op needs at least, and the part of the
/// machine's measured limit that it reaches. Of a model, prompts and decode steps are shown apart. The time of a step is
/// printed with and without the profile, so that its cost is seen. Busy and idle time add up to the traced step.
///
/// The trace opens in ui.perfetto.dev and chrome://tracing, the report in any browser; neither needs a network.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The op (see `warpsmith list`), unless a model is profiled
    #[arg(conflicts_with_all = ["model", "random"])]
    op: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
    #[arg(long, value_name = "CONFIG", conflicts_with = "model", help = source::RANDOM)]
    random: Option<String>,
    /// Of an op: sizes that are not given have their defaults
    #[arg(long, value_name = "SIZE=VALUE", num_args = 1.., requires = "op")]
    shape: Vec<String>,
    /// Of an op: set an option; can be repeated
    #[arg(long = "set", value_name = "OPTION=VALUE", requires = "op")]
    options: Vec<String>,
    /// Of an op: give this optional argument; can be repeated
    #[arg(long = "with", value_name = "ARGUMENT", requires = "op")]
    with: Vec<String>,
    /// Of an op: use this kernel or fail
    #[arg(long, requires = "op")]
    kernel: Option<String>,
    /// Of an op: calls that are recorded
    #[arg(long, value_name = "CALLS", default_value_t = 100, requires = "op", value_parser = at_least_one())]
    calls: usize,
    /// Of a model: tokens of each prompt
    #[arg(long, short = 'p', value_name = "TOKENS", default_value_t = 128, value_parser = at_least_one(), conflicts_with = "op")]
    prompt: usize,
    /// Of a model: decode steps
    #[arg(long, short = 'n', value_name = "STEPS", default_value_t = 16, value_parser = at_least_one(), conflicts_with = "op")]
    generate: usize,
    /// Of a model: requests at the same time
    #[arg(long, short = 'b', value_name = "REQUESTS", default_value_t = 1, value_parser = at_least_one(), conflicts_with = "op")]
    batch: usize,
    /// Runs without a profile, whose median is the untraced time, and with one, of which the median is shown
    #[arg(long, short = 'r', value_name = "RUNS", default_value_t = 5, value_parser = at_least_one())]
    repetitions: usize,
    /// Write a timeline for Perfetto and chrome://tracing; compressed if the name ends in .gz
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a page with the roofline, the timeline and tables: one file, for any browser
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith profile rms_norm --shape num_tokens=512 hidden=4096 --with weight
  warpsmith profile --model model.gguf --report report.html
  warpsmith profile --random qwen3-0.6b -p 512 -n 32 --trace trace.json.gz
  warpsmith profile linear --device cuda --json";

/// The time of each step in runs without a profile, in seconds, and what was recorded in one with it.
struct Measured {
    name: String,
    steps: usize,
    untraced: Vec<f64>,
    records: Records,
}

impl Measured {
    /// As a phase of a profile.
    fn phase(mut self, origin: u64, limits: &Limits) -> Phase {
        self.untraced.sort_by(f64::total_cmp);
        let wall = self.records.end - self.records.start;
        let step = Step {
            count: self.steps,
            traced_ns: wall as f64 / self.steps.max(1) as f64,
            untraced_ns: 1e9 * self.untraced.get(self.untraced.len() / 2).copied().unwrap_or(0.0),
            runs: self.untraced.len(),
        };
        Phase { step: Some(step), ..phase(&self.name, self.records, origin, limits) }
    }
}

pub fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    args.model.on_threads(|| profile(args))
}

fn profile(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let device = args.model.device();
    let (title, measured) = match &args.op {
        Some(op) => op::measure(args, op, device)?,
        None => model::measure(args, device)?,
    };
    let limits = Limits::measure(device)?;
    let origin = measured.iter().map(|phase| phase.records.start).min().unwrap_or(0);
    let phases = measured.into_iter().map(|measured| measured.phase(origin, &limits)).collect();
    let profile = Profile { about: about(title, command_line(std::env::args()), &limits), phases };
    for (path, what, save) in [
        (&args.trace, "the timeline", trace::save as fn(&Profile, &Path) -> _),
        (&args.report, "the report", report::save),
    ] {
        if let Some(path) = path {
            let bytes = save(&profile, path)?;
            eprintln!("{what} is in {} ({})", path.display(), text::amount(bytes as f64, "B"));
        }
    }
    match args.json {
        true => println!("{:#}", json(&profile)),
        false => print!("{}", text::report(&profile)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Of several recordings, the one whose time is the median.
fn median(mut records: Vec<Records>) -> Records {
    records.sort_by_key(|records| records.end - records.start);
    let middle = records.len() / 2;
    records.into_iter().nth(middle).unwrap_or_default()
}

/// Records what `work` does on a device, to its end.
fn record<R, E: From<warpsmith::Error>>(
    device: Device,
    work: impl FnOnce() -> std::result::Result<R, E>,
) -> std::result::Result<(R, Records), E> {
    device.synchronize()?;
    let session = Session::start()?;
    let result = work()?;
    Ok((result, session.stop()))
}

/// The profile without what happened when: tables alone.
fn json(profile: &Profile) -> Value {
    let phases = profile.phases.iter().map(|phase| {
        json!({
            "name": phase.name, "step": phase.step, "clock": phase.clock, "notes": phase.notes,
            "summary": Summary::of(phase), "memory": memory_peaks(phase),
        })
    });
    json!({ "about": profile.about, "phases": phases.collect::<Vec<_>>() })
}

/// A command line that a shell reads as it was.
fn command_line(words: impl Iterator<Item = String>) -> String {
    let is_plain = |word: &str| {
        !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_=./:,+@%".contains(c))
    };
    let quoted = |word: String| {
        if is_plain(&word) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
    };
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_pasted() {
        let line = |words: &[&str]| command_line(words.iter().map(ToString::to_string));
        assert_eq!(
            line(&["warpsmith", "profile", "--report", "a b.html"]),
            "warpsmith profile --report 'a b.html'"
        );
        assert_eq!(line(&["x", "it's", "", "$HOME"]), "x 'it'\\''s' '' '$HOME'");
    }
}
