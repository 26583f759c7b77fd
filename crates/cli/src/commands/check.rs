//! `warpsmith check`: kernels judged against the reference.

use crate::kernels::progress_bar;
use crate::select::{Selection, arrangement_name, case_words, parse_arrangement, parse_values, values_name};
use crate::table;
use indicatif::ProgressBar;
use std::path::PathBuf;
use std::process::ExitCode;
use warpsmith::evidence::{self, CaseRecord, Machine, Record};
use warpsmith::op::{Arrangement, Case, Values};
use warpsmith::proof::{Bulk, Large, Outcome, Prepared};
use warpsmith::registry::{AnyOp, KernelInfo};
use warpsmith::{Device, Error, Result};

/// Bytes that judging a case takes for each byte of its tensors: the reference in three arithmetics of `f64`.
const REFERENCE_COST: u64 = 40;
/// What a run under a sanitizer exits with when the sanitizer found something.
const SANITIZER_ERRORS: i32 = 99;
const SANITIZERS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// Check kernels against the f64 reference
///
/// Every kernel that runs here is run on every case of its op: sizes, types, layouts and values. Each element must
/// be as near to the f64 reference as a naive computation in the same type would be, twice over; nothing outside the
/// outputs may change; and a second run, and a run on a part of the batch, must give the same bits.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    select: Selection,
    /// Only cases with this memory layout: contiguous, padded, transposed, misaligned or heads-first
    #[arg(long, value_parser = parse_arrangement)]
    arrangement: Option<Arrangement>,
    /// Values of a case given with --shape: typical, large or special (NaN, infinities, zeros, subnormals)
    #[arg(long, value_parser = parse_values, requires = "shape")]
    values: Option<Values>,
    /// Compute a case given with --shape in place
    #[arg(long, requires = "shape")]
    in_place: bool,
    /// Seed of the values [default: the number of the case]
    #[arg(long)]
    seed: Option<u64>,
    /// Also run one case with more than 2^31 elements, where memory allows
    #[arg(long)]
    large: bool,
    /// Run under this tool of compute-sanitizer: memcheck, racecheck, initcheck, synccheck or all; recorded only over all
    /// cases of an op
    #[arg(long, value_name = "TOOL")]
    sanitizer: Option<String>,
    /// Record the results in the evidence folder
    #[arg(long)]
    record: bool,
    /// The evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
    /// Print one JSON object per case instead of a table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith check
  warpsmith check rms_norm --device cpu
  warpsmith check --kernel layer_norm_avx2 --dtype bf16
  warpsmith check rms_norm --shape num_tokens=3 hidden=1000 --with weight --set eps=0.1
  warpsmith check --record --large           on a GPU: the evidence
  warpsmith check --sanitizer all --record   on a GPU, after the above";

