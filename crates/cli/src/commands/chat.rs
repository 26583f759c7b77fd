//! `warpsmith chat`: a conversation in the terminal.

use crate::model::{ModelArgs, SamplingArgs, answer, print};
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::process::ExitCode;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{Engine, EngineOptions, Error, FinishReason, Request, Result};

/// Talk to a language model in the terminal
///
/// Each line is a message, and the answer is written as it comes. The model sees the whole conversation; what it has
/// seen before is not computed again. A message that cannot be answered is forgotten. `/clear` begins a new conversation,
/// `/exit` or the end of the input ends it.
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
            print("> ")?;
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
        match reply(&mut engine, &messages, args)? {
            Ok(text) => messages.push(json!({ "role": "assistant", "content": text })),
            // The conversation goes on as if the message had not been sent.
            Err(why) => {
                messages.pop();
                eprintln!("error: {why}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The answer to a conversation, shown as it comes, or why there is none. An error ends the command.
fn reply(
    engine: &mut Engine,
    messages: &[Value],
    args: &Args,
) -> Result<std::result::Result<String, String>> {
    // The template may refuse a message.
    let prompt = match engine.encode_chat(&Chat::new(Value::Array(messages.to_vec()))) {
        Ok(prompt) => prompt,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let request = Request { prompt, params: args.sampling.params(), ..Request::default() };
    let answer = match answer(engine, request, print) {
        Ok(answer) => answer,
        // The conversation has become too long, for example. It can be cleared.
        Err(error @ Error::Request { .. }) => return Ok(Err(error.to_string())),
        Err(error) => return Err(error),
    };
    print("\n")?;
    if let FinishReason::Failed(why) = answer.reason {
        return Ok(Err(why));
    }
    if let Some(summary) = answer.summary().filter(|_| args.stats) {
        eprintln!("{summary}");
    }
    Ok(Ok(answer.text))
}
