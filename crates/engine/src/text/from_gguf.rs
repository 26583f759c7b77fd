//! A tokenizer from the keys of a GGUF file.

use super::Tokenizer;
use super::byte_level;
use super::error::{Error, Result};
use super::pre::{KNOWN, Pre};
use super::vocabulary::{Kind, Vocabulary};
use crate::weights::{Keys, Strings};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence};

/// What `tokenizer.ggml.token_type` says.
mod types {
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const BYTE: i32 = 6;
}

/// The character that stands for a space in vocabularies of SentencePiece.
const SPACE: &str = "\u{2581}";

pub fn load(keys: &Keys) -> Result<Tokenizer> {
    let tokens: &Strings = keys.require("tokenizer.ggml.tokens")?;
    let kinds = kinds(keys, tokens)?;
    let mut loaded = match keys.require("tokenizer.ggml.model")? {
        "gpt2" => byte_pairs(keys, tokens, &kinds)?,
        "llama" => sentence_piece(keys, tokens, &kinds)?,
        other => {
            let expected = "`gpt2` or `llama`";
            return Err(Error::tokenizer(keys.file(), "model", expected, format!("`{other}`")));
        }
    };
    add_tokens(&mut loaded.tokenizer, tokens, &kinds);
    let vocabulary = &mut loaded.vocabulary;
    for name in ["eos", "eot", "eom"] {
        vocabulary.final_ids.extend(special_id(keys, name, tokens.len())?);
    }
    if keys.get("tokenizer.ggml.add_bos_token")?.unwrap_or(loaded.add_bos) {
        vocabulary.first = special_id(keys, "bos", tokens.len())?;
    }
    Ok(Tokenizer::new(loaded.tokenizer, loaded.vocabulary))
}

struct Loaded {
    tokenizer: tokenizers::Tokenizer,
    vocabulary: Vocabulary,
    add_bos: bool,
}

/// The type of each token.
fn kinds(keys: &Keys, tokens: &Strings) -> Result<Vec<i32>> {
    let key = "tokenizer.ggml.token_type";
    let kinds = keys.get::<&[i32]>(key)?.map_or_else(|| vec![1; tokens.len()], <[i32]>::to_vec);
    if kinds.len() != tokens.len() {
        let expected = format!("as many types as tokens, {}", tokens.len());
        return Err(Error::tokenizer(keys.file(), format!("key `{key}`"), expected, kinds.len().to_string()));
    }
    Ok(kinds)
}

/// The id under `tokenizer.ggml.<name>_token_id`, if there is one.
pub fn special_id(keys: &Keys, name: &str, tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    let Some(id) = keys.get::<u32>(&key)? else { return Ok(None) };
    if id as usize >= tokens {
        let expected = format!("one of {tokens} tokens");
        return Err(Error::tokenizer(keys.file(), format!("key `{key}`"), expected, id.to_string()));
    }
    Ok(Some(id))
}

fn is_control(kind: i32) -> bool {
    kind == types::CONTROL || kind == types::UNKNOWN
}

fn byte_pairs(keys: &Keys, tokens: &Strings, kinds: &[i32]) -> Result<Loaded> {
    let file = keys.file();
    let name: &str = keys.require("tokenizer.ggml.pre")?;
    let pre = Pre::named(name).ok_or_else(|| {
        let expected = format!("one of {}", KNOWN.join(", "));
        Error::tokenizer(file, "key `tokenizer.ggml.pre`", expected, format!("`{name}`"))
    })?;
    let mut vocabulary = Vocabulary::default();
    for (token, kind) in tokens.iter().zip(kinds) {
        let kind = match *kind {
            kind if is_control(kind) => Kind::Control,
            types::USER_DEFINED => {
                vocabulary.push(token, token.as_bytes(), Kind::Text);
                continue;
            }
            _ => Kind::Text,
        };
        // Names of control tokens are written as they are, other tokens with characters that stand for bytes.
        let bytes = if kind == Kind::Text { byte_level::bytes_of(token) } else { None };
        vocabulary.push(token, bytes.as_deref().unwrap_or(token.as_bytes()), kind);
    }
    let ids: Vocab = tokens.iter().enumerate().map(|(id, token)| (token.to_owned(), id as u32)).collect();
    let lines: &Strings = keys.require("tokenizer.ggml.merges")?;
    let mut merges = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        // The first character can be a space itself, where a vocabulary writes spaces as they are.
        let cut = line.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let pair = cut.map(|at| (line[..at].to_owned(), line[at + 1..].to_owned()));
        let known = |(a, b): &(String, String)| {
            ids.contains_key(a) && ids.contains_key(b) && ids.contains_key(&format!("{a}{b}"))
        };
        // The library takes it for granted that merged pairs are tokens.
        merges.push(pair.filter(known).ok_or_else(|| {
            let what = format!("key `tokenizer.ggml.merges`, pair {i}");
            Error::tokenizer(file, what, "two tokens that make a third", format!("{line:?}"))
        })?);
    }
    // No token for what is unknown: bytes without a token are dropped, instead of becoming an end token.
    let model = BPE::builder().vocab_and_merges(ids, merges).ignore_merges(pre.ignore_merges).build();
    let failed = |error: tokenizers::Error| {
        Error::tokenizer(file, "vocabulary", "a model of byte pairs", error.to_string())
    };
    let mut tokenizer = tokenizers::Tokenizer::new(model.map_err(failed)?);
    tokenizer.with_pre_tokenizer(Some(pre.build().map_err(failed)?));
    Ok(Loaded { tokenizer, vocabulary, add_bos: pre.add_bos })
}

