//! `warpsmith doctor`: what this machine has for Warpsmith, and what to do about the rest.

use crate::table;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use warpsmith::cpu::gemm::Isa;
use warpsmith::jit::cache::{Cache, EntryId};
use warpsmith::jit::nvrtc::{self, Nvrtc};
use warpsmith::jit::{Arch, Request, Source, inspect, pack::Pack};
use warpsmith::ops::RmsNorm;
use warpsmith::{DType, Device, Error, Result, Tensor, cpu, cuda, env};

/// Examine this machine: what works, what is missing, what that means and how to fix it
///
/// Every line says `ok`, `missing` (something optional is not there) or `broken` (something is there and does not
/// work, or a setting cannot be followed). The exit status is 1 if anything is broken; a machine without a GPU is not.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith doctor
  warpsmith doctor --json | jq '.[] | select(.state != \"ok\")'";

pub fn run(args: &Args) -> Result<ExitCode> {
    let findings = examine();
    if args.json {
        println!("{:#}", findings.iter().map(Finding::json).collect::<Value>());
    } else {
        findings.iter().for_each(Finding::print);
    }
    let broken = findings.iter().filter(|finding| finding.state == State::Broken).count();
    if broken > 0 {
        eprintln!("error: {broken} of {} things are broken", findings.len());
    }
    Ok(if broken > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Ok,
    Missing,
    Broken,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Missing => "missing",
            State::Broken => "broken",
        }
    }
}

/// One finding.
struct Finding {
    what: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What that means; may be empty.
    meaning: String,
    /// How to fix it; empty if nothing needs to be done.
    fix: String,
}

impl Finding {
    fn ok(what: &'static str, found: impl Into<String>) -> Finding {
        Finding::new(what, State::Ok, found, "", "")
    }

    fn new(
        what: &'static str,
        state: State,
        found: impl Into<String>,
        meaning: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        Finding { what, state, found: found.into(), meaning: meaning.into(), fix: fix.into() }
    }

    /// From an error. Errors about unavailable things carry their own fix.
    fn from_error(what: &'static str, state: State, error: &Error, meaning: &str, fix: &str) -> Finding {
        match error {
            Error::Unavailable { why, fix, .. } => Finding::new(what, state, why, meaning, fix),
            other => Finding::new(what, state, other.to_string(), meaning, fix),
        }
    }

    fn print(&self) {
        let mut head = format!("{:8} {:19} ", self.state.name(), self.what);
        let behind = " ".repeat(head.len());
        for line in self.found.lines() {
            println!("{}", table::headed(&head, line, behind.len()));
            head.clone_from(&behind);
        }
        for (label, text) in [("so", &self.meaning), ("fix", &self.fix)] {
            if !text.is_empty() {
                println!("{}", table::headed(&behind, &format!("{label}: {text}"), behind.len()));
            }
        }
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what,
            "state": self.state.name(),
            "found": self.found,
            "meaning": self.meaning,
            "fix": self.fix,
        })
    }
}

fn examine() -> Vec<Finding> {
    let mut findings = vec![Finding::ok("CPU", cpu::cpu_name()), tiers(), matrix_products(), threads()];
    findings.extend(memory());
    findings.push(driver());
    let gpus: Vec<Device> = Device::all().into_iter().filter(|device| *device != Device::Cpu).collect();
    findings.extend(gpus.iter().map(|gpu| describe_gpu(*gpu)));
    let nvrtc = nvrtc::find();
    findings.push(compiler(&nvrtc, gpus.first().copied()));
    findings.extend(gpus.iter().map(|gpu| try_gpu(*gpu)));
    findings.push(cublaslt());
    findings.push(disassembler());
    findings.push(cache());
    findings.push(tuned(Cache::default_location().root()));
    findings.extend(packs());
    findings.push(variables());
    findings
}

/// What an invalid setting means.
const WRONG_SETTING: &str = "calls on the CPU fail until it is corrected";

