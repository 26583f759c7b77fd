//! `warpsmith check --random`: random calls, judged like cases.

mod amount;
mod jobs;
mod ledger;
mod tally;

pub use self::amount::Amount;
pub use self::ledger::add as add_to_ledger;

use self::tally::{Tally, print};
use super::part::{NOTHING_LAUNCHED, Part};
use super::{Args, again};
use crate::kernels::progress_bar;
use crate::select::case_words;
use indicatif::ProgressBar;
use std::collections::HashMap;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use warpsmith::lab::AnyProvable;
use warpsmith::lab::evidence::today;
use warpsmith::lab::proof::Outcome;
use warpsmith::lab::random::{Draw, Draws, Instructions, Pinned, Verdict, judge, launch, reduce};
use warpsmith::op::KernelInfo;
use warpsmith::{Device, Result};

/// Draws whose references are evaluated together, at most.
const TOGETHER: usize = 16;
/// Failures of a kernel that are shown, and those of them that are made smaller.
const SHOWN: usize = 8;
const REDUCED: usize = 3;
/// The most calls spent on shrinking a failure.
const ATTEMPTS: usize = 250;
/// How often a run without a terminal reports its progress.
const PULSE: Duration = Duration::from_secs(60);
/// Exit status of an interrupted run.
const INTERRUPTED: u8 = 130;

