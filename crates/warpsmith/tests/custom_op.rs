//! An op of another crate: `examples/custom-op`, whose sources are compiled here against the library as any program would.
//! (A build of its own would compile the library once more.)

#[path = "../../../examples/custom-op/src/main.rs"]
mod example;

use example::relu_squared::{OUT, ReluSquared, X, relu_squared};
use std::process::Command;
use warpsmith::cpu::Tier;
use warpsmith::jit::{Arch, Request};
use warpsmith::lab::bench::{Bench, Ceilings, Settings};
use warpsmith::lab::proof::Prepared;
use warpsmith::lab::{self, Case};
use warpsmith::op::{
    AnyOp, ArgSpec, Args, Attrs, Cost, DTypeRule, Gradient, Kernel, Matcher, Op, OpSpec, Select, shape,
};
use warpsmith::ops::{self, Activation};
use warpsmith::{DType, Device, Error, Result, Stream, Tensor};

/// Registers the example's op, once for all tests.
fn registered() -> &'static dyn AnyOp {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| example::main().unwrap());
    ops::find("relu_squared").unwrap()
}

fn random(shape: &[usize]) -> Tensor {
    Tensor::randn(shape, DType::F32, Device::Cpu, 3).unwrap()
}

#[test]
fn the_example_runs_and_its_op_is_one_of_all() {
    let op = registered();
    assert_eq!(ops::all().len(), ops::ALL.len() + 1);
    assert_eq!(ops::provable().len(), ops::PROVABLE.len() + 1);
    assert_eq!(ops::all().last().unwrap().spec().name, "relu_squared");
    assert!(ops::ALL.iter().all(|op| op.spec().name != "relu_squared"));

    let x = random(&[3, 70]);
    let expected: Vec<f32> = x.to_vec::<f32>().unwrap().iter().map(|x| x.max(0.0) * x.max(0.0)).collect();
    assert_eq!(relu_squared(&x).unwrap().to_vec::<f32>().unwrap(), expected);
    // By name, as generic callers do.
    let mut out = random(&[3, 70]);
    let mut args = Args::new(op.spec()).input(X, x.view()).output(OUT, out.view_mut());
    let kernel = op.run(&mut args, &Attrs::defaults(op.spec()), &Stream::Host, &Select::default()).unwrap();
    assert!(kernel.unwrap().starts_with("relu_squared_"));
    assert_eq!(out.to_vec::<f32>().unwrap(), expected);

    let error = relu_squared(&x.narrow(1, 0, 69).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("relu_squared: argument `x`: expected a contiguous tensor"), "{error}");
}

#[test]
fn the_lab_judges_and_times_it() {
    registered();
    let op = lab::find("relu_squared").unwrap();
    let case = Case::new(op.spec(), DType::F32).sizes(&[4, 256]);
    let settings = Settings::quick(Device::Cpu);
    let mut bench = Bench::new(op, &case, Device::Cpu, Ceilings::copy(10.0), settings).unwrap();
    assert!(bench.measure(Some("relu_squared_portable")).unwrap().median_ms > 0.0);

    // One wrong element is found and named.
    let mut prepared = Prepared::new(&Wrong, &case, Device::Cpu, 0).unwrap();
    let kernel = AnyOp::kernels(&Wrong)[0];
    let outcome = prepared.judge(&kernel, &Stream::Host).unwrap().unwrap();
    let failure = outcome.failure.unwrap();
    assert!(!outcome.ok && failure.contains("element 77"), "{failure}");
}

/// Whether there must be a CUDA compiler.
fn must_compile() -> bool {
    std::env::var("WARPSMITH_REQUIRE_NVRTC").is_ok_and(|value| value == "1")
}

