//! `warpsmith fuse`: a formula as kernels.

mod random;

use crate::table;
use random::Task;
use std::process::ExitCode;
use std::time::Duration;
use warpsmith::device::known_arch;
use warpsmith::jit::Arch;
use warpsmith::{DType, Device, Tensor};
use warpsmith_fuse::cuda::{CudaSource, Variant};
use warpsmith_fuse::plan::Plan;
use warpsmith_fuse::shape::{Sizes, show};
use warpsmith_fuse::text::formula::free_names;
use warpsmith_fuse::{Compiled, Dim, Graph, Result, bench, parse};

/// Show what kernels a formula becomes, what they are made of, and how long they take
///
/// A formula is written over tensors: `rms_norm(x + r) * w`, or with names for its parts: `t = exp(x); t / sum(t)`.
/// Whatever is not defined in it is a tensor. Operations that work through the same shape become one kernel; the plan
/// says what does not and why. Reductions go along the last dimension.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The formula
    #[arg(value_name = "FORMULA", required_unless_present_any = ["random", "list"])]
    formula: Option<String>,
    /// The shape of a tensor, with numbers or names for sizes; can be repeated [default: B,H]
    #[arg(long = "shape", value_name = "TENSOR=SIZES", num_args = 1..)]
    shapes: Vec<String>,
    /// The value of a size that has a name, for traffic and times [default: 1024, and 4096 for H]
    #[arg(long = "size", value_name = "NAME=VALUE", num_args = 1..)]
    sizes: Vec<String>,
    /// The type of all tensors, or of one: `bf16` or `x=f32`; can be repeated
    #[arg(long = "dtype", value_name = "[TENSOR=]TYPE", num_args = 1..)]
    dtypes: Vec<String>,
    /// Show the CUDA source of each kernel
    #[arg(long)]
    source: bool,
    /// Compile the CUDA sources for this architecture, such as 90a, and show what they use
    #[arg(long, value_parser = known_arch)]
    arch: Option<Arch>,
    /// Time it on the CPU, beside the same nodes one by one
    #[arg(long)]
    bench: bool,
    /// Compute the gradients by these tensors too, separated by commas
    #[arg(long, value_name = "TENSORS", value_delimiter = ',')]
    grad: Vec<String>,
    /// Check this many random formulas against f64 instead; exits with 1 if one is wrong. With --arch they are compiled only
    #[arg(long, value_name = "N", conflicts_with = "formula")]
    random: Option<u64>,
    /// Where the random formulas are computed: `cpu`, `cuda` or `cuda:N`
    #[arg(long, default_value_t = Device::Cpu, requires = "random", conflicts_with = "arch")]
    device: Device,
    /// Where the random formulas begin
    #[arg(long, default_value_t = 0, requires = "random")]
    seed: u64,
    /// List the functions
    #[arg(long)]
    list: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith fuse 'rms_norm(x + r) * w' --shape w=H
  warpsmith fuse 'x * sigmoid(1.702 * x)' --dtype bf16 --bench
  warpsmith fuse 'softmax(x / 8 + mask)' --shape x=B,N,S,S mask=B,1,S,S \\
      --size B=2 N=16 S=512 --source
  warpsmith fuse 'gelu(x) * y' --grad x,y --arch 90a
  warpsmith fuse --random 10000 --seed 1
  warpsmith fuse --random 1000 --device cuda
  warpsmith fuse --random 100 --arch 90a";

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(count) = args.random {
        let task = args.arch.map_or(Task::Judge(args.device), Task::Compile);
        return random::run(task, args.seed, count);
    }
    let formula = args.formula.as_deref().unwrap_or_default();
    let graph = read(args, formula)?;
    let sizes = sizes(args, &graph)?;
    show_graph(args, "", &graph, &sizes)?;
    if !args.grad.is_empty() {
        let wanted: Vec<&str> = args.grad.iter().map(String::as_str).collect();
        let pair = warpsmith_fuse::gradient::gradient(&graph, &wanted)?;
        show_graph(args, "forward, with what is kept for the gradients", &pair.forward, &sizes)?;
        show_graph(args, "gradients", &pair.backward, &sizes)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list() {
    use warpsmith_fuse::op::{Binary, Reduce, Unary};
    let mut rows: Vec<Vec<String>> = Vec::new();
    for f in Unary::ALL {
        rows.push(vec![format!("{}(x)", f.name()), f.doc().trim().into()]);
    }
    for f in Binary::ALL {
        let symbol = if f.symbol().is_empty() { String::new() } else { format!(", a {} b", f.symbol()) };
        rows.push(vec![format!("{}(a, b){symbol}", f.name()), f.doc().trim().into()]);
    }
    for f in Reduce::ALL {
        rows.push(vec![format!("{}(x)", f.name()), "over the last dimension".into()]);
    }
    for f in warpsmith_fuse::functions::FUNCTIONS {
        let parameters: Vec<&str> = f.parameters.iter().map(|(name, _)| *name).collect();
        rows.push(vec![format!("{}({})", f.name, parameters.join(", ")), f.doc.into()]);
    }
    println!("{}", table::columns(&rows, 0).join("\n"));
}

fn pair<'a>(text: &'a str, expected: &str) -> Result<(&'a str, &'a str)> {
    text.split_once('=').ok_or_else(|| warpsmith::Error::parse("argument", expected, text).into())
}