/// Set by Ctrl-C: what was done so far is still reported. The second one ends the process.
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(signal: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
    // SAFETY: `signal` may be called in a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// The seed of a run without one: today's date as a number, so that every day tries others.
pub fn seed_of_the_day() -> u64 {
    today().replace('-', "").parse().unwrap_or_default()
}

pub fn run(args: &Args, amount: Amount, device: Device, folder: Option<PathBuf>) -> Result<ExitCode> {
    // SAFETY: the handler only stores a flag and calls `signal`.
    unsafe { libc::signal(libc::SIGINT, stop as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    let seed = args.seed.unwrap_or_else(seed_of_the_day);
    if args.part.is_none() {
        eprintln!("seed {seed} on {device}");
    }
    let begun = Instant::now();
    let tallies = match args.processes() {
        1 => Run::new(args, amount, device, seed).go()?,
        _ => jobs::run(args, amount, device, seed)?,
    };
    let stopped = STOP.load(Ordering::Relaxed);
    print(&tallies, args.json);
    let total = Tally::total(&tallies);
    if total.calls == 0 {
        eprintln!("no kernel on {device} runs what was asked for");
        return Ok(ExitCode::from(if args.launch_only { NOTHING_LAUNCHED } else { 1 }));
    }
    if stopped {
        eprintln!("interrupted: `--seed {seed}` begins again");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if let Some(folder) = folder {
        let path = ledger::add(args, device, seed, &total, begun.elapsed(), "judged", &folder)?;
        eprintln!("recorded in {}", path.display());
    }
    Ok(if total.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The counts of a run under a sanitizer, which ends when its amount is reached.
pub fn asked(amount: Amount, found: bool) -> Tally {
    let calls = if let Amount::Calls(calls) = amount { calls } else { 0 };
    Tally { calls, failures: found.into(), ..Tally::new("all") }
}

/// One process's share of a run.
struct Run<'a> {
    args: &'a Args,
    device: Device,
    seed: u64,
    part: Part,
    amount: Amount,
    begun: Instant,
    told: Instant,
    bar: ProgressBar,
    /// Failures of each kernel so far.
    failures: HashMap<&'static str, usize>,
}

/// An op with the state of its draws.
struct Share {
    op: &'static dyn AnyProvable,
    kernels: Vec<KernelInfo>,
    draws: Draws,
    tally: Tally,
}

impl<'a> Run<'a> {
    fn new(args: &'a Args, amount: Amount, device: Device, seed: u64) -> Self {
        let part = args.part.unwrap_or_default();
        let amount = amount.share(part.count());
        let (begun, told) = (Instant::now(), Instant::now());
        let bar = progress_bar(amount.length());
        Run { args, device, seed, part, amount, begun, told, bar, failures: HashMap::new() }
    }

    fn go(&mut self) -> Result<Vec<Tally>> {
        let pinned = Pinned {
            dtype: self.args.select.dtype(),
            arrangement: self.args.arrangement,
            values: self.args.values,
        };
        let share = |op: &'static dyn AnyProvable| {
            let kernels = self.args.select.kernels(op, self.device);
            let draws = Draws::new(op, pinned).filter(|_| !kernels.is_empty())?;
            Some(Share { op, kernels, draws, tally: Tally::new(op.spec().name) })
        };
        let mut shares: Vec<Share> = self.args.select.ops()?.into_iter().filter_map(share).collect();
        let together = self.amount.together(shares.len(), TOGETHER);
        let mut broken = None;
        // All ops in turn, so that each gets its part of any amount.
        'rounds: while !shares.is_empty() {
            let before: usize = shares.iter().map(|share| share.tally.draws).sum();
            for at in 0..shares.len() {
                let done: usize = shares.iter().map(|share| share.tally.calls).sum();
                if STOP.load(Ordering::Relaxed) || self.amount.is_reached(done, self.begun) {
                    break 'rounds;
                }
                self.show(&shares[at], done);
                if let Err(error) = self.batch(&mut shares[at], together) {
                    broken = Some(error);
                    break 'rounds;
                }
            }
            // No kernel runs here: the loop would never end.
            let calls: usize = shares.iter().map(|share| share.tally.calls).sum();
            if calls == 0 && before > 1000 {
                break;
            }
        }
        self.bar.finish_and_clear();
        let tallies: Vec<Tally> = shares.into_iter().map(|share| share.tally).collect();
        match broken {
            Some(error) => {
                // Without the device nothing else can be judged, but earlier results are still reported.
                print(&tallies, self.args.json);
                Err(error)
            }
            None => Ok(tallies),
        }
    }

    fn show(&mut self, share: &Share, done: usize) {
        self.bar.set_message(share.tally.op.clone());
        self.bar.set_position(self.amount.position(done, self.begun));
        if self.told.elapsed() > PULSE && !std::io::stderr().is_terminal() {
            self.told = Instant::now();
            let failures: usize = self.failures.values().sum();
            eprintln!("{} s: {done} calls, {failures} failures", self.begun.elapsed().as_secs());
        }
    }

    /// The next draws of one op.
    fn batch(&mut self, share: &mut Share, count: usize) -> Result<()> {
        let first = share.tally.draws as u64;
        let numbers = (first..first + count as u64).map(|number| self.part.number(number));
        let draws: Vec<Draw> = numbers.map(|number| share.draws.draw(self.seed, number)).collect();
        share.tally.draws += draws.len();
        let instructions = Instructions::draw(&share.draws, self.device, draws[0].seed);
        if self.args.launch_only {
            for draw in &draws {
                match launch(share.op, draw, &share.kernels, self.device) {
                    Ok(Some(launched)) => share.tally.calls += launched,
                    Ok(None) => share.tally.refused += 1,
                    Err(error) => {
                        self.tell(&self.command(share.op, None, draw, &instructions));
                        return Err(error);
                    }
                }
            }
            return Ok(());
        }
        let verdicts = judge(share.op, &draws, &share.kernels, self.device);
        let verdicts = verdicts.inspect_err(|_| {
            for draw in &draws {
                self.tell(&format!("maybe {}", self.command(share.op, None, draw, &instructions)));
            }
        })?;
        for (draw, verdict) in draws.iter().zip(verdicts) {
            let outcomes = match verdict {
                Verdict::Refused(error) => {
                    share.tally.refuse(&error.to_string());
                    continue;
                }
                Verdict::Judged(outcomes) => outcomes,
            };
            if outcomes.is_empty() {
                share.tally.refuse("no kernel supports it");
            }
            for (kernel, outcome) in outcomes {
                share.tally.count(&outcome);
                if !outcome.ok {
                    self.failed(share.op, &kernel, draw, &outcome, &instructions);
                }
            }
        }
        Ok(())
    }

    /// Shows a failure as a command, and as that of a smaller case.
    fn failed(
        &mut self,
        op: &'static dyn AnyProvable,
        kernel: &KernelInfo,
        draw: &Draw,
        outcome: &Outcome,
        instructions: &Instructions,
    ) {
        let count = self.failures.entry(kernel.name).or_default();
        *count += 1;
        if *count > SHOWN {
            return;
        }
        let why = outcome.failure.as_deref().unwrap_or("failed");
        let (name, dtype) = (draw.case.name(op.spec()), draw.case.dtype);
        let reduced = *count <= REDUCED;
        self.tell(&format!("\n{} [{name} {dtype}]: {why}", kernel.name));
        self.tell(&format!("  {}", self.command(op, Some(kernel), draw, instructions)));
        if !reduced || STOP.load(Ordering::Relaxed) {
            return;
        }
        let mut last = None;
        let case = reduce(op, &draw.case, ATTEMPTS, |case| {
            let draw = Draw { case: case.clone(), seed: draw.seed };
            let failure = match judge(op, &[draw], &[*kernel], self.device).as_deref() {
                Ok([Verdict::Judged(outcomes)]) => {
                    outcomes.iter().find_map(|(_, outcome)| outcome.failure.clone())
                }
                _ => None,
            };
            let fails = failure.is_some();
            last = failure.or_else(|| last.take());
            fails && !STOP.load(Ordering::Relaxed)
        });
        if case != draw.case {
            let smaller = Draw { case, seed: draw.seed };
            self.tell(&format!("  smaller: {}", last.unwrap_or_default()));
            self.tell(&format!("  {}", self.command(op, Some(kernel), &smaller, instructions)));
        }
    }

    /// The command line that repeats a draw.
    fn command(
        &self,
        op: &'static dyn AnyProvable,
        kernel: Option<&KernelInfo>,
        draw: &Draw,
        instructions: &Instructions,
    ) -> String {
        let words = format!("{} --seed {}", case_words(op.spec(), &draw.case).join(" "), draw.seed);
        let setting = kernel.map_or(String::new(), |kernel| instructions.setting(kernel));
        format!("{setting}{}", again(op, kernel, self.device, &words))
    }

    /// On standard error where standard output is read by a program.
    fn tell(&self, line: &str) {
        self.bar.suspend(|| if self.args.json { eprintln!("{line}") } else { println!("{line}") });
    }
}
