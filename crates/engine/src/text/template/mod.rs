//! Chat templates: Jinja as transformers renders it, within limits.
//!
//! A template comes with a model, and models come from anywhere: no template may abort the process, or take it over for
//! long. `compile` puts checks into its instructions, `builtins` before everything it can call; `weigh` knows how large
//! values are, and `meter` counts. All of it runs on a thread with a stack of its own.

mod builtins;
mod compile;
pub(super) mod meter;
mod weigh;

use super::chat::Chat;
use super::error::{Error, Result};
use super::from_gguf::special_id;
use super::from_json::{optional_json, special_name};
use super::python;
use super::tokenizer::folder_of;
use crate::weights::{Checkpoint, Keys, Metadata, Strings, read_limited};
use minijinja::machinery::{Vm, make_string_output};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::{Map, Value};
use std::path::Path;
use std::time::Duration;

/// Instructions of a template, checks included: some thousand times what a long conversation takes.
const FUEL: u64 = 20_000_000;
/// Time of a rendering, some hundred times what a long conversation takes.
const TIME: Duration = Duration::from_secs(2);
/// Bytes of a rendered prompt.
const MAX_OUTPUT: usize = 32 << 20;
/// Bytes of a single value.
const MAX_VALUE: usize = 32 << 20;
/// Bytes of all values that a rendering makes, and this many times the bytes of the chat.
const ROOM: usize = 64 << 20;
const ROOM_OF_CHAT: usize = 8;
/// Lists in lists, counted from the outside.
const MAX_DEPTH: usize = 200;
/// Bytes of a template: ten times the longest that models have.
const MAX_SOURCE: usize = 256 << 10;
/// Tokens of one tag.
const MAX_TAG: usize = 8192;
/// All `elif`s of a template.
const MAX_ELIFS: usize = 1000;
/// Operators and calls inside one another.
const MAX_NESTING: usize = 500;
/// Bytes of a constant that the compiler computes.
const MAX_FOLDED: usize = 64 << 10;
/// Stack of the thread: enough for all of these depths, without optimisation too.
const STACK: usize = 64 << 20;
/// Characters of a message about a template.
const MAX_MESSAGE: usize = 1000;

/// Tokens whose names templates use, with the names of GGUF's keys.
const TOKENS: [(&str, &str); 4] =
    [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];

/// The chat template of a model. Rendering gives the bytes that transformers gives.
///
/// A template comes with a model, never with a request. It can read nothing but what it is given. Its length and nesting,
/// and the memory, time, instructions and output of a rendering are limited: one that takes more is refused with
/// [`Error::TemplateLimit`].
pub struct ChatTemplate {
    source: String,
    /// Used instead when there are tools.
    with_tools: Option<String>,
    /// Names of special tokens.
    tokens: Map<String, Value>,
    environment: Environment<'static>,
    fuel: u64,
    max_output: usize,
}

