//! From the messages of a request to a prompt.

use crate::bridge::Facts;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::Form;
use crate::options::Limits;
use crate::output::{CallForm, Start};
use serde_json::{Map, Value, json};
use warpsmith_engine::text::{Chat, Error as TextError};

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
    /// What it does.
    pub description: Option<String>,
    /// Whether the request wants its arguments to fit the schema.
    pub strict: bool,
}

/// Which tools the model may, or must, call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// None.
    None,
    /// As it likes.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A rendered prompt.
pub struct Prompt {
    /// Its tokens.
    pub ids: Vec<i32>,
    /// Where it leaves the reasoning.
    pub start: Start,
}

/// Variables of templates that requests must not set: they are made from other fields.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
];

/// The messages of a chat, as templates expect them.
///
/// # Errors
/// Names the message and field that is wrong.
pub fn messages(fields: &Fields<'_>, limits: &Limits) -> Result<Vec<Value>> {
    fields.required("messages")?;
    let list = fields.list("messages", limits.max_messages)?.unwrap_or_default();
    if list.is_empty() {
        return Err(fields.error("messages", "expected at least one message, got an empty list"));
    }
    list.iter().enumerate().map(|(i, value)| message(value, format!("messages[{i}]"))).collect()
}

fn message(value: &Value, path: String) -> Result<Value> {
    let fields = Fields::of(value, path)?;
    fields.required("role")?;
    let roles = ["system", "developer", "user", "assistant", "tool"];
    let role = fields.choice("role", &roles)?.unwrap_or_default();
    let mut message = Map::new();
    // Templates know no developer.
    message.insert("role".into(), if role == "developer" { "system" } else { role }.into());
    let calls = tool_calls(&fields, role)?;
    let content = match fields.get("content") {
        None if calls.is_some() || (role == "assistant" && fields.get("reasoning_content").is_some()) => {
            String::new()
        }
        None => return Err(fields.error("content", "is missing")),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let part = |(i, part)| text_part(part, format!("{}[{i}]", fields.path("content")));
            parts.iter().enumerate().map(part).collect::<Result<Vec<String>>>()?.join("\n")
        }
        Some(other) => {
            return Err(ApiError::value(fields.path("content"), "a string or a list of parts", other));
        }
    };
    message.insert("content".into(), content.into());
    for name in ["reasoning_content", "name", "tool_call_id"] {
        if let Some(text) = fields.text(name, usize::MAX)? {
            message.insert(name.into(), text.into());
        }
    }
    if role == "tool" && fields.get("tool_call_id").is_none() {
        return Err(fields.error("tool_call_id", "is missing"));
    }
    fields.refuse_unsupported(&["function_call", "audio"])?;
    if let Some(calls) = calls {
        message.insert("tool_calls".into(), calls);
    }
    Ok(Value::Object(message))
}

fn text_part(value: &Value, path: String) -> Result<String> {
    let part = Fields::of(value, path)?;
    part.required("type")?;
    match part.choice("type", &["text", "input_text", "output_text"])? {
        Some(_) => {
            part.required("text")?;
            Ok(part.text("text", usize::MAX)?.unwrap_or_default().to_owned())
        }
        None => Err(part.error("type", "expected \"text\"")),
    }
}

/// The calls of an assistant's message. Templates want arguments as objects.
fn tool_calls(fields: &Fields<'_>, role: &str) -> Result<Option<Value>> {
    let Some(list) = fields.list("tool_calls", 128)? else { return Ok(None) };
    if role != "assistant" {
        return Err(fields.error("tool_calls", "only messages of the assistant have them"));
    }
    if list.is_empty() {
        return Ok(None);
    }
    let mut calls = Vec::new();
    for (i, value) in list.iter().enumerate() {
        let call = Fields::of(value, format!("{}[{i}]", fields.path("tool_calls")))?;
        call.choice("type", &["function"])?;
        let Some(function) = call.object("function")? else {
            return Err(call.error("function", "is missing"));
        };
        function.required("name")?;
        let name = function.text("name", 256)?.unwrap_or_default();
        let arguments = match function.get("arguments") {
            None => json!({}),
            Some(Value::String(text)) if text.trim().is_empty() => json!({}),
            Some(Value::String(text)) => match serde_json::from_str::<Value>(text) {
                Ok(arguments) if arguments.is_object() => arguments,
                _ => return Err(function.error("arguments", "expected a JSON object in a string")),
            },
            Some(arguments) if arguments.is_object() => arguments.clone(),
            Some(other) => {
                return Err(ApiError::value(function.path("arguments"), "a JSON object in a string", other));
            }
        };
        let id = call.text("id", 256)?;
        calls.push(json!({
            "type": "function", "id": id, "function": { "name": name, "arguments": arguments },
        }));
    }
    Ok(Some(Value::Array(calls)))
}

