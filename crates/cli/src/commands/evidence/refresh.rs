//! `warpsmith evidence --refresh`: proves, times and sanitizes what has changed, until the time is over.

use super::Args;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use warpsmith::lab::evidence::{Age, Machine, Record};
use warpsmith::{Device, Error, Result};

/// Less time than this is not worth the start of a program.
const SHORTEST: Duration = Duration::from_secs(5);

/// Runs the programs for what has changed, and says what is left. `root` is the repository.
pub fn run(args: &Args, root: &Path, folder: &Path) -> Result<ExitCode> {
    let device = args.device.unwrap_or_else(Device::best);
    let machine = Machine::of(device)?;
    let deadline = Instant::now() + args.budget;
    let program = std::env::current_exe().map_err(|e| Error::io("warpsmith", "finding this program", &e))?;
    let device_words = ["--device".to_string(), device.to_string()];
    let jobs =
        |jobs: Option<usize>| jobs.map_or(Vec::new(), |jobs| vec!["--jobs".to_string(), jobs.to_string()]);
    // What one step has left to the next: each records what it does.
    let ages = || Ok::<_, Error>(Record::open(folder, machine.clone())?.ages());
    let mut ok = true;
    let mut go = |command: &mut Command| -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left < SHORTEST {
            return Ok(());
        }
        command.args(["--budget", &format!("{}s", left.as_secs())]).current_dir(root);
        eprintln!("+ {command:?}");
        let name = command.get_program().to_owned();
        let status = command.status().map_err(|e| Error::io(Path::new(&name), "starting", &e))?;
        ok &= status.success();
        Ok(())
    };

    if ages()?.iter().any(|age| !age.unproven.is_empty()) {
        let mut check = Command::new(&program);
        go(check.args(["check", "--stale", "--record"]).args(&device_words).args(jobs(args.jobs)))?;
    }
    // It knows by itself which rows there are besides those that were timed.
    let (script, on) = if device == Device::Cpu { ("bench/cpu.py", "cpu") } else { ("bench/gpu.py", "cuda") };
    if has_torch(&args.python, device) && root.join(script).is_file() {
        go(Command::new(&args.python).args([script, "--stale"]))?;
    } else {
        eprintln!("{}: no PyTorch for {on}: times are recorded without a calibration", args.python);
        let mut bench = Command::new(&program);
        go(bench.args(["bench", "--stale", "--record"]).args(&device_words).args(jobs(args.jobs)))?;
    }
    if machine.is_gpu() && ages()?.iter().any(|age| !age.unwatched.is_empty()) {
        let mut sanitize = Command::new("bash");
        go(sanitize.args(["bench/sanitize.sh", "--stale"]).args(jobs(args.jobs.or(Some(8)))))?;
    }
    println!("{}", left(&ages()?));
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether this Python has a PyTorch that can use the device.
fn has_torch(python: &str, device: Device) -> bool {
    let test = match device {
        Device::Cpu => "import torch",
        Device::Cuda(_) => "import torch; assert torch.cuda.is_available()",
    };
    let mut command = Command::new(python);
    command.args(["-c", test]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// What is left to do.
fn left(ages: &[Age]) -> String {
    let names = |of: fn(&Age) -> &Vec<&'static str>| {
        let names: Vec<&str> = ages.iter().flat_map(|age| of(age).iter().copied()).collect();
        if names.is_empty() { "nothing".into() } else { names.join(", ") }
    };
    let stale: usize = ages.iter().map(|age| age.stale).sum();
    let rows: usize = ages.iter().map(|age| age.rows).sum();
    format!(
        "left to prove: {}\nleft to time: {stale} of {rows} rows\nleft to sanitize: {}",
        names(|age| &age.unproven),
        names(|age| &age.unwatched)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_named() {
        let age = |op, unproven: &[&'static str], stale, unwatched: &[&'static str]| Age {
            op,
            proven: "-".into(),
            unproven: unproven.to_vec(),
            timed: "-".into(),
            rows: 4,
            stale,
            unwatched: unwatched.to_vec(),
        };
        let text = left(&[age("a", &["x", "y"], 3, &[]), age("b", &["z"], 0, &[])]);
        assert_eq!(text, "left to prove: x, y, z\nleft to time: 3 of 8 rows\nleft to sanitize: nothing");
    }
}