impl ChatTemplate {
    /// The template that belongs to weights, if there is one: in the keys of a GGUF file, or in `chat_template.jinja` or
    /// `tokenizer_config.json` beside safetensors.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>> {
        match checkpoint.metadata() {
            Metadata::Gguf(keys) => from_gguf(keys),
            Metadata::Config(_) => from_folder(folder_of(checkpoint)),
        }
    }

    /// A template from its source. `tokens` are further variables it may use, such as `bos_token`.
    ///
    /// # Errors
    /// If it is not a template.
    pub fn new(source: &str, tokens: Map<String, Value>) -> Result<ChatTemplate> {
        let template = ChatTemplate {
            source: without_generation_tags(source),
            with_tools: None,
            tokens,
            environment: builtins::environment(),
            fuel: FUEL,
            max_output: MAX_OUTPUT,
        };
        metered(ROOM, || compile::compile(&template.source).map(drop))?;
        Ok(template.limited(FUEL, MAX_OUTPUT))
    }

    /// Another template for chats with tools.
    fn with_tools(mut self, source: Option<&str>) -> Result<ChatTemplate> {
        self.with_tools = source.map(without_generation_tags);
        if let Some(source) = &self.with_tools {
            metered(ROOM, || compile::compile(source).map(drop))?;
        }
        Ok(self)
    }

    /// With other limits on the number of instructions and the bytes of the output.
    pub fn limited(mut self, fuel: u64, max_output: usize) -> ChatTemplate {
        (self.fuel, self.max_output) = (fuel, max_output);
        self.environment.set_fuel(Some(fuel));
        self
    }

    /// The text of a chat.
    ///
    /// # Errors
    /// If the template refuses the chat, or takes more than its limits.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        let is_list =
            |value: &Value| value.as_array().is_some_and(|values| values.iter().all(Value::is_object));
        if !is_list(&chat.messages) {
            let (expected, got) = ("an array of objects".into(), kind_of(&chat.messages).into());
            return Err(Error::Argument { what: "messages", expected, got });
        }
        let has_tools =
            chat.tools.as_ref().is_some_and(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty()));
        let source = self.with_tools.as_ref().filter(|_| has_tools).unwrap_or(&self.source);
        let mut variables = self.tokens.clone();
        variables.insert("messages".into(), chat.messages.clone());
        variables.insert("tools".into(), chat.tools.clone().into());
        variables.insert("documents".into(), chat.documents.clone().into());
        variables.insert("add_generation_prompt".into(), chat.add_generation_prompt.into());
        variables.extend(chat.options.clone());
        let variables = Value::Object(variables);
        let room = ROOM.saturating_add(bytes_in(&variables).saturating_mul(ROOM_OF_CHAT));
        let output = metered(room, || self.run(source, &variables)).map_err(|error| match error {
            Error::TemplateLimit { what: OUT_OF_FUEL, .. } => {
                Error::TemplateLimit { what: OUT_OF_FUEL, limit: self.fuel }
            }
            error => error,
        })?;
        if output.len() > self.max_output {
            return Err(Error::TemplateLimit { what: "output in bytes", limit: self.max_output as u64 });
        }
        Ok(output)
    }

    fn run(&self, source: &str, variables: &Value) -> Result<String, minijinja::Error> {
        let program = compile::compile(source)?;
        let variables = weigh::from_json(variables)?;
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let machine = Vm::new(&self.environment);
        machine.eval(&program.main, variables, &program.blocks, &mut output, AutoEscape::None)?;
        drop(output);
        Ok(text)
    }
}

/// The limit that a template without fuel has exceeded.
const OUT_OF_FUEL: &str = "number of instructions";

/// Does work that is limited, on a thread with enough stack.
fn metered<T: Send>(room: usize, work: impl FnOnce() -> Result<T, minijinja::Error> + Send) -> Result<T> {
    let counted = || {
        meter::start(room, TIME);
        let result = work();
        let exceeded = meter::finish();
        result.map_err(|error| match exceeded {
            Some((what, limit)) => Error::TemplateLimit { what, limit },
            None if is_out_of_fuel(&error) => Error::TemplateLimit { what: OUT_OF_FUEL, limit: FUEL },
            None => explain(&error),
        })
    };
    let failed = |why: &str| Error::Template(format!("rendering failed: {why}"));
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, counted).map_err(|error| failed(&error.to_string()))?;
        // It ends: its instructions are limited, and so is what each of them takes.
        thread.join().unwrap_or_else(|_| Err(failed("a fault of the renderer")))
    })
}

/// Bytes of text in a value, and some for everything else.
fn bytes_in(value: &Value) -> usize {
    const EACH: usize = 32;
    EACH + match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(bytes_in).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + bytes_in(value)).sum(),
        _ => 0,
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.source.len())
    }
}

