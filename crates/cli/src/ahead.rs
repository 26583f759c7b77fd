//! Compiles what calls need before they are made, in several processes: NVRTC does much of its work for one thread of a
//! process at a time.

use crate::commands::explain::imagine;
use crate::kernels::{Variant, device_functions, progress_bar};
use std::io::{BufRead, BufReader, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;
use warpsmith::device::DeviceInfo;
use warpsmith::jit::{Arch, Jit, fast_math, nvrtc, profile};
use warpsmith::lab::{AnyProvable, Case};
use warpsmith::op::Select;
use warpsmith::op::survey::{Needed, survey};
use warpsmith::{Device, env};

/// A case of an op, and the kernel it runs on if that is not left to the op.
pub type Call<'a> = (&'static dyn AnyProvable, &'a Case, Option<&'a str>);

/// Compiles what calls on a GPU need and neither a pack nor the cache on disk has, in `jobs` processes, one per core if it is
/// not said. Whatever fails here, or is not reached before the deadline, is compiled when it is called.
pub fn compile(device: Device, calls: &[Call<'_>], jobs: Option<NonZeroUsize>, deadline: Option<Instant>) {
    if device == Device::Cpu {
        return;
    }
    let Ok(info) = device.info() else { return };
    let Some(arch) = info.arch else { return };
    let missing = missing(needed(info, calls), arch);
    let bar = progress_bar(missing.len());
    bar.set_message("compiling");
    let in_time = || deadline.is_none_or(|deadline| Instant::now() < deadline);
    compile_missing(&missing, arch, jobs, &in_time, &|| bar.inc(1));
    bar.finish_and_clear();
}

/// Those that neither a pack nor the cache on disk has.
pub fn missing(needed: Vec<Needed>, arch: Arch) -> Vec<Needed> {
    let is_missing =
        |needed: &Needed| !Jit::global().has(&Variant::from(needed.clone()).request(arch, profile()));
    needed.into_iter().filter(is_missing).collect()
}

/// Compiles functions for the cache on disk, in `jobs` processes, one per core if it is not said, for as long as `goes_on`. Calls
/// `tick` after each. One alone is left to whoever needs it: another process would not be faster.
pub fn compile_missing(
    missing: &[Needed],
    arch: Arch,
    jobs: Option<NonZeroUsize>,
    goes_on: &(dyn Fn() -> bool + Sync),
    tick: &(dyn Fn() + Sync),
) {
    let Ok(program) = std::env::current_exe() else { return };
    let cores = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let jobs = jobs.map_or_else(cores, NonZeroUsize::get).min(missing.len());
    if jobs < 2 || env::flag(env::DISABLE_JIT) || nvrtc::find().is_err() {
        return;
    }
    let requests = Mutex::new(requests(missing, arch).into_iter());
    let next = || match goes_on() {
        true => requests.lock().unwrap_or_else(|e| e.into_inner()).next(),
        false => None,
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| feed(&program, &next, tick));
        }
    });
}

/// The device functions that calls need on a GPU.
fn needed(info: DeviceInfo, calls: &[Call<'_>]) -> Vec<Needed> {
    let device = info.device;
    let note = || {
        for (op, case, kernel) in calls {
            let select = Select {
                kernel: kernel.map(|name| name.to_string().into()),
                allow_batch_variant: kernel.is_some(),
            };
            let call = imagine(op.spec(), &op.plan(case), case.arrangement, device);
            // A kernel that refuses a case needs nothing for it.
            let _ = call.and_then(|call| op.prepare(&call, &case.attrs, &select));
        }
    };
    survey(info, note).map(|((), needed)| needed).unwrap_or_default()
}

/// As lines for `bench --stdin`.
fn requests(needed: &[Needed], arch: Arch) -> Vec<String> {
    let known = device_functions();
    let line = |needed: &Needed| {
        let function = known.iter().position(|kernel| std::ptr::eq(*kernel, needed.kernel))?;
        let (arch, defines) = (arch.to_string(), &needed.defines);
        Some(
            serde_json::json!({"do": "build", "function": function, "defines": defines, "arch": arch})
                .to_string(),
        )
    };
    needed.iter().filter_map(line).collect()
}

/// Gives one request after the other to a process, and waits for each answer.
fn feed(program: &Path, next: &dyn Fn() -> Option<String>, tick: &dyn Fn()) -> std::io::Result<()> {
    let mut command = Command::new(program);
    command.args(["bench", "--device", "cpu", "--stdin"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    if fast_math() {
        command.arg("--fast-math");
    }
    let mut child = command.spawn()?;
    if let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) {
        let mut answers = BufReader::new(output).lines();
        while let Some(line) = next() {
            if writeln!(input, "{line}").is_err() || !matches!(answers.next(), Some(Ok(_))) {
                break;
            }
            tick();
        }
    }
    child.wait().map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_cases_need_is_found_without_a_gpu() {
        let arch: Arch = "90a".parse().unwrap();
        let ops = warpsmith::ops::PROVABLE;
        let cases: Vec<_> = ops.iter().map(|op| (*op, op.cases(), op.bench_cases())).collect();
        let mut calls: Vec<Call<'_>> = Vec::new();
        for (op, cases, bench_cases) in &cases {
            for kernel in op.kernels().iter().filter(|kernel| kernel.is_cuda()) {
                calls.extend(cases.iter().map(|case| (*op, case, Some(kernel.name))));
            }
            calls.extend(bench_cases.iter().map(|case| (*op, case, None)));
        }
        let found = needed(DeviceInfo::typical_gpu(arch, None), &calls);
        println!("{} calls need {} variants", calls.len(), found.len());
        let functions: std::collections::BTreeSet<&str> = found.iter().map(|n| n.kernel.function).collect();
        for function in ["attention_sm90", "linear_sm90", "linear_sm80"] {
            assert!(functions.iter().any(|name| name.starts_with(function)), "{function}: {functions:?}");
        }
        let lines = requests(&found, arch);
        assert!(lines.len() == found.len() && lines[0].contains("\"arch\":\"sm_90a\""), "{}", lines[0]);
    }
}
