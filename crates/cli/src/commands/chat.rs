//! `warpsmith chat`: a conversation in the terminal.

use crate::model::{ModelArgs, SamplingArgs, answer, print};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::process::ExitCode;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{EngineOptions, Error, Request, Result};

/// Talk to a language model in the terminal
///
/// Each line is a message, and the answer is written as it comes. The model sees the whole conversation; what it has
/// seen before is not computed again. `/clear` begins a new conversation, `/exit` or the end of the input ends it.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// A message of the system before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Say after each answer how fast it was
    #[arg(long)]
    stats: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpsmith chat --model model.gguf
  warpsmith chat --model model.gguf --system \"Answer in one sentence.\" --temperature 0.7 --stats";

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut engine = args.model.open(EngineOptions::default())?;
    if engine.template().is_none() {
        let got = "one without, which only continues text: see `warpsmith generate`";
        return Err(warpsmith::Error::parse("model", "one with a chat template", got).into());
    }
    let is_terminal = std::io::stdin().is_terminal();
    let beginning: Vec<Value> =
        args.system.iter().map(|text| json!({ "role": "system", "content": text })).collect();
    let mut messages = beginning.clone();
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if is_terminal {
            print("> ");
        }
        let Some(line) = lines.next() else { break };
        let line = line.map_err(|error| warpsmith::Error::io("standard input", "reading", &error))?;
        match line.trim() {
            "" => continue,
            "/exit" => break,
            "/clear" => {
                messages.clone_from(&beginning);
                continue;
            }
            text => messages.push(json!({ "role": "user", "content": text })),
        }
        let prompt = engine.encode_chat(&Chat::new(Value::Array(messages.clone())))?;
        let request = Request { prompt, params: args.sampling.params(), ..Request::default() };
        match answer(&mut engine, request, print) {
            Ok(answer) => {
                println!();
                if args.stats {
                    eprintln!("{}", answer.summary());
                }
                messages.push(json!({ "role": "assistant", "content": answer.text }));
            }
            // The conversation has become too long, for example. It can be cleared.
            Err(error @ Error::Request { .. }) => {
                messages.pop();
                eprintln!("error: {error}");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(ExitCode::SUCCESS)
}
