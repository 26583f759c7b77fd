//! `warpsmith demo`: the tour. A model that answers, attention, experts and fusion beside what they replace, other
//! hardware, and every op checked on this machine. At most 60 lines of 80 characters.

mod answers;
mod claims;
mod tour;

use crate::commands::bench::quick_bytes;
use crate::kernels::progress_bar;
use crate::table;
use std::process::ExitCode;
use std::time::Instant;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::Case;
use warpsmith::lab::bench::{Bench, Cache, Ceilings, Measurement, Settings};
use warpsmith::lab::proof::{BenchTensors, Prepared, kernels_on};
use warpsmith::{Device, Error, Result, cpu, ops};

/// See a model answer on this machine, and the kernels checked and timed, with or without a GPU
///
/// With --model, first asks the model two questions after the same long system prompt and shows what the prefix cache saves.
/// Then, in a model of the size that --batch-size, --seq-len, --d-model, --num-experts and --top-k describe: attention, a
/// mixture of experts and a fused layer, each beside what it replaces. Then what other hardware would change, what was
/// measured of well-known claims, and every op.
///
/// Checks every kernel that runs here on some of its op's cases, times every op on a large case (with --quick a few ops),
/// and compares the times with what the machine can do. Takes about a minute, with --quick at most fifteen seconds on two
/// cores. `warpsmith check` and `warpsmith bench` do the same in full.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A model to ask first: a .gguf or .safetensors file, or a folder with config.json
    #[arg(long, short, value_name = "PATH")]
    model: Option<std::path::PathBuf>,
    /// CPU threads, from 1 to 4096 [default: $WARPSMITH_NUM_THREADS, else as many as there are]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    /// Fewer cases, fewer samples, smaller tensors
    #[arg(long)]
    quick: bool,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long)]
    device: Option<Device>,
    /// Sequences in a batch
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch_size: u32,
    /// Tokens in a sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65536))]
    seq_len: u32,
    /// Width of the model: a multiple of 8
    #[arg(long, value_name = "WIDTH", default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..=16384))]
    d_model: u32,
    /// Keys that attention works on at a time, where a kernel has such blocks
    #[arg(long, value_name = "KEYS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    block_size: u32,
    /// Experts of the mixture
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    num_experts: u32,
    /// Experts of each token: at most all of them
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    top_k: u32,
    /// Also measure peak memory, beyond the sizes of what is kept between ops
    #[arg(long)]
    profile_memory: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith demo
  warpsmith demo --quick
  warpsmith demo --quick --model model.gguf --threads 4
  warpsmith demo --quick --device cpu --batch-size 1 \\
      --seq-len 4096 --profile-memory
  warpsmith demo --quick --d-model 512 --num-experts 16 --top-k 4";

/// Cases a kernel is checked on, and with --quick also bytes of their tensors, unless even the least has more.
const CASES: usize = 24;
const QUICK_CASES: usize = 2;
const QUICK_CASE_BYTES: usize = 64 << 10;
/// The ops with a line of their own. With --quick no other one is timed.
const MAIN_OPS: [&str; 6] = ["rms_norm", "softmax", "add_gelu", "linear", "attention", "paged_attention"];

/// What the names of gradients end with.
const GRADIENT: &str = "_backward";
/// Longest line.
const WIDTH: usize = 80;
/// Longest name of an op in [`MAIN_OPS`].
const NAME_WIDTH: usize = 15;
/// Longest description of a case: what is longer is cut.
const CASE_WIDTH: usize = 24;

pub fn run(args: &Args) -> std::result::Result<ExitCode, warpsmith_engine::Error> {
    match args.threads {
        Some(threads) => cpu::with_threads(threads.into(), || show(args)),
        None => show(args),
    }
}

