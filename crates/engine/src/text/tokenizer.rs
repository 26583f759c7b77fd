//! The tokenizer of a model.

use super::chat::{Chat, ChatPrompt};
use super::error::{Error, Result};
use super::marks::Marks;
use super::vocabulary::Vocabulary;
use super::{ChatTemplate, from_gguf, from_json};
use crate::weights::{Checkpoint, Metadata};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

/// Turns text into the ids of tokens, and ids into bytes.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    /// Takes names of control tokens in the text for these tokens.
    parsing: tokenizers::Tokenizer,
    /// Takes them for text. Made when it is needed first.
    plain: OnceLock<tokenizers::Tokenizer>,
}

impl Tokenizer {
    /// The tokenizer that belongs to weights: in the keys of a GGUF file, or in `tokenizer.json` beside safetensors.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Tokenizer> {
        match checkpoint.metadata() {
            Metadata::Gguf(keys) => from_gguf::load(keys),
            Metadata::Config(_) => Tokenizer::from_folder(folder_of(checkpoint)),
        }
    }

    /// The tokenizer in `tokenizer.json` of a folder, with what `tokenizer_config.json`, `generation_config.json` and
    /// `config.json` say about it, where they are there.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Tokenizer> {
        from_json::load(folder.as_ref())
    }

    pub(super) fn new(tokenizer: tokenizers::Tokenizer, vocabulary: Vocabulary) -> Tokenizer {
        Tokenizer { vocabulary, parsing: tokenizer, plain: OnceLock::new() }
    }

    /// The ids of a text from a user. Names of control tokens in it are text like any other. Nothing is added in front; see
    /// [`first`](Tokenizer::first).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let plain = self.plain.get_or_init(|| {
            let mut plain = self.parsing.clone();
            plain.set_encode_special_tokens(true);
            plain
        });
        ids(plain, text)
    }

    /// The ids of a text that is trusted, such as a template's. Names of control tokens in it become these tokens.
    pub fn encode_trusted(&self, text: &str) -> Result<Vec<u32>> {
        ids(&self.parsing, text)
    }

    /// Renders a chat and encodes it. Names of control tokens count in the text of the template alone: in messages they are
    /// text like any other, wherever the template puts them.
    pub fn encode_chat(&self, template: &ChatTemplate, chat: &Chat) -> Result<ChatPrompt> {
        let marks = Marks::new(&self.vocabulary.controls, chat)?;
        let rendered = template.render(&marks.protect(chat))?;
        let Some(pieces) = marks.pieces(&rendered) else {
            let ids = self.encode_trusted(&rendered)?;
            return Ok(ChatPrompt { text: rendered, ids });
        };
        let mut ids = Vec::new();
        for piece in pieces {
            match piece {
                super::marks::Piece::Control(id) => ids.push(id),
                super::marks::Piece::Text(text) => ids.extend(self.encode(&text)?),
            }
        }
        Ok(ChatPrompt { text: marks.remove(&rendered), ids })
    }

    /// The bytes a token stands for. They need not be whole characters: see [`TextStream`](super::TextStream). An id that is
    /// no token has none.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// The text of tokens, without control tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        let text = ids.iter().filter(|&&id| !self.is_control(id)).flat_map(|&id| self.bytes(id));
        let bytes: Vec<u8> = text.copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether a token is a sign for the model, not text.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocabulary.is_control(id)
    }

    /// The token that a prompt without a template starts with, if the model wants one.
    pub fn first(&self) -> Option<u32> {
        self.vocabulary.first
    }

    /// The tokens that end an answer. There can be several.
    pub fn final_ids(&self) -> &BTreeSet<u32> {
        &self.vocabulary.final_ids
    }

    /// Number of ids that stand for tokens. Logits can be wider: ids from here on must never be sampled.
    pub fn len(&self) -> usize {
        self.vocabulary.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The id of a token by its name, as the tokenizer writes it.
    pub fn id_of(&self, name: &str) -> Option<u32> {
        self.parsing.token_to_id(name)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.len())
    }
}

fn ids(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode_fast(text, false);
    let encoding = encoding.map_err(|e| Error::Encode { bytes: text.len(), cause: e.to_string() })?;
    Ok(encoding.get_ids().to_vec())
}

/// The folder in which the files beside the weights are.
pub(super) fn folder_of(checkpoint: &Checkpoint) -> &Path {
    let path = checkpoint.path();
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}
