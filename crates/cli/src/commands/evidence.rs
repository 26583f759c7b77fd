//! `warpsmith evidence`: what was proven and measured, and on which machines.

pub mod claims;
mod defaults;
mod refresh;
mod report;

use crate::inputs::parse_duration;
use crate::{files, table};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use warpsmith::lab::evidence::{self, PresentCode, Record};
use warpsmith::{Device, Error, Result};

/// Show what was proven and measured on real machines
///
/// `warpsmith check --record` and `warpsmith bench --record` write the evidence: one file per device, with the source
/// hash of every kernel; so do the tests in tests/gpu with WARPSMITH_RECORD=evidence. A kernel is proven if its present
/// source passed every case. A dagger marks results of an earlier version of a kernel. Times are compared with the
/// limits measured in the same run, and with times of other libraries that are measured once and kept. A double dagger
/// marks times of a run in which such a library took over 2 % more or less than what was kept of it.
///
/// Outside the repository it shows the pages of the version that was built.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
    /// Print one JSON object per case and per timing
    #[arg(long, conflicts_with_all = ["markdown", "check", "update_readme"])]
    json: bool,
    /// Print a table with one line per op
    #[arg(long)]
    markdown: bool,
    /// With --markdown: print the page of every device instead, with every timing and every check
    #[arg(long, requires = "markdown")]
    all: bool,
    /// Say how old the evidence of each op is and which default kernels lose to another of ours, and exit with 1 unless
    /// every CUDA kernel is proven, or named in unproven.txt with a reason
    #[arg(long)]
    check: bool,
    /// Prove, time and, on a GPU, sanitize what has changed on this machine, and rewrite the tables. It can be ended at any
    /// time: what is done is recorded, and the same command goes on with what is left
    #[arg(long, conflicts_with_all = ["evidence", "json", "markdown", "check", "sweep"])]
    refresh: bool,
    /// With --refresh: begin nothing more after this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "8m", requires = "refresh")]
    budget: Duration,
    /// With --refresh: the device [default: a GPU if there is one]
    #[arg(long, requires = "refresh")]
    device: Option<Device>,
    /// With --refresh: processes that compile or sanitize at the same time [default: one per core, 8 that sanitize]
    #[arg(long, value_name = "N", requires = "refresh", value_parser = parse_jobs)]
    jobs: Option<usize>,
    /// With --refresh: the Python that may have PyTorch, to time new cases on other libraries and to calibrate
    #[arg(long, value_name = "PROGRAM", default_value = "python3", requires = "refresh")]
    python: String,
    /// Write everything on record as one HTML page that loads nothing from elsewhere
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "markdown", "check", "refresh", "sweep"])]
    report: Option<PathBuf>,
    /// Rewrite the README's tables, docs/claims.md, and the pages and the picture in the evidence folder
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
  warpsmith evidence --report report.html
  warpsmith evidence --refresh --budget 8m
  warpsmith evidence --update-readme
  warpsmith evidence --sweep target/sweep-cuda-1.jsonl --update-readme";

/// The pages of all devices, for programs that are far from the repository.
const PAGES: [(&str, &str); 2] = [
    ("nvidia-h200.md", include_str!("../../../../evidence/nvidia-h200.md")),
    ("intel-r-xeon-r-processor.md", include_str!("../../../../evidence/intel-r-xeon-r-processor.md")),
];

fn parse_jobs(text: &str) -> Result<usize> {
    let jobs = text.parse().ok().filter(|jobs| *jobs > 0);
    jobs.ok_or_else(|| Error::parse("jobs", "a number above 0", text))
}