fn show(args: &Args) -> std::result::Result<ExitCode, warpsmith_engine::Error> {
    let device = args.device.unwrap_or_else(Device::best);
    let sizes = tour::Sizes::new(args)?;
    if let Some(path) = &args.model {
        answers::show(path, args.device)?;
    }
    let start = Instant::now();
    let settings = match args.quick {
        true => Settings::quick(device),
        // Every op in under a minute on two cores.
        false if device == Device::Cpu => {
            let bytes = 256 << 20;
            Settings { seconds: 0.1, copy_bytes: bytes, host_rotation: bytes, ..Settings::thorough(device) }
        }
        false => Settings { seconds: 0.1, ..Settings::thorough(device) },
    };
    introduce(device)?;
    tour::show(&sizes, device, args.profile_memory)?;
    claims::show();
    let bar = progress_bar(ops::PROVABLE.len() + 1);
    bar.set_message("copy");
    let ceilings = Ceilings::measure(device, &settings)?;
    bar.inc(1);
    bar.suspend(|| {
        print(&format!("The limits here: {ceilings}."));
        let headings = ["time", "rate", "of limit"].map(String::from);
        println!("\n{}\n{}", line(["op", "case"], &headings, "checks"), "-".repeat(WIDTH));
    });
    let (mut checks, mut failures, mut shares) = (0, Vec::new(), Vec::new());
    // Shares of the limit of the other ops and of gradients, by the forward op.
    let (mut others, mut untimed) = (Vec::<(&str, [Option<String>; 2])>::new(), Vec::new());
    for op in ops::PROVABLE {
        let spec = op.spec();
        bar.set_message(spec.name);
        let (passed, failed) = check(*op, device, args.quick)?;
        checks += passed + failed.len();
        let verdict = match failed.len() {
            0 => format!("{passed} ok"),
            n => format!("{n} FAIL"),
        };
        failures.extend(failed);
        bar.inc(1);
        let timed =
            if args.quick && !MAIN_OPS.contains(&spec.name) { None } else { timed_case(args, *op, device) };
        let measured = timed.map(|case| Bench::new(*op, &case, device, ceilings, settings)?.measure(None));
        let measured = match measured {
            Some(Ok(measured)) => measured,
            None | Some(Err(Error::OutOfMemory { .. })) => {
                if !args.quick || !spec.name.ends_with(GRADIENT) {
                    untimed.push(spec.name);
                }
                continue;
            }
            Some(Err(error)) => return Err(error.into()),
        };
        // The small tensors of a quick run may stay in a large last-level cache, so they give no verdict.
        if measured.l2 == Cache::Cold && !args.quick {
            shares.push(measured.percent_of_ceiling);
        }
        let numbers = numbers(&measured);
        if MAIN_OPS.contains(&spec.name) {
            let case = format!("{} {}", measured.dtype, measured.case);
            bar.suspend(|| println!("{}", line([spec.name, &case], &numbers, &verdict)));
        } else {
            let forward = spec.name.strip_suffix(GRADIENT).unwrap_or(spec.name);
            let known = others.iter().position(|(name, _)| *name == forward);
            let at = known.unwrap_or_else(|| {
                others.push((forward, [None, None]));
                others.len() - 1
            });
            let [_, _, share] = numbers;
            others[at].1[usize::from(forward != spec.name)] = Some(share);
        }
    }
    bar.finish_and_clear();
    if !others.is_empty() {
        let told = others.iter().map(|(name, [forward, gradient])| {
            let forward = forward.as_ref().map_or(String::new(), |share| format!(" {share}"));
            let gradient = gradient.as_ref().map_or(String::new(), |share| format!(" ({share})"));
            format!("{name}{forward}{gradient}")
        });
        let told: Vec<String> = told.collect();
        print(&format!("The others, of the limit, in brackets their gradients: {}", told.join(", ")));
    }
    if !untimed.is_empty() {
        let gradients = if args.quick { "all gradients, " } else { "" };
        print(&format!("Checked, not timed: {gradients}{}", untimed.join(", ")));
    }
    println!();
    for failure in &failures {
        print(failure);
    }
    let seconds = start.elapsed().as_secs_f64();
    if !failures.is_empty() {
        let failed = failures.len();
        print(&format!(
            "{failed} of {checks} checks failed ({seconds:.0} s). `warpsmith check` shows them all."
        ));
        return Ok(ExitCode::FAILURE);
    }
    print(&format!(
        "All {checks} checks of {} ops agree with the f64 reference ({seconds:.0} s).",
        ops::PROVABLE.len()
    ));
    shares.sort_by(f64::total_cmp);
    if let Some(median) = shares.get(shares.len() / 2) {
        print(&format!("On large tensors the median op runs at {median:.0} % of what the machine can do."));
    }
    Ok(ExitCode::SUCCESS)
}

fn introduce(device: Device) -> Result<()> {
    let info = device.info()?;
    match info.arch {
        Some(arch) => print(&format!("{} ({device}, {arch}, {} multiprocessors)", info.name, info.units)),
        None => print(&format!("{} ({device}, {} threads, {})", info.name, info.units, cpu::Tier::best())),
    }
    if device == Device::Cpu && Device::best() == Device::Cpu {
        print("There is no usable GPU (`warpsmith doctor` says why): these are the CPU kernels.");
    }
    Ok(())
}

