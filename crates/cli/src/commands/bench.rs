//! `warpsmith bench`: kernels timed against the machine's limit, an earlier run and other libraries.

mod asked;
mod recorder;

use self::recorder::{Cases, Recorder, print_left};
use crate::ahead;
use crate::inputs::{parse_duration, set_fast_math};
use crate::kernels::progress_bar;
use crate::select::Selection;
use crate::table;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use warpsmith::jit;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::Case;
use warpsmith::lab::bench::{Baseline, Bench, Cache, Ceilings, Measurement, Peers, Settings, host_times};
use warpsmith::lab::evidence::{self, Machine, Record};
use warpsmith::lab::proof::BenchTensors;
use warpsmith::{DType, Device, Error, Result};

/// Time kernels and compare them with the machine's limit
///
/// Reports the median of many runs on random data. Tensors that do not easily fit in the cache are read from memory:
/// calls rotate over several copies of them. On a GPU, calls are replayed from a graph. The limit is the longer of
/// two times derived from the same run: a plain copy of the fewest bytes the op can move, and its matrix products
/// with operands at hand.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    select: Selection,
    /// A first look: fewer samples, and no cases of more than a few hundred megabytes; not for the record
    #[arg(long, conflicts_with = "record")]
    quick: bool,
    /// Compare with an earlier run's --json output; exit with 1 if a case is slower than --tolerance allows
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// By how many percent a case may be slower than the baseline
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, value_parser = parse_tolerance)]
    tolerance: f64,
    /// Show timings of other libraries, one JSON object per line: op, case, dtype, device, peer, ms, and the library's
    /// version. Those with `calibration` are compared with the recorded time of the same peer
    #[arg(long, value_name = "FILE")]
    peers: Option<PathBuf>,
    /// Record the results in the evidence folder every few seconds, with the peers that are given. Where none are, recorded
    /// ones stand
    #[arg(long)]
    record: bool,
    /// Only cases that have no timing in the evidence, or one of an earlier version of the kernel, the oldest first; on the
    /// CPU none that are too large for --quick
    #[arg(long, requires = "record")]
    stale: bool,
    /// Begin no case after this time (60s, 8m, 2h): with --stale, the same command goes on with what is left
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "stdin")]
    budget: Option<Duration>,
    /// On a GPU, compile what the cases need in this many processes before the first is timed [default: one per core]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// The evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR")]
    evidence: Option<PathBuf>,
    /// Print one JSON object per result instead of a table
    #[arg(long)]
    json: bool,
    /// Time what calls cost the host instead: one repeated call of each of a few ops on tiny tensors, without a graph
    #[arg(long, conflicts_with_all = ["quick", "baseline", "stale", "budget", "step"])]
    host: bool,
    /// Wait for a line on standard input before each case and before the end, so that another program can time the same
    /// case in between; print each result at once, and read --peers last. The line `again` has a case and the limits
    /// measured once more: what counts in the end is the median of its rounds
    #[arg(long, requires = "json")]
    step: bool,
    /// Read cases from standard input, one JSON object per line, and answer each with a line: its result or an `error`. A
    /// case has `do`, `op` and `dtype`; `sizes`, `options` and `with` as lists of what --shape, --set and --with take; a
    /// `layout` as `check --arrangement`; and `kv_lens`, the keys of requests in turn. `do` is `time`, `compile`, which
    /// only prepares the case for later, or, alone, `again`
    #[arg(long, conflicts_with_all = ["op", "kernel", "shape", "dtype", "options", "with", "quick", "baseline", "peers",
        "record", "json", "host", "step"])]
    stdin: bool,
    /// On a GPU, time the kernels as compiled with fast math; never for the record
    #[arg(long, conflicts_with = "record")]
    fast_math: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith bench --quick
  warpsmith bench rms_norm --device cpu
  warpsmith bench rms_norm --shape num_tokens=8192 hidden=4096 \\
      --with weight --dtype bf16
  warpsmith bench --json > before.jsonl
  warpsmith bench --baseline before.jsonl --tolerance 5
  warpsmith bench --record --peers peers.jsonl   the evidence, beside peers
  warpsmith bench --record --stale --budget 8m   only what has changed
  warpsmith bench --host                         what a call costs the host
  echo '{\"do\": \"time\", \"op\": \"softmax\", \"dtype\": \"bf16\", \"layout\": \"padded\"}' \\
      | warpsmith bench --stdin";

