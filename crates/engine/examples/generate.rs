//! Answers a question: `cargo run --release -p warpsmith-engine --example generate -- model.gguf "Why is the sky blue?"`

use std::io::Write;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{Engine, EventKind, OpenOptions, Request, Result, SamplingParams};

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let (Some(model), Some(question)) = (words.next(), words.next()) else {
        eprintln!("usage: generate MODEL QUESTION");
        std::process::exit(2);
    };
    let mut engine = Engine::open(model, OpenOptions::default())?;
    let chat = Chat::new(serde_json::json!([{ "role": "user", "content": question }]));
    let prompt = engine.encode_chat(&chat)?;
    let params = SamplingParams { max_tokens: Some(200), ..SamplingParams::greedy() };
    engine.add_request(Request { prompt, params, ..Request::default() })?;
    while engine.has_work() {
        for event in engine.step()? {
            match event.kind {
                EventKind::Token { text, .. } => print!("{text}"),
                EventKind::Finished { text, usage, .. } => println!("{text}\n{usage:?}"),
            }
            let _ = std::io::stdout().flush();
        }
    }
    Ok(())
}
