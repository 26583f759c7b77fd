//! A check under the tools of compute-sanitizer.

use super::{Args, is_full};
use crate::select::{arrangement_name, values_name};
use std::path::PathBuf;
use std::process::ExitCode;
use warpsmith::evidence::{Machine, Record};
use warpsmith::{Device, Error, Result};

/// What a run under a sanitizer exits with when the sanitizer found something.
const SANITIZER_ERRORS: i32 = 99;
const SANITIZERS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// The record of a tool has one verdict for a kernel, which must stand for all its cases.
pub fn refuse_partial_record(args: &Args) -> Result<()> {
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
fn watched_words(args: &Args, device: Device) -> Vec<String> {
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
    words.push("--launch-only".into());
    words
}

/// Runs this very check under compute-sanitizer, once for each tool, and records what the tools said.
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
    let program = std::env::current_exe().map_err(|e| Error::io("warpsmith", "finding this program", &e))?;
    let mut verdicts = Vec::new();
    for tool in tools {
        eprintln!("compute-sanitizer --tool {tool}");
        let errors = SANITIZER_ERRORS.to_string();
        let status = std::process::Command::new(&sanitizer)
            .args(["--tool", tool, "--error-exitcode", &errors])
            .arg(&program)
            .args(watched_words(args, device))
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
        let line = "rms_norm --device cpu --shape hidden=7 --arrangement padded --values special --seed 3 --in-place";
        let words = watched_words(&parse(&format!("{line} --sanitizer all")), Device::Cpu);
        assert_eq!(words.join(" "), format!("check {line} --launch-only"));
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