/// The tools of a request: as templates want them, and as the server does.
///
/// # Errors
/// Names the tool and field that is wrong.
pub fn tools(fields: &Fields<'_>, limits: &Limits) -> Result<(Vec<Value>, Vec<Tool>)> {
    fields.refuse_unsupported(&["functions", "function_call"])?;
    let (mut values, mut tools) = (Vec::new(), Vec::<Tool>::new());
    for (i, value) in fields.list("tools", limits.max_tools)?.unwrap_or_default().iter().enumerate() {
        let tool = Fields::of(value, format!("tools[{i}]"))?;
        tool.required("type")?;
        tool.choice("type", &["function"])?;
        // The Responses API has the fields of the function in the tool itself.
        let function = tool.object("function")?.unwrap_or_else(|| tool.clone());
        if tool.get("function").is_none() && tool.get("name").is_none() {
            return Err(tool.error("function", "is missing"));
        }
        function.required("name")?;
        let name = function.text("name", 64)?.unwrap_or_default();
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_letter) {
            let got = json!(name);
            return Err(ApiError::value(function.path("name"), "letters, digits, `_`, `-` and `.`", &got));
        }
        if tools.iter().any(|tool| tool.name == name) {
            return Err(function.error("name", "another tool has the same name"));
        }
        let description = function.text("description", usize::MAX)?;
        let strict = function.flag("strict")?.unwrap_or(false);
        let path = function.path("parameters");
        let parameters = match function.get("parameters") {
            None => json!({ "type": "object", "properties": {} }),
            Some(schema) if schema.is_object() => {
                Form::Schema(schema.clone()).check(&path, limits)?;
                schema.clone()
            }
            Some(other) => return Err(ApiError::value(path, "a JSON schema, which is an object", other)),
        };
        let mut told = Map::new();
        told.insert("name".into(), name.into());
        if let Some(description) = description {
            told.insert("description".into(), description.into());
        }
        told.insert("parameters".into(), parameters.clone());
        values.push(json!({ "type": "function", "function": told }));
        let description = description.map(String::from);
        tools.push(Tool { name: name.to_owned(), parameters, description, strict });
    }
    Ok((values, tools))
}

/// Which tools may be called.
///
/// # Errors
/// If the field is wrong, or names an unknown tool.
pub fn tool_choice(fields: &Fields<'_>, tools: &[Tool]) -> Result<ToolChoice> {
    let named = |name: &str| match tools.iter().any(|tool| tool.name == name) {
        true => Ok(ToolChoice::Named(name.to_owned())),
        false => Err(ApiError::value("tool_choice", "the name of one of `tools`", &json!(name))),
    };
    let choice = match fields.get("tool_choice") {
        None => return Ok(if tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto }),
        Some(Value::String(_)) => match fields.choice("tool_choice", &["none", "auto", "required"])? {
            Some("none") => ToolChoice::None,
            Some("required") => ToolChoice::Required,
            _ => ToolChoice::Auto,
        },
        Some(value) => {
            let choice = Fields::of(value, "tool_choice".into())?;
            choice.required("type")?;
            choice.choice("type", &["function"])?;
            let function = choice.object("function")?.unwrap_or_else(|| choice.clone());
            function.required("name")?;
            return named(function.text("name", 256)?.unwrap_or_default());
        }
    };
    match choice {
        ToolChoice::Required if tools.is_empty() => Err(fields.error("tool_choice", "there are no `tools`")),
        ToolChoice::Auto if tools.is_empty() => Ok(ToolChoice::None),
        choice => Ok(choice),
    }
}

/// What an answer must look like in which tools are called: one, or as many as the model likes.
pub fn forced_calls(form: CallForm, tools: &[Tool], choice: &ToolChoice, several: bool) -> Option<Form> {
    let chosen: Vec<&Tool> = match choice {
        ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Named(name) => tools.iter().filter(|tool| tool.name == *name).collect(),
        ToolChoice::None | ToolChoice::Auto => return None,
    };
    let key = if form == CallForm::Tagged { "arguments" } else { "parameters" };
    let call = |tool: &&Tool| {
        json!({
            "type": "object",
            "properties": { "name": { "const": tool.name }, key: tool.parameters },
            "required": ["name", key],
            "additionalProperties": false,
        })
    };
    let calls: Vec<Value> = chosen.iter().map(call).collect();
    let several = several && matches!(choice, ToolChoice::Required);
    let (open, close, between) = match form {
        CallForm::Tagged => ("\"<tool_call>\\n\" ", " \"\\n</tool_call>\"", "\"\\n\""),
        CallForm::Bare { .. } => ("", "", "\"; \""),
    };
    let objects: Vec<String> = (0..calls.len()).map(|i| format!("object{i}")).collect();
    let mut lark = format!(
        "start: call{}\ncall: {open}object{close}\nobject: {}\n",
        if several { format!(" ({between} call)*") } else { String::new() },
        objects.join(" | ")
    );
    for (name, schema) in objects.iter().zip(&calls) {
        lark += &format!("{name}: %json {}\n", crate::grammar::laid_out(schema));
    }
    Some(Form::Lark(lark))
}

