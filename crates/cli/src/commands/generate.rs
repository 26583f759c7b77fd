//! `warpsmith generate`: answers of a model to one prompt.

use crate::model::{Answer, ModelArgs, SamplingArgs, answers, print};
use serde_json::{Value, json};
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{EngineOptions, FinishReason, Request, Result, SamplingParams, TokenLogprob};

/// Answer a prompt with a language model
///
/// A model with a chat template gets the prompt as a user message; any other continues it. The answer is printed as it
/// is generated, and a line about its speed goes to standard error. The last line break of a prompt from a file or pipe
/// is dropped.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The prompt; `-` reads standard input, which is also the default if that is a pipe or a file
    #[arg(conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(long, short, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Several outputs for the prompt; they differ if --temperature is above 0
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=SamplingParams::MAX_N as i64))]
    outputs: u16,
    /// A system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object at the end instead: text, tokens, reason, counts and times; with several outputs, a list of them
    #[arg(long)]
    json: bool,
    /// With --json: the log-probability of each token, and of this many of the most likely ones at its place
    #[arg(long, value_name = "COUNT", requires = "json")]
    logprobs: Option<usize>,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith generate \"Why is the sky blue?\" --model model.gguf
  warpsmith generate \"Once upon a time\" --model model.gguf --raw \\
      --max-tokens 100 --temperature 0.8 --seed 1
  warpsmith generate \"Why is the sky blue?\" --model Qwen/Qwen3-0.6B
  warpsmith generate \"Why is the sky blue?\" --model \\
      unsloth/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf
  warpsmith generate --file letter.txt --system \"Summarise.\" \\
      --model model.gguf --threads 4
  warpsmith generate \"A haiku\" --model model.gguf --lora adapters/poems
  git diff | warpsmith generate - --system \"Describe this change.\" \\
      --model model.gguf
  warpsmith generate \"A name for a cat?\" --model model.gguf --outputs 3 \\
      --temperature 1
  WARPSMITH_MODEL=model.gguf warpsmith generate \"Name three colours.\" --json";

impl Args {
    /// The prompt, from wherever it is.
    fn prompt(&self) -> Result<String> {
        let (from, bytes) = match (&self.prompt, &self.file) {
            (_, Some(path)) => {
                let read = std::fs::read(path).map_err(|error| warpsmith::Error::io(path, "reading", &error));
                (path.display().to_string(), read?)
            }
            (Some(prompt), None) if prompt != "-" => return Ok(prompt.clone()),
            (None, None) if std::io::stdin().is_terminal() => {
                let expected = "a text, `-` for standard input, or --file with a path";
                return Err(warpsmith::Error::parse("prompt", expected, "nothing").into());
            }
            _ => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().lock().read_to_end(&mut bytes);
                read.map_err(|error| warpsmith::Error::io("standard input", "reading", &error))?;
                ("standard input".into(), bytes)
            }
        };
        let mut text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            warpsmith::Error::parse("prompt", "text in UTF-8", format!("another byte at {at} in {from}"))
        })?;
        if text.ends_with('\n') {
            text.truncate(text.len() - 1);
            text.truncate(text.strip_suffix('\r').map_or(text.len(), str::len));
        }
        if text.is_empty() {
            return Err(warpsmith::Error::parse("prompt", "a text", format!("nothing in {from}")).into());
        }
        Ok(text)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.model.on_threads(|| generate(args))
}

fn generate(args: &Args) -> Result<ExitCode> {
    let text = args.prompt()?;
    let adapter = args.model.adapter()?;
    let mut engine = args.model.open(EngineOptions::default())?;
    let prompt = if args.raw || engine.template().is_none() {
        engine.encode(&text)?
    } else {
        let system = args.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let messages = system.chain([json!({ "role": "user", "content": text })]).collect();
        engine.encode_chat(&Chat::new(messages))?
    };
    let n = usize::from(args.outputs);
    let params = SamplingParams { logprobs: args.logprobs, n, ..args.sampling.params() };
    let request = Request { prompt: prompt.clone(), params, adapter, ..Request::default() };
    // A single output is shown as it is generated; several would mix.
    let show = |text: &str| if args.json || n > 1 { Ok(()) } else { print(text) };
    let answers = answers(&mut engine, request, |_, text| show(text), || false)?;
    match &answers[..] {
        [answer] if args.json => {
            let mut result = as_json(answer, args);
            result["prompt"] = json!(prompt);
            result["prompt_tokens"] = json!(answer.usage.prompt_tokens);
            print(&format!("{result:#}\n"))?;
        }
        answers if args.json => {
            let outputs: Vec<Value> = answers.iter().map(|answer| as_json(answer, args)).collect();
            let result = json!({ "prompt": prompt, "prompt_tokens": prompt.len(), "outputs": outputs });
            print(&format!("{result:#}\n"))?;
        }
        [_] => print("\n")?,
        answers => {
            for (i, answer) in answers.iter().enumerate() {
                print(&format!("--- {} of {n} ---\n{}\n", i + 1, answer.text))?;
            }
        }
    }
    let mut status = ExitCode::SUCCESS;
    for answer in &answers {
        if let FinishReason::Failed(why) = &answer.reason {
            eprintln!("error: {why}");
            status = ExitCode::FAILURE;
        }
        if let Some(summary) = answer.summary().filter(|_| !args.json) {
            eprintln!("{summary}");
        }
    }
    Ok(status)
}

fn as_json(answer: &Answer, args: &Args) -> Value {
    let mut result = json!({
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": reason_name(&answer.reason),
        "cached_tokens": answer.usage.cached_tokens,
        "output_tokens": answer.usage.output_tokens,
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
    result
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
