//! A model answers two questions. The second finds most of its prompt in the prefix cache.

use super::WIDTH;
use crate::model::{Answer, ModelArgs, answer, print};
use crate::table;
use serde_json::json;
use std::path::Path;
use warpsmith::Device;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{Engine, EngineOptions, Error, Request, Result, SamplingParams};

/// Long, as the instructions of real assistants are: it is computed once.
const SYSTEM: &str = "You are a patient teacher who explains the world to curious people of any age. Answer in one or two \
    short sentences. Use plain words, and name a cause where there is one. Do not repeat the question, do not apologise, \
    and do not mention that you are a model. If a question has a wrong assumption, say so first and then explain what is \
    true. Prefer an everyday example to a technical term; if a technical term helps, explain it in the same sentence. \
    Numbers are given in metric units and rounded so that they are easy to remember. When several answers are possible, \
    give the most common one and say that there are others. Never give medical or legal advice; say who could help \
    instead. Keep a friendly tone, and stop when the question is answered.";

const QUESTIONS: [&str; 2] = ["Why is the sky blue?", "What do plants need to grow?"];

/// Asks both questions and prints the answers with their times.
pub fn show(path: &Path, device: Option<Device>) -> Result<()> {
    let mut engine = ModelArgs::of(path, device).open(EngineOptions::default())?;
    println!("{}", path.file_name().unwrap_or(path.as_os_str()).to_string_lossy());
    let [first, second] = QUESTIONS.map(|question| ask(&mut engine, question));
    let (first, second) = (first?, second?);
    let told = format!(
        "The second question began with the same instructions: {} of its {} prompt tokens were cached, and its answer \
         began after {:.0} ms instead of {:.0} ms.",
        second.usage.cached_tokens,
        second.usage.prompt_tokens,
        second.first.as_secs_f64() * 1e3,
        first.first.as_secs_f64() * 1e3,
    );
    println!("\n{}\n", table::wrap(&told, WIDTH, 0).join("\n"));
    Ok(())
}

fn ask(engine: &mut Engine, question: &str) -> Result<Answer> {
    println!("\n> {question}");
    let messages = json!([{ "role": "system", "content": SYSTEM }, { "role": "user", "content": question }]);
    let prompt = engine.encode_chat(&Chat::new(messages))?;
    let params = SamplingParams { max_tokens: Some(64), ..SamplingParams::greedy() };
    let answer = answer(engine, Request { prompt, params, ..Request::default() }, print)?;
    match (answer.summary(), &answer.reason) {
        (Some(summary), _) => println!("\n{}", table::wrap(&format!("({summary})"), WIDTH, 1).join("\n")),
        (None, reason) => return Err(Error::Broken(format!("no answer: {reason:?}"))),
    }
    Ok(answer)
}