/// One case on one kernel.
struct Judged {
    op: &'static dyn AnyOp,
    kernel: KernelInfo,
    case: Case,
    outcome: Outcome,
    /// The command line that runs just this.
    again: String,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.select.device()?;
    // Found before hours of work, not after.
    let folder = if args.record { Some(evidence::folder(args.evidence.as_deref())?) } else { None };
    if let Some(tool) = &args.sanitizer {
        refuse_partial_sanitizer_record(args)?;
        return sanitize(args, device, tool, folder);
    }
    let mut results = Vec::new();
    let mut broken = None;
    for op in args.select.ops()? {
        if let Err(error) = check_op(args, op, device, &mut results) {
            // Without the device nothing else can be checked, but what was found so far is still told.
            broken = Some(error);
            break;
        }
    }
    report(args, &results);
    if let Some(error) = broken {
        return Err(error);
    }
    if results.is_empty() {
        eprintln!("no kernel on {device} runs what was asked for");
        return Ok(ExitCode::FAILURE);
    }
    if let Some(folder) = folder {
        record(args, device, &results, &folder)?;
    }
    Ok(match results.iter().all(|result| result.outcome.ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn check_op(args: &Args, op: &'static dyn AnyOp, device: Device, results: &mut Vec<Judged>) -> Result<()> {
    let spec = op.spec();
    let kernels = args.select.kernels(op, device);
    if kernels.is_empty() {
        return Ok(());
    }
    let stream = device.default_stream()?;
    let cases = cases(args, op)?;
    let bar = progress_bar(cases.len() + usize::from(args.large));
    bar.set_message(spec.name);
    for (number, case) in cases {
        let seed = args.seed.unwrap_or(number as u64);
        check_memory(op, &case)?;
        let mut prepared = Prepared::new(op, &case, device, seed)?;
        for kernel in &kernels {
            if let Some(outcome) = prepared.judge(kernel, &stream)? {
                let again = format!("{} --seed {seed}", case_words(spec, &case).join(" "));
                results.push(result(op, kernel, &case, outcome, device, &again));
            }
        }
        bar.inc(1);
    }
    if args.large {
        check_large(op, device, &kernels, results, &bar)?;
    }
    bar.finish_and_clear();
    Ok(())
}

fn check_large(
    op: &'static dyn AnyOp,
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
    op: &'static dyn AnyOp,
    kernel: &KernelInfo,
    case: &Case,
    outcome: Outcome,
    device: Device,
    again: &str,
) -> Judged {
    let again =
        format!("warpsmith check {} --device {device} --kernel {} {again}", op.spec().name, kernel.name);
    Judged { op, kernel: *kernel, case: case.clone(), outcome, again }
}

/// The cases asked for, each with the number it has among them.
fn cases(args: &Args, op: &'static dyn AnyOp) -> Result<Vec<(usize, Case)>> {
    let mut cases: Vec<(usize, Case)> = args.select.cases(op, op.cases())?.into_iter().enumerate().collect();
    if args.select.is_one_case() {
        for (_, case) in &mut cases {
            case.arrangement = args.arrangement.unwrap_or(case.arrangement);
            case.values = args.values.unwrap_or(case.values);
            case.in_place |= args.in_place;
        }
    } else if let Some(arrangement) = args.arrangement {
        cases.retain(|(_, case)| case.arrangement == arrangement);
    }
    Ok(cases)
}

/// Refuses a case whose reference would not fit into memory, which would end the process.
fn check_memory(op: &dyn AnyOp, case: &Case) -> Result<()> {
    let bytes = Bulk::bytes(&op.plan(case), case.arrangement)? as u64;
    let (needed, memory) = (bytes.saturating_mul(REFERENCE_COST), Device::Cpu.memory()?);
    match needed <= memory.free {
        true => Ok(()),
        false => Err(memory.exceeded("the host, where the reference is computed", needed)),
    }
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
    let headings = ["op", "kernel", "passed", "worst", "error", "verdict"].map(String::from);
    let mut table = table::new(&headings, 2);
    for kernel in kernels_of(results) {
        let of_kernel: Vec<&Judged> = results.iter().filter(|r| r.kernel.name == kernel).collect();
        let passed = of_kernel.iter().filter(|r| r.outcome.ok).count();
        let largest =
            |value: fn(&Outcome) -> f64| of_kernel.iter().map(|r| value(&r.outcome)).fold(0.0, f64::max);
        table.add_row([
            of_kernel[0].op.spec().name.to_string(),
            kernel.to_string(),
            format!("{passed}/{}", of_kernel.len()),
            format!("{:.2}", largest(|outcome| outcome.worst)),
            format!("{:.1e}", largest(|outcome| outcome.error)),
            if passed == of_kernel.len() { "ok" } else { "FAILED" }.to_string(),
        ]);
    }
    println!("{table}");
    println!(
        "worst: largest elementwise error over what is allowed; error: |out - f64| / |f64|, the largest norm"
    );
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

/// Whether every case of the ops asked for is run.
fn is_full(args: &Args) -> bool {
    !args.select.is_partial() && args.arrangement.is_none()
}

fn record(args: &Args, device: Device, results: &[Judged], folder: &std::path::Path) -> Result<()> {
    let full = is_full(args);
    let mut record = Record::open(folder, Machine::of(device)?)?;
    let mut added = false;
    for name in kernels_of(results) {
        let of_kernel: Vec<&Judged> = results.iter().filter(|r| r.kernel.name == name).collect();
        let cases = of_kernel
            .iter()
            .map(|r| CaseRecord::new(r.case.name(r.op.spec()), r.case.dtype.name(), &r.outcome));
        let op = of_kernel[0].op.spec().name;
        let hash = of_kernel[0].kernel.source_hash(op);
        if record.add_cases(op, name, &hash, cases.collect(), full) {
            added = true;
        } else {
            eprintln!(
                "not recorded: {name} has no full run of its present code yet (`warpsmith check {op} --record`)"
            );
        }
    }
    if added {
        eprintln!("recorded in {}", record.save(folder)?.display());
    }
    Ok(())
}

/// The record of a tool has one verdict for a kernel, which must stand for all its cases.
fn refuse_partial_sanitizer_record(args: &Args) -> Result<()> {
    if !args.record || is_full(args) {
        return Ok(());
    }
    Err(Error::parse(
        "--sanitizer with --record",
        "all cases of an op, because what is recorded says that a kernel is clean on every one",
        "some of them (--shape, --dtype, --set, --with or --arrangement)",
    ))
}

/// The words after `warpsmith` that check under a sanitizer what was asked for.
fn sanitized_words(args: &Args, device: Device) -> Vec<String> {
    let mut words = vec!["check".to_string()];
    words.extend(args.select.words(device));
    if let Some(arrangement) = args.arrangement {
        words.extend(["--arrangement".into(), arrangement_name(arrangement).into()]);
    }
    if let Some(values) = args.values {
        words.extend(["--values".into(), values_name(values).into()]);
    }
    if let Some(seed) = args.seed {
        words.extend(["--seed".into(), seed.to_string()]);
    }
    words.extend(args.in_place.then(|| "--in-place".into()));
    words.extend(args.large.then(|| "--large".into()));
    words
}

/// Runs this very check under compute-sanitizer, once for each tool, and records what the tools said.
fn sanitize(args: &Args, device: Device, tool: &str, folder: Option<PathBuf>) -> Result<ExitCode> {
    let tools: Vec<&str> = match tool {
        "all" => SANITIZERS.to_vec(),
        one => SANITIZERS.into_iter().filter(|known| *known == one).collect(),
    };
    if tools.is_empty() {
        return Err(Error::parse("sanitizer", format!("{} or all", SANITIZERS.join(", ")), tool));
    }
    if device == Device::Cpu {
        return Err(Error::parse("device", "a CUDA device, for compute-sanitizer", "cpu"));
    }
    let missing = || Error::Unavailable {
        what: "compute-sanitizer".into(),
        why: "it is neither in CUDA_HOME nor on the PATH".into(),
        fix: "Install the CUDA toolkit".into(),
    };
    let sanitizer = warpsmith::jit::inspect::tool("compute-sanitizer").ok_or_else(missing)?;
    let program = std::env::current_exe().map_err(|e| Error::io("warpsmith", "finding this program", &e))?;
    let mut verdicts = Vec::new();
    for tool in tools {
        eprintln!("compute-sanitizer --tool {tool}");
        let errors = SANITIZER_ERRORS.to_string();
        let status = std::process::Command::new(&sanitizer)
            .args(["--tool", tool, "--error-exitcode", &errors])
            .arg(&program)
            .args(sanitized_words(args, device))
            .status()
            .map_err(|e| Error::io(&sanitizer, "starting", &e))?;
        match status.code() {
            Some(0) => verdicts.push((tool, true)),
            Some(SANITIZER_ERRORS) => verdicts.push((tool, false)),
            _ => eprintln!("{tool}: the check did not run to its end ({status}): nothing is recorded"),
        }
        if !status.success() {
            break;
        }
    }
    let clean = verdicts.iter().all(|(_, clean)| *clean) && !verdicts.is_empty();
    if let Some(folder) = folder {
        let mut record = Record::open(&folder, Machine::of(device)?)?;
        for op in args.select.ops()? {
            for kernel in args.select.kernels(op, device) {
                let hash = kernel.source_hash(op.spec().name);
                for (tool, clean) in &verdicts {
                    if !record.add_sanitizer(kernel.name, &hash, tool, *clean) {
                        eprintln!(
                            "not recorded: {} has no evidence yet (`warpsmith check --record`)",
                            kernel.name
                        );
                    }
                }
            }
        }
        eprintln!("recorded in {}", record.save(&folder)?.display());
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &str) -> Args {
        Line::try_parse_from(["check"].into_iter().chain(words.split_whitespace())).unwrap().args
    }

    #[test]
    fn a_sanitizer_sees_the_case_that_was_asked_for() {
        let line = "rms_norm --device cpu --shape hidden=7 --arrangement padded --values special --seed 3 --in-place --large";
        let words = sanitized_words(&parse(&format!("{line} --sanitizer all")), Device::Cpu);
        assert_eq!(words.join(" "), format!("check {line}"));
    }

    #[test]
    fn what_a_sanitizer_said_about_some_cases_is_not_recorded() {
        for part in
            ["--shape hidden=7", "--dtype f32", "--set eps=1", "--with weight", "--arrangement padded"]
        {
            let error = refuse_partial_sanitizer_record(&parse(&format!("rms_norm {part} --record")));
            assert!(matches!(error, Err(Error::Parse { .. })), "{part}");
            assert!(refuse_partial_sanitizer_record(&parse(&format!("rms_norm {part}"))).is_ok(), "{part}");
        }
        for whole in ["", "rms_norm", "--kernel rms_norm_row --large --seed 1"] {
            assert!(refuse_partial_sanitizer_record(&parse(&format!("{whole} --record"))).is_ok(), "{whole}");
        }
    }
}
