//! `warpsmith bench-model`: how fast a model reads and writes.

use crate::model::ModelArgs;
use serde_json::json;
use std::process::ExitCode;
use std::time::Instant;
use warpsmith::tensor::Random;
use warpsmith_engine::weights::Checkpoint;
use warpsmith_engine::{Engine, EngineOptions, Request, Result, SamplingParams};

/// Measure how fast a model reads prompts and writes tokens
///
/// The rows are those of llama-bench: `pp512` computes a prompt of 512 tokens, `tg128` generates 128 tokens one after the
/// other. Each is run once to warm up and then several times; the table shows mean and standard deviation of tokens per
/// second. Prefixes are not kept between runs.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Lengths of prompts; can be repeated
    #[arg(long, short = 'p', value_name = "TOKENS", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Numbers of tokens to generate; can be repeated
    #[arg(long, short = 'n', value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    generate: Vec<usize>,
    /// Runs of each row
    #[arg(long, short = 'r', value_name = "RUNS", default_value_t = 5)]
    repetitions: usize,
    /// The form of the output
    #[arg(long, short, default_value = "md")]
    output: Form,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    /// A table in Markdown
    Md,
    /// A JSON array
    Json,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith bench-model --model model.gguf
  warpsmith bench-model --model model.gguf -p 128,512 -n 32 -r 3 -o json";

/// A row of the table.
struct Row {
    test: String,
    /// Tokens per second of each run.
    rates: Vec<f64>,
}

impl Row {
    fn mean(&self) -> f64 {
        self.rates.iter().sum::<f64>() / self.rates.len() as f64
    }

    fn deviation(&self) -> f64 {
        let (mean, others) = (self.mean(), (self.rates.len() - 1).max(1) as f64);
        (self.rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / others).sqrt()
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let checkpoint = Checkpoint::open(args.model.path()?)?;
    let bytes: usize = checkpoint.tensors().map(|tensor| tensor.range().len()).sum();
    let parameters: usize = checkpoint.tensors().map(|tensor| tensor.numel()).sum();
    let longest = args.prompt.iter().copied().max().unwrap_or(1).max(512);
    let options = EngineOptions {
        prefix_cache: false,
        max_batch_tokens: longest,
        max_chunk: longest,
        ..EngineOptions::default()
    };
    let mut engine = args.model.open(options)?;
    let mut rows = Vec::new();
    let tests = args.prompt.iter().map(|&n| (n, 1)).chain(args.generate.iter().map(|&n| (1, n)));
    for (i, (prompt, tokens)) in tests.enumerate() {
        let reads = i < args.prompt.len();
        let test = if reads { format!("pp{prompt}") } else { format!("tg{tokens}") };
        let mut rates = Vec::new();
        for run in 0..=args.repetitions.max(1) {
            let seconds = time(&mut engine, prompt, tokens, run as u64)?;
            if run > 0 {
                rates.push(if reads { prompt } else { tokens } as f64 / seconds);
            }
        }
        rows.push(Row { test, rates });
    }
    let name = engine.model().config().architecture.clone();
    let threads = warpsmith::cpu::num_threads();
    match args.output {
        Form::Md => {
            println!("| model | size | params | threads | test | t/s |");
            println!("| --- | ---: | ---: | ---: | ---: | ---: |");
            let size = format!("{:.2} MiB", bytes as f64 / (1 << 20) as f64);
            let parameters = format!("{:.2} M", parameters as f64 / 1e6);
            for row in &rows {
                let rate = format!("{:.2} ± {:.2}", row.mean(), row.deviation());
                println!("| {name} | {size} | {parameters} | {threads} | {} | {rate} |", row.test);
            }
        }
        Form::Json => {
            let rows: Vec<_> = rows
                .iter()
                .map(|row| {
                    json!({
                        "model": name, "bytes": bytes, "parameters": parameters, "threads": threads,
                        "test": row.test, "mean": row.mean(), "deviation": row.deviation(), "samples": row.rates,
                    })
                })
                .collect();
            println!("{:#}", json!(rows));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Seconds that a random prompt and its answer take.
fn time(engine: &mut Engine, prompt: usize, tokens: usize, seed: u64) -> Result<f64> {
    let mut random = Random::new(seed);
    let vocab = engine.tokenizer().map_or(engine.model().config().vocab_size, |t| t.len()) as u64;
    let prompt = (0..prompt).map(|_| random.below(vocab) as i32).collect();
    let params = SamplingParams { max_tokens: Some(tokens), ignore_eos: true, ..SamplingParams::greedy() };
    engine.add_request(Request { prompt, params, ..Request::default() })?;
    let start = Instant::now();
    while engine.has_work() {
        engine.step()?;
    }
    Ok(start.elapsed().as_secs_f64())
}
