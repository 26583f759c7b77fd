//! `warpsmith list`: the ops and their kernels.

use crate::inputs::find_op;
use crate::table;
use serde_json::{Value, json};
use std::process::ExitCode;
use warpsmith::lab::AnyProvable;
use warpsmith::op::{AttrSpec, KernelInfo, Role};
use warpsmith::{Result, ops};

/// List the ops, or show one with its arguments, options, sizes and kernels
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Show this op in full
    op: Option<String>,
    /// Print JSON: every op in full, or the one named
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith list                 one line for each op
  warpsmith list rms_norm        everything about rms_norm
  warpsmith list --json | jq '.[] | .kernels[].name'";

pub fn run(args: &Args) -> Result<ExitCode> {
    match (&args.op, args.json) {
        (Some(name), true) => println!("{:#}", describe(find_op(name)?)),
        (Some(name), false) => show(find_op(name)?),
        (None, true) => println!("{:#}", ops::provable().into_iter().map(describe).collect::<Value>()),
        (None, false) => overview(),
    }
    Ok(ExitCode::SUCCESS)
}

fn overview() {
    let rows = ops::provable().into_iter().map(|op| {
        let kernels = op.kernels();
        let cuda = kernels.iter().filter(|kernel| kernel.is_cuda()).count();
        let count = format!("{cuda} CUDA, {} CPU", kernels.len() - cuda);
        vec![op.spec().name.to_string(), count, op.spec().summary.to_string()]
    });
    println!("{}", table::columns(&rows.collect::<Vec<_>>(), 0).join("\n"));
}

fn show(op: &dyn AnyProvable) {
    let spec = op.spec();
    println!("{}", table::fit(&format!("{}: {}", spec.name, spec.summary), 2));
    let (outputs, inputs): (Vec<_>, Vec<_>) = spec.args.iter().partition(|arg| arg.is_output());
    for (title, args) in [("inputs", inputs), ("outputs", outputs)] {
        let rows = args.iter().map(|arg| {
            let note = match (arg.optional, arg.role) {
                (true, _) => "optional",
                (_, Role::InOut) => "changed",
                _ => "",
            };
            vec![arg.name.into(), note.into(), arg.help()]
        });
        section(title, rows.collect());
    }
    section("options", spec.attrs.iter().map(option_row).collect());
    let rows = spec.sizes.iter().map(|s| vec![s.name.into(), format!("default {}", s.default), s.doc.into()]);
    section("sizes", rows.collect());
    let rows = op.kernels().into_iter().map(|kernel| {
        let batch = if kernel.batch_invariant { "batch-invariant" } else { "depends on the batch" };
        vec![kernel.name.into(), runs_on(&kernel), batch.into()]
    });
    section("kernels, preferred first", rows.collect());
}

fn option_row(attr: &AttrSpec) -> Vec<String> {
    vec![attr.name.into(), format!("{} ({}; default {})", attr.doc, attr.kind, default_of(attr))]
}

fn default_of(attr: &AttrSpec) -> String {
    attr.kind.default_value().text(attr.kind)
}

fn runs_on(kernel: &KernelInfo) -> String {
    match (kernel.min_arch, kernel.tier, kernel.library) {
        (Some(arch), ..) if arch.accel => format!("CUDA, {arch} alone"),
        (Some(arch), ..) => format!("CUDA, {arch} or newer"),
        (None, Some(tier), _) => format!("CPU, {tier}"),
        (None, None, library) => {
            format!("CUDA, with {}", library.map_or("a library", |library| library.name))
        }
    }
}

/// Rows under a title, in columns; nothing if there are none.
fn section(title: &str, rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    println!("\n{title}:\n{}", table::columns(&rows, 2).join("\n"));
}

fn describe(op: &dyn AnyProvable) -> Value {
    let spec = op.spec();
    let args = spec.args.iter().map(|arg| {
        json!({
            "name": arg.name,
            "input": arg.is_input(),
            "output": arg.is_output(),
            "optional": arg.optional,
            "shape": arg.shape.to_string(),
            "doc": arg.help(),
        })
    });
    let options = spec.attrs.iter().map(|attr| {
        json!({ "name": attr.name, "type": attr.kind.to_string(), "default": default_of(attr), "doc": attr.doc })
    });
    let sizes = spec.sizes.iter().map(|s| json!({ "name": s.name, "default": s.default, "doc": s.doc }));
    let kernels = op.kernels().into_iter().map(|kernel| {
        json!({
            "name": kernel.name,
            "device": if kernel.is_cuda() { "cuda" } else { "cpu" },
            "tier": kernel.tier.map(|tier| tier.name()),
            "min_arch": kernel.min_arch.map(|arch| arch.to_string()),
            "variants": crate::kernels::variants(&kernel).len(),
            "batch_invariant": kernel.batch_invariant,
            "source_hash": warpsmith::lab::source_hash(&kernel, spec.name),
        })
    });
    json!({
        "name": spec.name,
        "summary": spec.summary,
        "args": args.collect::<Value>(),
        "options": options.collect::<Value>(),
        "sizes": sizes.collect::<Value>(),
        "gradient": spec.gradient.as_ref().map(|gradient| gradient.op),
        "kernels": kernels.collect::<Value>(),
    })
}
