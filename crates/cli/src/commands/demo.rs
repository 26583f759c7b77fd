//! `warpsmith demo`: every op checked and timed on this machine in under a minute.

use crate::commands::bench::quick_bytes;
use crate::kernels::progress_bar;
use crate::table;
use std::process::ExitCode;
use std::time::Instant;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::Case;
use warpsmith::lab::bench::{Bench, Cache, Ceilings, Settings};
use warpsmith::lab::proof::{Bulk, Prepared, kernels_on};
use warpsmith::{DType, Device, Error, Result, cpu, ops};

/// See the kernels verified and timed on this machine, with or without a GPU
///
/// Checks every op on a handful of its cases with every kernel that runs here, times it on a large case and on one
/// of your size, and shows how near each comes to what the machine can do. Under a minute; --quick under fifteen
/// seconds. `warpsmith check` and `warpsmith bench` do the same in full.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Fewer cases, fewer samples, smaller tensors
    #[arg(long)]
    quick: bool,
    /// Where to run: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long)]
    device: Option<Device>,
    /// Sequences of the case of your size
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Tokens of a sequence of that case
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    seq_len: u32,
    /// Length of a row of that case, for ops that work on rows
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    d_model: u32,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith demo
  warpsmith demo --quick
  warpsmith demo --device cpu --batch-size 4 --seq-len 2048 --d-model 4096";

/// Cases that a kernel is checked on.
const CASES: usize = 24;
const QUICK_CASES: usize = 8;

pub fn run(args: &Args) -> Result<ExitCode> {
    let start = Instant::now();
    let device = args.device.unwrap_or_else(Device::best);
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
    let bar = progress_bar(ops::PROVABLE.len() + 1);
    bar.set_message("copy");
    let ceilings = Ceilings::measure(device, &settings)?;
    bar.inc(1);
    let headings = ["op", "checked", "case", "dtype", "kernel", "time", "rate", "of the limit"];
    let mut table = table::new(&headings.map(String::from), 5);
    let (mut checks, mut failures, mut shares) = (0, Vec::new(), Vec::new());
    for op in ops::PROVABLE {
        bar.set_message(op.spec().name);
        let (passed, failed) = check(*op, device, if args.quick { QUICK_CASES } else { CASES })?;
        checks += passed + failed.len();
        let verdict = match failed.len() {
            0 => format!("{passed} ok"),
            n => format!("{n} of {} FAILED", passed + n),
        };
        failures.extend(failed);
        let mut first = true;
        for case in timed_cases(args, *op, device) {
            let measured = match Bench::new(*op, &case, device, ceilings, settings) {
                Ok(bench) => bench.measure(None)?,
                Err(Error::OutOfMemory { .. }) => continue,
                Err(error) => return Err(error),
            };
            let cached = measured.l2 == Cache::Warm;
            // The small tensors of a quick run may stay in a large last-level cache: no verdict from those.
            if first && !cached && !args.quick {
                shares.push(measured.percent_of_ceiling);
            }
            table.add_row([
                if first { measured.op } else { String::new() },
                if first { verdict.clone() } else { String::new() },
                measured.case,
                measured.dtype,
                measured.kernel,
                table::time(measured.median_ms),
                measured.bound.rate(measured.gbps, measured.tflops),
                if cached { "in cache".into() } else { format!("{:.0} %", measured.percent_of_ceiling) },
            ]);
            first = false;
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    println!("The limits here: {ceilings}.\n");
    println!("{table}");
    for failure in &failures {
        println!("{failure}");
    }
    let seconds = start.elapsed().as_secs_f64();
    if !failures.is_empty() {
        println!(
            "{} of {checks} checks failed: `warpsmith check` shows them all ({seconds:.0} s)",
            failures.len()
        );
        return Ok(ExitCode::FAILURE);
    }
    shares.sort_by(f64::total_cmp);
    let speed = match shares.get(shares.len() / 2) {
        Some(median) => format!("; the median op runs at {median:.0} % of its limit"),
        None => String::new(),
    };
    println!(
        "All {checks} checks of {} ops passed against the f64 reference{speed} ({seconds:.0} s).",
        ops::PROVABLE.len()
    );
    Ok(ExitCode::SUCCESS)
}

fn introduce(device: Device) -> Result<()> {
    let info = device.info()?;
    match info.arch {
        Some(arch) => println!("{} ({device}, {arch}, {} multiprocessors)", info.name, info.units),
        None => println!("{} ({device}, {} threads, {})", info.name, info.units, cpu::Tier::best()),
    }
    if device == Device::Cpu && Device::best() == Device::Cpu {
        println!("No GPU can be used here (`warpsmith doctor` says why): these are the CPU kernels.");
    }
    Ok(())
}

/// Checks every kernel on up to `most` of the op's cases, spread over all of them; passes and descriptions of failures.
fn check(op: &'static dyn AnyProvable, device: Device, most: usize) -> Result<(usize, Vec<String>)> {
    let stream = device.default_stream()?;
    let cases = op.cases();
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

/// The largest case that fits the demo, and one of the user's size.
fn timed_cases(args: &Args, op: &'static dyn AnyProvable, device: Device) -> Vec<Case> {
    let limit = match args.quick {
        true => quick_bytes(device) / 4,
        false => quick_bytes(device),
    };
    let bytes = |case: &Case| Bulk::bytes(&op.plan(case), case.arrangement).unwrap_or(usize::MAX);
    let cases = op.bench_cases();
    let fitting = cases.iter().filter(|case| bytes(case) <= limit).max_by_key(|case| bytes(case));
    let Some(large) = fitting.or_else(|| cases.iter().min_by_key(|case| bytes(case))) else {
        return Vec::new();
    };
    let mut large = large.clone();
    // Where even the smallest is too large, fewer rows of it.
    while bytes(&large) > limit && large.sizes[0] > 1 {
        large.sizes[0] /= 2;
    }
    let mut own = Case { dtype: DType::F32, ..large.clone() };
    let tokens = args.batch_size as usize * args.seq_len as usize;
    for (size, value) in op.spec().sizes.iter().zip(&mut own.sizes) {
        match size.name {
            "num_tokens" => *value = tokens,
            "hidden" => *value = args.d_model as usize,
            _ => {}
        }
    }
    if own.sizes == large.sizes { vec![large] } else { vec![large, own] }
}
