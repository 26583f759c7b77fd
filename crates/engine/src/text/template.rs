//! Chat templates: Jinja as transformers renders it.

use super::chat::Chat;
use super::error::{Error, Result};
use super::from_gguf::special_id;
use super::from_json::{optional_json, special_name};
use super::python;
use super::tokenizer::folder_of;
use crate::weights::{Checkpoint, Keys, Metadata, Strings, read_limited};
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value};
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Instructions of a template: some thousand times what a long conversation takes.
const FUEL: u64 = 20_000_000;
/// Bytes of a rendered prompt.
const MAX_OUTPUT: usize = 32 << 20;

/// Tokens whose names templates use, with the names of GGUF's keys.
const TOKENS: [(&str, &str); 4] =
    [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")];

/// The chat template of a model. Rendering gives the bytes that transformers gives.
///
/// A template comes with a model, never with a request. It can read nothing but what it is given. Its instructions and its
/// output are limited; memory of strings it builds inside is not, so models should come from somewhere one trusts.
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
            environment: environment(),
            fuel: FUEL,
            max_output: MAX_OUTPUT,
        };
        template.environment.template_from_named_str("chat", &template.source).map_err(explain)?;
        Ok(template)
    }

    /// Another template for chats with tools.
    fn with_tools(mut self, source: Option<&str>) -> Result<ChatTemplate> {
        self.with_tools = source.map(without_generation_tags);
        if let Some(source) = &self.with_tools {
            self.environment.template_from_named_str("chat", source).map_err(explain)?;
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
        let template = self.environment.template_from_named_str("chat", source).map_err(explain)?;
        let mut variables = self.tokens.clone();
        variables.insert("messages".into(), chat.messages.clone());
        variables.insert("tools".into(), chat.tools.clone().into());
        variables.insert("documents".into(), chat.documents.clone().into());
        variables.insert("add_generation_prompt".into(), chat.add_generation_prompt.into());
        variables.extend(chat.options.clone());
        let mut output = Limited { bytes: Vec::new(), most: self.max_output, is_full: false };
        match template.render_captured_to(&variables, &mut output) {
            Ok(_) => String::from_utf8(output.bytes).map_err(|error| Error::Template(error.to_string())),
            Err(_) if output.is_full => {
                Err(Error::TemplateLimit { what: "output in bytes", limit: self.max_output as u64 })
            }
            Err(error) if is_out_of_fuel(&error) => {
                Err(Error::TemplateLimit { what: "number of instructions", limit: self.fuel })
            }
            Err(error) => Err(explain(error)),
        }
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

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| python::write_value(out, value));
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", |value: &minijinja::Value| python::text_of(value));
    environment.add_filter("items", python::items);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("sequence", python::is_sequence);
    environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs());
        python::strftime(now, format)
    });
    environment
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

fn explain(error: minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let message = error.detail().map_or_else(|| error.kind().to_string(), ToOwned::to_owned);
    Error::Template(format!("{message}{line}"))
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

/// Bytes up to a limit.
struct Limited {
    bytes: Vec<u8>,
    most: usize,
    is_full: bool,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.most - self.bytes.len() {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
