//! A random check in several processes.

use super::super::part::Part;
use super::tally::Tally;
use super::{Amount, Args};
use std::process::{Command, Output, Stdio};
use warpsmith::{Device, Error, Result};

/// Runs a part of the draws in each of several processes and adds up what they count.
pub fn run(args: &Args, amount: Amount, device: Device, seed: u64) -> Result<Vec<Tally>> {
    let program = std::env::current_exe().map_err(|e| Error::io("warpsmith", "finding this program", &e))?;
    let start = |part: Part| {
        let mut command = Command::new(&program);
        command.args(super::super::sanitize::watched_words(args, device, part, Some((amount, seed))));
        // Failures and errors are shown as they come.
        command.stdout(Stdio::piped()).spawn().map_err(|e| Error::io(&program, "starting", &e))
    };
    // Start all before waiting for the first.
    let children = Part::all(args.processes()).map(start).collect::<Result<Vec<_>>>()?;
    let mut total: Vec<Tally> = Vec::new();
    for child in children {
        let output = child.wait_with_output().map_err(|e| Error::io(&program, "waiting for", &e))?;
        for tally in read(&output)? {
            match total.iter_mut().find(|known| known.op == tally.op) {
                Some(known) => known.add(&tally),
                None => total.push(tally),
            }
        }
    }
    Ok(total)
}

fn read(output: &Output) -> Result<Vec<Tally>> {
    let text = String::from_utf8_lossy(&output.stdout);
    let tally = |line: &str| {
        serde_json::from_str(line)
            .map_err(|e| Error::parse("a process's counts", "a JSON object", e.to_string()))
    };
    let tallies: Vec<Tally> = text.lines().map(tally).collect::<Result<_>>()?;
    // Its output says it all, unless it ended before.
    if output.status.code().is_none() || tallies.is_empty() {
        return Err(Error::parse("a process of the check", "its counts", output.status.to_string()));
    }
    Ok(tallies)
}
