//! Text that comes out of the engine: deltas, stops, ends.

use crate::engine;
use crate::oracle::{Oracle, VOCAB};
use warpsmith_engine::text::Tokenizer;
use warpsmith_engine::{Engine, EngineOptions, EventKind, FinishReason, Request, SamplingParams};

/// One letter for each token, and an end token, as `tokenizer.json` has them.
fn tokenizer() -> Tokenizer {
    let letters = ('a'..='z').chain('A'..='M').map(String::from);
    let vocab: serde_json::Map<_, _> = letters.zip(0i32..).map(|(letter, id)| (letter, id.into())).collect();
    let end = VOCAB as i32 - 1;
    let json = serde_json::json!({
        "version": "1.0",
        "added_tokens": [{ "id": end, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true }],
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    std::fs::write(folder.path().join("generation_config.json"), format!("{{\"eos_token_id\": {end}}}"))
        .unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn talking_engine() -> Engine {
    let options = EngineOptions { page_size: 4, num_pages: 100, ..EngineOptions::default() };
    engine(Box::new(Oracle::new(4)), options).with_text(tokenizer(), None)
}

/// The text of an answer, its number of tokens, and why it ended.
fn ask(engine: &mut Engine, prompt: &str, params: SamplingParams) -> (String, usize, FinishReason) {
    let prompt = engine.encode(prompt).unwrap();
    engine.add_request(Request { prompt, params, ..Request::default() }).unwrap();
    let mut text = String::new();
    while engine.has_work() {
        for event in engine.step().unwrap() {
            match event.kind {
                EventKind::Token { text: delta, .. } => text += &delta,
                EventKind::Finished { reason, text: rest, usage } => {
                    return (text + &rest, usage.output_tokens, reason);
                }
            }
        }
    }
    unreachable!("every request ends")
}

#[test]
fn nothing_of_or_after_a_stop_is_told_wherever_it_is() {
    let mut engine = talking_engine();
    let free = SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
    let (whole, count, reason) = ask(&mut engine, "hello", free.clone());
    assert_eq!((count, reason), (40, FinishReason::Length));
    assert!(whole.len() >= 35, "only end tokens have no letter: {whole}");
    for start in 0..whole.len() - 3 {
        let stop = whole[start..start + 3].to_owned();
        let found = whole.find(&stop).unwrap();
        let params = SamplingParams { stop: vec!["never".into(), stop], ..free.clone() };
        let (text, count, reason) = ask(&mut engine, "hello", params);
        assert_eq!((text.as_str(), reason), (&whole[..found], FinishReason::Stop));
        assert!(count < 40 || found + 3 >= whole.len() - 1);
    }
    // The beginning of a stop that never comes is told in the end.
    let stop = whole[whole.len() - 2..].to_owned() + "!";
    let (text, _, reason) = ask(&mut engine, "hello", SamplingParams { stop: vec![stop], ..free });
    assert_eq!((text, reason), (whole, FinishReason::Length));
}

#[test]
fn end_tokens_and_stop_ids_end_an_answer_without_a_letter() {
    let mut engine = talking_engine();
    let params = SamplingParams { max_tokens: Some(200), ..SamplingParams::greedy() };
    let prompt = engine.encode("hello").unwrap();
    let tokens = Oracle::output(&prompt, 200);
    let end = tokens.iter().position(|&token| token == VOCAB as i32 - 1).expect("one of 40 tokens in 200");
    let (text, count, reason) = ask(&mut engine, "hello", params.clone());
    assert_eq!((text.len(), count, reason), (end, end + 1, FinishReason::Stop));
    let stop_id = tokens[2];
    let first = tokens.iter().position(|&token| token == stop_id).unwrap();
    let (text, count, _) = ask(&mut engine, "hello", SamplingParams { stop_ids: vec![stop_id], ..params });
    assert_eq!((text.len(), count), (first, first + 1));
}

#[test]
fn stop_texts_need_a_tokenizer() {
    let mut mute = engine(Box::new(Oracle::new(4)), EngineOptions::default());
    let params = SamplingParams { stop: vec!["x".into()], ..SamplingParams::greedy() };
    let refused = mute.add_request(Request { prompt: vec![1], params, ..Request::default() });
    assert!(refused.unwrap_err().to_string().contains("`stop`"));
    assert!(mute.encode("text").is_err());
}
