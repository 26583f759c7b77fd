//! Every kernel of every op over every case, on the CPU with each tier forced, and on the GPU if there is one.
//! `WARPSMITH_TEST_OP=name` proves one op alone.

use rayon::prelude::*;
use std::collections::BTreeSet;
use warpsmith::cpu::Tier;
use warpsmith::cpu::gemm::Isa;
use warpsmith::device::Device;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::Case;
use warpsmith::lab::proof::Prepared;
use warpsmith::op::KernelInfo;
use warpsmith::ops;

/// Cases whose references are held at once.
const TOGETHER: usize = 64;

/// Judges the kernels of `op` that run on `device`.
fn prove(op: &'static dyn AnyProvable, device: Device) {
    let name = op.spec().name;
    let is_for_device = |(_, case): &(u64, Case)| device != Device::Cpu || !case.gpu_only;
    let cases: Vec<(u64, Case)> = (0..).zip(op.cases()).filter(is_for_device).collect();
    let mut reached = BTreeSet::new();
    let mut failures = Vec::new();
    for cases in cases.chunks(TOGETHER) {
        let mut prepared = Prepared::many(op, cases, &op.kernels(), device).unwrap();
        for (isa, kernels) in choices(op, device) {
            if let Some(isa) = isa {
                Isa::limit(isa);
            }
            let judge = |((_, case), prepared): (&(u64, Case), &mut Prepared)| {
                let name = format!("{} {}{}", case.name(op.spec()), case.dtype, named(isa));
                judge(prepared, &kernels, device, &name)
            };
            // A GPU has one case at a time.
            let proven: Vec<Proven> = match device {
                Device::Cpu => cases.par_iter().zip(&mut prepared).map(judge).collect(),
                Device::Cuda(_) => cases.iter().zip(&mut prepared).map(judge).collect(),
            };
            for ((_, case), proven) in cases.iter().zip(proven) {
                let runs = !proven.kernels.is_empty() || case.selective;
                assert!(runs, "{name}: no kernel on {device} runs {} {}", case.name(op.spec()), case.dtype);
                reached.extend(proven.kernels.iter().map(|kernel| (isa, *kernel)));
                failures.extend(proven.failures);
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    for (isa, kernels) in choices(op, device) {
        let idle: Vec<_> = kernels.iter().map(|k| k.name).filter(|k| !reached.contains(&(isa, *k))).collect();
        assert!(idle.is_empty(), "{name}: no case reaches {idle:?} on {device}{}", named(isa));
    }
}

/// The kernels that run on `device`. Ops that multiply matrices choose among instructions within the highest tier, which
/// is then judged with each of them.
fn choices(op: &dyn AnyProvable, device: Device) -> Vec<(Option<Isa>, Vec<KernelInfo>)> {
    const OPS: [&str; 11] = [
        "linear",
        "linear_backward",
        "linear_quant",
        "linear_cross_entropy",
        "grouped_linear",
        "grouped_linear_backward",
        "moe_ffn",
        "moe_ffn_backward",
        "attention",
        "attention_backward",
        "paged_attention",
    ];
    let here = |kernel: &KernelInfo| match device {
        Device::Cpu => kernel.tier.is_some_and(|tier| Tier::available().contains(&tier)),
        Device::Cuda(_) => kernel.is_cuda(),
    };
    let kernels: Vec<KernelInfo> = op.kernels().into_iter().filter(here).collect();
    if device != Device::Cpu || !OPS.contains(&op.spec().name) {
        return vec![(None, kernels)];
    }
    let best = Isa::configured().unwrap();
    let fewer = [Isa::Avx512, Isa::Avx512Dot, Isa::Amx].into_iter().filter(|&isa| isa < best).map(|isa| {
        let highest = kernels.iter().filter(|kernel| kernel.tier == Some(Tier::Avx512));
        (Some(isa), highest.cloned().collect())
    });
    // The best is last, and so stays in use.
    fewer.chain([(Some(best), kernels.clone())]).collect()
}

fn named(isa: Option<Isa>) -> String {
    isa.map_or(String::new(), |isa| format!(" on {}", isa.name()))
}

/// The kernels that ran a case, and what went wrong.
#[derive(Default)]
struct Proven {
    kernels: Vec<&'static str>,
    failures: Vec<String>,
}

fn judge(prepared: &mut Prepared, kernels: &[KernelInfo], device: Device, name: &str) -> Proven {
    let stream = device.default_stream().unwrap();
    let mut proven = Proven::default();
    for kernel in kernels {
        let outcome = prepared.judge(kernel, &stream).unwrap_or_else(|e| panic!("{}: {e}", kernel.name));
        let Some(outcome) = outcome else { continue };
        proven.kernels.push(kernel.name);
        proven.failures.extend(outcome.failure.map(|why| format!("{} [{name}]: {why}", kernel.name)));
    }
    proven
}

fn wanted() -> impl Iterator<Item = &'static dyn AnyProvable> {
    let name = std::env::var("WARPSMITH_TEST_OP").ok();
    ops::PROVABLE.iter().copied().filter(move |op| name.as_ref().is_none_or(|name| name == op.spec().name))
}

/// One test for all: what matrix products may use is set for the whole process.
#[test]
fn every_op_on_the_cpu() {
    wanted().for_each(|op| prove(op, Device::Cpu));
}

#[test]
fn every_op_on_the_gpu() {
    match Device::best() {
        Device::Cpu => eprintln!("skipped: no GPU"),
        gpu => wanted().for_each(|op| prove(op, gpu)),
    }
}
