//! `warpsmith bench-serve`: how fast a server answers.

use crate::files::replace;
use crate::model::{at_least_one, print};
use serde_json::Value;
use std::path::PathBuf;
use std::process::ExitCode;
use warpsmith_server::bench::{self, Load};
use warpsmith_server::client::Target;

/// Measure a server under load: throughput, first token, time between tokens
///
/// Sends random prompts to an OpenAI-compatible server and reads its streams. The figures have the names that `vllm bench
/// serve` gives them. The server need not be Warpsmith's.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:30000")]
    base_url: String,
    /// The path: /v1/completions sends tokens, /v1/chat/completions words
    #[arg(long, value_name = "PATH", default_value = "/v1/completions")]
    endpoint: String,
    /// The name of the model [default: the first that the server has]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The key to the server
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Requests
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = at_least_one())]
    num_prompts: usize,
    /// Requests in a second, at random times; `inf` sends all at once
    #[arg(long, value_name = "RATE", default_value = "inf", value_parser = rate)]
    request_rate: f64,
    /// The most requests at the same time [default: all]
    #[arg(long, value_name = "COUNT", value_parser = at_least_one())]
    max_concurrency: Option<usize>,
    /// Tokens of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one(), alias = "input-len")]
    random_input_len: usize,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_one(), alias = "output-len")]
    random_output_len: usize,
    /// Tokens that all prompts begin with
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    random_prefix_len: usize,
    /// Answers may end before their length
    #[arg(long)]
    allow_eos: bool,
    /// Limits that good requests keep, in milliseconds: `ttft:500`, `tpot:50`, `e2el:5000`; can be repeated
    #[arg(long, value_name = "NAME:MS")]
    goodput: Vec<String>,
    /// Measure the server with all its places taken, and then under this many times as many requests as it has served: what is
    /// left of the goodput, and how many requests were refused. Places are --max-concurrency [default: as many as the server
    /// runs at once]
    #[arg(long, value_name = "FACTOR", value_parser = factor, conflicts_with = "request_rate")]
    overload: Option<f64>,
    /// Percentiles to tell, separated by commas
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "99")]
    metric_percentiles: Vec<f64>,
    /// Of the random prompts and times
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Also write the JSON to a file
    #[arg(long, value_name = "FILE")]
    result_filename: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith bench-serve
  warpsmith bench-serve --num-prompts 64 --max-concurrency 8 \\
      --random-input-len 256 --random-output-len 64
  warpsmith bench-serve --request-rate 4 --goodput ttft:500 \\
      --goodput tpot:50 --json
  warpsmith bench-serve --num-prompts 500 --overload 10 --goodput e2el:20000
  warpsmith bench-serve --base-url http://other:8000 --model NAME \\
      --endpoint /v1/chat/completions";

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 => Ok(rate),
        _ => Err(format!("expected requests in a second above 0, or `inf`, got `{text}`")),
    }
}

fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (1.0..=1000.0).contains(&factor) => Ok(factor),
        _ => Err(format!("expected a number from 1 to 1000, got `{text}`")),
    }
}

fn goals(given: &[String]) -> Result<[Option<f64>; 3], String> {
    let mut goals = [None; 3];
    for goal in given {
        let parsed = goal.split_once(':').and_then(|(name, limit)| {
            let index = ["ttft", "tpot", "e2el"].iter().position(|known| *known == name)?;
            Some((index, limit.parse::<f64>().ok().filter(|limit| *limit > 0.0)?))
        });
        let (index, limit) =
            parsed.ok_or_else(|| format!("--goodput: expected ttft:MS, tpot:MS or e2el:MS, got `{goal}`"))?;
        goals[index] = Some(limit);
    }
    Ok(goals)
}

