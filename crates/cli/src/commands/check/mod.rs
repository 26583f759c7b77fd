//! `warpsmith check`: kernels judged against the reference.

mod part;
mod random;
mod sanitize;

use self::part::Part;
use self::random::Amount;
use crate::ahead;
use crate::inputs::{parse_duration, set_fast_math};
use crate::kernels::progress_bar;
use crate::select::{Selection, case_words, parse_arrangement, parse_values};
use crate::table;
use clap::ArgGroup;
use indicatif::ProgressBar;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use warpsmith::lab::AnyProvable;
use warpsmith::lab::evidence::{self, CaseRecord, Machine, Record};
use warpsmith::lab::proof::{BenchTensors, Drawn, Large, Outcome, Prepared};
use warpsmith::lab::{Arrangement, Case, Values};
use warpsmith::op::KernelInfo;
use warpsmith::{Device, Error, Result};

/// Memory needed to judge a case, per byte of its tensors: the reference in three arithmetics, as `f64`.
const REFERENCE_COST: u64 = 40;
/// Cases whose references are held at once, per thread: more than one, because they take very different times.
const CASES_PER_THREAD: usize = 4;

/// Check kernels against the f64 reference
///
/// Every kernel that runs here is run on every case of its op: sizes, types, layouts and values. The error of each
/// element against the f64 reference may be at most twice that of a naive computation in the same type. Nothing
/// outside the outputs may change. A second run, and a run on a part of the batch, must give the same bits.
#[derive(clap::Args, Clone)]
#[command(after_help = EXAMPLES)]
#[command(group(ArgGroup::new("described").args(["shape", "random"]).multiple(true)))]
#[command(group(ArgGroup::new("parted").args(["launch_only", "random"]).multiple(true)))]
pub struct Args {
    #[command(flatten)]
    select: Selection,
    /// Only cases with this memory layout: contiguous, padded, transposed, misaligned, heads-first or mixed (each
    /// argument another, by the seed)
    #[arg(long, value_parser = parse_arrangement)]
    arrangement: Option<Arrangement>,
    /// Values of a case given with --shape, or of --random: typical, large, special (NaN, infinities, zeros, subnormals)
    /// exponents (from the smallest subnormal to the largest number), or typical ones where the choices of a router are skewed
    /// (zipf) or all the same (all-to-one)
    #[arg(long, value_parser = parse_values, requires = "described")]
    values: Option<Values>,
    /// Compute a case given with --shape in place
    #[arg(long, requires = "shape")]
    in_place: bool,
    /// Seed of the values [default: the number of the case], or of --random [default: the date]
    #[arg(long)]
    seed: Option<u64>,
    /// Instead of cases, judge this many random calls, or as many as a time allows (60s, 10m, 2h): random sizes,
    /// options, arguments, types, layouts, values and CPU instructions. What fails is made smaller and shown as a command
    #[arg(long, value_name = "CALLS|TIME", value_parser = Amount::parse, conflicts_with_all = ["shape", "options", "with", "large", "in_place"])]
    random: Option<Amount>,
    /// Also run one case with more than 2^31 elements, where memory allows
    #[arg(long)]
    large: bool,
    /// Run under this tool of compute-sanitizer: memcheck, racecheck, initcheck, synccheck or all. Recorded only if
    /// all cases of an op run
    #[arg(long, value_name = "TOOL", conflicts_with = "large")]
    sanitizer: Option<String>,
    /// Compile the code of an op's cases in this many processes before they are judged on a GPU [default: one per core];
    /// distribute the work of --sanitizer or --random over them [default: 1]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Only run each kernel once on each case, without a reference, as --sanitizer does
    #[arg(long, conflicts_with_all = ["record", "sanitizer", "json", "large"])]
    launch_only: bool,
    /// Only every N-th case, beginning with number I: `I/N`
    #[arg(long, value_parser = Part::parse, requires = "parted", hide = true)]
    part: Option<Part>,
    /// Record the results in the evidence folder, each op when it is done; those of --random in its random.md
    #[arg(long)]
    record: bool,
    /// Only kernels whose present code has not passed all cases in the evidence; with --sanitizer, each proven one under the tools that
    /// have not seen it
    #[arg(long, requires = "record", conflicts_with_all = ["shape", "dtype", "options", "with", "arrangement", "random"])]
    stale: bool,
    /// Begin nothing more after this time (60s, 8m, 2h): the same command goes on with what is left
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "stale")]
    budget: Option<Duration>,
    /// The evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
    /// Print one JSON object per case instead of a table
    #[arg(long)]
    json: bool,
    /// On a GPU, judge the kernels as compiled with fast math: approximate division, square root and exponentials, subnormals
    /// flushed. Failures are what it costs; it is never recorded
    #[arg(long, conflicts_with_all = ["record", "sanitizer", "random"])]
    fast_math: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith check
  warpsmith check rms_norm --device cpu
  warpsmith check --kernel layer_norm_avx2 --dtype bf16
  warpsmith check rms_norm --shape num_tokens=3 hidden=1000 \\
      --with weight --set eps=0.1
  warpsmith check --random 60s               a minute of random calls of all ops
  warpsmith check attention --random 2000 --seed 7 --dtype bf16
  warpsmith check --record --large           on a GPU: the evidence
  warpsmith check --record --stale           of the kernels that have changed
  warpsmith check --sanitizer all --record   on a GPU, after the above
  warpsmith check attention --sanitizer racecheck --jobs 8";

