//! Every kernel of every op over every case, on the CPU with each tier forced, and on the GPU if there is one.

use rayon::prelude::*;
use warpsmith::cpu::Tier;
use warpsmith::cpu::gemm::Isa;
use warpsmith::device::{Device, Stream};
use warpsmith::op::Case;
use warpsmith::proof::Prepared;
use warpsmith::registry::{AnyOp, KernelInfo};
use warpsmith::{env, ops};

/// Judges the kernels of `op` that run on `device` and are `wanted`.
fn prove(op: &'static dyn AnyOp, device: Device, wanted: fn(&KernelInfo) -> bool) {
    let name = op.spec().name;
    let cases: Vec<(usize, Case)> = op.cases().into_iter().enumerate().collect();
    let prove = |(seed, case): &(usize, Case)| prove_case(op, case, *seed as u64, device, wanted);
    // References take most of the time, each on one thread. A GPU has one case at a time.
    let proven: Vec<Proven> = match device {
        Device::Cpu => cases.par_iter().map(prove).collect(),
        Device::Cuda(_) => cases.iter().map(prove).collect(),
    };
    let failures: Vec<&str> = proven.iter().flat_map(|case| &case.failures).map(String::as_str).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    let reached = |kernel: &KernelInfo| proven.iter().any(|case| case.kernels.contains(&kernel.name));
    let kernels = op.kernels().into_iter().filter(|kernel| runs_here(kernel, device) && wanted(kernel));
    let idle: Vec<_> = kernels.filter(|kernel| !reached(kernel)).map(|kernel| kernel.name).collect();
    assert!(idle.is_empty(), "{name}: no case reaches {idle:?} on {device}");
}

/// The kernels that ran a case, and what went wrong.
#[derive(Default)]
struct Proven {
    kernels: Vec<&'static str>,
    failures: Vec<String>,
}

fn prove_case(
    op: &'static dyn AnyOp,
    case: &Case,
    seed: u64,
    device: Device,
    wanted: fn(&KernelInfo) -> bool,
) -> Proven {
    let stream = device.default_stream().unwrap();
    let mut prepared = Prepared::new(op, case, device, seed).unwrap();
    let mut proven = Proven::default();
    let name = format!("{} {}", case.name(op.spec()), case.dtype);
    for kernel in op.kernels().iter().filter(|kernel| wanted(kernel)) {
        let Some(outcome) = judge(&mut prepared, kernel, &stream) else { continue };
        proven.kernels.push(kernel.name);
        proven.failures.extend(outcome.failure.map(|why| format!("{} [{name}]: {why}", kernel.name)));
    }
    let runs = !proven.kernels.is_empty() || case.selective;
    assert!(runs, "{}: no kernel on {device} runs {name}", op.spec().name);
    proven
}

fn judge(prepared: &mut Prepared, kernel: &KernelInfo, stream: &Stream) -> Option<warpsmith::proof::Outcome> {
    prepared.judge(kernel, stream).unwrap_or_else(|e| panic!("{}: {e}", kernel.name))
}

fn runs_here(kernel: &KernelInfo, device: Device) -> bool {
    match device {
        Device::Cpu => kernel.tier.is_some_and(|tier| Tier::available().contains(&tier)),
        Device::Cuda(_) => kernel.is_cuda(),
    }
}

#[test]
fn every_op_on_the_cpu() {
    for op in ops::ALL {
        prove(*op, Device::Cpu, |_| true);
    }
}

/// The ops that multiply matrices choose among instructions within the highest tier: each is run in a process of its own
/// that may use no better ones.
#[test]
fn matrix_products_with_fewer_instructions() {
    const OPS: [&str; 4] = ["linear", "linear_backward", "attention", "paged_attention"];
    if env::get(env::CPU_MATRIX).is_some() {
        for op in ops::ALL.iter().filter(|op| OPS.contains(&op.spec().name)) {
            prove(*op, Device::Cpu, |kernel| kernel.tier == Some(Tier::Avx512));
        }
        return;
    }
    for isa in [Isa::Avx512, Isa::Avx512Dot].into_iter().filter(|&isa| isa < Isa::supported()) {
        let test = std::env::current_exe().unwrap();
        let output = std::process::Command::new(test)
            .args(["--exact", "matrix_products_with_fewer_instructions"])
            .env(env::CPU_MATRIX, isa.name())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", isa.name());
    }
}

#[test]
fn every_op_on_the_gpu() {
    match Device::best() {
        Device::Cpu => eprintln!("skipped: no GPU"),
        gpu => ops::ALL.iter().for_each(|op| prove(*op, gpu, |_| true)),
    }
}
