//! Checks under the tools of compute-sanitizer.

use super::part::{NOTHING_LAUNCHED, Part};
use super::random::{self, Amount, seed_of_the_day};
use super::{Args, is_full};
use crate::kernels::progress_bar;
use crate::select::{arrangement_name, values_name};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Instant;
use warpsmith::lab::evidence::{Machine, Record, SANITIZERS};
use warpsmith::{Device, Error, Result};

/// Exit status of a run in which the sanitizer found something.
const SANITIZER_ERRORS: i32 = 99;

/// A tool's record has one verdict per kernel, which must stand for all its cases.
pub fn refuse_partial_record(args: &Args) -> Result<()> {
    if !args.record || is_full(args) || args.random.is_some() {
        return Ok(());
    }
    Err(Error::parse(
        "--sanitizer with --record",
        "all cases of an op, because what is recorded says that a kernel is clean on every one",
        "some of them (--shape, --dtype, --set, --with or --arrangement)",
    ))
}

/// The arguments of `warpsmith` for one part of the check in a process of its own. Random calls have an amount and a seed.
pub fn watched_words(args: &Args, device: Device, part: Part, random: Option<(Amount, u64)>) -> Vec<String> {
    let mut words = vec!["check".to_string()];
    words.extend(args.select.words(device));
    if let Some(arrangement) = args.arrangement {
        words.extend(["--arrangement".into(), arrangement_name(arrangement).into()]);
    }
    if let Some(values) = args.values {
        words.extend(["--values".into(), values_name(values).into()]);
    }
    if let Some((amount, _)) = random {
        words.extend(["--random".into(), amount.text()]);
    }
    if let Some(seed) = random.map(|(_, seed)| seed).or(args.seed) {
        words.extend(["--seed".into(), seed.to_string()]);
    }
    words.extend(args.in_place.then(|| "--in-place".into()));
    words.push(if args.sanitizer.is_some() || args.launch_only { "--launch-only" } else { "--json" }.into());
    words.extend(part.words());
    words
}

/// The verdict of a tool over all cases, or `None` if a process did not finish or nothing was launched.
fn verdict(statuses: &[ExitStatus]) -> Option<bool> {
    let codes: Option<Vec<i32>> = statuses.iter().map(ExitStatus::code).collect();
    let launched: Vec<i32> = codes?.into_iter().filter(|code| *code != i32::from(NOTHING_LAUNCHED)).collect();
    let known = launched.iter().all(|code| [0, SANITIZER_ERRORS].contains(code));
    (known && !launched.is_empty()).then(|| launched.iter().all(|code| *code == 0))
}

/// Runs the same check under a tool, one process per part of the cases, and returns how each ended.
fn watch(
    args: &Args,
    device: Device,
    sanitizer: &Path,
    tool: &str,
    random: Option<(Amount, u64)>,
) -> Result<Vec<ExitStatus>> {
    let program = std::env::current_exe().map_err(|e| Error::io("warpsmith", "finding this program", &e))?;
    let command = |part: Part| {
        let mut command = Command::new(sanitizer);
        command.args(["--tool", tool, "--error-exitcode", &SANITIZER_ERRORS.to_string()]);
        command.arg(&program).args(watched_words(args, device, part, random));
        command
    };
    let failed = |e| Error::io(sanitizer, "starting", &e);
    let parts: Vec<Part> = Part::all(args.processes()).collect();
    if let [whole] = parts[..] {
        return Ok(vec![command(whole).status().map_err(failed)?]);
    }
    let bar = progress_bar(parts.len());
    bar.set_message("processes");
    let run = |part: Part| {
        let output = command(part).output();
        bar.inc(1);
        output
    };
    std::thread::scope(|scope| {
        // Start all before waiting for the first.
        let processes: Vec<_> = parts.iter().map(|part| scope.spawn(|| run(*part))).collect();
        let mut statuses = Vec::new();
        for process in processes {
            let output = process.join().expect("the thread only waits").map_err(failed)?;
            // One after the other, so that a tool's messages about a case stay together.
            bar.suspend(|| {
                eprint!("{}", String::from_utf8_lossy(&output.stderr));
                print!("{}", String::from_utf8_lossy(&output.stdout));
            });
            statuses.push(output.status);
        }
        bar.finish_and_clear();
        Ok(statuses)
    })
}

