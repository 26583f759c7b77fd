//! Attacks the parsers of weights with damaged files and prints a line for `tests/ledger.md`.
//!
//!     cargo run --release -p warpsmith-engine --example fuzz_weights -- gguf|safetensors INPUTS [SEED]

#[path = "../tests/weights/mutate.rs"]
mod mutate;

use mutate::{Target, attack};
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let target = match args.first().map(String::as_str) {
        Some("gguf") => Some(Target::Gguf),
        Some("safetensors") => Some(Target::Safetensors),
        _ => None,
    };
    let number = |i: usize, default: Option<u64>| args.get(i).map_or(default, |text| text.parse().ok());
    let (Some(target), Some(count), Some(seed)) = (target, number(1, None), number(2, Some(1))) else {
        eprintln!("usage: fuzz_weights gguf|safetensors INPUTS [SEED]");
        return ExitCode::from(2);
    };
    let start = Instant::now();
    match attack(target, seed, count) {
        Ok(outcome) => {
            let seconds = start.elapsed().as_secs_f64();
            let (accepted, refused) = (outcome.accepted, outcome.refused);
            let name = format!("{target:?}").to_lowercase();
            println!(
                "| {name} | {seed} | {count} | {accepted} | {refused} | 0 | {seconds:.0} | {} |",
                peak_memory()
            );
            ExitCode::SUCCESS
        }
        Err(input) => {
            eprintln!("{target:?} panics on {input:?}");
            ExitCode::FAILURE
        }
    }
}

/// The most memory this process had, as the system tells it.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.map_or("unknown".into(), |peak| peak.trim().into())
}