/// One case on one kernel.
struct Judged {
    op: &'static dyn AnyProvable,
    kernel: KernelInfo,
    case: Case,
    outcome: Outcome,
    /// The command line that repeats it.
    again: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.select.device()?;
    set_fast_math(args.fast_math, device)?;
    // Fail before hours of work, not after.
    let folder = if args.record { Some(evidence::folder(args.evidence.as_deref())?) } else { None };
    if let Some(tool) = &args.sanitizer {
        sanitize::refuse_partial_record(args)?;
        return sanitize::run(args, device, tool, folder);
    }
    if let Some(amount) = args.random {
        return random::run(args, amount, device, folder);
    }
    if args.launch_only {
        return launch(args, device);
    }
    let deadline = args.budget.map(|budget| Instant::now() + budget);
    let known = known(args, device, folder.as_deref())?;
    let (mut results, mut left, mut recorded) = (Vec::new(), Vec::new(), None);
    let mut broken = None;
    for op in args.select.ops()? {
        let kernels = kernels(args, op, device, known.as_ref());
        if kernels.is_empty() {
            continue;
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            left.push(op.spec().name);
            continue;
        }
        let first = results.len();
        let checked = check_op(args, op, &kernels, device, deadline, &mut results);
        if let (Ok(()), Some(folder)) = (&checked, &folder) {
            recorded = record(args, device, &results[first..], folder)?.or(recorded);
        }
        if let Err(error) = checked {
            // Without the device nothing else can be checked, but results so far are still reported.
            broken = Some(error);
            break;
        }
    }
    report(args, &results);
    if let Some(path) = recorded {
        eprintln!("recorded in {}", path.display());
    }
    if let Some(error) = broken {
        return Err(error);
    }
    if !left.is_empty() {
        eprintln!("left to check: {}", left.join(", "));
    }
    if results.is_empty() && args.stale {
        eprintln!("nothing was checked");
        return Ok(ExitCode::SUCCESS);
    }
    if results.is_empty() {
        eprintln!("no kernel on {device} runs what was asked for");
        return Ok(ExitCode::FAILURE);
    }
    Ok(match results.iter().all(|result| result.outcome.ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// With --stale, the device's record.
fn known(args: &Args, device: Device, folder: Option<&Path>) -> Result<Option<Record>> {
    let folder = folder.filter(|_| args.stale);
    folder.map(|folder| Record::open(folder, Machine::of(device)?)).transpose()
}

/// The requested kernels of an op; with a record, those whose present code has not passed all cases in it.
fn kernels(args: &Args, op: &dyn AnyProvable, device: Device, known: Option<&Record>) -> Vec<KernelInfo> {
    let mut kernels = args.select.kernels(op, device);
    if let Some(known) = known {
        let hash = |kernel: &KernelInfo| warpsmith::lab::source_hash(kernel, op.spec().name);
        kernels.retain(|kernel| known.passes(kernel.name, &hash(kernel)).is_err());
    }
    kernels
}

impl Args {
    /// Processes over which the work of --sanitizer or --random is distributed: a single one does not keep a GPU busy.
    fn processes(&self) -> usize {
        self.jobs.map_or(1, NonZeroUsize::get)
    }
}

/// Runs each kernel once on each case.
fn launch(args: &Args, device: Device) -> Result<ExitCode> {
    let mut table = table::new(&["op", "kernel", "launched"].map(String::from), 2);
    let mut launched = 0;
    for op in args.select.ops()? {
        let kernels = args.select.kernels(op, device);
        if kernels.is_empty() {
            continue;
        }
        let stream = device.default_stream()?;
        let mut cases = cases(args, op, device)?;
        if let Some(part) = args.part {
            cases = part.of(cases);
        }
        let bar = progress_bar(cases.len());
        bar.set_message(op.spec().name);
        let mut counts = vec![0; kernels.len()];
        for (seed, case) in cases {
            let mut drawn = Drawn::new(op, &case, device, seed)?;
            for (kernel, count) in kernels.iter().zip(&mut counts) {
                *count += usize::from(drawn.launch(kernel, &stream)?);
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        for (kernel, count) in kernels.iter().zip(counts) {
            table.add_row([op.spec().name.to_string(), kernel.name.to_string(), count.to_string()]);
            launched += count;
        }
    }
    if launched == 0 {
        eprintln!("no kernel on {device} runs what was asked for");
        return Ok(ExitCode::from(part::NOTHING_LAUNCHED));
    }
    println!("{table}");
    Ok(ExitCode::SUCCESS)
}

fn check_op(
    args: &Args,
    op: &'static dyn AnyProvable,
    kernels: &[KernelInfo],
    device: Device,
    deadline: Option<Instant>,
    results: &mut Vec<Judged>,
) -> Result<()> {
    let spec = op.spec();
    let stream = device.default_stream()?;
    let cases = cases(args, op, device)?;
    let calls = |kernel: &KernelInfo| {
        let name = Some(kernel.name);
        cases.iter().map(move |(_, case)| (op, case, name)).collect::<Vec<ahead::Call<'_>>>()
    };
    ahead::compile(device, &kernels.iter().flat_map(calls).collect::<Vec<_>>(), args.jobs, deadline);
    let bar = progress_bar(cases.len() + usize::from(args.large));
    bar.set_message(spec.name);
    let mut left = &cases[..];
    while !left.is_empty() {
        let (now, later) = left.split_at(fitting(op, left)?);
        left = later;
        let mut prepared = Prepared::many(op, now, kernels, device)?;
        for ((seed, case), prepared) in now.iter().zip(&mut prepared) {
            for kernel in kernels {
                if let Some(outcome) = prepared.judge(kernel, &stream)? {
                    let again = format!("{} --seed {}", case_words(spec, case).join(" "), seed);
                    results.push(result(op, kernel, case, outcome, device, &again));
                }
            }
            bar.inc(1);
        }
    }
    if args.large {
        check_large(op, device, kernels, results, &bar)?;
    }
    bar.finish_and_clear();
    Ok(())
}

fn check_large(
    op: &'static dyn AnyProvable,
    device: Device,
    kernels: &[KernelInfo],
    results: &mut Vec<Judged>,
    bar: &ProgressBar,
) -> Result<()> {
    let stream = device.default_stream()?;
    let mut large = match Large::new(op, device) {
        Ok(large) => large,
        Err(error @ (Error::Unavailable { .. } | Error::OutOfMemory { .. })) => {
            bar.suspend(|| eprintln!("skipped: {error}"));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for kernel in kernels {
        if let Some(outcome) = large.judge(kernel, &stream)? {
            results.push(result(op, kernel, large.case(), outcome, device, "--large"));
        }
    }
    Ok(())
}

fn result(
    op: &'static dyn AnyProvable,
    kernel: &KernelInfo,
    case: &Case,
    outcome: Outcome,
    device: Device,
    again: &str,
) -> Judged {
    let again = self::again(op, Some(kernel), device, again);
    Judged { op, kernel: *kernel, case: case.clone(), outcome, again }
}

/// The command line that runs `words` again on a kernel of an op, or on all.
fn again(op: &dyn AnyProvable, kernel: Option<&KernelInfo>, device: Device, words: &str) -> String {
    let kernel = kernel.map_or(String::new(), |kernel| format!("--kernel {} ", kernel.name));
    format!("warpsmith check {} --device {device} {kernel}{words}", op.spec().name)
}

/// The requested cases, each with its seed: the given one, or its number among them.
fn cases(args: &Args, op: &'static dyn AnyProvable, device: Device) -> Result<Vec<(u64, Case)>> {
    let asked_for = (0..).zip(args.select.cases(op, op.cases())?);
    let mut cases: Vec<(u64, Case)> =
        asked_for.map(|(number, case)| (args.seed.unwrap_or(number), case)).collect();
    if args.select.is_one_case() {
        for (_, case) in &mut cases {
            case.arrangement = args.arrangement.unwrap_or(case.arrangement);
            case.values = args.values.unwrap_or(case.values);
            case.in_place |= args.in_place;
        }
        return Ok(cases);
    }
    cases.retain(|(_, case)| !case.gpu_only || device != Device::Cpu);
    if let Some(arrangement) = args.arrangement {
        cases.retain(|(_, case)| case.arrangement == arrangement);
    }
    Ok(cases)
}

/// The number of cases whose references are evaluated at once: enough to keep all threads busy, if they fit in
/// memory. Refuses a case whose reference alone does not fit, because the process would be killed.
fn fitting(op: &dyn AnyProvable, cases: &[(u64, Case)]) -> Result<usize> {
    let memory = Device::Cpu.memory()?;
    let most = cases.len().min(CASES_PER_THREAD * rayon::current_num_threads());
    let mut needed = 0u64;
    for (count, (_, case)) in cases[..most].iter().enumerate() {
        let bytes = BenchTensors::bytes(&op.plan(case), case.arrangement)? as u64;
        needed = needed.saturating_add(bytes.saturating_mul(REFERENCE_COST));
        if needed > memory.free {
            return match count {
                0 => Err(memory.exceeded("the host, where the reference is computed", needed)),
                _ => Ok(count),
            };
        }
    }
    Ok(most)
}

fn report(args: &Args, results: &[Judged]) {
    if args.json {
        for r in results {
            let line = serde_json::json!({
                "op": r.op.spec().name,
                "kernel": r.kernel.name,
                "case": r.case.name(r.op.spec()),
                "dtype": r.case.dtype.name(),
                "ok": r.outcome.ok,
                "error": r.outcome.error,
                "worst": r.outcome.worst,
                "failure": r.outcome.failure,
            });
            println!("{line}");
        }
        return;
    }
    if results.is_empty() {
        return;
    }
    let headings = ["kernel", "passed", "worst", "error", "verdict"].map(String::from);
    let mut table = table::new(&headings, 1);
    for kernel in kernels_of(results) {
        let of_kernel: Vec<&Judged> = results.iter().filter(|r| r.kernel.name == kernel).collect();
        let passed = of_kernel.iter().filter(|r| r.outcome.ok).count();
        let largest =
            |value: fn(&Outcome) -> f64| of_kernel.iter().map(|r| value(&r.outcome)).fold(0.0, f64::max);
        table.add_row([
            kernel.to_string(),
            format!("{passed}/{}", of_kernel.len()),
            format!("{:.2}", largest(|outcome| outcome.worst)),
            format!("{:.1e}", largest(|outcome| outcome.error)),
            if passed == of_kernel.len() { "ok" } else { "FAILED" }.to_string(),
        ]);
    }
    println!("{table}");
    let legend =
        "worst: largest elementwise error over what is allowed; error: |out - f64| / |f64|, the largest norm";
    println!("{}", table::fit(legend, 2));
    for r in results.iter().filter(|r| !r.outcome.ok) {
        let why = r.outcome.failure.as_deref().unwrap_or("failed");
        println!("\n{} [{} {}]: {why}", r.kernel.name, r.case.name(r.op.spec()), r.case.dtype);
        println!("  {}", r.again);
    }
}

/// The names of the kernels in the results, in order.
fn kernels_of(results: &[Judged]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for result in results {
        if !names.contains(&result.kernel.name) {
            names.push(result.kernel.name);
        }
    }
    names
}

/// Whether every case of the requested ops runs.
fn is_full(args: &Args) -> bool {
    !args.select.is_partial() && args.arrangement.is_none() && args.random.is_none()
}

/// Adds the results of an op to the evidence; returns the file if it is another one now.
fn record(args: &Args, device: Device, results: &[Judged], folder: &Path) -> Result<Option<PathBuf>> {
    let full = is_full(args);
    let mut record = Record::open(folder, Machine::of(device)?)?;
    let mut added = false;
    for name in kernels_of(results) {
        let of_kernel: Vec<&Judged> = results.iter().filter(|r| r.kernel.name == name).collect();
        let cases = of_kernel
            .iter()
            .map(|r| CaseRecord::new(r.case.name(r.op.spec()), r.case.dtype.name(), &r.outcome));
        let op = of_kernel[0].op.spec().name;
        let hash = warpsmith::lab::source_hash(&of_kernel[0].kernel, op);
        if record.add_cases(op, name, &hash, cases.collect(), full) {
            added = true;
        } else {
            eprintln!(
                "not recorded: {name} has no full run of its present code yet (`warpsmith check {op} --record`)"
            );
        }
    }
    if added { record.save(folder).map(Some) } else { Ok(None) }
}
