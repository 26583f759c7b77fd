//! The scratch of a call follows from the shapes of its tensors. If it cannot be allocated, calls end with
//! `Error::OutOfMemory`, and the next one works.

use std::collections::BTreeSet;
use std::process::Command;
use warpsmith::cpu::{scratch::limit, with_threads};
use warpsmith::lab::proof::{Drawn, kernels_on};
use warpsmith::op::{Args, Attrs, Select};
use warpsmith::tensor::{Layout, Shape};
use warpsmith::{DType, Device, Error, Stream, Tensor, TensorView, ops};

/// Every CPU kernel without any scratch, and with little, alone and on several threads.
#[test]
fn kernels_without_scratch_give_errors_and_run_afterwards() {
    let mut missed = BTreeSet::new();
    for op in ops::PROVABLE {
        let (spec, kernels) = (op.spec(), kernels_on(*op, Device::Cpu));
        let numel = |case: &warpsmith::lab::Case| -> usize {
            op.plan(case).iter().flatten().map(|arg| arg.shape.iter().product::<usize>()).sum()
        };
        let small = op.cases().into_iter().filter(|case| numel(case) < 1 << 13);
        for (seed, case) in (0..).zip(small) {
            let mut drawn = Drawn::new(*op, &case, Device::Cpu, seed).unwrap();
            for kernel in &kernels {
                for (bytes, threads) in [(0, 1), (0, 3), (20_000, 3)] {
                    let mut launch = || with_threads(threads, || drawn.launch(kernel, &Stream::Host));
                    match limit::with_at_most(bytes, &mut launch) {
                        Ok(_) => {}
                        Err(Error::OutOfMemory { requested, .. }) => {
                            assert!(requested > bytes as u64, "{}: {requested} bytes", kernel.name);
                            missed.insert(kernel.name);
                            launch().unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
                        }
                        Err(error) => panic!("{}, {}: {error}", kernel.name, case.name(spec)),
                    }
                }
            }
        }
    }
    // Kernels that never need any would show nothing.
    for op in ["rms_norm", "softmax", "rope", "attention", "linear", "linear_quant", "sample", "embedding"] {
        let of_op = missed.iter().filter(|kernel| kernel.starts_with(op)).count();
        assert!(of_op > 0, "no kernel of {op} asked for scratch: {missed:?}");
    }
}

/// A tensor of `shape` that repeats one element, as PyTorch's `expand` makes them.
fn repeated<'a>(element: &'a [half::bf16; 1], shape: &[usize]) -> TensorView<'a> {
    let layout = Layout::strided(Shape::new(shape).unwrap(), &vec![0; shape.len()]).unwrap();
    // SAFETY: strides of zero stay at the one element.
    unsafe { TensorView::from_raw(element.as_ptr() as usize, DType::BF16, layout, Device::Cpu) }
}

/// The same with memory that is really missing: in a process that may not have more.
#[test]
fn a_process_without_memory_gets_errors() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", "limited_process", "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}

#[test]
#[ignore = "limits its process; started by `a_process_without_memory_gets_errors`"]
fn limited_process() {
    let limit = libc::rlimit { rlim_cur: 7 << 30, rlim_max: 7 << 30 };
    // SAFETY: a system call on a struct of our own.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let one = [half::bf16::ONE];
    let long = (1usize << 31) + 3;
    let missing = |what: &str, result: warpsmith::Result<()>| match result {
        Err(Error::OutOfMemory { .. }) => {}
        other => panic!("{what}: {other:?}"),
    };
    let wide = repeated(&one, &[1, long]);
    missing("to_vec", wide.to_f64().map(drop));
    missing("tensor", Tensor::zeros(&[4, long], DType::BF16, Device::Cpu).map(drop));
    // Outputs fit, untouched, but not what the kernels need beside them.
    let mut out = Tensor::empty(&[1, long], DType::BF16, Device::Cpu).unwrap();
    for name in ["rms_norm", "layer_norm", "softmax"] {
        let op = ops::find(name).unwrap();
        let at = |arg: &str| op.spec().arg(arg).unwrap();
        let mut args = Args::new(op.spec()).input(at("x"), wide).output(at("out"), out.view_mut());
        let attrs = Attrs::defaults(op.spec());
        missing(name, op.run(&mut args, &attrs, &Stream::Host, &Select::default()).map(drop));
    }
    for name in ["rms_norm_backward", "layer_norm_backward", "softmax_backward"] {
        let op = ops::find(name).unwrap();
        let at = |arg: &str| op.spec().arg(arg).unwrap();
        let first = if name == "softmax_backward" { "y" } else { "x" };
        let mut args = Args::new(op.spec()).input(at(first), wide).input(at("dout"), wide);
        args = args.output(at("dx"), out.view_mut());
        let attrs = Attrs::defaults(op.spec());
        missing(name, op.run(&mut args, &attrs, &Stream::Host, &Select::default()).map(drop));
    }
    drop(out);
    let x = Tensor::randn(&[4, 64], DType::BF16, Device::Cpu, 0).unwrap();
    assert_eq!(ops::RmsNorm::new(&x).run().unwrap().shape(), [4, 64], "the process goes on");
}