fn tiers() -> Finding {
    let names: Vec<&str> = cpu::Tier::available().iter().map(|tier| tier.name()).collect();
    let have = names.join(", ");
    match cpu::Tier::configured() {
        Ok(tier) => Finding::ok("CPU tiers", format!("{have}; kernels use {tier}")),
        Err(error) => Finding::new(
            "CPU tiers",
            State::Broken,
            error.to_string(),
            WRONG_SETTING,
            format!("Set {} to one of {have}, or unset it", env::CPU_TIER),
        ),
    }
}

fn matrix_products() -> Finding {
    const WHAT: &str = "CPU matrix products";
    match Isa::configured() {
        Ok(isa) => {
            Finding::ok(WHAT, format!("up to {}; kernels use {}", Isa::supported().name(), isa.name()))
        }
        Err(error) => Finding::new(
            WHAT,
            State::Broken,
            error.to_string(),
            WRONG_SETTING,
            format!("Set {} to one of {}, or unset it", env::CPU_MATRIX, Isa::ALL.map(Isa::name).join(", ")),
        ),
    }
}

fn threads() -> Finding {
    match cpu::configured_threads() {
        Ok(threads) => Finding::ok("CPU threads", threads.to_string()),
        Err(error) => Finding::new(
            "CPU threads",
            State::Broken,
            error.to_string(),
            WRONG_SETTING,
            format!("Set {} to a number, or unset it", env::NUM_THREADS),
        ),
    }
}

fn memory() -> Option<Finding> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let gib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.trim_start_matches(':').split_whitespace().next()?.parse().ok()?;
        Some(kib / (1 << 20) as f64)
    };
    Some(Finding::ok("memory", format!("{:.1} GiB, {:.1} free", gib("MemTotal")?, gib("MemAvailable")?)))
}

fn driver() -> Finding {
    const MEANING: &str = "ops run on the CPU";
    let Err(error) = cuda::status() else {
        let count = cuda::device_count();
        return Finding::ok("CUDA driver", format!("{count} device{}", if count == 1 { "" } else { "s" }));
    };
    // No driver, or a driver without a GPU, means a machine without CUDA; anything else is a driver failure.
    let absent = cuda::probe_library(&["libcuda.so.1", "libcuda.so"]).is_none();
    let why = error.to_string();
    let no_gpu = why.contains("CUDA_ERROR_NO_DEVICE") || why.contains("sees no device");
    let state = if absent || no_gpu { State::Missing } else { State::Broken };
    Finding::from_error("CUDA driver", state, &error, MEANING, "Check that `nvidia-smi` works for this user")
}

fn describe_gpu(device: Device) -> Finding {
    let Device::Cuda(ordinal) = device else { return Finding::ok("GPU", device.to_string()) };
    match cuda::Context::get(ordinal) {
        Ok(context) => {
            let props = context.info();
            let arch = Arch::for_device(props.major as u8, props.minor as u8);
            let gib = props.total_memory as f64 / (1u64 << 30) as f64;
            let version = (props.driver_version / 1000, props.driver_version % 1000 / 10);
            Finding::ok(
                "GPU",
                format!(
                    "{device}: {}, {arch}, {gib:.1} GiB, driver for CUDA {}.{}",
                    props.name, version.0, version.1
                ),
            )
        }
        Err(error) => Finding::from_error(
            "GPU",
            State::Broken,
            &error,
            "this GPU cannot be used",
            "Check that `nvidia-smi` works for this user and that no other process holds the GPU exclusively",
        ),
    }
}