#[test]
fn its_device_code_compiles() {
    let Some(device) = registered().kernels().iter().find_map(|kernel| kernel.cuda) else {
        panic!("it has a CUDA kernel")
    };
    let prelude = (device.prelude)();
    for arch in [Arch::new(7, 5, false), Arch::new(9, 0, true)] {
        let request = Request { prelude: &prelude, ..Request::new(&device.source, arch) };
        match warpsmith::jit::get(&request) {
            Ok(compiled) => assert!(compiled.cubin.len() > 500),
            Err(Error::Unavailable { .. }) if !must_compile() => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn its_manifest_is_that_of_a_crate_outside_the_workspace() {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/custom-op/Cargo.toml");
    let mut command = Command::new(env!("CARGO"));
    command.args(["metadata", "--no-deps", "--offline", "--format-version=1"]).arg("--manifest-path");
    command.arg(manifest);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = found["packages"].as_array().unwrap();
    assert_eq!(packages.len(), 1, "it is a workspace of its own");
    let library = &packages[0]["dependencies"][0];
    let path = std::fs::canonicalize(library["path"].as_str().unwrap()).unwrap();
    assert_eq!(path, std::fs::canonicalize(env!("CARGO_MANIFEST_DIR")).unwrap());
    assert_eq!((&library["name"], &library["features"]), (&"warpsmith".into(), &serde_json::json!(["lab"])));
}

/// The example's op with another description: `Op` has no state, so each needs a type.
macro_rules! described {
    ($name:ident, $spec:expr, $kernels:expr) => {
        struct $name;
        // SAFETY: the shapes make both tensors as long as the problem says, and the kernels write no more.
        unsafe impl Op for $name {
            type Problem = usize;
            const SPEC: OpSpec = $spec;
            fn check(args: &Args<'_>, attrs: &Attrs) -> Result<usize> {
                Matcher::of(args, attrs)?;
                Ok(args.at(X).layout().numel())
            }
            fn kernels() -> &'static [Kernel<usize>] {
                static LIST: &[Kernel<usize>] = $kernels;
                LIST
            }
            fn cost(count: &usize) -> Cost {
                Cost::moving(8.0 * *count as f64, 0.0)
            }
        }
    };
}

const TWO: &[ArgSpec] = &[
    ArgSpec::input("x", shape![.., hidden], DTypeRule::F32, ""),
    ArgSpec::output("out", shape![.., hidden], DTypeRule::F32, ""),
];

/// Writes sevens.
const SEVENS: fn(&warpsmith::op::Launch<'_, usize>) -> Result<()> = |launch| {
    let out = launch.args.address(OUT) as *mut f32;
    // SAFETY: the check bound the output to the input's number of elements.
    (0..*launch.problem).for_each(|at| unsafe { out.add(at).write(7.0) });
    Ok(())
};

#[test]
fn what_cannot_be_registered_is_refused() {
    registered();
    let refused = |op: &'static dyn AnyOp, about: &str, expected: &str| {
        let Err(Error::Argument { op: name, arg, expected: found, .. }) = ops::register(op) else {
            panic!("{} is accepted", op.spec().name)
        };
        assert_eq!((name, arg.as_str()), (op.spec().name, about));
        assert!(found.contains(expected), "{found}");
        assert!(ops::find("rms_norm").unwrap().kernels().len() > 1);
    };
    const ONE: &[Kernel<usize>] = &[Kernel::cpu("new_kernel", Tier::Portable, SEVENS)];
    refused(&ReluSquared, "name", "no other op has");

    described!(TakenName, OpSpec { name: "rms_norm", args: TWO, ..OpSpec::EMPTY }, ONE);
    refused(&TakenName, "name", "no other op has");
    for op in {
        described!(Empty, OpSpec { name: "", args: TWO, ..OpSpec::EMPTY }, ONE);
        described!(Dash, OpSpec { name: "my-op", args: TWO, ..OpSpec::EMPTY }, ONE);
        described!(Digit, OpSpec { name: "2nd", args: TWO, ..OpSpec::EMPTY }, ONE);
        described!(Upper, OpSpec { name: "MyOp", args: TWO, ..OpSpec::EMPTY }, ONE);
        let all: [&'static dyn AnyOp; 4] = [&Empty, &Dash, &Digit, &Upper];
        all
    } {
        refused(op, "name", "an identifier");
    }

    const KERNEL: &[Kernel<usize>] = &[Kernel::cpu("rms_norm_avx2", Tier::Portable, SEVENS)];
    described!(TakenKernel, OpSpec { name: "taken_kernel", args: TWO, ..OpSpec::EMPTY }, KERNEL);
    refused(&TakenKernel, "kernels", "no other kernel has");
    described!(NoKernel, OpSpec { name: "no_kernel", args: TWO, ..OpSpec::EMPTY }, &[]);
    refused(&NoKernel, "kernels", "at least one");
    described!(NoOutput, OpSpec { name: "no_output", args: &TWO_INPUTS, ..OpSpec::EMPTY }, ONE);
    refused(&NoOutput, "args", "an output");
    const TWO_INPUTS: [ArgSpec; 1] = [ArgSpec::input("x", shape![hidden], DTypeRule::F32, "")];
    const TWICE: &[ArgSpec] = &[
        ArgSpec::input("x", shape![hidden], DTypeRule::F32, ""),
        ArgSpec::output("x", shape![hidden], DTypeRule::F32, ""),
    ];
    described!(Twice, OpSpec { name: "twice", args: TWICE, ..OpSpec::EMPTY }, ONE);
    refused(&Twice, "x", "occurs once");
    const NOWHERE: &[ArgSpec] = &[
        ArgSpec::input("x", shape![hidden], DTypeRule::F32, ""),
        ArgSpec::output("out", shape![hidden], DTypeRule::Same(9), ""),
    ];
    described!(Nowhere, OpSpec { name: "nowhere", args: NOWHERE, ..OpSpec::EMPTY }, ONE);
    refused(&Nowhere, "out", "the type of a required argument");
    const GRADIENT: Option<Gradient> =
        Some(Gradient { op: "no_such_op", inputs: &[], results: &[], only_if: &[], without: &[] });
    described!(Lost, OpSpec { name: "lost", args: TWO, gradient: GRADIENT, ..OpSpec::EMPTY }, ONE);
    refused(&Lost, "gradient", "`no_such_op` to be registered before");
    assert_eq!(ops::all().len(), ops::ALL.len() + 1, "none of them is there");
}

/// An op may have the name of another, as long as it is not registered: calls must not meet the other's plans.
#[test]
fn plans_of_ops_with_one_name_are_not_confused() {
    const KERNELS: &[Kernel<usize>] = &[Kernel::cpu("other_activation", Tier::Portable, SEVENS)];
    const ARGS: &[ArgSpec] = &[
        ArgSpec::input("x", shape![.., hidden], DTypeRule::F32, ""),
        ArgSpec::output("out", shape![.., hidden], DTypeRule::F32, "").in_place_of(0),
    ];
    described!(Namesake, OpSpec { name: "relu_squared", args: ARGS, ..OpSpec::EMPTY }, KERNELS);
    let x = random(&[5, 31]);
    let run = |op: &dyn AnyOp| {
        let mut out = random(&[5, 31]);
        let mut args = Args::new(op.spec()).input(0, x.view()).output(1, out.view_mut());
        op.run(&mut args, &Attrs::defaults(op.spec()), &Stream::Host, &Select::default()).unwrap();
        out.to_vec::<f32>().unwrap()
    };
    let ours = run(registered());
    for _ in 0..2 {
        assert!(run(&Namesake).iter().all(|&y| y == 7.0));
        assert_eq!(run(registered()), ours);
    }
    // Nor does an op take the arguments of another.
    let mut out = random(&[5, 31]);
    let activation = ops::find("activation").unwrap();
    let mut args = Args::new(activation.spec()).input(0, x.view()).output(1, out.view_mut());
    let attrs = Attrs::defaults(activation.spec());
    let error = registered().run(&mut args, &attrs, &Stream::Host, &Select::default()).unwrap_err();
    assert!(
        error.to_string().contains("expected those of `relu_squared`, got those of `activation`"),
        "{error}"
    );
    drop(Activation::gelu(&x).run().unwrap());
}

/// The example's op with one element planted.
struct Wrong;

// SAFETY: its problems are the example's, and so is its kernel, but for an element that every case has.
unsafe impl Op for Wrong {
    type Problem = <ReluSquared as Op>::Problem;
    const SPEC: OpSpec = ReluSquared::SPEC;
    fn check(args: &Args<'_>, attrs: &Attrs) -> Result<Self::Problem> {
        <ReluSquared as Op>::check(args, attrs)
    }
    fn kernels() -> &'static [Kernel<Self::Problem>] {
        static KERNELS: &[Kernel<<ReluSquared as Op>::Problem>] =
            &[Kernel::cpu("wrong_portable", Tier::Portable, |launch| {
                let right =
                    <ReluSquared as Op>::kernels().iter().find(|kernel| kernel.name.ends_with("portable"));
                (right.unwrap().run)(launch)?;
                // SAFETY: the case has more than 77 elements.
                unsafe { (launch.args.address(OUT) as *mut f32).add(77).write(-1.0) };
                Ok(())
            })];
        KERNELS
    }
    fn cost(problem: &Self::Problem) -> Cost {
        <ReluSquared as Op>::cost(problem)
    }
}

impl lab::Provable for Wrong {
    fn reference<R: lab::Real>(inputs: &lab::Inputs<'_, R>, attrs: &Attrs) -> Vec<Option<lab::Array<R>>> {
        ReluSquared::reference(inputs, attrs)
    }
    fn plan(case: &Case) -> Vec<Option<lab::ArgPlan>> {
        <ReluSquared as lab::Provable>::plan(case)
    }
    fn cases() -> Vec<Case> {
        <ReluSquared as lab::Provable>::cases()
    }
    fn bench_cases() -> Vec<Case> {
        <ReluSquared as lab::Provable>::bench_cases()
    }
}
