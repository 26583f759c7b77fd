//! Log-probabilities, in the two forms that OpenAI has.

use crate::bridge::Facts;
use crate::mailbox::Token;
use serde_json::{Map, Value, json};

/// The text of a token. Bytes that are no whole characters become U+FFFD.
pub fn text_of(facts: &Facts, id: i32) -> String {
    let bytes = facts.tokenizer.as_ref().map(|tokenizer| tokenizer.bytes(id as u32)).unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

fn bytes_of(facts: &Facts, id: i32) -> Vec<u8> {
    facts.tokenizer.as_ref().map(|tokenizer| tokenizer.bytes(id as u32).to_vec()).unwrap_or_default()
}

/// JSON has no infinity.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// A token in the form of chats.
pub fn of_chat(facts: &Facts, token: &Token) -> Value {
    let entry = |id: i32, logprob: f32| json!({ "token": text_of(facts, id), "logprob": finite(logprob), "bytes": bytes_of(facts, id) });
    let mut value = entry(token.id, token.logprob.unwrap_or_default());
    value["top_logprobs"] = token.top.iter().map(|top| entry(top.token, top.logprob)).collect();
    value
}

/// Tokens in the form of completions: arrays. `offset` is where the text of the first begins, in characters.
pub fn of_completion<'a>(
    facts: &Facts,
    tokens: impl Iterator<Item = &'a Token>,
    offset: &mut usize,
    with_top: bool,
) -> Value {
    let (mut texts, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let text = text_of(facts, token.id);
        offsets.push(*offset);
        *offset += text.chars().count();
        texts.push(text);
        logprobs.push(finite(token.logprob.unwrap_or_default()));
        let mut top = Map::new();
        for best in &token.top {
            top.entry(text_of(facts, best.token)).or_insert_with(|| json!(finite(best.logprob)));
        }
        tops.push(Value::Object(top));
    }
    let tops = if with_top { json!(tops) } else { Value::Null };
    json!({ "tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}
