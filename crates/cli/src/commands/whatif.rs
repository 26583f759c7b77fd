//! `warpsmith whatif`: how long ops and decode steps would take on other hardware.

use super::explain::imagine;
use crate::inputs::{find_args, find_op, parse_attrs, parse_sizes, plan_case};
use crate::{files, source, table};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use warpsmith::device::{DeviceInfo, known_arch};
use warpsmith::lab::Case;
use warpsmith::lab::evidence::{self, PresentCode};
use warpsmith::op::Select;
use warpsmith::{DType, Error};
use warpsmith_engine::models::{self, Config, RandomWeights};
use warpsmith_engine::{Error as EngineError, Result};
use warpsmith_whatif::change::{Target, compare, parse_bytes, parse_factor};
use warpsmith_whatif::model::{Row, rows};
use warpsmith_whatif::{
    Card, Change, Comparison, Errors, FAMILIES, FittedFamily, Layers, Model, Step, Work, families, picture,
    standard_changes, step,
};

/// Predict what other hardware would change, for an op or a decode step
///
/// An analytical model of the kernels: launches, bytes, products and exponentials, in waves of blocks. Its few parameters
/// are fitted to the recorded times of an H200 and judged on rows that were held back from the fit; this error stands
/// beside each answer, and a difference that is smaller is none. Without changes it shows a list of them. Several changes
/// are shown one by one and together. No GPU is needed.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The op (see `warpsmith list`)
    #[arg(required_unless_present_any = ["model", "fit"], conflicts_with_all = ["model", "fit"])]
    op: Option<String>,
    /// Set a size of the op; can be repeated
    #[arg(long = "shape", value_name = "SIZE=VALUE", num_args = 1.., requires = "op")]
    shape: Vec<String>,
    /// Element type of the op
    #[arg(long, default_value = "bf16", requires = "op")]
    dtype: DType,
    /// Set an option of the op; can be repeated
    #[arg(long = "set", value_name = "OPTION=VALUE", requires = "op")]
    options: Vec<String>,
    /// Give this optional argument of the op; can be repeated
    #[arg(long = "with", value_name = "ARGUMENT", requires = "op")]
    with: Vec<String>,
    /// A decode step of this model in bf16: the name of one that is known (as for `bench-model --random`), a config.json, a
    /// folder with one, or a .gguf file
    #[arg(long, value_name = "MODEL", conflicts_with = "fit")]
    model: Option<String>,
    /// Sequences of the decode step
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "model")]
    batch: usize,
    /// Keys of each sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, requires = "model")]
    context: usize,
    /// Memory with this many times the bandwidth
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor)]
    hbm: Option<f64>,
    /// So many times the L2
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor)]
    l2: Option<f64>,
    /// So many times the multiprocessors, with the same memory
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor)]
    sms: Option<f64>,
    /// Tensor cores this many times as fast
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor)]
    tensor: Option<f64>,
    /// A store on the chip for so much of the keys and values (of all layers, for a model), such as 30MB
    #[arg(long, value_name = "AMOUNT", value_parser = parse_bytes)]
    kv_on_chip: Option<f64>,
    /// Results go from one op to the next without memory
    #[arg(long)]
    stream: bool,
    /// Another GPU, by the ratios of the data sheets: A100, L40S, H100, H200 or B200; can be repeated
    #[arg(long, value_name = "NAME", value_parser = Card::find)]
    gpu: Vec<Card>,
    /// Write the plot as SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Fit the model to the evidence, and show its errors on rows held back from the fit
    #[arg(long)]
    fit: bool,
    /// With --fit: the evidence folder [default: the repository's]
    #[arg(long, value_name = "DIR", requires = "fit")]
    evidence: Option<PathBuf>,
    /// With --fit: write the model to crates/whatif/fitted.json beside the evidence, for the next build
    #[arg(long, requires = "fit")]
    record: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith whatif attention --shape q_len=8192 kv_len=8192 --set causal=true
  warpsmith whatif linear --shape m=64 n=14336 k=4096 --hbm 2x --sms 1.5x
  warpsmith whatif --model qwen3-8b
  warpsmith whatif --model qwen3-8b --batch 32 --context 8192 \\
      --gpu B200 --svg decode.svg
  warpsmith whatif --model llama-3.1-8b --kv-on-chip 1GB --stream --json
  warpsmith whatif --fit";

