//! `warpsmith fuse --random`: random formulas, judged or compiled.

use crate::kernels::progress_bar;
use crate::table;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use warpsmith::Device;
use warpsmith::cuda::Context;
use warpsmith::jit::{self, Arch};
use warpsmith_fuse::cuda::{CudaSource, Variant};
use warpsmith_fuse::plan::Plan;
use warpsmith_fuse::random::{Draw, draw, judge};
use warpsmith_fuse::shape::Sizes;
use warpsmith_fuse::{Error, Result};

/// Threads at most: kernels for a GPU are compiled on the CPU.
const MAX_THREADS: usize = 16;

/// What is done with each formula.
#[derive(Clone, Copy)]
pub enum Task {
    /// Its results are judged.
    Judge(Device),
    /// Its kernels are compiled, which needs no GPU.
    Compile(Arch),
}

/// What has been found.
#[derive(Default)]
struct Found {
    done: u64,
    wrong: u64,
    unknown: f64,
    kernels: u64,
}

pub fn run(task: Task, seed: u64, count: u64) -> Result<ExitCode> {
    let found = Mutex::new(Found::default());
    let (next, lost) = (AtomicU64::new(seed), AtomicBool::new(false));
    let progress = progress_bar(count as usize);
    let end = seed.saturating_add(count);
    let work = || {
        while !lost.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return;
            }
            let result = one(task, seed);
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.done += 1;
            match result {
                Ok((unknown, kernels)) => {
                    found.unknown += unknown;
                    found.kernels += kernels;
                }
                Err(what) => {
                    found.wrong += 1;
                    progress.suspend(|| println!("seed {seed}: {what}\n"));
                    lost.fetch_or(is_lost(task), Ordering::Relaxed);
                }
            }
            progress.inc(1);
        }
    };
    thread::scope(|scope| {
        // The CPU's kernels take all cores themselves.
        let threads = match task {
            Task::Judge(Device::Cpu) => 1,
            _ => thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_THREADS)),
        };
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    progress.finish_and_clear();
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let Found { done, wrong, unknown, kernels } = found;
    match task {
        Task::Judge(device) => println!(
            "{done} random formulas on {device}, {wrong} wrong; {} of the elements could be anything",
            table::percent(unknown / done.max(1) as f64)
        ),
        Task::Compile(arch) => {
            println!("{done} random formulas for {arch}, {kernels} kernels, {wrong} formulas wrong")
        }
    }
    if lost.into_inner() {
        println!("the device was lost; {} formulas were not judged", count - done);
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether a kernel's fault has made the device useless for the process.
fn is_lost(task: Task) -> bool {
    match task {
        Task::Judge(Device::Cuda(ordinal)) => Context::get(ordinal).and_then(Context::check_poison).is_err(),
        _ => false,
    }
}

/// The share of elements about which nothing can be said, and the kernels.
fn one(task: Task, seed: u64) -> std::result::Result<(f64, u64), String> {
    let draw = draw(seed).map_err(|error| error.to_string())?;
    match task {
        Task::Judge(device) => match judge(&draw, device) {
            Ok(unknown) => Ok((unknown, 0)),
            Err(fault) => Err(fault.to_string()),
        },
        Task::Compile(arch) => {
            let compiled = compile(&draw, arch, seed.is_multiple_of(2));
            compiled.map(|kernels| (0.0, kernels)).map_err(|error| format!("{error}\n{}", draw.graph))
        }
    }
}

fn compile(draw: &Draw, arch: Arch, dense: bool) -> Result<u64> {
    let (graph, plan) = (&draw.graph, Plan::new(&draw.graph));
    let mut sizes = Sizes::default();
    for (&id, (shape, _)) in graph.inputs().iter().zip(&draw.inputs) {
        sizes.bind(graph.input_name(id), &graph.node(id).shape, shape)?;
    }
    for kernel in &plan.kernels {
        let columns = kernel.domain.last().map_or(Ok(1), |dim| sizes.of(dim))?;
        let source = CudaSource::new(graph, kernel, &Variant::plain(columns, dense))?;
        let compiled = source.with_request(arch, jit::get)?;
        let spilled = jit::inspect::spills(&compiled.log);
        if let Some(spills) = spilled.iter().find(|spills| spills.store_bytes + spills.load_bytes > 0) {
            return Err(Error::Node { node: source.describe(), what: format!("spills: {spills:?}") });
        }
    }
    Ok(plan.kernels.len() as u64)
}
