//! The input of a chat template.

use serde_json::{Map, Value};

/// A conversation to be rendered.
#[derive(Debug, Clone, PartialEq)]
pub struct Chat {
    /// The messages, as a template expects them: an array of objects with `role` and `content`.
    pub messages: Value,
    /// Descriptions of tools the model may call.
    pub tools: Option<Value>,
    /// Documents the answer may rely on.
    pub documents: Option<Value>,
    /// Whether the prompt ends where the model's answer starts.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub options: Map<String, Value>,
}

impl Chat {
    /// A conversation that the model is to continue, without tools.
    pub fn new(messages: Value) -> Chat {
        Chat { messages, tools: None, documents: None, add_generation_prompt: true, options: Map::new() }
    }
}

/// A rendered and encoded conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
}