/// Finds the compiler and compiles something with it.
fn compiler(nvrtc: &Result<&'static Nvrtc>, gpu: Option<Device>) -> Finding {
    let nvrtc = match nvrtc {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            let meaning = "CUDA kernels come from kernel packs and the cache alone";
            return Finding::from_error("NVRTC", State::Missing, error, meaning, "");
        }
    };
    let (major, minor) = nvrtc.version();
    let archs = nvrtc.supported_archs();
    let range = match (archs.first(), archs.last()) {
        (Some(first), Some(last)) => format!(", sm_{first} to sm_{last}"),
        _ => String::new(),
    };
    let found = format!("{major}.{minor}{range}, {}", nvrtc.path().display());
    let arch = gpu.and_then(|gpu| gpu.info().ok()?.arch).unwrap_or_else(|| match archs.last() {
        Some(&newest) => Arch::new((newest / 10) as u8, (newest % 10) as u8, false),
        None => Arch::new(7, 5, false),
    });
    static TRIAL: Source = Source {
        name: "doctor",
        code: "extern \"C\" __global__ void doctor(float* x) { x[threadIdx.x] *= 2.0f; }",
    };
    match nvrtc.compile_with(&Request::new(&TRIAL, arch)) {
        Ok(_) if env::flag(env::DISABLE_JIT) => {
            Finding::new("NVRTC", State::Ok, found, format!("not used: {} is set", env::DISABLE_JIT), "")
        }
        Ok(_) => Finding::ok("NVRTC", found),
        Err(error) => {
            let meaning = format!("{found} does not compile a small kernel: none can be made at run time");
            let fix = "Reinstall it: `pip install --force-reinstall nvidia-cuda-nvrtc`";
            Finding::from_error("NVRTC", State::Broken, &error, &meaning, fix)
        }
    }
}

/// Runs an op on a GPU: compiler, driver and device together.
fn try_gpu(device: Device) -> Finding {
    let attempt = || -> Result<()> {
        let x = Tensor::randn(&[4, 256], DType::F32, device, 0)?;
        let (there, here) =
            (RmsNorm::new(&x).run()?.to_f64()?, RmsNorm::new(&x.to_device(Device::Cpu)?).run()?);
        let agree = there.iter().zip(here.to_f64()?).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
        if agree { Ok(()) } else { Err(Error::parse("rms_norm", "the CPU's results", "others")) }
    };
    match attempt() {
        Ok(()) => Finding::ok("GPU trial", format!("rms_norm on {device} agrees with the CPU")),
        // Without a compiler or a pack there is nothing to try; an earlier finding says so.
        Err(error @ Error::Unavailable { .. }) => {
            Finding::from_error("GPU trial", State::Missing, &error, "kernels cannot run on this GPU yet", "")
        }
        Err(error) => Finding::from_error(
            "GPU trial",
            State::Broken,
            &error,
            "kernels do not run on this GPU",
            "If the driver is older than NVRTC, update it or install the NVRTC of its major version",
        ),
    }
}

fn cublaslt() -> Finding {
    match cuda::cublaslt::find() {
        Ok(library) => {
            let version = library.version();
            let (major, minor) = (version / 10_000, version / 100 % 100);
            Finding::ok("cuBLASLt", format!("{} ({major}.{minor})", library.path().display()))
        }
        Err(Error::Unavailable { why, fix, .. }) => Finding::new(
            "cuBLASLt",
            State::Missing,
            why,
            "the kernel linear_cublaslt cannot be named or tuned; nothing else needs it",
            fix,
        ),
        Err(error) => Finding::new("cuBLASLt", State::Broken, error.to_string(), "", ""),
    }
}

fn disassembler() -> Finding {
    match inspect::tool("nvdisasm").or_else(|| inspect::tool("cuobjdump")) {
        Some(path) => Finding::ok("disassembler", path.display().to_string()),
        None => Finding::new(
            "disassembler",
            State::Missing,
            "neither nvdisasm nor cuobjdump was found",
            "`warpsmith dump --sass` does not work",
            inspect::INSTALL_DISASSEMBLER,
        ),
    }
}

fn cache() -> Finding {
    let cache = Cache::default_location();
    let entries = cache.entries();
    // Taking a lock creates the folder and a file in it, and leaves nothing behind.
    static TRIAL: Source = Source { name: "doctor", code: "" };
    let arch = Arch::new(9, 0, true);
    drop(cache.lock(&EntryId { key: Request::new(&TRIAL, arch).key(), arch, nvrtc: (0, 0) }));
    match (cache.warning(), cache.root()) {
        (None, Some(root)) => {
            let bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
            Finding::ok(
                "kernel cache",
                format!("{} kernels, {:.1} MB, {}", entries.len(), bytes as f64 / 1e6, root.display()),
            )
        }
        (warning, _) => Finding::new(
            "kernel cache",
            State::Broken,
            warning.unwrap_or_default(),
            "every process compiles its kernels again",
            format!("Set {} to a folder that is yours and can be written", env::CACHE_DIR),
        ),
    }
}

