//! Text to tokens and back, against what tokenizers and transformers gave.

mod chats;
mod hostile;
mod model;
mod vocabularies;

use serde_json::Value;
use std::path::{Path, PathBuf};
use warpsmith_engine::text::{TextStream, Tokenizer};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

/// Numbers of a JSON array.
fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Compares the tokenizer with recorded ids, and what comes back with the text.
fn check(tokenizer: &Tokenizer, recorded: &Value) {
    for case in recorded.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let plain = tokenizer.encode(text).unwrap();
        assert_eq!(plain, ids(&case["plain"]), "{text:?}");
        assert_eq!(
            tokenizer.encode_trusted(text).unwrap(),
            ids(&case["trusted"]),
            "{text:?} with control tokens"
        );
        // Bytes that have no token are lost; everything else comes back.
        if text.chars().all(|c| !c.is_control() || c == '\n') && text.chars().all(|c| u32::from(c) < 0xF0000)
        {
            assert_eq!(tokenizer.decode(&plain), text);
        }
        let mut stream = TextStream::new(&[]).unwrap();
        let mut joined: String = plain.iter().map(|&id| stream.push(tokenizer.bytes(id)).text).collect();
        joined += &stream.finish();
        assert_eq!(joined, tokenizer.decode(&plain), "deltas of {text:?}");
    }
}
