//! A tokenizer from `tokenizer.json` and the files beside it.

use super::Tokenizer;
use super::byte_level;
use super::error::{Error, Result};
use super::from_gguf::hexadecimal_byte;
use super::vocabulary::{Kind, Vocabulary};
use crate::weights::{read_json, read_limited};
use serde_json::Value;
use std::panic::catch_unwind;
use std::path::Path;

/// A vocabulary with ids beyond this would take more memory than any model's.
const MAX_ID: u32 = 1 << 24;

pub fn load(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let json = read_limited(&path)?;
    let unusable = |cause: String| Error::tokenizer(&path, "content", "a tokenizer", cause);
    // The library trusts its files: some that are wrong make it panic instead of failing.
    let parsed = catch_unwind(|| tokenizers::Tokenizer::from_bytes(&json));
    let mut tokenizer = parsed
        .map_err(|_| unusable("one that makes the library panic".into()))?
        .map_err(|error| unusable(error.to_string()))?;
    tokenizer.with_truncation(None).map_err(|error| unusable(error.to_string()))?;
    tokenizer.with_padding(None);
    let writing = Writing::of(&tokenizer).ok_or_else(|| {
        Error::tokenizer(&path, "decoder", "ByteLevel, ByteFallback or Metaspace", "another")
    })?;
    let mut vocabulary = read_vocabulary(&tokenizer, writing, &path)?;
    add_ends(folder, &tokenizer, &mut vocabulary)?;
    // The encoding of an empty text is what the model wants in front of every prompt.
    let around = tokenizer.encode_fast("", true).map_err(|error| unusable(error.to_string()))?;
    if let &[first] = around.get_ids() {
        vocabulary.first = Some(first);
    }
    Ok(Tokenizer::new(tokenizer, vocabulary))
}

/// How tokens are written.
#[derive(Clone, Copy, PartialEq)]
enum Writing {
    /// With characters that stand for bytes.
    Bytes,
    /// As text, with U+2581 for a space and `<0x1F>` for a byte.
    Text,
}

impl Writing {
    /// As the decoder says; `None` if it is another one.
    fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Writing> {
        let decoder = serde_json::to_value(tokenizer.get_decoder()?).ok()?;
        let mut steps = vec![&decoder];
        steps.extend(decoder["decoders"].as_array().into_iter().flatten());
        steps.iter().find_map(|step| match step["type"].as_str()? {
            "ByteLevel" => Some(Writing::Bytes),
            "ByteFallback" | "Metaspace" => Some(Writing::Text),
            _ => None,
        })
    }
}

fn read_vocabulary(tokenizer: &tokenizers::Tokenizer, writing: Writing, path: &Path) -> Result<Vocabulary> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut names: Vec<(u32, String)> =
        tokenizer.get_vocab(true).into_iter().map(|(name, id)| (id, name)).collect();
    names.sort_unstable();
    let mut vocabulary = Vocabulary::default();
    for (id, name) in names {
        if id >= MAX_ID {
            let expected = format!("ids below {MAX_ID}");
            return Err(Error::tokenizer(path, "vocabulary", expected, id.to_string()));
        }
        // Ids without a token, as some models have, stand for nothing.
        while vocabulary.len() < id as usize {
            vocabulary.push("", &[], Kind::Text);
        }
        if vocabulary.len() > id as usize {
            continue;
        }
        let special = added.get(&id).map(|token| token.special);
        let bytes = match (special, writing) {
            (Some(_), _) => None,
            (None, Writing::Bytes) => byte_level::bytes_of(&name),
            (None, Writing::Text) => Some(
                hexadecimal_byte(&name)
                    .map_or_else(|| name.replace('\u{2581}', " ").into_bytes(), |byte| vec![byte]),
            ),
        };
        let kind = if special == Some(true) { Kind::Control } else { Kind::Text };
        vocabulary.push(&name, bytes.as_deref().unwrap_or(name.as_bytes()), kind);
    }
    Ok(vocabulary)
}

/// Adds the ends that the files beside the tokenizer name.
fn add_ends(folder: &Path, tokenizer: &tokenizers::Tokenizer, vocabulary: &mut Vocabulary) -> Result<()> {
    for name in ["generation_config.json", "config.json"] {
        let Some(config) = optional_json(&folder.join(name))? else { continue };
        let ids = match &config["eos_token_id"] {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            id => Vec::from_iter(id.as_u64()),
        };
        let tokens = vocabulary.len();
        let known = ids.into_iter().filter_map(|id| u32::try_from(id).ok());
        vocabulary.final_ids.extend(known.filter(|&id| (id as usize) < tokens));
    }
    if let Some(config) = optional_json(&folder.join("tokenizer_config.json"))? {
        let name = special_name(&config, "eos_token");
        vocabulary.final_ids.extend(name.and_then(|name| tokenizer.token_to_id(name)));
    }
    Ok(())
}

/// A JSON file, if it is there.
pub fn optional_json(path: &Path) -> Result<Option<Value>> {
    if !path.is_file() {
        return Ok(None);
    }
    Ok(Some(read_json(path, "JSON")?))
}

/// The name of a token in `tokenizer_config.json`: a string, or an object with it.
pub fn special_name<'a>(config: &'a Value, key: &str) -> Option<&'a str> {
    config[key].as_str().or_else(|| config[key]["content"].as_str())
}