pub fn run(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let target = Target::new(&args.base_url, args.api_key.clone())?;
    let goodput = goals(&args.goodput)?;
    if let Some(wrong) = args.metric_percentiles.iter().find(|percent| !(0.0..=100.0).contains(*percent)) {
        return Err(format!("--metric-percentiles: expected numbers from 0 to 100, got {wrong}").into());
    }
    if args.random_prefix_len >= args.random_input_len && args.random_prefix_len > 0 {
        return Err("--random-prefix-len: expected fewer tokens than --random-input-len".into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let Measured { report, failed, why } = runtime.block_on(measure(args, &target, goodput))?;
    if let Some(path) = &args.result_filename {
        replace(path, format!("{report:#}\n").as_bytes())?;
    }
    print(&if args.json { format!("{report:#}\n") } else { table(&report) })?;
    match why {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => {
            eprintln!("error: {failed} requests failed, the first with: {why}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// The figures, and the requests that failed without being asked to.
struct Measured {
    report: Value,
    failed: usize,
    why: Option<String>,
}

impl Measured {
    fn new(report: Value, (failed, why): (usize, Option<&str>)) -> Measured {
        Measured { report, failed, why: why.map(String::from) }
    }
}

async fn measure(
    args: &Args,
    target: &Target,
    goodput: [Option<f64>; 3],
) -> Result<Measured, Box<dyn std::error::Error>> {
    let unreachable = |error| format!("no answer from {}: {error}", args.base_url);
    let models = target.send("GET", "/v1/models", None).await.map_err(unreachable)?;
    if models.status != 200 && args.model.is_none() {
        let message = models.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        return Err(format!("/v1/models: {} {message}", models.status).into());
    }
    let first = models.json()["data"][0]["id"].as_str().map(String::from);
    let model = args.model.clone().or(first).ok_or("the server names no model: give --model")?;
    // Tokens that every model has, where the server does not say how many there are.
    let info = target.send("GET", "/server_info", None).await.map_err(unreachable)?.json();
    let vocab = info["model"]["vocab_size"].as_u64().unwrap_or(1000) as usize;
    let load = Load {
        endpoint: args.endpoint.clone(),
        model,
        count: args.num_prompts,
        rate: args.request_rate,
        concurrency: args.max_concurrency,
        input: args.random_input_len,
        output: args.random_output_len,
        prefix: args.random_prefix_len,
        vocab,
        seed: args.seed,
        ends: args.allow_eos,
        goodput,
    };
    // One request first, so that nothing is measured that happens once.
    let warm =
        bench::run(target, &Load { count: 1, seed: !args.seed, rate: f64::INFINITY, ..load.clone() }).await;
    if let (1.., Some(why)) = warm.failures() {
        return Err(format!("the first request failed: {why}").into());
    }
    if let Some(factor) = args.overload {
        let places = info["engine"]["max_running_requests"].as_u64().map(|places| places as usize);
        let concurrency = args.max_concurrency.or(places).ok_or("--overload: give --max-concurrency")?;
        if args.num_prompts < concurrency {
            let told = format!("--num-prompts: expected at least {concurrency}, the places of the server");
            return Err(told.into());
        }
        let load = Load { concurrency: Some(concurrency), ..load };
        let overload = bench::overload(target, &load, factor).await?;
        // To be refused is what these requests are for.
        let ((full, first), (over, second)) = (overload.full.failures(), overload.over.broken());
        return Ok(Measured::new(overload.json(&args.metric_percentiles), (full + over, first.or(second))));
    }
    let report = bench::run(target, &load).await;
    Ok(Measured::new(report.json(&args.metric_percentiles), report.failures()))
}

/// The figures as lines; those of a part behind its name.
fn table(report: &Value) -> String {
    let lines = report.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    lines
        .map(|(name, value)| match value.as_f64().filter(|_| !value.is_u64()) {
            _ if value.is_object() => format!("{name}:\n{}", table(value)),
            Some(number) => format!("{name:<24} {number:>14.2}\n"),
            None => format!("{name:<24} {:>14}\n", value.to_string().trim_matches('"')),
        })
        .collect()
}