/// The verdicts of the tools, up to the first that found something or did not see all cases.
fn verdicts<'a>(
    args: &Args,
    device: Device,
    sanitizer: &Path,
    tools: &[&'a str],
    random: Option<(Amount, u64)>,
) -> Result<Vec<(&'a str, bool)>> {
    let mut verdicts = Vec::new();
    for &tool in tools {
        eprintln!("compute-sanitizer --tool {tool}");
        let statuses = watch(args, device, sanitizer, tool, random)?;
        let Some(clean) = verdict(&statuses) else {
            let ends: Vec<String> = statuses.iter().map(ToString::to_string).collect();
            eprintln!("{tool}: not all cases were run ({}): nothing is recorded of it", ends.join(", "));
            break;
        };
        verdicts.push((tool, clean));
        if !clean {
            break;
        }
    }
    Ok(verdicts)
}

/// Runs the same check under compute-sanitizer, once per tool, and records the verdicts.
pub fn run(args: &Args, device: Device, tool: &str, folder: Option<PathBuf>) -> Result<ExitCode> {
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
    if let (true, Some(folder)) = (args.stale, &folder) {
        return stale(args, device, &sanitizer, &tools, folder);
    }
    let random = args.random.map(|amount| (amount, args.seed.unwrap_or_else(seed_of_the_day)));
    let begun = Instant::now();
    let verdicts = verdicts(args, device, &sanitizer, &tools, random)?;
    let clean = verdicts.len() == tools.len() && verdicts.iter().all(|(_, clean)| *clean);
    if let (Some((amount, seed)), Some(folder)) = (random, &folder) {
        for (tool, clean) in verdicts {
            let total = random::asked(amount, !clean);
            let path = random::add_to_ledger(args, device, seed, &total, begun.elapsed(), tool, folder)?;
            eprintln!("recorded in {}", path.display());
        }
    } else if let Some(folder) = folder {
        eprintln!("recorded in {}", record(args, device, &verdicts, &folder)?.display());
    }
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Adds the verdicts to the evidence of all requested kernels.
fn record(args: &Args, device: Device, verdicts: &[(&str, bool)], folder: &Path) -> Result<PathBuf> {
    let mut record = Record::open(folder, Machine::of(device)?)?;
    for op in args.select.ops()? {
        for kernel in args.select.kernels(op, device) {
            let hash = warpsmith::lab::source_hash(&kernel, op.spec().name);
            for (tool, clean) in verdicts {
                if !record.add_sanitizer(kernel.name, &hash, tool, *clean) {
                    eprintln!(
                        "not recorded: {} has no evidence yet (`warpsmith check --record`)",
                        kernel.name
                    );
                }
            }
        }
    }
    record.save(folder)
}

/// Runs each kernel under the tools that have not seen its present code, and records each verdict at once.
fn stale(args: &Args, device: Device, sanitizer: &Path, tools: &[&str], folder: &Path) -> Result<ExitCode> {
    let deadline = args.budget.map(|budget| Instant::now() + budget);
    let known = Record::open(folder, Machine::of(device)?)?;
    let (mut clean, mut left) = (true, Vec::new());
    for op in args.select.ops()? {
        for kernel in args.select.kernels(op, device) {
            let hash = warpsmith::lab::source_hash(&kernel, op.spec().name);
            let missing = known.missing_sanitizers(&kernel, &hash);
            let one = Args { select: args.select.only(kernel.name), ..args.clone() };
            for tool in missing.into_iter().filter(|tool| tools.contains(tool)) {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    left.push(format!("{} {tool}", kernel.name));
                    continue;
                }
                eprintln!("{}", kernel.name);
                let verdicts = verdicts(&one, device, sanitizer, &[tool], None)?;
                clean &= matches!(verdicts[..], [(_, true)]);
                record(&one, device, &verdicts, folder)?;
            }
        }
    }
    if !left.is_empty() {
        eprintln!("left for the sanitizers: {}", left.join(", "));
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
        let line = "rms_norm --device cpu --shape hidden=7 --arrangement padded --values special --seed 3 --in-place";
        let args = parse(&format!("{line} --sanitizer all --jobs 2"));
        let whole: Vec<Part> = Part::all(1).collect();
        assert_eq!(
            watched_words(&args, Device::Cpu, whole[0], None).join(" "),
            format!("check {line} --launch-only")
        );
        for (number, part) in Part::all(2).enumerate() {
            let words = watched_words(&args, Device::Cpu, part, None);
            assert_eq!(words.join(" "), format!("check {line} --launch-only --part {number}/2"));
        }
    }

    /// A stand-in for compute-sanitizer that ends as a shell says, by its words.
    #[cfg(unix)]
    fn ends_by(name: &str, script: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("warpsmith-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("compute-sanitizer");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    #[cfg(unix)]
    fn every_part_is_watched_and_the_tools_end_at_the_first_that_says_no() {
        let args = parse("rms_norm --sanitizer all --jobs 3");
        let of = |name: &str, script: &str| {
            let path = ends_by(name, script);
            let verdicts =
                verdicts(&args, Device::Cpu, &path, &["memcheck", "racecheck", "initcheck"], None).unwrap();
            std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
            verdicts
        };
        let parts = "case \"$*\" in *--part\\ [012]/3*) exit 0;; *) exit 1;; esac";
        assert_eq!(of("clean", parts), [("memcheck", true), ("racecheck", true), ("initcheck", true)]);
        let found = "case \"$*\" in *racecheck*--part\\ 2/3*) exit 99;; *) exit 0;; esac";
        assert_eq!(of("found", found), [("memcheck", true), ("racecheck", false)]);
        let broken = "case \"$*\" in *racecheck*--part\\ 1/3*) exit 1;; *) exit 0;; esac";
        assert_eq!(of("broken", broken), [("memcheck", true)], "some cases were not seen");
        assert_eq!(of("nothing", "exit 98"), [], "nothing was launched");
    }

    #[test]
    #[cfg(unix)]
    fn a_verdict_needs_every_process_and_a_launch() {
        use std::os::unix::process::ExitStatusExt;
        let ended =
            |codes: &[i32]| codes.iter().map(|code| ExitStatus::from_raw(code << 8)).collect::<Vec<_>>();
        assert_eq!(verdict(&ended(&[0, 0])), Some(true));
        assert_eq!(verdict(&ended(&[0, 98])), Some(true), "a part may have no case for the kernel");
        assert_eq!(verdict(&ended(&[0, 99])), Some(false));
        assert_eq!(verdict(&ended(&[98, 98])), None, "nothing was seen");
        assert_eq!(verdict(&ended(&[0, 1])), None, "a process failed by itself");
        assert_eq!(verdict(&[ended(&[0])[0], ExitStatus::from_raw(9)]), None, "a process was killed");
        assert_eq!(verdict(&[]), None);
    }

    #[test]
    fn a_launch_without_a_judgement_is_not_recorded() {
        for option in ["--record", "--json", "--large", "--sanitizer all"] {
            let words = format!("check rms_norm --launch-only {option}");
            assert!(Line::try_parse_from(words.split_whitespace()).is_err(), "{option}");
        }
    }

    #[test]
    fn what_a_sanitizer_said_about_some_cases_is_not_recorded() {
        for part in
            ["--shape hidden=7", "--dtype f32", "--set eps=1", "--with weight", "--arrangement padded"]
        {
            let error = refuse_partial_record(&parse(&format!("rms_norm {part} --record")));
            assert!(matches!(error, Err(Error::Parse { .. })), "{part}");
            assert!(refuse_partial_record(&parse(&format!("rms_norm {part}"))).is_ok(), "{part}");
        }
        for whole in ["", "rms_norm", "--kernel rms_norm_row --seed 1"] {
            assert!(refuse_partial_record(&parse(&format!("{whole} --record"))).is_ok(), "{whole}");
        }
    }
}
