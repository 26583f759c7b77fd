//! A sequence: a prompt and one output that grows behind it.

use crate::pages::Held;
use crate::request::{RequestId, Salt};

/// The order in which sequences are served: by priority, then by arrival. It is also their name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The request's priority; lower is served first.
    pub priority: i32,
    /// The request.
    pub request: RequestId,
    /// Which of its outputs.
    pub index: usize,
}

/// What the scheduler knows of a sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its name and rank.
    pub key: Key,
    /// All tokens that are known: the prompt and the output so far.
    pub tokens: Vec<i32>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// The most tokens it may have in the end.
    pub max_len: usize,
    /// Tokens whose keys and values are stored in its pages. Catches up with `tokens`.
    pub computed: usize,
    /// Of these, the ones after which the model gave logits that were all numbers. Only they may be shared.
    pub verified: usize,
    /// Its pages; none unless it is running.
    pub held: Held,
    /// Tokens that were found in the cache when it was first admitted.
    pub cached_tokens: Option<usize>,
    /// How often it lost its pages.
    pub preemptions: usize,
    /// It shares cached prefixes with sequences of the same salt.
    pub salt: Option<Salt>,
    /// The number of its adapter.
    pub adapter: Option<usize>,
}

impl Sequence {
    /// A sequence that has only its prompt.
    pub fn new(key: Key, prompt: Vec<i32>, max_len: usize) -> Sequence {
        Sequence {
            key,
            prompt_len: prompt.len(),
            tokens: prompt,
            max_len,
            computed: 0,
            verified: 0,
            held: Held::default(),
            cached_tokens: None,
            preemptions: 0,
            salt: None,
            adapter: None,
        }
    }

    /// Tokens that are known and not computed yet.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Keys and values it will have stored if it reaches its full length: the last token needs none.
    pub fn most_stored(&self) -> usize {
        self.max_len - 1
    }
}
