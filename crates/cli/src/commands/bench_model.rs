//! `warpsmith bench-model`: how fast a model reads and writes.

mod report;
mod runs;

use super::serve;
use crate::model::{ModelArgs, at_least_one};
use crate::source::{self, Source};
use report::{Form, Report, Row};
use runs::{Requests, prefix, time};
use std::process::ExitCode;
use warpsmith_engine::{EngineOptions, Result};

/// Measure how fast a model reads prompts and writes tokens
///
/// The rows are those of llama-bench: `pp512` computes a prompt of 512 tokens, `tg128` generates 128 tokens one after the
/// other; `tg128@32` does so for 32 sequences at the same time, and counts the tokens of all. Each is run once to warm up and
/// then several times; the table shows mean and standard deviation of tokens per second, and the milliseconds of a prompt or
/// of a step. Prefixes are not kept between runs.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[arg(long, value_name = "CONFIG", conflicts_with = "model", help = source::RANDOM)]
    random: Option<String>,
    /// Lengths of prompts; can be repeated. 0 for none
    #[arg(long, short = 'p', value_name = "TOKENS", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Numbers of tokens to generate; can be repeated. 0 for none
    #[arg(long, short = 'n', value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    generate: Vec<usize>,
    /// Numbers of sequences that generate at the same time; can be repeated
    #[arg(long, short = 'b', value_name = "SEQUENCES", value_delimiter = ',', default_value = "1", value_parser = at_least_one())]
    batch: Vec<usize>,
    /// Also serve a set of requests as fast as possible, and count the tokens that they generate
    #[arg(long)]
    workload: Option<Workload>,
    /// Requests of the workload
    #[arg(long, value_name = "REQUESTS", default_value_t = 256, requires = "workload", value_parser = at_least_one())]
    requests: usize,
    /// Tokens of each prompt of the workload `serve`
    #[arg(long, value_name = "TOKENS", default_value_t = 512, requires = "workload", value_parser = at_least_one())]
    random_input_len: usize,
    /// Tokens of each answer of the workload `serve`
    #[arg(long, value_name = "TOKENS", default_value_t = 128, requires = "workload", value_parser = at_least_one())]
    random_output_len: usize,
    /// Outputs that the workload `serve` generates at the same time
    #[arg(long, value_name = "COUNT", default_value_t = serve::MAX_RUNNING, requires = "workload", value_parser = at_least_one())]
    max_running_requests: usize,
    /// Also compare the first token of a prompt of this many tokens and a few more with that of a second one with the same
    /// beginning; can be repeated
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = at_least_one())]
    prefix: Vec<usize>,
    /// Runs of each row
    #[arg(long, short = 'r', value_name = "RUNS", default_value_t = 5, value_parser = at_least_one())]
    repetitions: usize,
    /// The form of the output
    #[arg(long, short, default_value = "md")]
    output: Form,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Workload {
    /// That of nano-vllm: prompts and answers of 100 to 1024 tokens, all lengths as likely, temperature 0.6
    NanoVllm,
    /// Requests of equal lengths, greedily, in an engine as `serve` has it: what is left between this and the figures of
    /// `bench-serve` with the same lengths is what HTTP costs
    Serve,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith bench-model --model model.gguf
  warpsmith bench-model --model model.gguf -p 128,512 -n 32 -r 3 \\
      -o json --threads 4
  warpsmith bench-model --random qwen3-0.6b --device cuda --batch 1,32,128
  warpsmith bench-model --random qwen3-8b --device cuda -p 0 -n 0 \\
      --workload nano-vllm
  warpsmith bench-model --random qwen3-8b --device cuda -p 0 -n 0 \\
      --workload serve --requests 256
  warpsmith bench-model --random config.json --prefix 8192";

impl Args {
    /// Room for the largest test.
    fn engine_options(&self) -> EngineOptions {
        let workload = match self.workload {
            // As nano-vllm has it.
            Some(Workload::NanoVllm) => [self.requests.min(512), 16384.min(1024 * self.requests)],
            // Other rows would change its steps, and it theirs.
            Some(Workload::Serve) => return serve::engine_options(self.max_running_requests, None, None),
            None => [1, 1],
        };
        let most = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
        let max_running = most(&self.batch).max(workload[0]);
        let tokens =
            most(&self.prompt).max(512).max(workload[1]).max(max_running).max(most(&self.prefix).min(8192));
        EngineOptions {
            prefix_cache: !self.prefix.is_empty(),
            max_batch_tokens: tokens,
            max_chunk: tokens,
            max_running,
            ..EngineOptions::default()
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.model.on_threads(|| measure_all(args))
}

fn measure_all(args: &Args) -> Result<ExitCode> {
    if !args.model.adapters().is_empty() {
        let expected =
            "a model without adapters: its own speed is measured here, and `bench-serve` measures theirs";
        return Err(warpsmith::Error::parse("lora", expected, "an adapter").into());
    }
    let is_empty = |sizes: &[usize]| sizes.iter().all(|&size| size == 0);
    if is_empty(&args.prompt) && is_empty(&args.generate) && args.workload.is_none() && args.prefix.is_empty()
    {
        let expected = "something to measure: a prompt, tokens to generate, a workload or a prefix";
        return Err(warpsmith::Error::parse("bench-model", expected, "nothing").into());
    }
    let source = Source::new(args.random.as_deref(), || args.model.path())?;
    let mut engine = source.open(&args.model, args.engine_options())?;
    let runs = args.repetitions;
    let mut rows = Vec::new();
    for &prompt in args.prompt.iter().filter(|&&prompt| prompt > 0) {
        let seconds = measure(runs, |run| time(&mut engine, &Requests::alike(1, prompt, 1), run))?;
        rows.push(Row::new(format!("pp{prompt}"), prompt, &seconds, 1));
    }
    for &tokens in args.generate.iter().filter(|&&tokens| tokens > 0) {
        for &count in &args.batch {
            let seconds = measure(runs, |run| time(&mut engine, &Requests::alike(count, 1, tokens), run))?;
            let at = if count == 1 { String::new() } else { format!("@{count}") };
            rows.push(Row::new(format!("tg{tokens}{at}"), count * tokens, &seconds, tokens));
        }
    }
    let workload = match args.workload {
        Some(Workload::NanoVllm) => Some((Requests::nano_vllm(args.requests), "nano-vllm", 1)),
        Some(Workload::Serve) => {
            let (input, output) = (args.random_input_len, args.random_output_len);
            Some((Requests::alike(args.requests, input, output), "serve", runs))
        }
        None => None,
    };
    if let Some((requests, name, runs)) = workload {
        let seconds = measure(runs, |run| time(&mut engine, &requests, run))?;
        let row = Row::new(name.into(), requests.output_tokens(), &seconds, 1);
        rows.push(row.reading(requests.reads()));
    }
    for &tokens in &args.prefix {
        let runs = (0..=runs).map(|run| prefix(&mut engine, tokens, run as u64));
        let pairs = runs.skip(1).collect::<Result<Vec<[f64; 2]>>>()?;
        let [first, again] = [0, 1].map(|which| pairs.iter().map(|pair| pair[which]).collect::<Vec<f64>>());
        let (first, again) = (
            Row::new(format!("prefix{tokens} first"), tokens, &first, 1),
            Row::new(format!("prefix{tokens} again"), tokens, &again, 1),
        );
        let ratio = first.milliseconds() / again.milliseconds();
        rows.extend([first, again.faster(ratio)]);
    }
    let stats = engine.stats();
    let report = Report {
        model: source.name(&engine),
        bytes: source.bytes(&args.model),
        parameters: source.parameters(),
        device: args.model.device(),
        graphs: stats.graphs,
        graph_failure: engine.graph_failure(),
        rows,
    };
    report.print(args.output);
    Ok(ExitCode::SUCCESS)
}

/// Seconds of each run, after one to warm up.
fn measure(runs: usize, mut run: impl FnMut(u64) -> Result<f64>) -> Result<Vec<f64>> {
    run(0)?;
    (1..=runs as u64).map(run).collect()
}