/// Prints text in lines that are not too long.
fn print(text: &str) {
    println!("{}", table::wrap(text, WIDTH, 4).join("\n"));
}

/// The line of a timed case: what was timed, three numbers, and the verdict of the op's checks.
fn line([name, case]: [&str; 2], [time, rate, share]: &[String; 3], verdict: &str) -> String {
    let mut case = case.to_string();
    if case.chars().count() > CASE_WIDTH {
        case = case.chars().take(CASE_WIDTH - 3).chain("...".chars()).collect();
    }
    format!("{name:<NAME_WIDTH$} {case:<CASE_WIDTH$} {time:>10} {rate:>12} {share:>8} {verdict:>6}")
}

/// The time, the rate and the share of the limit.
fn numbers(measured: &Measurement) -> [String; 3] {
    // A part of what is read from memory may still be in a large cache.
    let share = match measured.l2 {
        Cache::Cold if measured.percent_of_ceiling <= 100.0 => {
            format!("{:.0} %", measured.percent_of_ceiling)
        }
        _ => "in cache".into(),
    };
    [table::time(measured.median_ms), measured.bound.rate(measured.gbps, measured.tflops), share]
}

/// Checks every kernel on some cases, spread evenly over all of the op's, or with `quick` over the small ones. Returns the
/// number of passes and a description of each failure.
fn check(op: &'static dyn AnyProvable, device: Device, quick: bool) -> Result<(usize, Vec<String>)> {
    let stream = device.default_stream()?;
    let bytes = |case: &Case| BenchTensors::bytes(&op.plan(case), case.arrangement).unwrap_or(usize::MAX);
    let mut cases = op.cases();
    let mut most = CASES;
    if quick {
        most = QUICK_CASES;
        let least = cases.iter().map(bytes).filter(|bytes| *bytes > 0).min().unwrap_or(0);
        cases.retain(|case| (1..=least.max(QUICK_CASE_BYTES)).contains(&bytes(case)));
    }
    let step = cases.len().div_ceil(most).max(1);
    let (mut passed, mut failures) = (0, Vec::new());
    for (seed, case) in cases.iter().enumerate().step_by(step) {
        let mut prepared = Prepared::new(op, case, device, seed as u64)?;
        for kernel in kernels_on(op, device) {
            let Some(outcome) = prepared.judge(&kernel, &stream)? else { continue };
            match outcome.failure {
                None => passed += 1,
                Some(why) => failures.push(format!(
                    "FAILED {} [{} {}]: {why}",
                    kernel.name,
                    case.name(op.spec()),
                    case.dtype
                )),
            }
        }
    }
    Ok((passed, failures))
}

/// The largest case that fits the demo, or the smallest of all with fewer rows.
fn timed_case(args: &Args, op: &'static dyn AnyProvable, device: Device) -> Option<Case> {
    let limit = match args.quick {
        true => quick_bytes(device) / 4,
        false => quick_bytes(device),
    };
    let bytes = |case: &Case| BenchTensors::bytes(&op.plan(case), case.arrangement).unwrap_or(usize::MAX);
    let cases = op.bench_cases();
    let fitting = cases.iter().filter(|case| bytes(case) <= limit).max_by_key(|case| bytes(case));
    let mut large = fitting.or_else(|| cases.iter().min_by_key(|case| bytes(case)))?.clone();
    while bytes(&large) > limit && large.sizes[0] > 1 {
        large.sizes[0] /= 2;
    }
    Some(large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_line_is_longer_than_80_characters() {
        let numbers = ["999.999 ms", "1234 TFLOP/s", "in cache"].map(String::from);
        let main = |op: &&&dyn AnyProvable| MAIN_OPS.contains(&op.spec().name);
        assert_eq!(ops::PROVABLE.iter().filter(main).count(), MAIN_OPS.len());
        for op in ops::PROVABLE.iter().filter(main) {
            for case in op.bench_cases().iter().chain(&op.cases()) {
                let line = line([op.spec().name, &case.name(op.spec())], &numbers, "288 ok");
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
        }
        assert_eq!(line(["", ""], &["", "", ""].map(String::from), "").chars().count(), WIDTH);
    }
}
