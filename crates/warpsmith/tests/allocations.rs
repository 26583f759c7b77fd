//! A repeated call allocates nothing, on any thread: its plan is found, and its kernel works in kept scratch.
//!
//! Every kernel of the CPU runs cases of its op twice, and allocations of the second run fail the test.
//! `WARPSMITH_TEST_OP=name` runs one op alone.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use warpsmith::Error;
use warpsmith::cpu::gemm::Isa;
use warpsmith::cpu::{Tier, with_threads};
use warpsmith::device::Device;
use warpsmith::lab::AnyProvable;
use warpsmith::lab::proof::Tensors;
use warpsmith::op::Select;
use warpsmith::ops;

/// Ops that multiply matrices, and choose among instructions within the highest tier.
const WITH_PRODUCTS: [&str; 11] = [
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
/// Threads of the kernels: more than one, so that workers are counted too.
const THREADS: usize = 3;

/// Cases of each op at most: to find out where an allocation came from takes milliseconds.
const CASES: usize = 40;

/// Whether allocations are counted now.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// Where they came from.
static FOUND: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// Whether this thread is looking at an allocation, which allocates too.
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

struct Counting;

impl Counting {
    fn note(&self) {
        if !COUNTING.load(Ordering::Relaxed) || LOOKING.replace(true) {
            return;
        }
        let trace = Backtrace::force_capture().to_string();
        FOUND.lock().unwrap().push(trace);
        LOOKING.set(false);
    }
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.note();
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.note();
        // SAFETY: passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.note();
        // SAFETY: passed on.
        unsafe { System.realloc(p, layout, size) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The frames of the library, from the allocation outwards.
fn frames(trace: &str) -> String {
    let names = trace.lines().map(str::trim).filter_map(|line| line.split_once(": ").map(|(_, name)| name));
    names.filter(|name| name.contains("warpsmith::")).take(8).collect::<Vec<_>>().join("\n    ")
}

/// Where the allocations of the second of two runs came from.
fn second_run(
    op: &dyn AnyProvable,
    tensors: &mut Tensors,
    case: &warpsmith::lab::Case,
    select: &Select,
) -> Option<Vec<String>> {
    let plan = op.plan(case);
    let stream = Device::Cpu.default_stream().unwrap();
    let mut args = tensors.args(&plan, None);
    let mut run = || op.run(&mut args, &case.attrs, &stream, select);
    match run() {
        Ok(Some(_)) => {}
        Ok(None) | Err(Error::Unsupported { .. }) => return None,
        Err(error) => panic!("{}: {error}", op.spec().name),
    }
    // A worker that takes part for the first time sets up its thread's own values: what a call allocates shows each time.
    let mut found = Vec::new();
    for _ in 0..3 {
        COUNTING.store(true, Ordering::SeqCst);
        let again = run();
        COUNTING.store(false, Ordering::SeqCst);
        again.unwrap();
        found = std::mem::take(&mut *FOUND.lock().unwrap());
        if found.is_empty() {
            break;
        }
    }
    Some(found)
}

/// Runs all cases of an op; returns what second runs allocated, by place.
fn count(op: &dyn AnyProvable) -> BTreeMap<String, usize> {
    let spec = op.spec();
    let mut found = BTreeMap::new();
    let cases = op.cases();
    for case in cases.iter().step_by(cases.len().div_ceil(CASES)) {
        let mut tensors = Tensors::new(spec, case, &op.plan(case), Device::Cpu, 1).unwrap();
        for kernel in op.kernels() {
            if kernel.tier.is_none_or(|tier| tier > Tier::supported()) {
                continue;
            }
            let select = Select { kernel: Some(kernel.name.into()), allow_batch_variant: true };
            for trace in second_run(op, &mut tensors, case, &select).into_iter().flatten() {
                let place = frames(&trace);
                *found.entry(format!("{} {}:\n    {place}", kernel.name, case.name(spec))).or_insert(0) += 1;
            }
        }
    }
    found
}

#[test]
fn a_second_call_allocates_nothing() {
    let wanted = std::env::var("WARPSMITH_TEST_OP").ok();
    let mut failures = Vec::new();
    for &op in ops::PROVABLE {
        let name = op.spec().name;
        if wanted.as_ref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let isas: Vec<Isa> = match WITH_PRODUCTS.contains(&name) {
            true => Isa::available().filter(|isa| isa.tier() == Tier::supported()).collect(),
            false => vec![Isa::supported()],
        };
        for isa in isas {
            Isa::limit(isa);
            let found = with_threads(THREADS, || count(op));
            println!("{name} on {}: {} allocations", isa.name(), found.values().sum::<usize>());
            failures.extend(found.into_iter().take(3).map(|(place, times)| format!("{times} x {place}")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
