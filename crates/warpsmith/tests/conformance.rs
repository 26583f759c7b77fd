//! Every kernel of every op over every case, on the CPU with each tier forced, and on the GPU if there is one.

use warpsmith::cpu::Tier;
use warpsmith::cpu::gemm::Isa;
use warpsmith::device::{Device, Stream};
use warpsmith::proof::Prepared;
use warpsmith::registry::{AnyOp, KernelInfo};
use warpsmith::{env, ops};

/// Judges the kernels of `op` that run on `device` and are `wanted`.
fn prove(op: &'static dyn AnyOp, device: Device, wanted: fn(&KernelInfo) -> bool) {
    let name = op.spec().name;
    let stream = device.default_stream().unwrap();
    let mut passed: Vec<(&str, usize)> = op.kernels().iter().map(|k| (k.name, 0)).collect();
    let mut failures = Vec::new();
    for (seed, case) in op.cases().iter().enumerate() {
        let mut prepared = Prepared::new(op, case, device, seed as u64).unwrap();
        let mut supported = 0;
        for (kernel, (_, passes)) in op.kernels().iter().zip(&mut passed) {
            if !wanted(kernel) {
                continue;
            }
            let Some(outcome) = judge(&mut prepared, kernel, &stream) else { continue };
            supported += 1;
            *passes += 1;
            if let Some(why) = outcome.failure {
                failures.push(format!("{} [{} {}]: {why}", kernel.name, case.name(op.spec()), case.dtype));
            }
        }
        let runs = supported > 0 || case.selective;
        assert!(runs, "{name}: no kernel on {device} runs {} {}", case.name(op.spec()), case.dtype);
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    let idle: Vec<_> = op
        .kernels()
        .iter()
        .zip(&passed)
        .filter(|(kernel, (_, passes))| *passes == 0 && runs_here(kernel, device) && wanted(kernel))
        .map(|(kernel, _)| kernel.name)
        .collect();
    assert!(idle.is_empty(), "{name}: no case reaches {idle:?} on {device}");
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
