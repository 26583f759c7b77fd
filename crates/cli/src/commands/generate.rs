//! `warpsmith generate`: one answer of a model.

use crate::model::{ModelArgs, SamplingArgs, answer, print};
use serde_json::{Value, json};
use std::process::ExitCode;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{EngineOptions, FinishReason, Request, Result, SamplingParams, TokenLogprob};

/// Answer a prompt with a language model
///
/// A model with a chat template gets the prompt as a message of the user; any other continues it. The answer is written as
/// it comes, and a line about its speed to standard error.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The prompt
    prompt: String,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// A message of the system before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continues the prompt as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object at the end instead: text, tokens, reason, counts and times
    #[arg(long)]
    json: bool,
    /// With --json: the log-probability of each token, and of this many of the most likely ones at its place
    #[arg(long, value_name = "COUNT", requires = "json")]
    logprobs: Option<usize>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith generate \"Why is the sky blue?\" --model model.gguf
  warpsmith generate \"Once upon a time\" --model model.gguf --raw --max-tokens 100 --temperature 0.8 --seed 1
  warpsmith generate \"Why is the sky blue?\" --model Qwen/Qwen3-0.6B
  warpsmith generate \"Why is the sky blue?\" --model unsloth/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
  WARPSMITH_MODEL=model.gguf warpsmith generate \"Name three colours.\" --json";

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut engine = args.model.open(EngineOptions::default())?;
    let prompt = if args.raw || engine.template().is_none() {
        engine.encode(&args.prompt)?
    } else {
        let system = args.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let messages = system.chain([json!({ "role": "user", "content": args.prompt })]).collect();
        engine.encode_chat(&Chat::new(messages))?
    };
    let params = SamplingParams { logprobs: args.logprobs, ..args.sampling.params() };
    let request = Request { prompt: prompt.clone(), params, ..Request::default() };
    let answer = answer(&mut engine, request, |text| if args.json { Ok(()) } else { print(text) })?;
    if args.json {
        let usage = answer.usage;
        let mut result = json!({
            "text": answer.text,
            "prompt": prompt,
            "tokens": answer.tokens,
            "finish_reason": reason_name(&answer.reason),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "first_token_ms": answer.first.as_secs_f64() * 1e3,
            "rest_ms": answer.rest.as_secs_f64() * 1e3,
        });
        if answer.summary().is_none() {
            // It failed: there is nothing to time.
            result["first_token_ms"] = Value::Null;
            result["rest_ms"] = Value::Null;
        }
        if args.logprobs.is_some() {
            let likely = |best: &Vec<TokenLogprob>| -> Vec<Value> {
                best.iter().map(|best| json!({ "token": best.token, "logprob": best.logprob })).collect()
            };
            result["logprobs"] = json!(answer.logprobs);
            result["top_logprobs"] = answer.top.iter().map(likely).collect();
        }
        print(&format!("{result:#}\n"))?;
    } else {
        print("\n")?;
        if let Some(summary) = answer.summary() {
            eprintln!("{summary}");
        }
    }
    if let FinishReason::Failed(why) = &answer.reason {
        eprintln!("error: {why}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Failed(_) => "failed",
    }
}
