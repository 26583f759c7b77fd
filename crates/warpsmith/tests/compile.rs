//! Every CUDA kernel compiled for each architecture it declares, without a GPU. No kernel may spill registers or
//! keep a stack.
//!
//! All variants would take an hour on two cores, so a run builds these: for `sm_90a`, enough to have each value of
//! each define; for the oldest architecture of each generation of instructions, the heaviest variant of each element
//! type; for the others, the heaviest variant of one element type. `--ignored` builds all variants for `sm_90a`.
//!
//! What `evidence/compiled.txt` names, by the hash of everything the compiler gets, was compiled before and is not compiled
//! again. `WARPSMITH_RECORD=evidence` adds what was compiled to that file, and takes out what is no more;
//! `WARPSMITH_TEST_ALL=1` compiles all of it again.
//! Code is kept under `target/`, keyed by its content, so that a second run compiles only what changed.
//!
//! NVRTC does much of its work for one thread of a process at a time. So the test starts itself again, once for each core,
//! to compile a share of the jobs each, and then finds all of them in the cache.
#![cfg(feature = "cuda")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use warpsmith::jit::cache::Cache;
use warpsmith::jit::nvrtc::{self, Nvrtc};
use warpsmith::jit::{Arch, Jit, Origin, Request, Toolchain, inspect};
use warpsmith::jit::{CudaKernel, Defines};
use warpsmith::ops;

/// How many variants of a kernel are built.
#[derive(Clone, Copy, PartialEq)]
enum Extent {
    /// Each value of each define at least once.
    EveryValue,
    /// The heaviest of each element type.
    EveryElement,
    /// The heaviest of one element type.
    One,
}
use Extent::{EveryElement, EveryValue, One};

/// What each NVRTC is for (the older one knows the GPUs the newer one has dropped).
const PLAN: [(i32, &[(&str, Extent)]); 2] = [
    (
        13,
        &[
            ("sm_75", EveryElement),
            ("sm_80", EveryElement),
            ("sm_86", One),
            ("sm_89", One),
            ("sm_90a", EveryValue),
            ("sm_100a", One),
            ("sm_120a", One),
        ],
    ),
    (12, &[("sm_60", EveryElement), ("sm_70", One)]),
];

/// One compilation and the function it is for.
struct Job {
    kernel: &'static CudaKernel,
    prelude: String,
    defines: Defines,
    arch: Arch,
}

impl Job {
    fn new(kernel: &'static CudaKernel, defines: Defines, arch: Arch) -> Job {
        Job { kernel, prelude: (kernel.prelude)(), defines, arch }
    }

    fn request(&self) -> Request<'_> {
        Request {
            prelude: &self.prelude,
            defines: &self.defines,
            fast_math: self.kernel.fast_math,
            ..Request::new(&self.kernel.source, self.arch)
        }
    }

    /// Bytes of stack and spills that are known: heads of 256 do not fit the registers of Blackwell, by a few, in bf16 by
    /// more than in f16. Nor does the fallback in f32 of a gated product fit those of sm_120, with everything that may follow it.
    fn tolerated_bytes(&self) -> u32 {
        let is_known = self.kernel.function == "paged_attention_sm80"
            && self.arch.to_string() == "sm_100a"
            && self.defines.iter().any(|(name, value)| *name == "HEAD_DIM" && value == "256");
        let has = |name: &str, value: &str| self.defines.iter().any(|(n, v)| *n == name && v == value);
        let is_gated = has("X_T", "f32") && has("GATE", "2") && has("HAS_RESIDUAL", "1");
        if self.kernel.function == "linear_generic" && self.arch.to_string() == "sm_120a" && is_gated {
            return 64;
        }
        let is_bf16 = self.defines.contains(&("ELEM", "bf16".into()));
        match (is_known, is_bf16) {
            (true, true) => 52,
            (true, false) => 36,
            _ => 0,
        }
    }

    /// Compiles and looks at the result; says what is wrong with it, and the milliseconds compiling took.
    fn run(&self, jit: &Jit) -> (Option<String>, u64) {
        let function = self.kernel.function;
        let failure = |what: String| {
            let defines: Vec<_> =
                self.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
            Some(format!("{function} for {} with {}: {what}", self.arch, defines.join(" ")))
        };
        let compiled = match jit.get(&self.request()) {
            Ok(compiled) => compiled,
            Err(error) => return (failure(error.to_string()), 0),
        };
        let ms = if let Origin::Built { ms } = compiled.origin { ms } else { 0 };
        let resources = match inspect::resources(&compiled.cubin) {
            Ok(resources) => resources,
            Err(error) => return (failure(error.to_string()), ms),
        };
        let Some(found) = resources.iter().find(|found| found.function == function) else {
            return (failure("the source has no such function".into()), ms);
        };
        let spills = inspect::spills(&compiled.log).into_iter().find(|spills| spills.function == function);
        let wrong = match spills {
            None => failure("the compiler did not report its resources".into()),
            Some(spills)
                if found.stack_bytes + spills.store_bytes + spills.load_bytes > self.tolerated_bytes() =>
            {
                failure(format!(
                    "{} registers, {} bytes of stack, {} bytes of spills",
                    found.registers,
                    found.stack_bytes,
                    spills.store_bytes + spills.load_bytes
                ))
            }
            Some(_) => None,
        };
        (wrong, ms)
    }
}

