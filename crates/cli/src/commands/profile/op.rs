//! The profile of one op.

use super::{Args, Measured, median, record};
use crate::inputs::{find_args, find_op, parse_attrs, parse_sizes, plan_case};
use std::time::Instant;
use warpsmith::lab::Case;
use warpsmith::lab::proof::BenchTensors;
use warpsmith::op::Select;
use warpsmith::{Device, Result};

/// Bytes over which calls on the CPU rotate, so that those of large tensors find them in memory, not in a cache.
const ROTATION: usize = 128 << 20;

pub fn measure(args: &Args, name: &str, device: Device) -> Result<(String, Vec<Measured>)> {
    let op = find_op(name)?;
    let spec = op.spec();
    let mut case = Case::new(spec, args.model.dtype()).sizes(&parse_sizes(spec, &args.shape)?);
    case.attrs = parse_attrs(spec, &args.options)?;
    for index in find_args(spec, &args.with, |arg| arg.optional, "optional argument")? {
        case = case.give(index);
    }
    let plan = plan_case(op, &case)?;
    let mut sets = BenchTensors::copies(spec, &case, &plan, device, copies(device, &plan, &case)?)?;
    let select =
        Select { kernel: args.kernel.clone().map(Into::into), allow_batch_variant: args.kernel.is_some() };
    let stream = device.default_stream()?;
    let count = sets.len();
    let mut calls = |calls: usize| -> Result<f64> {
        let start = Instant::now();
        for call in 0..calls {
            op.run(&mut sets[call % count].args(), &case.attrs, &stream, &select)?;
        }
        stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / calls as f64)
    };
    // Each copy is touched, and on a GPU the kernel is compiled.
    calls(count.max(3))?;
    // In turn, so that both see the machine in the same state; but what a GPU does to keep records stays.
    let (mut untraced, mut records) = (Vec::new(), Vec::new());
    for _ in 0..args.repetitions {
        untraced.push(calls(args.calls)?);
        if device == Device::Cpu {
            records.push(record(device, || calls(args.calls))?.1);
        }
    }
    if records.is_empty() {
        records.push(record(device, || calls(args.calls))?.1);
    }
    let records = median(records);
    let title = format!("{name} {} {} on {device}", case.name(spec), case.dtype);
    Ok((title, vec![Measured { name: "calls".into(), steps: args.calls, untraced, records }]))
}

/// How many copies of the tensors calls rotate over.
fn copies(device: Device, plan: &[Option<warpsmith::lab::ArgPlan>], case: &Case) -> Result<usize> {
    let bytes = BenchTensors::bytes(plan, case.arrangement)?;
    let info = device.info()?;
    let memory = device.memory()?;
    let usable = memory.free / 10 * 8;
    if bytes as u64 > usable {
        return Err(memory.exceeded(device.to_string(), bytes as u64));
    }
    let (fits, wanted) = match device {
        Device::Cpu => (info.cache_bytes * info.units / 2, ROTATION),
        Device::Cuda(_) => (info.cache_bytes / 8, 3 * info.cache_bytes),
    };
    let wanted = if bytes < fits { 1 } else { wanted.div_ceil(bytes.max(1)) + 1 };
    Ok(wanted.min((usable / bytes.max(1) as u64) as usize).max(1))
}
