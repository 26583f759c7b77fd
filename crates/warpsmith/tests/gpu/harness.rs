//! Runs the tests one after the other, understands the usual arguments of test binaries, and records what passed.
//!
//! The standard harness cannot say at run time that a test was ignored; here one that lacks its device is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use warpsmith::Device;
use warpsmith::env;
use warpsmith::lab::evidence::{Machine, Record, TestRecord};

/// One test.
pub struct Test {
    /// `module::function`.
    pub name: &'static str,
    /// Why it runs only when asked for with `--ignored`.
    pub alone: Option<&'static str>,
    pub run: fn(),
}

/// The tests of a module, `TESTS`: names of functions, with the reason where one is run only when asked for.
macro_rules! tests {
    ($($name:ident $((alone: $why:literal))?;)*) => {
        pub const TESTS: &[crate::harness::Test] = &[$(crate::harness::Test {
            name: concat!(module_path!(), "::", stringify!($name)),
            alone: [$(Some($why),)? None][0],
            run: $name,
        }),*];
    };
}
pub(crate) use tests;

/// Why the test that runs now cannot.
static SKIPPED: Mutex<Option<String>> = Mutex::new(None);

/// The test that runs now counts as ignored.
pub fn skip<T>(why: impl Into<String>) -> Option<T> {
    *SKIPPED.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.into());
    None
}

enum Outcome {
    Passed,
    Failed,
    Ignored(String),
}

/// What is run and how, as `cargo test` says it.
#[derive(Default)]
struct Arguments {
    filters: Vec<String>,
    skips: Vec<String>,
    exact: bool,
    list: bool,
    ignored: bool,
    include_ignored: bool,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
        let mut arguments = Arguments::default();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word}: expected a value"));
            match word.as_str() {
                "--exact" => arguments.exact = true,
                "--list" => arguments.list = true,
                "--ignored" => arguments.ignored = true,
                "--include-ignored" => arguments.include_ignored = true,
                "--skip" => arguments.skips.push(value()?),
                // Tests are run one by one and what they print is never held back.
                "--nocapture" | "--no-capture" | "--show-output" | "-q" | "--quiet" => {}
                "--test-threads" | "--format" | "--color" => drop(value()?),
                _ if word.starts_with("--test-threads=") || word.starts_with("--color=") => {}
                _ if word.starts_with('-') => return Err(format!("{word}: no such option")),
                _ => arguments.filters.push(word),
            }
        }
        Ok(arguments)
    }

    fn wants(&self, name: &str) -> bool {
        let fits = |filter: &String| if self.exact { name == filter } else { name.contains(filter.as_str()) };
        (self.filters.is_empty() || self.filters.iter().any(fits)) && !self.skips.iter().any(fits)
    }
}

/// Runs the tests of modules, each with the text of its file.
pub fn main(modules: &[(&'static [Test], &'static str)]) -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    for (_, source) in modules {
        let forgotten = source.contains("#[test]");
        assert!(!forgotten, "a test must be named in `tests!`: the attribute has no meaning here");
    }
    let all = || modules.iter().flat_map(|&(tests, source)| tests.iter().map(move |test| (test, source)));
    let name = |test: &Test| test.name.split_once("::").map_or(test.name, |(_, name)| name);
    let chosen: Vec<_> = all().filter(|(test, _)| arguments.wants(name(test))).collect();
    if arguments.list {
        chosen.iter().for_each(|(test, _)| println!("{}: test", name(test)));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", chosen.len());
    let begin = Instant::now();
    let mut records = Vec::new();
    let (mut failed, mut ignored, mut passed) = (Vec::new(), 0, 0);
    for &(test, source) in &chosen {
        let waits = test.alone.filter(|_| !arguments.ignored && !arguments.include_ignored);
        let outcome = match waits {
            Some(why) => Outcome::Ignored(why.into()),
            None if arguments.ignored && test.alone.is_none() => continue,
            None => run(test),
        };
        match &outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed => failed.push(name(test)),
            Outcome::Ignored(_) => ignored += 1,
        }
        println!(
            "test {} ... {}",
            name(test),
            match &outcome {
                Outcome::Passed => "ok".into(),
                Outcome::Failed => "FAILED".into(),
                Outcome::Ignored(why) => format!("ignored, {why}"),
            }
        );
        if !matches!(outcome, Outcome::Ignored(_)) {
            records.push((name(test), TestRecord::new(source, matches!(outcome, Outcome::Passed))));
        }
    }
    if !failed.is_empty() {
        println!("\nfailures:\n    {}", failed.join("\n    "));
    }
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    let (filtered, seconds) =
        (all().count() - passed - ignored - failed.len(), begin.elapsed().as_secs_f64());
    println!(
        "\ntest result: {verdict}. {passed} passed; {} failed; {ignored} ignored; 0 measured; {filtered} filtered out; \
         finished in {seconds:.2}s\n",
        failed.len()
    );
    if let Err(error) = record(records) {
        eprintln!("nothing was recorded: {error}");
        return ExitCode::FAILURE;
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(test: &Test) -> Outcome {
    *SKIPPED.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let passes = catch_unwind(AssertUnwindSafe(test.run)).is_ok();
    match SKIPPED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        _ if !passes => Outcome::Failed,
        Some(why) => Outcome::Ignored(why),
        None => Outcome::Passed,
    }
}

/// Adds what was run to the evidence in the folder that [`env::RECORD`] names, if it does.
fn record(tests: Vec<(&str, TestRecord)>) -> warpsmith::Result<()> {
    let Some(folder) = env::path(env::RECORD).filter(|_| !tests.is_empty()) else { return Ok(()) };
    let mut record = Record::open(&folder, Machine::of(Device::Cuda(0))?)?;
    for (name, test) in tests {
        record.add_test(name, test);
    }
    println!("recorded in {}", record.save(&folder)?.display());
    Ok(())
}