/// Total bytes of the tensors of a case in a quick run, at most.
pub fn quick_bytes(device: Device) -> usize {
    match device {
        Device::Cpu => 192 << 20,
        Device::Cuda(_) => 1 << 30,
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.host {
        return host(args);
    }
    let device = args.select.device()?;
    if args.stdin {
        // It may compile for a GPU that this process does not use.
        jit::set_fast_math(args.fast_math);
        asked::answer(device, std::io::stdin().lock(), std::io::stdout().lock());
        return Ok(ExitCode::SUCCESS);
    }
    set_fast_math(args.fast_math, device)?;
    let folder = if args.record { Some(evidence::folder(args.evidence.as_deref())?) } else { None };
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?;
    let mut recorder = Recorder::new(folder, args.peers.as_deref(), device)?;
    if !args.step {
        // Fail before the work, not after.
        recorder.peers()?;
    }
    let settings = if args.quick { Settings::quick(device) } else { Settings::thorough(device) };
    let deadline = args.budget.map(|budget| Instant::now() + budget);
    // The evidence of a CPU has no large cases: they take minutes there.
    let small = args.quick || (device == Device::Cpu && (args.stale || args.step));
    let mut cases = timed_cases(&args.select, device, small)?;
    if args.stale {
        cases = recorder.stale(cases)?;
        if cases.is_empty() {
            eprintln!("the evidence has a timing of every case");
            return Ok(ExitCode::SUCCESS);
        }
    }
    let calls: Vec<ahead::Call<'_>> =
        cases.iter().map(|(op, case)| (*op, case, args.select.kernel())).collect();
    ahead::compile(device, &calls, args.jobs, deadline);
    let is_over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let mut started = false;
    let outcome = for_each_case(&cases, device, settings, |bench, _| {
        let measured = match args.step {
            _ if is_over() => None,
            true if !std::mem::replace(&mut started, true) && next_step() == Step::End => None,
            true => in_rounds(bench, args.select.kernel())?,
            false => Some(bench.measure(args.select.kernel())?),
        };
        if let Some(m) = &measured {
            recorder.add(m, bench.ceilings())?;
        }
        Ok(measured)
    });
    recorder.save()?;
    let (ceilings, measured) = outcome?;
    if args.json && !args.step {
        for m in &measured {
            println!("{}", json_line(Some(m)));
        }
    } else if !args.step && !measured.is_empty() {
        println!("{}", table::fit(&format!("{}: {ceilings}", device.info()?.name), 2));
        print_table(&measured, device, baseline.as_ref(), &recorder.peers()?);
    }
    if let Some(path) = recorder.path() {
        eprintln!("recorded in {}", path.display());
    }
    if args.stale {
        print_left(&recorder.stale(cases)?);
    }
    if measured.is_empty() && !is_over() {
        eprintln!("nothing was timed");
        return Ok(ExitCode::FAILURE);
    }
    let slower = baseline.map(|baseline| baseline.regressions(&measured, args.tolerance / 100.0));
    for (m, ratio) in slower.iter().flatten() {
        eprintln!("slower: {} [{} {}]: {ratio:.2}x the time of the baseline", m.op, m.case, m.dtype);
    }
    Ok(match slower.is_some_and(|slower| !slower.is_empty()) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    })
}