/// The NVRTC of a major version: the library `WARPSMITH_TEST_NVRTC<major>` names, else this machine's. Without
/// one the test is skipped, unless `WARPSMITH_REQUIRE_NVRTC` is 1.
fn nvrtc(major: i32) -> Option<Nvrtc> {
    let named = format!("WARPSMITH_TEST_NVRTC{major}");
    if let Some(path) = std::env::var_os(&named) {
        return Some(nvrtc::open(Path::new(&path)).unwrap());
    }
    let found = nvrtc::find().ok().filter(|nvrtc| nvrtc.version().0 == major);
    if found.is_none() {
        assert!(!is_set("WARPSMITH_REQUIRE_NVRTC", "1"), "no NVRTC {major}: name the library in {named}");
        eprintln!("skipped: no NVRTC {major}");
    }
    Some(nvrtc::open(found?.path()).unwrap())
}

/// Every device function of every op, once, and those that measure the machine.
fn kernels() -> Vec<&'static CudaKernel> {
    let mut seen = BTreeSet::new();
    let of =
        |kernel: warpsmith::op::KernelInfo| kernel.cuda.into_iter().chain(kernel.also.into_iter().flatten());
    let all = ops::PROVABLE.iter().flat_map(|op| op.kernels()).flat_map(of);
    let all = all.chain(warpsmith::lab::bench::device_functions());
    all.filter(|kernel| seen.insert(std::ptr::from_ref(*kernel) as usize)).collect()
}

/// A few of `variants` that together have each value of each define.
fn covering(variants: &[Defines]) -> Vec<Defines> {
    let mut wanted: BTreeSet<_> = variants.iter().flatten().collect();
    let mut chosen = Vec::new();
    while !wanted.is_empty() {
        let gain = |defines: &&Defines| defines.iter().filter(|define| wanted.contains(define)).count();
        let best = variants.iter().max_by_key(gain).expect("what is wanted comes from a variant");
        wanted.retain(|define| !best.contains(define));
        chosen.push(best.clone());
    }
    // A kernel without defines has one variant that is empty.
    if chosen.is_empty() { variants.to_vec() } else { chosen }
}

/// For each element type the variant with the largest numbers: most threads, most elements each, all features.
fn heaviest(variants: &[Defines]) -> Vec<Defines> {
    let element = |defines: &Defines| {
        defines.iter().filter(|(_, v)| v.parse::<u64>().is_err()).cloned().collect::<Vec<_>>()
    };
    let weight = |defines: &&Defines| defines.iter().filter_map(|(_, v)| v.parse::<u64>().ok()).sum::<u64>();
    let elements: BTreeSet<_> = variants.iter().map(element).collect();
    let of = |wanted| variants.iter().filter(|v| element(v) == wanted).max_by_key(weight).cloned();
    elements.into_iter().filter_map(of).collect()
}

