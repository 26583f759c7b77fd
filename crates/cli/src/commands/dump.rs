//! `warpsmith dump`: the inside of a kernel.

use crate::inputs::{ProfileArgs, parse_pairs};
use crate::kernels::{self, Variant};
use crate::table;
use rayon::prelude::*;
use std::process::ExitCode;
use warpsmith::jit::CudaKernel;
use warpsmith::jit::{self, Arch, inspect};
use warpsmith::op::KernelInfo;
use warpsmith::{Device, Error, Result};

/// Show a kernel: the resources of its variants, its source, its PTX or its machine code
///
/// CUDA kernels are compiled in variants, one for each set of defines. Without an option, lists the registers, shared
/// memory and spills of the variants that a kernel pack holds (all of them, or a covering set where there are
/// thousands). --variant and --set choose among them. Needs NVRTC but no GPU (see `warpsmith doctor`).
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The kernel (see `warpsmith list OP`)
    kernel: String,
    /// Architecture to compile for [default: that of this machine's GPU, else 90a]
    #[arg(long)]
    arch: Option<Arch>,
    #[command(flatten)]
    what: What,
    /// Only the variant of this number
    #[arg(long, value_name = "N")]
    variant: Option<usize>,
    /// Only variants with this define; can be repeated
    #[arg(long = "set", value_name = "DEFINE=VALUE")]
    defines: Vec<String>,
    #[command(flatten)]
    profile: ProfileArgs,
    /// Compile with fast math: approximate division, square root and exponentials, subnormals flushed
    #[arg(long)]
    fast_math: bool,
}

#[derive(clap::Args)]
#[group(multiple = false)]
struct What {
    /// The source as the compiler gets it, parameter structs included
    #[arg(long)]
    source: bool,
    /// The PTX of the first variant chosen
    #[arg(long)]
    ptx: bool,
    /// The machine code of the first variant chosen; needs nvdisasm or cuobjdump
    #[arg(long)]
    sass: bool,
    /// Registers, stack, shared memory and spills of the variants chosen (this is the default)
    #[arg(long)]
    resources: bool,
}

impl What {
    /// Whether the output requires device code.
    fn compiled(&self) -> bool {
        self.ptx || self.sass || self.resources
    }
}

const EXAMPLES: &str = "\
Examples:
  warpsmith dump rms_norm_row --variant 3 --arch 90a   resources of one variant
  warpsmith dump rms_norm_row --variant 3 --sass       its machine code
  warpsmith dump rms_norm_row --source                 what is compiled
  warpsmith dump rms_norm_row --set ELEM=bf16          all variants for bf16";