fn tuned(root: Option<&Path>) -> Finding {
    let folder = root.map(|root| root.join("tuned"));
    let files = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let mut devices = 0;
    for path in files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let whole = std::fs::read(&path).is_ok_and(|text| serde_json::from_slice::<Value>(&text).is_ok());
        if !whole {
            return Finding::new(
                "tuned choices",
                State::Broken,
                format!("{} cannot be read", path.display()),
                "choices tuned on that device are ignored",
                "Remove the file and tune again",
            );
        }
        devices += 1;
    }
    match devices {
        0 => Finding::new("tuned choices", State::Ok, "none", "kernels are chosen by rank", ""),
        1 => Finding::ok("tuned choices", "for 1 device"),
        n => Finding::ok("tuned choices", format!("for {n} devices")),
    }
}

fn packs() -> Vec<Finding> {
    let folders = env::path(env::KERNEL_PACK);
    let check = |folder| {
        let pack = Pack::open(folder)?;
        pack.verify().map(|()| pack)
    };
    let describe = |found: Result<Pack>| match found {
        Ok(pack) => {
            let mut archs: Vec<String> = pack.entries().iter().map(|entry| entry.arch.to_string()).collect();
            archs.sort();
            archs.dedup();
            let folder = pack.folder().display();
            Finding::ok(
                "kernel pack",
                format!("{} kernels for {}, {folder}", pack.entries().len(), archs.join(", ")),
            )
        }
        Err(error) => Finding::from_error(
            "kernel pack",
            State::Broken,
            &error,
            "no CUDA kernel can be used",
            &format!("Build it with `warpsmith build-kernels`, or unset {}", env::KERNEL_PACK),
        ),
    };
    folders.iter().flat_map(std::env::split_paths).map(check).map(describe).collect()
}

/// Settings in force. Problems with them are reported where they matter.
fn variables() -> Finding {
    let names = [
        env::CACHE_DIR,
        env::KERNEL_PACK,
        env::DISABLE_JIT,
        env::NUM_THREADS,
        env::CPU_TIER,
        env::CPU_MATRIX,
    ];
    let set: Vec<String> =
        names.iter().filter_map(|name| Some(format!("{name}={}", env::path(name)?.display()))).collect();
    Finding::ok(
        "environment",
        if set.is_empty() { "no WARPSMITH_ variable is set".into() } else { set.join(" ") },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_become_findings_with_their_own_fix() {
        let error = Error::Unavailable { what: "X".into(), why: "why".into(), fix: "do this".into() };
        let finding = Finding::from_error("thing", State::Missing, &error, "so", "other");
        assert_eq!((finding.found.as_str(), finding.fix.as_str()), ("why", "do this"));
        let finding =
            Finding::from_error("thing", State::Broken, &Error::parse("a", "b", "c"), "so", "other");
        assert_eq!(finding.fix, "other");
        assert_eq!(finding.json()["state"], "broken");
    }

    #[test]
    fn damaged_tuned_choices_are_found() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(tuned(Some(folder.path())).state, State::Ok);
        std::fs::create_dir(folder.path().join("tuned")).unwrap();
        std::fs::write(folder.path().join("tuned/gpu.json"), "{}").unwrap();
        std::fs::write(folder.path().join("tuned/gpu.lock"), "").unwrap();
        assert_eq!(tuned(Some(folder.path())).found, "for 1 device");
        std::fs::write(folder.path().join("tuned/other.json"), "{").unwrap();
        assert_eq!(tuned(Some(folder.path())).state, State::Broken);
    }
}
