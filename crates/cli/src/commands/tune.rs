//! `warpsmith tune`: every kernel timed on a case, and the fastest remembered.

use super::bench::{for_each_case, timed_cases};
use crate::select::Selection;
use crate::table;
use std::process::ExitCode;
use warpsmith::Result;
use warpsmith::lab::bench::{Settings, Tuning};

/// Time every kernel that can run a case, and remember the fastest for calls on this machine
///
/// Without tuning, a call gets the first kernel in rank that supports it. Choices are kept per device and problem
/// (sizes, types, layout and options) until the kernel's source changes or this command runs again. A kernel whose
/// results depend on the rest of the batch is remembered only for calls that allow this. A choice applies only to the
/// sizes it was made for. If tuning selects different kernels for different batch sizes, the bits of a row may differ
/// between them; without tuning they do not. Cases are timed as by `warpsmith bench`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    select: Selection,
    /// Fewer samples, and no cases of more than a few hundred megabytes
    #[arg(long)]
    quick: bool,
    /// Print one JSON object per case, with every kernel's time, instead of a table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith tune                      the sizes that every op is timed with
  warpsmith tune linear --dtype bf16
  warpsmith tune linear --shape m=777 n=11008 k=4096 --dtype bf16 --device cuda
  warpsmith tune rms_norm --kernel rms_norm_avx2          always this kernel
  warpsmith explain linear --shape m=777 n=11008 k=4096   what runs now, and why";

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.select.device()?;
    let settings = if args.quick { Settings::quick(device) } else { Settings::thorough(device) };
    let cases = timed_cases(&args.select, device, args.quick)?;
    let (_, tunings) = for_each_case(&cases, device, settings, |bench, op| {
        let candidates: Vec<&str> =
            args.select.kernels(op, device).iter().map(|kernel| kernel.name).collect();
        bench.tune(&candidates).map(Some)
    })?;
    if args.json {
        for tuning in &tunings {
            println!("{}", serde_json::to_string(tuning).expect("measurements are plain data"));
        }
    } else if !tunings.is_empty() {
        println!("{}", tunings_table(&tunings));
        let legend = "gain: how many times as fast as the kernel that ran until now; fastest: of all that can run the case";
        println!("{}", table::fit(legend, 2));
    }
    if tunings.is_empty() {
        eprintln!("nothing was timed");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn tunings_table(tunings: &[Tuning]) -> impl std::fmt::Display {
    let headings = ["op", "case", "dtype", "chosen", "time", "until now", "gain", "fastest"];
    let mut table = table::new(&headings.map(String::from), 4);
    for tuning in tunings {
        let Some(fastest) = tuning.measured.first() else { continue };
        let timed = |kernel: &str| match tuning.of(kernel) {
            Some(m) => format!("{kernel}, {}", table::time(m.median_ms)),
            None => kernel.to_string(),
        };
        let chosen = tuning.chosen.as_deref();
        table.add_row([
            fastest.op.clone(),
            fastest.case.clone(),
            fastest.dtype.clone(),
            chosen.unwrap_or("none").to_string(),
            chosen.and_then(|kernel| tuning.of(kernel)).map_or("-".into(), |m| table::time(m.median_ms)),
            timed(tuning.before),
            tuning.gain().map_or("-".into(), |gain| format!("{gain:.2}x")),
            timed(&fastest.kernel),
        ]);
    }
    table
}