/// A chat from the fields of a request.
///
/// # Errors
/// If a field is wrong.
pub fn chat(fields: &Fields<'_>, messages: Vec<Value>, tools: Vec<Value>) -> Result<Chat> {
    let mut chat = Chat::new(Value::Array(messages));
    chat.tools = (!tools.is_empty()).then_some(Value::Array(tools));
    chat.add_generation_prompt = fields.flag("add_generation_prompt")?.unwrap_or(true);
    if let Some(documents) = fields.list("documents", 1024)? {
        if let Some(i) = documents.iter().position(|document| !document.is_object()) {
            return Err(ApiError::value(format!("documents[{i}]"), "an object", &documents[i]));
        }
        chat.documents = Some(Value::Array(documents.to_vec()));
    }
    if let Some(options) = fields.object("chat_template_kwargs")? {
        for name in options.names() {
            if RESERVED.contains(&name.as_str()) {
                return Err(options.error(name, "is made from other fields"));
            }
            if let Some(value) = options.get(name) {
                chat.options.insert(name.clone(), value.clone());
            }
        }
    }
    fields.refuse_unsupported(&["chat_template", "continue_final_message"])?;
    Ok(chat)
}

/// Bytes of text for each token of room, beyond which a sample of it is encoded first.
const LONG: usize = 16;

/// Refuses texts that are far too long after encoding a part of them: encoding all would take seconds.
fn check_length<'a>(facts: &Facts, texts: impl Iterator<Item = &'a str>, field: &str) -> Result<()> {
    let (most, mut sample) = (facts.room * LONG, String::new());
    for text in texts {
        let left = most + 1 - sample.len();
        sample.push_str(&text[..text.floor_char_boundary(left)]);
        if sample.len() + 4 > most {
            break;
        }
    }
    let Some(tokenizer) = facts.tokenizer.as_ref().filter(|_| sample.len() + 4 > most) else { return Ok(()) };
    let tokens = tokenizer.encode(&sample).map_err(|error| ApiError::field(field, error))?.len();
    // What follows can change the last tokens of a part, but never half of them.
    if tokens <= 2 * facts.room {
        return Ok(());
    }
    let told = format!("has more than {} tokens; at most {} are possible", 2 * facts.room, facts.room - 1);
    Err(ApiError::field(field, told).code("context_length_exceeded"))
}

/// Renders and encodes a chat. This takes time: it belongs on a thread that may wait.
///
/// # Errors
/// If the model has no template, or it refuses the chat.
pub fn render(facts: &Facts, chat: &Chat) -> Result<Prompt> {
    let (Some(tokenizer), Some(template)) = (&facts.tokenizer, &facts.template) else {
        return Err(ApiError::field("messages", "this model has no chat template; use /v1/completions"));
    };
    let messages = chat.messages.as_array().map(Vec::as_slice).unwrap_or_default();
    check_length(facts, messages.iter().filter_map(|message| message["content"].as_str()), "messages")?;
    let prompt = tokenizer.encode_chat(template, chat).map_err(|error| match error {
        TextError::Template(_) | TextError::TemplateLimit { .. } | TextError::Argument { .. } => {
            ApiError::field("messages", error)
        }
        other => ApiError::server(other.to_string()),
    })?;
    let start = Start::of(&prompt.text);
    Ok(Prompt { ids: prompt.ids.into_iter().map(|id| id as i32).collect(), start })
}

/// Encodes a text, with the token that prompts of the model begin with.
///
/// # Errors
/// If the model has no tokenizer.
pub fn encode(facts: &Facts, text: &str, field: &str, first: bool) -> Result<Vec<i32>> {
    let Some(tokenizer) = &facts.tokenizer else {
        return Err(ApiError::field(field, "this model has no tokenizer: expected token ids"));
    };
    check_length(facts, std::iter::once(text), field)?;
    let ids = tokenizer.encode(text).map_err(|error| ApiError::field(field, error))?;
    let first = tokenizer.first().filter(|_| first);
    Ok(first.into_iter().chain(ids).map(|id| id as i32).collect())
}
