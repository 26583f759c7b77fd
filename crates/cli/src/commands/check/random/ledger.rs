//! The ledger of long random checks.

use super::Args;
use super::tally::Tally;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use warpsmith::lab::evidence::{Machine, today};
use warpsmith::{Device, Error, Result};

const FILE: &str = "random.md";
const HEADING: &str = "\
# Random calls

Runs of `warpsmith check --random N --seed SEED --record`. Each line can be run again with its seed, on code of its time. A call is one
kernel judged on one random case like any other case: against the f64 reference, with guards, twice, and on parts of the batch. Under a
tool of compute-sanitizer a kernel runs once without being judged. The code is named by a hash of all kernels that ran.

| date | device | what | how | seed | calls | refused draws | failures | seconds | code |
|---|---|---|---|---|---|---|---|---|---|
";

/// Adds a line to the ledger and returns its path.
pub fn add(
    args: &Args,
    device: Device,
    seed: u64,
    total: &Tally,
    time: Duration,
    how: &str,
    folder: &Path,
) -> Result<PathBuf> {
    let path = folder.join(FILE);
    let mut text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => HEADING.into(),
        Err(error) => return Err(Error::io(&path, "reading", &error)),
    };
    let date = today();
    let (name, what) = (Machine::of(device)?.device, what(args)?);
    let Tally { calls, refused, failures, .. } = total;
    let (seconds, code) = (time.as_secs(), code(args, device)?);
    let _ = writeln!(
        text,
        "| {date} | {name} | {what} | {how} | {seed} | {calls} | {refused} | {failures} | {seconds} | {code} |"
    );
    std::fs::write(&path, text).map_err(|e| Error::io(&path, "writing", &e))?;
    Ok(path)
}

/// What was asked for, as far as it is not everything.
fn what(args: &Args) -> Result<String> {
    let mut words: Vec<String> = Vec::new();
    if args.select.names_an_op() {
        words.extend(args.select.ops()?.iter().map(|op| op.spec().name.to_string()));
    }
    words.extend(args.select.kernel().map(String::from));
    words.extend(args.select.dtype().map(|dtype| dtype.name().to_string()));
    words
        .extend(args.arrangement.map(|arrangement| crate::select::arrangement_name(arrangement).to_string()));
    words.extend(args.values.map(|values| crate::select::values_name(values).to_string()));
    Ok(if words.is_empty() { "all ops".into() } else { words.join(" ") })
}

/// A hash of the code of all kernels that run.
fn code(args: &Args, device: Device) -> Result<String> {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for op in args.select.ops()? {
        for kernel in args.select.kernels(op, device) {
            let source = warpsmith::lab::source_hash(&kernel, op.spec().name);
            hash = source
                .bytes()
                .fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        }
    }
    Ok(format!("{:08x}", hash >> 32))
}
