//! What is known about each token.

use std::collections::BTreeSet;

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A piece of text.
    Text,
    /// A sign for the model, such as the end of a turn. It is no text.
    Control,
}

/// The tokens by their ids.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// The bytes of all tokens.
    bytes: Vec<u8>,
    /// For each token, where it ends in `bytes`.
    ends: Vec<usize>,
    kinds: Vec<Kind>,
    /// Names and ids of control tokens.
    pub controls: Vec<(String, u32)>,
    /// The token that starts a prompt, if the model wants one.
    pub first: Option<u32>,
    /// Tokens after which a model has no more to say.
    pub final_ids: BTreeSet<u32>,
}

/// Control tokens that end an answer or a turn, whatever the rest of a file says.
const FINAL_NAMES: [&str; 14] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "</s>",
];

impl Vocabulary {
    /// Adds the next token. `name` is how it is written in the tokenizer, `bytes` the text it stands for.
    pub fn push(&mut self, name: &str, bytes: &[u8], kind: Kind) {
        if kind == Kind::Control {
            let id = self.ends.len() as u32;
            if FINAL_NAMES.contains(&name) {
                self.final_ids.insert(id);
            }
            self.controls.push((name.into(), id));
        }
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        self.kinds.push(kind);
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; none for an id that is no token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }

    pub fn is_control(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Control)
    }
}