fn jobs(arch: Arch, extent: Extent, turn: usize) -> Vec<Job> {
    let declared = kernels().into_iter().filter(|kernel| kernel.is_for(arch));
    let chosen = declared.enumerate().flat_map(|(index, kernel)| {
        let variants = (kernel.variants)();
        assert!(!variants.is_empty(), "{} has no variants", kernel.function);
        let defines = match extent {
            EveryValue => covering(&variants),
            EveryElement => heaviest(&variants),
            // In turn, so that the architectures together have all element types of each kernel.
            One => {
                let heaviest = heaviest(&variants);
                vec![heaviest[(index + turn) % heaviest.len()].clone()]
            }
        };
        defines.into_iter().map(move |defines| Job::new(kernel, defines, arch))
    });
    chosen.collect()
}

/// What was compiled before without spills, by NVRTC's version and the hash of what it got.
struct Record(BTreeSet<String>);

impl Record {
    fn path() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence/compiled.txt")
    }

    fn read() -> Record {
        let text = std::fs::read_to_string(Record::path()).unwrap_or_default();
        Record(text.lines().filter(|line| !line.starts_with('#')).map(String::from).collect())
    }

    fn entry(version: (i32, i32), job: &Job) -> String {
        // Enough to tell some thousand programs apart.
        format!("{}.{} {}", version.0, version.1, &job.request().key().to_string()[..20])
    }

    fn write(&self) {
        let head = "# Variants of CUDA kernels that were compiled without spills: version of NVRTC, hash of what it got.\n\
                    # Written by `WARPSMITH_RECORD=evidence cargo test --release --test compile`.\n";
        let lines: String = self.0.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(Record::path(), format!("{head}{lines}")).unwrap();
    }
}

/// Whether an environment variable of a test is set to `value`.
fn is_set(name: &str, value: &str) -> bool {
    std::env::var(name).is_ok_and(|found| found == value)
}

/// The share of the jobs that a process started by this one is to compile, as `number/of/NVRTC's major version`.
const SHARE: &str = "WARPSMITH_TEST_SHARE";
/// What such a process says before the number of a job and its milliseconds.
const TOOK: &str = "took:";

/// Has `test`, which is the caller, compile `count` jobs in as many processes as there are cores; the milliseconds of each.
/// What goes wrong there goes wrong again where the code is looked at.
fn compile_ahead(test: &str, major: i32, count: usize) -> Vec<u64> {
    let processes = std::thread::available_parallelism().map_or(1, usize::from);
    let start = |number| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--include-ignored", "--nocapture"]);
        command.env(SHARE, format!("{number}/{processes}/{major}"));
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let children: Vec<_> = (0..processes).map(start).collect();
    let mut took = vec![0; count];
    for child in children {
        let output = child.wait_with_output().unwrap();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some(words) = line.strip_prefix(TOOK) else { continue };
            let (index, ms) = words.trim().split_once(' ').unwrap();
            took[index.parse::<usize>().unwrap()] = ms.parse().unwrap();
        }
    }
    took
}

/// Builds everything for `test` through a cache in `folder` of the build folder, on all cores.
fn build(test: &str, nvrtc: Nvrtc, folder: &str, jobs: &[Job]) -> Vec<String> {
    let start = std::time::Instant::now();
    let cache = Cache::at(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder));
    let version = nvrtc.version();
    let jit = Jit::new(Vec::new(), cache, Toolchain::Given(Arc::new(nvrtc)));
    if let Ok(share) = std::env::var(SHARE) {
        let share: Vec<usize> = share.split('/').map(|number| number.parse().unwrap()).collect();
        let &[number, of, major] = &share[..] else { panic!("{SHARE} is not three numbers: {share:?}") };
        if version.0 as usize == major {
            for (index, job) in jobs.iter().enumerate().skip(number).step_by(of) {
                // On a line of its own: the harness has begun one.
                println!("\n{TOOK} {index} {}", job.run(&jit).1);
            }
        }
        return Vec::new();
    }
    let ahead = compile_ahead(test, version.0, jobs.len());
    let run = |(job, ahead): (&Job, u64)| {
        let (wrong, ms) = job.run(&jit);
        (wrong, ms + ahead)
    };
    let outcomes: Vec<_> = jobs.iter().zip(ahead).map(run).collect();
    let (built, ms) = outcomes.iter().fold((0, 0), |(n, sum), (_, ms)| (n + (*ms > 0) as usize, sum + ms));
    println!(
        "NVRTC {}.{}: {} variants of {} kernels, {built} compiled in {:.1} s of compiler time, {:.1} s in all",
        version.0,
        version.1,
        jobs.len(),
        kernels().len(),
        ms as f64 / 1e3,
        start.elapsed().as_secs_f64()
    );
    let mut of_kernel = BTreeMap::<_, (usize, u64)>::new();
    for (job, (_, ms)) in jobs.iter().zip(&outcomes) {
        let (variants, sum) = of_kernel.entry(job.kernel.function).or_default();
        (*variants, *sum) = (*variants + 1, *sum + ms);
    }
    let mut most: Vec<_> = of_kernel.into_iter().collect();
    most.sort_unstable_by_key(|(_, (_, ms))| std::cmp::Reverse(*ms));
    for (function, (variants, ms)) in most.iter().take(5).filter(|(_, (_, ms))| *ms > 0) {
        println!("  {function}: {variants} variants, {:.1} s", *ms as f64 / 1e3);
    }
    outcomes.into_iter().filter_map(|(wrong, _)| wrong).collect()
}