/// SentencePiece's byte pairs: of all neighbours that make a token, the one with the best score is merged first.
fn sentence_piece(keys: &Keys, tokens: &Strings, kinds: &[i32]) -> Result<Loaded> {
    let file = keys.file();
    let scores: &[f32] = keys.require("tokenizer.ggml.scores")?;
    if scores.len() != tokens.len() {
        let expected = format!("as many scores as tokens, {}", tokens.len());
        let what = "key `tokenizer.ggml.scores`";
        return Err(Error::tokenizer(file, what, expected, scores.len().to_string()));
    }
    let mut vocabulary = Vocabulary::default();
    for (token, &kind) in tokens.iter().zip(kinds) {
        if is_control(kind) {
            vocabulary.push(token, token.as_bytes(), Kind::Control);
        } else if kind == types::BYTE {
            let byte = hexadecimal_byte(token).ok_or_else(|| {
                Error::tokenizer(file, "token of a byte", "`<0x00>` to `<0xFF>`", format!("{token:?}"))
            })?;
            vocabulary.push(token, &[byte], Kind::Text);
        } else {
            vocabulary.push(token, token.replace(SPACE, " ").as_bytes(), Kind::Text);
        }
    }
    let ids: Vocab = tokens.iter().enumerate().map(|(id, token)| (token.to_owned(), id as u32)).collect();
    let mut ranked: Vec<(usize, usize)> = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        if is_control(kinds[id]) || kinds[id] == types::BYTE {
            continue;
        }
        let cuts = token.char_indices().skip(1).map(|(at, _)| at);
        ranked.extend(
            cuts.filter(|&at| ids.contains_key(&token[..at]) && ids.contains_key(&token[at..]))
                .map(|at| (id, at)),
        );
    }
    // Stable: tokens with equal scores keep their order.
    ranked.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]));
    let pair = |(id, at): (usize, usize)| {
        let token = tokens.get(id).expect("it was taken from here");
        (token[..at].to_owned(), token[at..].to_owned())
    };
    let merges = ranked.into_iter().map(pair).collect();
    let mut builder = BPE::builder().vocab_and_merges(ids, merges).byte_fallback(true).fuse_unk(true);
    if let Some(id) = special_id(keys, "unknown", tokens.len())? {
        builder = builder.unk_token(tokens.get(id as usize).expect("the id is checked").to_owned());
    }
    let failed = |error: tokenizers::Error| {
        Error::tokenizer(file, "vocabulary", "a model of byte pairs", error.to_string())
    };
    let mut tokenizer = tokenizers::Tokenizer::new(builder.build().map_err(failed)?);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if keys.get("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
        steps.push(Prepend::new(SPACE.into()).into());
    }
    steps.push(Replace::new(" ", SPACE).map_err(failed)?.into());
    tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(failed)?;
    Ok(Loaded { tokenizer, vocabulary, add_bos: true })
}

/// The byte that `<0x1F>` stands for.
pub fn hexadecimal_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // `from_str_radix` would take a sign.
    let is_byte = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_byte.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Tokens that are found in the text before it is cut into words.
fn add_tokens(tokenizer: &mut tokenizers::Tokenizer, tokens: &Strings, kinds: &[i32]) {
    let with = |wanted: fn(i32) -> bool, special: bool| {
        let chosen =
            tokens.iter().zip(kinds).filter(move |(token, kind)| wanted(**kind) && !token.is_empty());
        chosen.map(move |(token, _)| AddedToken::from(token, special).normalized(false)).collect::<Vec<_>>()
    };
    // Both are in the vocabulary already, so they keep their ids and nothing can fail.
    let _ = tokenizer.add_special_tokens(with(is_control, true));
    let _ = tokenizer.add_tokens(with(|kind| kind == types::USER_DEFINED, false));
}
