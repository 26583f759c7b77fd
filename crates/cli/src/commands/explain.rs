//! `warpsmith explain`: which kernel a call would run, and why.

use crate::inputs::{find_args, find_op, parse_attrs, parse_sizes, plan_case};
use crate::table;
use std::process::ExitCode;
use warpsmith::device::{DeviceInfo, known_arch};
use warpsmith::jit::Arch;
use warpsmith::lab::proof::arrange;
use warpsmith::lab::{ArgPlan, Arrangement, Case};
use warpsmith::op::{Args as OpArgs, OpSpec, Select};
use warpsmith::tensor::{Shape, TensorView, TensorViewMut};
use warpsmith::{DType, Device, Result};

/// Show which kernel would run a call, how it would be configured, and why not the others
///
/// Nothing runs and no memory is allocated, so any size works, and with --arch any GPU, whether or not this machine has
/// it.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The op (see `warpsmith list`)
    op: String,
    /// Set a size; can be repeated
    #[arg(long = "shape", value_name = "SIZE=VALUE", num_args = 1..)]
    shape: Vec<String>,
    /// Element type
    #[arg(long, default_value = "bf16")]
    dtype: DType,
    /// Set an option of the op; can be repeated
    #[arg(long = "set", value_name = "OPTION=VALUE")]
    options: Vec<String>,
    /// Give this optional argument; can be repeated
    #[arg(long = "with", value_name = "ARGUMENT")]
    with: Vec<String>,
    /// A device of this machine: `cpu`, `cuda` or `cuda:N` [default: a GPU if there is one]
    #[arg(long, conflicts_with = "arch")]
    device: Option<Device>,
    /// A GPU architecture instead, such as 90a; this machine need not have it
    #[arg(long, value_parser = known_arch)]
    arch: Option<Arch>,
    /// Number of multiprocessors of the GPU of --arch [default: that of a typical card]
    #[arg(long, requires = "arch", value_parser = clap::value_parser!(u16).range(1..=4096))]
    units: Option<u16>,
    /// Ask about this kernel
    #[arg(long)]
    kernel: Option<String>,
    /// Also consider kernels whose results depend on the rest of the batch
    #[arg(long)]
    allow_batch_variant: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith explain rms_norm
  warpsmith explain rms_norm --shape num_tokens=1 hidden=65536 \\
      --dtype f32 --device cpu
  warpsmith explain layer_norm --with weight --with bias --arch 80
  warpsmith explain layer_norm_backward --arch 90a --units 78
  warpsmith explain paged_attention --with group_starts --with prefix_lens \\
      --arch 90a   # are shared prefixes read once?";

pub fn run(args: &Args) -> Result<ExitCode> {
    let op = find_op(&args.op)?;
    let spec = op.spec();
    let mut case = Case::new(spec, args.dtype).sizes(&parse_sizes(spec, &args.shape)?);
    case.attrs = parse_attrs(spec, &args.options)?;
    for index in find_args(spec, &args.with, |arg| arg.optional, "optional argument")? {
        case = case.give(index);
    }
    let info = match args.arch {
        Some(arch) => DeviceInfo::typical_gpu(arch, args.units),
        None => args.device.unwrap_or_else(Device::best).info()?,
    };
    let call = imagine(spec, &plan_case(op, &case)?, case.arrangement, info.device)?;
    let select =
        Select { kernel: args.kernel.clone().map(Into::into), allow_batch_variant: args.allow_batch_variant };
    let cost = op.cost(&call, &case.attrs)?;
    let explanation = op.explain(&call, &case.attrs, &info, &select)?;

    println!("{}", table::fit(&format!("{} {} {}", spec.name, case.name(spec), case.dtype), 2));
    println!("on {}", info.name);
    println!("\nruns {}: {}", explanation.kernel, explanation.reason);
    if !explanation.config.is_empty() {
        println!("{}", table::headed("  ", &explanation.config, 4));
    }
    for (kernel, why) in &explanation.others {
        println!("{}", table::fit(&format!("not {kernel}: {why}"), 2));
    }
    println!(
        "\nat least {} of memory traffic, {} operations",
        table::amount(cost.bytes, "B"),
        table::amount(cost.flops, "")
    );
    Ok(ExitCode::SUCCESS)
}

/// The call that a plan describes, with tensors that have addresses but no memory. Sizes accepted by [`plan_case`]
/// are addressable.
pub fn imagine(
    spec: &'static OpSpec,
    plan: &[Option<ArgPlan>],
    arrangement: Arrangement,
    device: Device,
) -> Result<OpArgs<'static>> {
    // Spaced and aligned as an allocator would.
    const ALIGN: usize = 256;
    let mut address = 1usize << 32;
    let mut call = OpArgs::new(spec);
    for (index, (arg, plan)) in spec.args.iter().zip(plan).enumerate() {
        let Some(plan) = plan else { continue };
        let layout = arrange(Shape::new(&plan.shape)?, arrangement)?;
        address += if arrangement == Arrangement::Misaligned { plan.dtype.size() } else { 0 };
        let next = (address + layout.span() * plan.dtype.size()).next_multiple_of(ALIGN);
        call = if arg.is_output() {
            // SAFETY: the call is only checked and explained, which uses shapes and addresses but never accesses
            // memory.
            call.output(index, unsafe { TensorViewMut::from_raw(address, plan.dtype, layout, device) })
        } else {
            // SAFETY: as above.
            call.input(index, unsafe { TensorView::from_raw(address, plan.dtype, layout, device) })
        };
        address = next;
    }
    Ok(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bench_case_of_every_op_can_be_imagined() {
        let info = DeviceInfo::typical_gpu("90a".parse().unwrap(), None);
        assert_eq!((info.units, info.arch.unwrap().to_string()), (132, "sm_90a".to_string()));
        for op in warpsmith::ops::PROVABLE {
            // Mixtures of experts have no products on GPUs yet.
            if !op.kernels().iter().any(|kernel| kernel.is_cuda()) {
                continue;
            }
            for case in op.bench_cases() {
                let call = imagine(op.spec(), &op.plan(&case), case.arrangement, Device::Cuda(0)).unwrap();
                let found = op.explain(&call, &case.attrs, &info, &Select::default()).unwrap();
                assert_eq!(found.others.len() + 1, op.kernels().len());
            }
        }
    }
}
