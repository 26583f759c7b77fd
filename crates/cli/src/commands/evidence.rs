//! `warpsmith evidence`: what was proven and measured, and on which machines.

use crate::{files, table};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith::lab::evidence::{self, PresentCode, Record};
use warpsmith::{Error, Result};

/// Show what was proven and measured on real machines
///
/// `warpsmith check --record` and `warpsmith bench --record` write the evidence: one file per device, with the source
/// hash of every kernel; so do the tests in tests/gpu with WARPSMITH_RECORD=evidence. A kernel is proven if its present
/// source passed every case. A dagger marks results of an earlier version of a kernel. Times are compared with the
/// ceilings measured in the same run.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
    /// Print one JSON object per case and per timing
    #[arg(long, conflicts_with_all = ["markdown", "check", "update_readme"])]
    json: bool,
    /// Print the README's table: one line per op
    #[arg(long)]
    markdown: bool,
    /// With --markdown: print the page of every device instead, with every timing and every check
    #[arg(long, requires = "markdown")]
    all: bool,
    /// Exit with 1 unless every CUDA kernel is proven, or named in unproven.txt with a reason
    #[arg(long)]
    check: bool,
    /// Rewrite the README's table and the page of every device in the evidence folder
    #[arg(long)]
    update_readme: bool,
    /// Record the summaries of sweeps: files that bench/sweep.py wrote on a device that has a record, all with the same
    /// version of each kernel
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "json")]
    sweep: Vec<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith evidence
  warpsmith evidence --json
  warpsmith evidence --check
  warpsmith evidence --update-readme
  warpsmith evidence --sweep target/sweep-cuda-1.jsonl --update-readme";

pub fn run(args: &Args) -> Result<ExitCode> {
    let folder = evidence::folder(args.evidence.as_deref())?;
    if !args.sweep.is_empty() {
        add_sweeps(&folder, &args.sweep)?;
    }
    let records = evidence::load(&folder)?;
    if args.json {
        for row in evidence::rows(&records) {
            println!("{}", serde_json::to_string(&row).expect("rows are plain data"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.update_readme {
        update(&folder, &records)?;
    }
    if args.markdown {
        match args.all {
            true => print!("{}", records.iter().map(evidence::page).collect::<Vec<_>>().join("\n")),
            false => print!("{}", evidence::overview(&records)),
        }
    }
    if args.check {
        let problems = evidence::unproven(&folder)?;
        for problem in &problems {
            println!("{problem}");
        }
        return Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if !args.markdown && !args.update_readme && args.sweep.is_empty() {
        print_tables(&records);
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds the summaries of the sweeps in these files to the record of their device.
fn add_sweeps(folder: &Path, paths: &[PathBuf]) -> Result<()> {
    let (device, sweeps) = evidence::read_sweeps(paths)?;
    let mut records = evidence::load(folder)?;
    let Some(record) = records.iter_mut().find(|record| record.machine.device == device) else {
        let known: Vec<&str> = records.iter().map(|record| record.machine.device.as_str()).collect();
        let expected = format!("rows of a device that has a record: {}", known.join(", "));
        return Err(Error::parse("sweep", expected, device));
    };
    record.add_sweeps(sweeps);
    eprintln!("recorded in {}", record.save(folder)?.display());
    Ok(())
}

/// The tests that need the device: how many passed, and which did not.
fn print_tests(record: &Record) {
    if record.tests.is_empty() {
        return;
    }
    let versions: BTreeSet<&str> = record.tests.values().map(|test| test.version.as_str()).collect();
    let versions: Vec<&str> = versions.into_iter().collect();
    let passed = record.tests.values().filter(|test| test.ok).count();
    let of = record.tests.len();
    println!("tests on the device: {passed} of {of} passed, of version {}", versions.join(", "));
    for (name, _) in record.tests.iter().filter(|(_, test)| !test.ok) {
        println!("  failed: {name}");
    }
}

/// Rewrites the table of the README beside the evidence folder, and the pages inside it.
fn update(folder: &Path, records: &[Record]) -> Result<()> {
    let folder = folder.canonicalize().map_err(|e| Error::io(folder, "resolving", &e))?;
    let readme = folder.parent().unwrap_or(&folder).join("README.md");
    let text = std::fs::read_to_string(&readme).map_err(|e| Error::io(&readme, "reading", &e))?;
    match evidence::embed(&text, &evidence::overview(records)) {
        Some(updated) => replace(&readme, &updated)?,
        None => eprintln!("README.md has no evidence markers: left alone"),
    }
    for record in records {
        replace(&folder.join(evidence::page_name(record)), &evidence::page(record))?;
    }
    Ok(())
}

/// Writes a file if its text differs.
fn replace(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    files::replace(path, text.as_bytes())?;
    eprintln!("updated {}", path.display());
    Ok(())
}

fn print_tables(records: &[Record]) {
    if records.is_empty() {
        println!("nothing is recorded yet: run `warpsmith check --record` and `warpsmith bench --record`");
    }
    let rows = evidence::rows(records);
    let present = PresentCode::new();
    for record in records {
        println!("{}", record.machine.device);
        let headings = ["op", "kernel", "cases", "worst", "sanitizer", "proven"].map(String::from);
        let mut kernels = table::new(&headings, 2);
        for (name, kernel) in &record.kernels {
            let proven =
                rows.iter().any(|row| row.kernel == *name && row.gpu == record.machine.device && row.proven);
            let passed = kernel.cases.iter().filter(|case| case.ok).count();
            let worst = kernel.cases.iter().filter_map(|case| case.worst).fold(0.0, f64::max);
            let tools: Vec<String> =
                kernel.sanitizer.iter().map(|(tool, verdict)| format!("{tool} {verdict}")).collect();
            kernels.add_row([
                kernel.op.clone(),
                name.clone(),
                format!("{passed}/{}", kernel.cases.len()),
                format!("{worst:.2}"),
                if tools.is_empty() { "-".into() } else { tools.join(", ") },
                if proven { "yes" } else { "no" }.to_string(),
            ]);
        }
        println!("{kernels}");
        print_tests(record);
        if record.timings.is_empty() {
            continue;
        }
        let headings =
            ["op", "case", "dtype", "kernel", "time", "rate", "of limit", "fastest peer", "speed-up"];
        let mut timings = table::new(&headings.map(String::from), 4);
        for t in &record.timings {
            let peer = t.best_peer();
            timings.add_row([
                t.op.clone(),
                t.case.clone(),
                t.dtype.clone(),
                t.kernel.clone(),
                table::time(t.ms) + present.mark(t),
                t.bound.rate(t.gbps, t.tflops),
                table::percent(t.limit_ms / t.ms),
                peer.map_or("-".into(), |(name, ms)| format!("{name} {}", table::time(ms))),
                peer.map_or("-".into(), |(_, ms)| format!("{:.2}x", ms / t.ms)),
            ]);
        }
        println!("{timings}");
        if record.timings.iter().any(|t| !present.mark(t).is_empty()) {
            println!("{}", evidence::EARLIER);
        }
    }
}