/// Host time of single calls.
fn host(args: &Args) -> Result<ExitCode> {
    let device = args.select.device()?;
    let peers = args.peers.as_deref().map(Peers::read).transpose()?.unwrap_or_default();
    let mut times = host_times(device)?;
    for time in &mut times {
        let found = peers.of(&time.op, &time.case, HOST_DTYPE, &device.to_string());
        time.peers = found.into_iter().map(|(name, ms)| (name, ms * 1e3)).collect();
    }
    if args.json {
        for time in &times {
            println!("{}", serde_json::to_string(time).expect("times are plain data"));
        }
    } else {
        let mut headings = vec!["op".to_string(), "case".into(), "host time".into(), "fastest".into()];
        headings.extend(peers.names());
        let mut table = table::new(&headings, 2);
        for time in &times {
            let us = |us: f64| format!("{us:.2} us");
            let mut row = vec![time.op.clone(), time.case.clone(), us(time.us), us(time.best_us)];
            row.extend(peers.names().iter().map(|name| time.peers.get(name).map_or("-".into(), |t| us(*t))));
            table.add_row(row);
        }
        println!("{table}");
    }
    if args.record {
        let folder = evidence::folder(args.evidence.as_deref())?;
        let mut record = Record::open(&folder, Machine::of(device)?)?;
        record.set_host_times(times);
        eprintln!("recorded in {}", record.save(&folder)?.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The dtype that files of peers have for host times; the case says it, too.
const HOST_DTYPE: &str = "host";

fn json_line(measurement: Option<&Measurement>) -> String {
    serde_json::to_string(&measurement).expect("measurements are plain data")
}

/// Measures a case until the answer is something other than `again`, and prints each result at once. `None` if nobody
/// answers, because the peer's timings of the case are incomplete then.
fn in_rounds(bench: &mut Bench, kernel: Option<&str>) -> Result<Option<Measurement>> {
    let mut rounds = Vec::new();
    loop {
        let measured = bench.measure(kernel);
        // The other side waits for a line, even if the case fails. If nobody listens, the next wait notices.
        let _ = writeln!(std::io::stdout(), "{}", json_line(measured.as_ref().ok()));
        let step = next_step();
        rounds.push(measured?);
        match step {
            Step::Again => bench.renew_ceilings()?,
            Step::Next => return Ok(bench.median(rounds)),
            Step::End => return Ok(None),
        }
    }
}

/// The answer of the other side of `--step`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Next,
    Again,
    End,
}

/// Waits for a line; `None` if the other side has ended.
fn next_step() -> Step {
    let mut line = String::new();
    match std::io::stdin().read_line(&mut line) {
        Ok(1..) if line.trim() == "again" => Step::Again,
        Ok(1..) => Step::Next,
        _ => Step::End,
    }
}

/// Reads a tolerance in percent. NaN is refused, because it would let everything pass.
fn parse_tolerance(text: &str) -> Result<f64> {
    let percent = text.parse().ok().filter(|percent: &f64| percent.is_finite() && *percent >= 0.0);
    percent.ok_or_else(|| Error::parse("tolerance", "a finite number of zero or more", text))
}

/// The cases to time, at least one; without the large ones in a `quick` run.
pub fn timed_cases(select: &Selection, device: Device, quick: bool) -> Result<Cases> {
    let mut cases = Vec::new();
    for op in select.ops()? {
        if select.kernels(op, device).is_empty() {
            continue;
        }
        for case in select.cases(op, op.bench_cases())? {
            if case.gpu_only && device == Device::Cpu && !select.is_one_case() {
                continue;
            }
            let small =
                !quick || BenchTensors::bytes(&op.plan(&case), case.arrangement)? <= quick_bytes(device);
            if small || select.is_one_case() {
                cases.push((op, case));
            }
        }
    }
    if cases.is_empty() { Err(no_case(select, device)?) } else { Ok(cases) }
}

/// Why [`timed_cases`] found none.
fn no_case(select: &Selection, device: Device) -> Result<Error> {
    let ops = select.ops()?;
    let cases = ops.iter().flat_map(|op| op.bench_cases());
    let cases = cases.filter(|case| !case.gpu_only || device != Device::Cpu);
    let mut dtypes: Vec<DType> = cases.map(|case| case.dtype).collect();
    dtypes.sort();
    dtypes.dedup();
    let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
    let (why, fix) = match select.dtype() {
        _ if ops.iter().all(|op| select.kernels(*op, device).is_empty()) => {
            (format!("no kernel that was asked for runs on {device}"), "See `warpsmith list OP`")
        }
        _ if dtypes.is_empty() => (format!("all are too large for {device}"), "Give one with --shape"),
        Some(dtype) if !dtypes.contains(&dtype) => {
            (format!("none is of {dtype}, only of {}", names.join(", ")), "Give one with --shape")
        }
        _ => ("all are too large for --quick".into(), "Give one with --shape, or leave --quick out"),
    };
    Ok(Error::Unavailable { what: "a case to time".into(), why, fix: fix.into() })
}

/// Calls `time` with the tensors of every case until it returns `None`. Skips a case, with a message, if it does not
/// fit in memory or no kernel supports it.
pub fn for_each_case<T>(
    cases: &[(&'static dyn AnyProvable, Case)],
    device: Device,
    settings: Settings,
    mut time: impl FnMut(&mut Bench, &'static dyn AnyProvable) -> Result<Option<T>>,
) -> Result<(Ceilings, Vec<T>)> {
    let bar = progress_bar(cases.len() + 1);
    bar.set_message("copy");
    let ceilings = Ceilings::measure(device, &settings)?;
    bar.inc(1);
    let mut results = Vec::new();
    for (op, case) in cases {
        bar.set_message(op.spec().name);
        match Bench::new(*op, case, device, ceilings, settings).and_then(|mut bench| time(&mut bench, *op)) {
            Ok(Some(result)) => results.push(result),
            Ok(None) => break,
            Err(error @ (Error::OutOfMemory { .. } | Error::Unsupported { .. })) => {
                let name = case.name(op.spec());
                bar.suspend(|| eprintln!("skipped: {} [{name} {}]: {error}", op.spec().name, case.dtype));
            }
            Err(error) => return Err(error),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((ceilings, results))
}

fn print_table(measured: &[Measurement], device: Device, baseline: Option<&Baseline>, peers: &Peers) {
    let mut headings = ["op", "case", "dtype", "kernel", "median", "spread", "GB/s", "TFLOP/s", "of limit"]
        .map(String::from)
        .to_vec();
    headings.extend(baseline.map(|_| "vs baseline".to_string()));
    headings.extend(peers.names());
    let mut table = table::new(&headings, 4);
    for m in measured {
        let cached = if m.l2 == Cache::Warm { " (in cache)" } else { "" };
        let mut row = vec![
            m.op.clone(),
            m.case.clone(),
            m.dtype.clone(),
            m.kernel.clone(),
            table::time(m.median_ms),
            format!("±{}", table::percent(m.spread())),
            format!("{:.1}", m.gbps),
            format!("{:.3}", m.tflops),
            format!("{:.1} %{cached}", m.percent_of_ceiling),
        ];
        if let Some(baseline) = baseline {
            row.push(baseline.ratio(m).map_or("new".into(), |ratio| format!("{ratio:.2}x")));
        }
        let times = peers.of(&m.op, &m.case, &m.dtype, &device.to_string());
        row.extend(peers.names().iter().map(|name| match times.get(name) {
            Some(ms) => format!("{} ({:.2}x)", table::time(*ms), ms / m.median_ms),
            None => "-".into(),
        }));
        table.add_row(row);
    }
    println!("{table}");
    if baseline.is_some() {
        println!("vs baseline: time over the baseline's; below 1 is faster");
    }
    if !peers.names().is_empty() {
        println!("peers: their time, and in brackets how many times as long as ours");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerances_that_would_switch_the_comparison_off_are_refused() {
        assert!([parse_tolerance("0"), parse_tolerance("2.5")].iter().all(|percent| percent.is_ok()));
        for bad in ["nan", "inf", "-1", "-inf", "x", ""] {
            assert!(matches!(parse_tolerance(bad), Err(Error::Parse { .. })), "{bad}");
        }
    }
}