#[test]
fn every_kernel_for_every_architecture() {
    let (records, all) = (is_set("WARPSMITH_RECORD", "evidence"), is_set("WARPSMITH_TEST_ALL", "1"));
    let before = Record::read();
    let (mut failures, mut now) = (Vec::new(), Record(BTreeSet::new()));
    for (major, archs) in PLAN {
        let Some(nvrtc) = nvrtc(major) else { continue };
        let version = nvrtc.version();
        let mut jobs: Vec<Job> = archs
            .iter()
            .enumerate()
            .flat_map(|(turn, (arch, extent))| jobs(arch.parse().unwrap(), *extent, turn))
            .collect();
        let wanted = jobs.len();
        now.0.extend(jobs.iter().map(|job| Record::entry(version, job)));
        if !all {
            jobs.retain(|job| !before.0.contains(&Record::entry(version, job)));
        }
        println!("NVRTC {major}: {} of {wanted} variants are on record", wanted - jobs.len());
        let test = "every_kernel_for_every_architecture";
        failures.extend(build(test, nvrtc, &format!("nvrtc{major}-cache"), &jobs));
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    if records && std::env::var_os(SHARE).is_none() {
        now.write();
    }
}

#[test]
#[ignore = "all variants take most of an hour on two cores"]
fn every_variant_for_sm_90a() {
    let Some(nvrtc) = nvrtc(13) else { return };
    let arch = "sm_90a".parse().unwrap();
    let variants = |kernel: &'static CudaKernel| {
        (kernel.variants)().into_iter().map(move |defines| Job::new(kernel, defines, arch))
    };
    let jobs: Vec<Job> = kernels().into_iter().flat_map(variants).collect();
    let failures = build("every_variant_for_sm_90a", nvrtc, "nvrtc13-all-cache", &jobs);
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn chosen_variants_have_every_value_and_every_element_type() {
    for kernel in kernels() {
        let variants = (kernel.variants)();
        let values = |list: &[Defines]| list.iter().flatten().cloned().collect::<BTreeSet<_>>();
        assert_eq!(values(&covering(&variants)), values(&variants), "{}", kernel.function);
        let elements = |list: &[Defines]| {
            values(list).into_iter().filter(|(name, _)| *name == "ELEM").collect::<Vec<_>>()
        };
        assert_eq!(elements(&heaviest(&variants)), elements(&variants), "{}", kernel.function);
    }
}

/// One that did not would read what the kernel before it has not written yet.
#[test]
fn kernels_that_overlap_wait_by_themselves() {
    let waits = |code: &str| code.contains("begin_kernel();") || code.contains("await_kernel_before();");
    for kernel in kernels() {
        let headers = warpsmith::jit::headers::included_by(&[kernel.source.code]);
        // The header that defines the wait is no use of it.
        let mut uses = headers.iter().filter(|header| !header.name.ends_with("/base.cuh"));
        let found = waits(kernel.source.code) || uses.any(|header| waits(header.code));
        assert_eq!(kernel.overlaps, found, "{}", kernel.function);
    }
}