impl Args {
    /// Whether it is asked for nothing but the pages.
    fn only_shows(&self) -> bool {
        let works = self.json || self.check || self.update_readme || self.refresh || !self.sweep.is_empty();
        let works = works || self.report.is_some();
        self.evidence.is_none() && !works
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let folder = match evidence::folder(args.evidence.as_deref()) {
        Err(_) if args.only_shows() => {
            print!("{}", PAGES.map(|(_, page)| page).join("\n"));
            return Ok(ExitCode::SUCCESS);
        }
        folder => folder?,
    };
    if args.refresh {
        let root = folder.parent().unwrap_or(&folder);
        let code = refresh::run(args, root, &folder)?;
        update(&folder, &evidence::load(&folder)?)?;
        return Ok(code);
    }
    if !args.sweep.is_empty() {
        add_sweeps(&folder, &args.sweep)?;
    }
    let records = evidence::load(&folder)?;
    if let Some(path) = &args.report {
        files::replace(path, report::page(&records, &PresentCode::new()).as_bytes())?;
        eprintln!("wrote {}", path.display());
        return Ok(ExitCode::SUCCESS);
    }
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
        print_ages(&records);
        for line in defaults::losing(&records)? {
            println!("{line}");
        }
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

/// When what each op has was proven and timed.
fn print_ages(records: &[Record]) {
    for record in records {
        let headings = ["op", "proven", "open", "timed", "rows", "stale", "unwatched"];
        let mut table = table::new(&headings.map(String::from), 1);
        let ages = record.ages();
        for age in ages.iter().filter(|age| age.proven != "-" || age.rows > 0) {
            let count = |names: &[&str]| if names.is_empty() { "-".into() } else { names.len().to_string() };
            table.add_row([
                age.op.to_string(),
                age.proven.clone(),
                count(&age.unproven),
                age.timed.clone(),
                age.rows.to_string(),
                age.stale.to_string(),
                count(&age.unwatched),
            ]);
        }
        println!("{}, the oldest date of each op\n{table}", record.machine.device);
        let legend = "open: kernels without a proof; stale: rows of an earlier version of a kernel; unwatched: kernels \
            that the sanitizers have not seen";
        println!("{}", table::fit(legend, 2));
    }
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

/// Rewrites the generated parts of the README beside the evidence folder, and the generated files inside it.
fn update(folder: &Path, records: &[Record]) -> Result<()> {
    let folder = folder.canonicalize().map_err(|e| Error::io(folder, "resolving", &e))?;
    let readme = folder.parent().unwrap_or(&folder).join("README.md");
    let text = std::fs::read_to_string(&readme).map_err(|e| Error::io(&readme, "reading", &e))?;
    replace(&readme, &evidence::readme(&text, &folder, records)?)?;
    for (name, text) in evidence::pages(records) {
        replace(&folder.join(name), &text)?;
    }
    if let Some(record) = records.iter().find(|record| record.machine.is_gpu()) {
        let page = folder.parent().unwrap_or(&folder).join(claims::PAGE);
        // Beside a folder that is not the repository's there are no documents.
        if page.parent().is_some_and(Path::is_dir) {
            replace(&page, &claims::page(record))?;
        }
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
        let headings = ["kernel", "cases", "worst", "sanitizer", "proven"].map(String::from);
        let mut kernels = table::new(&headings, 1);
        for (name, kernel) in &record.kernels {
            let proven =
                rows.iter().any(|row| row.kernel == *name && row.gpu == record.machine.device && row.proven);
            let passed = kernel.cases.iter().filter(|case| case.ok).count();
            let worst = kernel.cases.iter().filter_map(|case| case.worst).fold(0.0, f64::max);
            let unclean = kernel.sanitizer.iter().filter(|(_, verdict)| *verdict != "clean");
            let unclean: Vec<String> = unclean.map(|(tool, verdict)| format!("{tool} {verdict}")).collect();
            let sanitizer = match (kernel.sanitizer.len(), &unclean[..]) {
                (0, _) => "-".into(),
                (tools, []) => format!("{tools} clean"),
                (_, unclean) => unclean.join(", "),
            };
            kernels.add_row([
                name.clone(),
                format!("{passed}/{}", kernel.cases.len()),
                format!("{worst:.2}"),
                sanitizer,
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
            let peer = record.best_peer(t);
            timings.add_row([
                t.op.clone(),
                t.case.clone(),
                t.dtype.clone(),
                t.kernel.clone(),
                table::time(t.ms) + present.marks(&[t]),
                t.bound.rate(t.gbps, t.tflops),
                table::percent(t.limit_ms / t.ms),
                peer.map_or("-".into(), |peer| format!("{} {}", peer.peer, table::time(peer.ms))),
                peer.map_or("-".into(), |peer| format!("{:.2}x", peer.ms / t.ms)),
            ]);
        }
        let timings = timings.to_string();
        println!("{timings}{}", evidence::legend(&timings));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_in_the_program() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
        let mut pages: Vec<String> =
            evidence::load(&folder).unwrap().iter().map(evidence::page_name).collect();
        let mut embedded = PAGES.map(|(name, _)| name.to_string()).to_vec();
        pages.sort();
        embedded.sort();
        assert_eq!(embedded, pages);
    }
}