fn from_gguf(keys: &Keys) -> Result<Option<ChatTemplate>> {
    let Some(source) = keys.get::<&str>("tokenizer.chat_template")? else { return Ok(None) };
    let mut tokens = Map::new();
    if let Some(names) = keys.get::<&Strings>("tokenizer.ggml.tokens")? {
        for (variable, key) in TOKENS {
            let id = special_id(keys, key, names.len())?;
            if let Some(name) = id.and_then(|id| names.get(id as usize)) {
                tokens.insert(variable.into(), name.into());
            }
        }
    }
    let with_tools = keys.get::<&str>("tokenizer.chat_template.tool_use")?;
    ChatTemplate::new(source, tokens)?.with_tools(with_tools).map(Some)
}

fn from_folder(folder: &Path) -> Result<Option<ChatTemplate>> {
    let config = optional_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
    let mut tokens = Map::new();
    for (variable, _) in TOKENS {
        if let Some(name) = special_name(&config, variable) {
            tokens.insert(variable.into(), name.into());
        }
    }
    let file = folder.join("chat_template.jinja");
    if file.is_file() {
        let source =
            String::from_utf8(read_limited(&file)?).map_err(|error| Error::Template(error.to_string()))?;
        return ChatTemplate::new(&source, tokens).map(Some);
    }
    match &config["chat_template"] {
        Value::String(source) => ChatTemplate::new(source, tokens).map(Some),
        Value::Array(named) => {
            let find = |name: &str| named.iter().find(|entry| entry["name"] == name)?["template"].as_str();
            let Some(source) = find("default") else { return Ok(None) };
            ChatTemplate::new(source, tokens)?.with_tools(find("tool_use")).map(Some)
        }
        _ => Ok(None),
    }
}

fn is_out_of_fuel(error: &minijinja::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    std::iter::from_fn(|| {
        let current = cause?;
        cause = current.source();
        Some(current)
    })
    .any(|cause| {
        cause.downcast_ref::<minijinja::Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel)
    })
}

fn explain(error: &minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let message = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    let shown: String = message.chars().take(MAX_MESSAGE).collect();
    let more = if shown.len() < message.len() { "..." } else { "" };
    Error::Template(format!("{shown}{more}{line}"))
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Array(_) => "an array with something else",
        Value::Object(_) => "an object",
        Value::String(_) => "a string",
        _ => "another value",
    }
}

/// The template with `{% generation %}`, which marks the model's own text for training, as a block that changes nothing.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            out.push_str(tag);
            return out;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = tag[2..tag.len() - 2].trim_matches(['-', '+', ' ', '\n', '\t', '\r']);
        match inside {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, chat: &Chat) -> Result<String> {
        ChatTemplate::new(source, Map::new())?.render(chat)
    }

    fn empty() -> Chat {
        Chat::new(json!([]))
    }

    #[test]
    fn instructions_and_output_are_limited() {
        let endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(endless, Map::new()).unwrap().limited(100_000, 1000);
        let error = template.render(&empty()).unwrap_err();
        assert!(matches!(error, Error::TemplateLimit { limit: 100_000, .. }), "{error}");
        let long = "{% for i in range(9999) %}aaaaaaaaaa{% endfor %}";
        let template = ChatTemplate::new(long, Map::new()).unwrap().limited(100_000, 1000);
        let error = template.render(&empty()).unwrap_err();
        assert!(matches!(error, Error::TemplateLimit { what: "output in bytes", .. }), "{error}");
        let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(render(deep, &empty()).is_err());
    }

    #[test]
    fn templates_refuse_with_their_own_words() {
        let error =
            render("{{ raise_exception('roles must alternate') }}", &empty()).unwrap_err().to_string();
        assert_eq!(error, "chat template: roles must alternate (line 1)");
        let error = ChatTemplate::new("{% if %}", Map::new()).unwrap_err().to_string();
        assert!(error.starts_with("chat template: ") && error.contains("(line 1)"), "{error}");
        let error = render("", &Chat::new(json!({"role": "user"}))).unwrap_err().to_string();
        assert_eq!(error, "messages: expected an array of objects, got an object");
    }

    #[test]
    fn generation_blocks_change_nothing() {
        let source = "a {%- generation -%} b {% endgeneration %} c {% if x %}generation{% endif %}";
        assert_eq!(render(source, &empty()).unwrap(), "ab  c ");
    }
}