fn read(args: &Args, formula: &str) -> Result<Graph> {
    let names = free_names(formula)?;
    let known = |name: &str| -> Result<()> {
        if names.iter().any(|other| other == name) {
            return Ok(());
        }
        let expected = format!("a tensor of the formula: {}", names.join(", "));
        Err(warpsmith::Error::parse("tensor", expected, name).into())
    };
    let mut inputs: Vec<(String, DType, Vec<Dim>)> = vec![];
    let all: Option<&String> = args.dtypes.iter().rfind(|text| !text.contains('='));
    for name in &names {
        let dtype = all.map_or(Ok(DType::F32), |text| text.parse())?;
        inputs.push((name.clone(), dtype, vec![Dim::named("B"), Dim::named("H")]));
    }
    for text in args.dtypes.iter().filter(|text| text.contains('=')) {
        let (name, dtype) = pair(text, "TENSOR=TYPE")?;
        known(name)?;
        let dtype = dtype.parse()?;
        inputs.iter_mut().filter(|input| input.0 == name).for_each(|input| input.1 = dtype);
    }
    for text in &args.shapes {
        let (name, list) = pair(text, "TENSOR=SIZES, such as x=8,4096")?;
        known(name)?;
        let shape =
            list.split(',').filter(|size| !size.is_empty()).map(str::parse).collect::<Result<Vec<Dim>>>()?;
        inputs.iter_mut().filter(|input| input.0 == name).for_each(|input| input.2.clone_from(&shape));
    }
    let listed: Vec<(&str, DType, &[Dim])> =
        inputs.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, &shape[..])).collect();
    parse(formula, &listed)
}

fn sizes(args: &Args, graph: &Graph) -> Result<Sizes> {
    let mut sizes = Sizes::default();
    for text in &args.sizes {
        let (name, value) = pair(text, "NAME=VALUE")?;
        let number = value.parse().map_err(|_| warpsmith::Error::parse("size", "a number", value))?;
        sizes.bind("--size", &[Dim::named(name)], &[number])?;
    }
    let dims = graph.inputs().iter().flat_map(|&id| graph.node(id).shape.clone());
    for dim in dims.collect::<Vec<_>>() {
        if sizes.of(&dim).is_err() {
            let default = if dim == Dim::named("H") { 4096 } else { 1024 };
            sizes.bind("--size", &[dim], &[default])?;
        }
    }
    Ok(sizes)
}