impl Args {
    /// The changes that were asked for, or the list. Several also come together.
    fn changes(&self) -> Vec<Change> {
        let mut asked: Vec<Change> = [
            self.hbm.map(Change::Memory),
            self.l2.map(Change::Cache),
            self.sms.map(Change::Units),
            self.tensor.map(Change::Tensor),
            self.kv_on_chip.map(Change::KeptKv),
            self.stream.then_some(Change::Streaming),
        ]
        .into_iter()
        .flatten()
        .collect();
        // Of several GPUs there can be only one in its place.
        let gpus = self.gpu.iter().cloned().map(Change::Gpu);
        let all: Vec<Change> = if self.gpu.len() > 1 {
            asked.clone()
        } else {
            asked.iter().cloned().chain(gpus.clone()).collect()
        };
        asked.extend(gpus);
        match asked.len() {
            0 => standard_changes(),
            1 => asked,
            _ if all.len() > 1 => asked.into_iter().chain([Change::Together(all)]).collect(),
            _ => asked,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.fit {
        return fit(args);
    }
    let model = Model::built_in();
    let (title, target) = match (&args.op, &args.model) {
        (Some(op), _) => op_target(args, op, &model)?,
        (None, Some(name)) => {
            let step = Step::new(layers(name)?, args.batch, args.context)?;
            (step.describe(), Target::Step(step))
        }
        (None, None) => unreachable!("the command line requires one of them"),
    };
    let comparison = compare(&model, &target, &args.changes())?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&comparison).expect("a comparison is plain data"));
    } else {
        print!("{}", report(&title, &model, &comparison));
    }
    write_svg(args, || picture::changes(&title, &comparison))?;
    Ok(ExitCode::SUCCESS)
}

/// The call of an op that the command line describes, on the GPU of the model.
fn op_target(args: &Args, name: &str, model: &Model) -> Result<(String, Target)> {
    /// Tensors up to this part of the L2 stay in it, as in benchmarks.
    const STAYS: f64 = 1.0 / 8.0;
    let op = find_op(name)?;
    let spec = op.spec();
    let mut case = Case::new(spec, args.dtype).sizes(&parse_sizes(spec, &args.shape)?);
    case.attrs = parse_attrs(spec, &args.options)?;
    for index in find_args(spec, &args.with, |arg| arg.optional, "optional argument")? {
        case = case.give(index);
    }
    let info = DeviceInfo::typical_gpu(known_arch("90a")?, None);
    let call = imagine(spec, &plan_case(op, &case)?, case.arrangement, info.device)?;
    let kernel = op.explain(&call, &case.attrs, &info, &Select::default())?.kernel;
    let cost = op.cost(&call, &case.attrs)?;
    let text = case.name(spec);
    let mut work = Work::new(spec.name, kernel, &text, args.dtype.name()).costing(cost.bytes, cost.flops);
    work.in_cache = cost.bytes <= STAYS * model.machine.l2_mib * 1048576.0;
    Ok((format!("{name} {text} {}", args.dtype), Target::Op(work)))
}

/// The sizes of a model, by a known name or a file.
fn layers(name: &str) -> Result<Layers> {
    let path = Path::new(name);
    let config = match RandomWeights::config(name) {
        Some(json) => Config::from_json(&json)?,
        None if path.extension().is_some_and(|kind| kind == "gguf" || kind == "safetensors") => {
            Config::from_checkpoint(&models::open(path)?)?
        }
        None => Config::from_json(&source::read("model", name)?)?,
    };
    layers_of(name, &config)
}

fn layers_of(name: &str, config: &Config) -> Result<Layers> {
    let known = ["llama", "mistral", "qwen2", "qwen3"];
    let refuse =
        |expected: String, got: &str| EngineError::Settings { what: "model", expected, got: got.into() };
    if !known.contains(&config.architecture.as_str()) {
        return Err(refuse(
            format!("a dense model of the form of {}", known.join(", ")),
            &config.architecture,
        ));
    }
    if config.layers.iter().any(|layer| layer.window.is_some()) {
        return Err(refuse("a model whose layers see all keys".into(), "windows"));
    }
    Ok(Layers {
        name: name.into(),
        layers: config.num_layers,
        hidden: config.hidden_size,
        inner: config.intermediate_size,
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        vocab: config.vocab_size,
        head_norms: config.architecture == "qwen3",
    })
}