pub fn run(args: &Args) -> Result<ExitCode> {
    let (op, kernel) = kernels::find_kernel(&args.kernel)?;
    if let (true, Some(why)) = (args.what.compiled(), not_ours(&kernel)) {
        return Err(Error::Unavailable {
            what: format!("device code of {}", args.kernel),
            why,
            fix: "`warpsmith dump` without options says where its code is".into(),
        });
    }
    if let Some(tier) = kernel.tier {
        let folder = op.strip_suffix("_backward").unwrap_or(op);
        println!(
            "{} is the CPU kernel of {op} for the {tier} tier: Rust, written once for all tiers.",
            args.kernel
        );
        println!("Its source is the op's folder, crates/warpsmith/src/ops/{folder}, on the shared parts in");
        println!("crates/warpsmith/src/cpu. To see its machine code: objdump -d --demangle of this program.");
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(library) = kernel.library {
        println!("{} calls {}: its code is that library's, not Warpsmith's.", args.kernel, library.name);
        return Ok(ExitCode::SUCCESS);
    }
    jit::set_fast_math(args.fast_math);
    let arch = args.arch.unwrap_or_else(default_arch);
    let chosen = choose(&args.kernel, kernels::variants(&kernel), args.variant, &args.defines)?;
    if !args.what.source {
        for (_, variant) in &chosen {
            can_compile(&args.kernel, variant.device, arch)?;
        }
    }
    let (number, first) = &chosen[0];
    let header =
        format!("variant {number} of {}: {}, {}", args.kernel, first.device.function, first.describe());
    let request = first.request(arch, args.profile.profile());
    if args.what.source {
        for (name, value) in &first.defines {
            println!("#define {name} {value}");
        }
        println!("{}", request.program());
    } else if args.what.ptx {
        println!("// {header}\n{}", jit::to_ptx(&request)?);
    } else if args.what.sass {
        println!("// {header}\n{}", inspect::sass(&jit::get(&request)?.cubin)?);
    } else {
        resources(&chosen, arch, args)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Why this program has no device code for a kernel, if so.
fn not_ours(kernel: &KernelInfo) -> Option<String> {
    let library = kernel.library.map(|library| format!("its code is {}'s", library.name));
    kernel.tier.map(|_| "it runs on the CPU and is part of this program".to_string()).or(library)
}

/// Refuses architectures that the compiler would reject with a long message.
fn can_compile(kernel: &str, device: &CudaKernel, arch: Arch) -> Result<()> {
    if kernels::compiles_for(device, arch) {
        return Ok(());
    }
    let least = if device.min_arch.accel { "" } else { " or newer" };
    Err(Error::Unavailable {
        what: format!("{kernel} for {arch}"),
        why: format!("it needs {}{least}", device.min_arch),
        fix: format!("Give --arch {}", device.min_arch),
    })
}

fn default_arch() -> Arch {
    let here = Device::best().info().ok().and_then(|info| info.arch);
    here.unwrap_or(Arch::new(9, 0, true))
}

/// The requested variants with their numbers; at least one.
fn choose(
    kernel: &str,
    variants: Vec<Variant>,
    number: Option<usize>,
    defines: &[String],
) -> Result<Vec<(usize, Variant)>> {
    let wanted = parse_pairs(defines)?;
    let count = variants.len();
    let has = |variant: &Variant, (name, value): &(String, String)| {
        variant.defines.iter().any(|(known, is)| known == name && is == value)
    };
    for pair in &wanted {
        if !variants.iter().any(|variant| has(variant, pair)) {
            let mut known: Vec<String> = variants
                .iter()
                .flat_map(|variant| variant.defines.iter().map(|(name, value)| format!("{name}={value}")))
                .collect();
            known.sort();
            known.dedup();
            let expected = format!("one of {}", known.join(", "));
            return Err(Error::parse(
                format!("define of {kernel}"),
                expected,
                format!("{}={}", pair.0, pair.1),
            ));
        }
    }
    let chosen: Vec<(usize, Variant)> = variants
        .into_iter()
        .enumerate()
        .filter(|(index, _)| number.is_none_or(|number| *index == number))
        .filter(|(_, variant)| wanted.iter().all(|pair| has(variant, pair)))
        .collect();
    if chosen.is_empty() {
        let got = number.map_or_else(|| defines.join(" "), |number| number.to_string());
        let expected = match number {
            Some(_) => format!("a number below {count} that has the defines given"),
            None => "defines that one variant has together".into(),
        };
        return Err(Error::parse(format!("variant of {kernel}"), expected, got));
    }
    Ok(chosen)
}

fn resources(chosen: &[(usize, Variant)], arch: Arch, args: &Args) -> Result<()> {
    let bar = kernels::progress_bar(chosen.len());
    let compiled = chosen
        .par_iter()
        .map(|(_, variant)| {
            let compiled = jit::get(&variant.request(arch, args.profile.profile()))?;
            bar.inc(1);
            Ok(compiled)
        })
        .collect::<Result<Vec<_>>>();
    bar.finish_and_clear();
    let compiled = compiled?;
    println!("{} for {arch}, {} of its variants", args.kernel, chosen.len());
    println!("variant  registers  stack  shared  spilled  function and defines");
    const INDENT: usize = 9;
    for ((number, variant), compiled) in chosen.iter().zip(compiled) {
        let function = variant.device.function;
        // A source may hold several functions; the kernel launches this one.
        let Some(used) = inspect::resources(&compiled.cubin)?.into_iter().find(|r| r.function == function)
        else {
            return Err(Error::parse(
                format!("code of variant {number}"),
                format!("a function `{function}`"),
                variant.describe(),
            ));
        };
        let spills = inspect::spills(&compiled.log).into_iter().find(|spills| spills.function == function);
        // Packs keep no log, and only the log distinguishes spills from local arrays.
        let spilled =
            spills.map_or("?".into(), |spills| (spills.store_bytes + spills.load_bytes).to_string());
        let numbers = format!(
            "{number:7}  {:9}  {:5}  {:6}  {spilled:>7}  ",
            used.registers, used.stack_bytes, used.shared_bytes
        );
        println!("{}", table::headed(&numbers, &format!("{function} {}", variant.describe()), INDENT));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_chosen_by_number_and_by_defines() {
        let variants = || kernels::variants(&kernels::find_kernel("rms_norm_row").unwrap().1);
        let all = variants().len();
        let choose = |number, defines: &[&str]| {
            let defines: Vec<String> = defines.iter().map(ToString::to_string).collect();
            choose("k", variants(), number, &defines)
        };
        assert_eq!(choose(None, &[]).unwrap().len(), all);
        let bf16 = choose(None, &["ELEM=bf16"]).unwrap();
        assert_eq!(bf16.len() * 3, all);
        assert!(bf16.iter().all(|(_, variant)| variant.describe().contains("ELEM=bf16")));
        let number = bf16[1].0;
        assert_eq!(choose(Some(number), &["ELEM=bf16"]).unwrap().len(), 1);
        for (number, defines) in [
            (Some(all), &[][..]),
            (Some(number), &["ELEM=f32"]),
            (None, &["ELEM=f64"]),
            (None, &["ELEM"]),
            (None, &["ELEM=f32", "ELEM=f16"]),
        ] {
            assert!(matches!(choose(number, defines), Err(Error::Parse { .. })), "{number:?} {defines:?}");
        }
    }
}