fn show_graph(args: &Args, title: &str, graph: &Graph, sizes: &Sizes) -> Result<()> {
    if !title.is_empty() {
        println!("\n{title}");
    }
    for &id in graph.inputs() {
        let node = graph.node(id);
        println!("{}: {} {}", graph.input_name(id), node.dtype, show(&node.shape));
    }
    let (plan, apart) = (Plan::new(graph), Plan::unfused(graph));
    println!("\n{}", plan.show(graph).trim_end());
    let (fused, single) = (plan.traffic(graph, sizes)?, apart.traffic(graph, sizes)?);
    println!(
        "\n{} launches instead of {}, {} of memory traffic instead of {}",
        fused.launches,
        single.launches,
        table::amount(fused.bytes as f64, "B"),
        table::amount(single.bytes as f64, "B")
    );
    for (i, kernel) in plan.kernels.iter().enumerate().filter(|_| args.source || args.arch.is_some()) {
        let columns = kernel.domain.last().map_or(Ok(1), |dim| sizes.of(dim))?;
        let source = CudaSource::new(graph, kernel, &Variant::plain(columns, true))?;
        println!("\nkernel {i} on GPUs: {}", source.describe());
        if let Some(arch) = args.arch {
            let compiled = source.with_request(arch, warpsmith::jit::get)?;
            for used in warpsmith::jit::inspect::resources(&compiled.cubin)? {
                println!(
                    "  {} for {arch}: {} registers, {} bytes of stack, {} of shared memory",
                    used.function, used.registers, used.stack_bytes, used.shared_bytes
                );
            }
        }
        if args.source {
            println!("{}", source.code);
        }
    }
    if args.bench {
        time(graph, apart, sizes)?;
    }
    Ok(())
}

fn time(graph: &Graph, apart: Plan, sizes: &Sizes) -> Result<()> {
    const BUDGET: Duration = Duration::from_millis(500);
    let mut tensors: Vec<Tensor> = vec![];
    for (seed, &id) in graph.inputs().iter().enumerate() {
        let node = graph.node(id);
        tensors.push(bench::sample(node.dtype, &sizes.shape(&node.shape)?, 2, seed as u64)?);
    }
    let inputs: Vec<&Tensor> = tensors.iter().collect();
    let fused = bench::time(&Compiled::new(graph.clone())?, &inputs, BUDGET)?;
    let single = bench::time(&Compiled::with_plan(graph.clone(), apart)?, &inputs, BUDGET)?;
    println!(
        "\non the CPU: {} in the median of {} calls; node by node {} ({:.2} times as long)",
        table::time(fused.median * 1e3),
        fused.calls,
        table::time(single.median * 1e3),
        single.median / fused.median
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn graph(line: &[&str]) -> Result<Graph> {
        let args = Line::try_parse_from([&["fuse"], line].concat()).unwrap().args;
        let graph = read(&args, args.formula.as_deref().unwrap_or_default())?;
        sizes(&args, &graph).map(|_| graph)
    }

    #[test]
    fn tensors_have_the_types_and_shapes_of_the_options() {
        let line = ["x + w", "--shape", "w=H", "x=2,H", "--dtype", "bf16", "w=f32", "--size", "H=8"];
        let graph = graph(&line).unwrap();
        assert_eq!(graph.to_string().lines().next(), Some("# x: bf16 [2, H]"));
        assert_eq!(graph.to_string().lines().nth(1), Some("# w: f32 [H]"));
    }

    #[test]
    fn wrong_options_are_named() {
        for (line, part) in [
            (&["x", "--shape", "y=4"][..], "a tensor of the formula: x"),
            (&["x", "--dtype", "x=float"], "bf16"),
            (&["x", "--size", "H=many"], "a number"),
            (&["x", "--shape", "x"], "TENSOR=SIZES"),
            (&["x +"], "expected a value"),
        ] {
            let error = graph(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line:?}: {error}");
        }
    }
}