fn write_svg(args: &Args, draw: impl FnOnce() -> String) -> Result<()> {
    if let Some(path) = &args.svg {
        files::replace(path, draw().as_bytes())?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

/// The answer, in at most 80 columns.
fn report(title: &str, model: &Model, comparison: &Comparison) -> String {
    const WIDTH: usize = 80;
    let time = |us: f64| table::time(us * 1e-3);
    let mut lines = table::wrap(title, WIDTH, 2);
    let about = format!("on {} by the model \"{}\"", model.machine.name, comparison.family);
    lines.extend(table::wrap(&format!("{about}: {}", time(comparison.now_us)), WIDTH, 2));
    let parts: Vec<String> =
        comparison.parts.iter().take(6).map(|(name, us)| format!("{name} {}", time(*us))).collect();
    lines.extend(table::wrap(&format!("of which {}", parts.join(", ")), WIDTH, 2));
    lines.push(String::new());
    lines.push(format!("{:<42}{:>12}   {}", "change", "time", "gain"));
    for outcome in &comparison.outcomes {
        let gain = match outcome.faster {
            None => "no difference".to_string(),
            Some(faster) if faster >= 1.0 => format!("{faster:.2}x as fast"),
            Some(faster) => format!("{:.2}x as long", 1.0 / faster),
        };
        lines.push(format!("{:<42}{:>12}   {gain}", outcome.change, time(outcome.us)));
    }
    let e = comparison.held_out;
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    lines.push(String::new());
    let error = format!(
        "The model's error on rows held back from its fit: median {}, nine of ten within {}, worst {}. A difference \
         below {} counts as none. Other hardware is taken to run kernels as good as these, with enough bytes in flight \
         for its memory.",
        percent(e.median),
        percent(e.ninth),
        percent(e.worst),
        percent(comparison.least_difference)
    );
    lines.extend(table::wrap(&error, WIDTH, 0));
    if let Some(miss) = missed_bar(comparison.held_out) {
        lines.extend(table::wrap(&miss, WIDTH, 0));
    }
    lines.join("\n") + "\n"
}

/// The bars for the errors on rows that were held back: of the median, and of nine of ten.
const BARS: [f64; 2] = [0.10, 0.25];

fn missed_bar(errors: Errors) -> Option<String> {
    let met = errors.median <= BARS[0] && errors.ninth <= BARS[1];
    (!met)
        .then(|| "This misses the bar (median 10 %, nine of ten within 25 %): take it as a hint.".to_string())
}

/// Fits the model to the evidence and shows its errors.
fn fit(args: &Args) -> Result<ExitCode> {
    let folder = evidence::folder(args.evidence.as_deref())?;
    let built_in = Model::built_in();
    let records = evidence::load(&folder)?;
    let device = &built_in.machine.name;
    let record = records.iter().find(|record| record.machine.device == *device).ok_or_else(|| {
        let known: Vec<&str> = records.iter().map(|record| record.machine.device.as_str()).collect();
        Error::parse("evidence", format!("a record of {device}"), known.join(", "))
    })?;
    let mut model = Model::fit(record)?;
    let steps = folder.join("models").join("nvidia-h200.json");
    if steps.is_file() {
        let text = std::fs::read_to_string(&steps).map_err(|e| Error::io(&steps, "reading", &e))?;
        let known = |name: &str| Ok(RandomWeights::config(name).and_then(|_| layers(name).ok()));
        model = model.with_steps(&step::measured(&text, known)?)?;
    }
    if args.json {
        print!("{}", model.to_json());
    } else {
        let present = PresentCode::new();
        let earlier = record.timings.iter().filter(|timing| !present.is_of(timing)).count();
        print!("{}", fit_report(&model, record.timings.len(), earlier));
    }
    write_svg(args, || fit_picture(&model, &rows(record)))?;
    if args.record {
        let root = folder.parent().unwrap_or(&folder);
        let path = root.join("crates/whatif/fitted.json");
        files::replace(&path, model.to_json().as_bytes())?;
        eprintln!("wrote {}: build again to use it", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The families and their errors, in at most 80 columns.
fn fit_report(model: &Model, rows: usize, earlier: usize) -> String {
    let mut lines = vec![
        format!("{}, errors in percent on rows held back from the fit", model.machine.name),
        String::new(),
        format!(
            "{:<29}{:>5}{:>8}{:>6}{:>7}{:>7}  {:>8}{:>6}",
            "", "rows", "median", "9/10", "worst", "bias", "roofline", "9/10"
        ),
    ];
    let line = |family: &FittedFamily, mark: &str| {
        let [e, r] = [family.held_out, family.roofline];
        let [median, ninth, worst, bias] = [e.median, e.ninth, e.worst, e.bias].map(|part| 100.0 * part);
        format!(
            "{:<29}{:>5}{median:>8.1}{ninth:>6.0}{worst:>7.0}{bias:>+7.1}  {:>8.1}{:>6.0}{mark}",
            family.name,
            family.rows,
            100.0 * r.median,
            100.0 * r.ninth
        )
    };
    let mut missed = Vec::new();
    for fitted in &model.families {
        let family = FAMILIES.iter().find(|family| family.name == fitted.name);
        let counts = fitted.rows >= 10 && family.is_some_and(|family| !family.in_cache);
        let misses = counts && missed_bar(fitted.held_out).is_some();
        if misses {
            missed.push(fitted.name.as_str());
        }
        lines.push(line(fitted, if misses { " *" } else { "" }));
    }
    lines.extend(model.steps.iter().map(|steps| line(steps, "")));
    lines.push(String::new());
    if !missed.is_empty() {
        lines.extend(table::wrap(
            &format!(
                "* misses the bar for ten cold rows or more (median 10, 9/10 25): {}",
                missed.join(", ")
            ),
            80,
            2,
        ));
    }
    let without: Vec<String> = model.without_family.iter().map(|(op, rows)| format!("{op} {rows}")).collect();
    lines.extend(table::wrap(&format!("without a model: {}", without.join(", ")), 80, 2));
    lines.push(format!("{earlier} of {rows} recorded rows are of an earlier version of their kernel"));
    lines.push(String::new());
    for fitted in &model.families {
        let Some(family) = FAMILIES.iter().find(|family| family.name == fitted.name) else { continue };
        lines.extend(table::wrap(&format!("{}: {}", family.name, family.form), 80, 2));
        for (parameter, value) in family.parameters.iter().zip(&fitted.parameters) {
            lines.push(format!("  {value:<9} {}", parameter.name));
        }
    }
    lines.join("\n") + "\n"
}

fn fit_picture(model: &Model, rows: &[Row]) -> String {
    let dots = FAMILIES.iter().map(|family| {
        let of_family =
            rows.iter().filter(|row| families::find(&row.work).is_some_and(|f| f.name == family.name));
        let dots =
            of_family.filter_map(|row| Some((row.us, model.parts(&row.work, &model.machine).ok()?.total())));
        (family.name, dots.collect::<Vec<_>>())
    });
    let dots: Vec<picture::Dots<'_>> = dots.filter(|(_, dots)| !dots.is_empty()).collect();
    picture::fits(&format!("Modelled and measured times on {}", model.machine.name), &dots)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_fit(text: &str) {
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn answers_and_errors_fit_in_80_columns() {
        let model = Model::built_in();
        let step = Step::new(layers("qwen3-8b").unwrap(), 32, 8192).unwrap();
        let comparison = compare(&model, &Target::Step(step.clone()), &standard_changes()).unwrap();
        let text = report(&step.describe(), &model, &comparison);
        lines_fit(&text);
        assert!(text.contains("memory bandwidth 2x") && text.contains("no difference"), "{text}");
        let fit = fit_report(&model, 413, 70);
        lines_fit(&fit);
        // Every family of ten rows or more meets it now.
        assert!(fit.contains("linear, 16-bit") && !fit.contains("* misses the bar"), "{fit}");
    }

    #[test]
    fn models_of_another_form_are_refused_by_name() {
        let error = layers("qwen3-30b-a3b").unwrap_err().to_string();
        assert!(error.contains("qwen3_moe"), "{error}");
        assert!(layers("no-such-model").is_err());
        for name in ["qwen3-0.6b", "llama-3.1-8b"] {
            assert!(layers(name).is_ok(), "{name}");
        }
    }
}
