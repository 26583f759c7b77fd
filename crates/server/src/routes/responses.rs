//! `/v1/responses`: the same model in the form of OpenAI's newer API. Nothing is stored.

use super::chat::{self, Choice, Delta, Reply, Shape, Whole, calls};
use super::generate::{self, Asked, Totals, Writer};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::Form;
use crate::http::{self, Events, named_event};
use crate::keys::Tenant;
use crate::mailbox::Chunk;
use crate::output::Piece;
use crate::prompt::{self, ToolChoice};
use crate::server::App;
use crate::{params, prompt::Tool};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

struct Ask {
    asked: Asked,
    stream: bool,
    shape: Shape,
    /// What the answer tells of the request.
    told: Value,
}

/// Answers a request.
pub async fn serve(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response> {
    let arrived = Instant::now();
    app.facts()?;
    let body = http::read_body(request, &app.options.limits).await?;
    app.check_room(1)?;
    let Ask { asked, stream, shape, told } =
        app.prepare(move |app| read(app, tenant, &http::parse(&body, &app.options.limits)?)).await?;
    let reply = Reply {
        app: app.clone(),
        totals: Totals::of_prompts(asked.prompt.len()),
        ignore_eos: asked.params.ignore_eos,
        stop_ids: asked.params.stop_ids.clone(),
        choices: vec![Choice::new(shape.splitter())],
        most_calls: shape.most_calls,
        logprobs: false,
        has_end: false,
    };
    let ticket = app.submit(vec![asked.job(&app, arrived, 0)], arrived)?;
    let mut writer =
        Items { reply, told, number: 0, items: Vec::new(), whole: Whole::default(), has_begun: false };
    if stream {
        let (events, response) = Events::new(app.options.limits.stall_timeout);
        tokio::spawn(generate::stream(ticket, writer, events));
        return Ok(response);
    }
    // The events make the items; nobody sees them.
    generate::collect(ticket, |chunks| writer.write(chunks, &mut String::new())).await?;
    writer.close(&mut String::new());
    Ok(http::json(&writer.response("completed")))
}

fn read(app: &App, tenant: Tenant, body: &Map<String, Value>) -> Result<Ask> {
    let (fields, facts, limits) = (Fields::new(body), app.facts()?, &app.options.limits);
    let model = generate::model(app, &fields)?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let (salt, priority) = generate::placing(app, tenant, &fields)?;
    generate::without_effect(&fields, limits)?;
    fields.refuse_unsupported(&[
        "previous_response_id",
        "conversation",
        "background",
        "prompt",
        "include",
    ])?;
    fields.choice("truncation", &["disabled"])?;
    if let Some(reasoning) = fields.object("reasoning")? {
        reasoning.choice("effort", &["none", "minimal", "low", "medium", "high", "xhigh"])?;
    }
    if let Some(options) = fields.object("stream_options")? {
        options.flag("include_obfuscation")?;
    }
    // Only tools that run in a server count, and there are none here.
    fields.count("max_tool_calls", 1..=i64::MAX)?;
    if fields.count("top_logprobs", 0..=20)?.is_some_and(|top| top > 0) {
        let told = "log-probabilities are not supported here; /v1/chat/completions has them";
        return Err(fields.error("top_logprobs", told).code("unsupported_parameter"));
    }
    let mut params = params::sampling(&fields, limits, facts)?;
    if params.n != 1 {
        return Err(fields.error("n", "a response has one output").code("unsupported_parameter"));
    }
    let length = params::max_tokens(&fields, &["max_output_tokens"])?;
    let instructions = fields.text("instructions", limits.max_body)?;
    let mut messages: Vec<Value> = Vec::new();
    if let Some(text) = instructions {
        messages.push(json!({ "role": "system", "content": text }));
    }
    messages.extend(input(&fields, limits.max_messages)?);
    let mut form = params::form(&fields, limits)?;
    if let Some(text) = fields.object("text")? {
        text.choice("verbosity", &["low", "medium", "high"])?;
        if let Some((own, path)) = format(&text)? {
            own.check(&path, limits)?;
            if let Some((_, other)) = form.replace((own, path)) {
                return Err(ApiError::field(other, "cannot be combined with `text.format`"));
            }
        }
    }
    let (values, tools) = prompt::tools(&fields, limits)?;
    let choice = prompt::tool_choice(&fields, &tools)?;
    let several = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    let shown = if choice == ToolChoice::None { Vec::new() } else { values };
    let wrapped: Map<String, Value> = Map::from_iter([("messages".to_owned(), Value::Array(messages))]);
    let messages = prompt::messages(&Fields::new(&wrapped), limits)
        .map_err(|error| ApiError::field("input", error.message))?;
    let rendered = prompt::render(facts, &prompt::chat(&fields, messages, shown)?).map_err(|error| {
        if error.param.is_some() { ApiError::field("input", error.message) } else { error }
    })?;
    params::fit(&mut params, &rendered.ids, "input", length, facts)?;
    let forms = app.forms(facts);
    let start = forms.reasoning.then_some(rendered.start);
    let (calls, forced) = calls(forms.calls, &tools, &choice, several);
    let grammar = chat::grammar(app, facts, forced, form, start)?;
    params.validate(facts.vocab_size).map_err(|error| ApiError::invalid(error.to_string()))?;
    let names = tools.iter().map(|Tool { name, parameters, description, strict }| {
        json!({
            "type": "function", "name": name, "description": description, "parameters": parameters, "strict": strict,
        })
    });
    let text_format =
        fields.get("text").and_then(|text| text.get("format")).filter(|format| !format.is_null());
    let told = json!({
        "id": http::new_id("resp_"),
        "object": "response",
        "created_at": http::now(),
        "model": model,
        "error": null,
        "incomplete_details": null,
        "instructions": instructions,
        "previous_response_id": null,
        "background": false,
        "truncation": "disabled",
        "reasoning": fields.get("reasoning").cloned().unwrap_or_else(|| json!({ "effort": null, "summary": null })),
        "text": { "format": text_format.cloned().unwrap_or_else(|| json!({ "type": "text" })) },
        "metadata": fields.get("metadata").cloned().unwrap_or_else(|| json!({})),
        "max_output_tokens": length.map(|(length, _)| length),
        "parallel_tool_calls": several,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tool_choice": fields.get("tool_choice").cloned().unwrap_or_else(|| json!("auto")),
        "tools": names.collect::<Vec<Value>>(),
        "store": false,
    });
    let adapter = generate::adapter(app, &model);
    let asked = Asked { prompt: rendered.ids, params, grammar, salt, priority, adapter };
    Ok(Ask { asked, stream, shape: Shape { start, calls, most_calls: chat::most_calls(several) }, told })
}

/// The format of `text`.
fn format(text: &Fields<'_>) -> Result<Option<(Form, String)>> {
    let Some(format) = text.object("format")? else { return Ok(None) };
    format.required("type")?;
    match format.choice("type", &["text", "json_object", "json_schema"])? {
        Some("json_object") => Ok(Some((Form::object(), format.path("type")))),
        Some("json_schema") => {
            let schema = format.required("schema")?.clone();
            Ok(Some((Form::Schema(schema), format.path("schema"))))
        }
        _ => Ok(None),
    }
}

/// The input as messages of a chat.
fn input(fields: &Fields<'_>, most: usize) -> Result<Vec<Value>> {
    if let Value::String(text) = fields.required("input")? {
        return Ok(vec![json!({ "role": "user", "content": text })]);
    }
    let list = fields.list("input", most)?.unwrap_or_default();
    if list.is_empty() {
        return Err(fields.error("input", "is empty"));
    }
    let mut messages: Vec<Value> = Vec::new();
    for (i, value) in list.iter().enumerate() {
        let item = Fields::of(value, format!("input[{i}]"))?;
        let kinds = ["message", "function_call", "function_call_output", "reasoning"];
        match item.choice("type", &kinds)?.unwrap_or("message") {
            "function_call" => {
                for name in ["call_id", "name", "arguments"] {
                    item.required(name)?;
                }
                let (id, name) = (item.text("call_id", 256)?, item.text("name", 256)?);
                let arguments = item.text("arguments", usize::MAX)?;
                let call = json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
                // Calls that belong together are one message.
                match messages.last_mut().and_then(|last| last["tool_calls"].as_array_mut()) {
                    Some(calls) => calls.push(call),
                    None => messages.push(json!({ "role": "assistant", "tool_calls": [call] })),
                }
            }
            "function_call_output" => {
                item.required("call_id")?;
                item.required("output")?;
                let (id, output) = (item.text("call_id", 256)?, item.text("output", usize::MAX)?);
                messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
            }
            // What the model said to itself does not come back.
            "reasoning" => {}
            _ => {
                item.required("role")?;
                item.required("content")?;
                messages.push(value.clone());
            }
        }
    }
    Ok(messages)
}

/// An item of the answer.
#[derive(Clone)]
enum Item {
    Reasoning { id: String, text: String },
    Message { id: String, text: String },
    Call { id: String, call_id: String, name: String, arguments: String },
}

impl Item {
    fn json(&self, status: &str) -> Value {
        match self {
            Item::Reasoning { id, text } => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [],
                "content": [{ "type": "reasoning_text", "text": text }],
            }),
            Item::Message { id, text } => {
                let content = match status {
                    "in_progress" => json!([]),
                    _ => json!([{ "type": "output_text", "text": text, "annotations": [], "logprobs": [] }]),
                };
                json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
            }
            Item::Call { id, call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": arguments,
            }),
        }
    }

    fn id(&self) -> &str {
        match self {
            Item::Reasoning { id, .. } | Item::Message { id, .. } | Item::Call { id, .. } => id,
        }
    }
}

/// An answer as items, and the events of their making.
struct Items {
    reply: Reply,
    told: Value,
    number: u64,
    items: Vec<Item>,
    whole: Whole,
    has_begun: bool,
}

impl Items {
    fn event(&mut self, out: &mut String, name: &str, mut value: Value) {
        value["type"] = json!(name);
        value["sequence_number"] = json!(self.number);
        self.number += 1;
        named_event(out, name, &value);
    }

    /// The answer in some state.
    fn response(&self, status: &str) -> Value {
        let mut value = self.told.clone();
        let is_open = status == "in_progress";
        let is_cut = !is_open && self.whole.finish == Some("length");
        let items: Vec<Value> = self
            .items
            .iter()
            .map(|item| item.json(if is_cut { "incomplete" } else { "completed" }))
            .collect();
        value["status"] = json!(if is_cut { "incomplete" } else { status });
        if is_cut {
            value["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        value["output"] = if is_open { json!([]) } else { json!(items) };
        value["usage"] = if is_open { Value::Null } else { self.reply.totals.json_of_response() };
        value
    }

    fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            for name in ["response.created", "response.in_progress"] {
                let response = self.response("in_progress");
                self.event(out, name, json!({ "response": response }));
            }
        }
    }

    /// Begins an item, and ends the one before it.
    fn open(&mut self, item: Item, out: &mut String) {
        self.close_item(out);
        let index = self.items.len();
        let (value, id) = (item.json("in_progress"), item.id().to_owned());
        self.event(out, "response.output_item.added", json!({ "output_index": index, "item": value }));
        if let Item::Message { .. } = item {
            let part = json!({ "type": "output_text", "text": "", "annotations": [], "logprobs": [] });
            let value = json!({ "item_id": id, "output_index": index, "content_index": 0, "part": part });
            self.event(out, "response.content_part.added", value);
        }
        self.items.push(item);
    }

    /// Ends the last item.
    fn close_item(&mut self, out: &mut String) {
        let Some(item) = self.items.last().cloned() else { return };
        let index = self.items.len() - 1;
        let place = json!({ "item_id": item.id(), "output_index": index });
        let with = |name: &str, value: &Value| {
            let mut place = place.clone();
            place["content_index"] = json!(0);
            place[name] = value.clone();
            place
        };
        match &item {
            Item::Reasoning { text, .. } => {
                self.event(out, "response.reasoning_text.done", with("text", &json!(text)));
            }
            Item::Message { text, .. } => {
                let mut done = with("text", &json!(text));
                done["logprobs"] = json!([]);
                self.event(out, "response.output_text.done", done);
                let part = json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] });
                self.event(out, "response.content_part.done", with("part", &part));
            }
            Item::Call { name, arguments, .. } => {
                let mut value = place.clone();
                (value["name"], value["arguments"]) = (json!(name), json!(arguments));
                self.event(out, "response.function_call_arguments.done", value);
            }
        }
        let value = item.json("completed");
        self.event(out, "response.output_item.done", json!({ "output_index": index, "item": value }));
    }

    fn close(&mut self, out: &mut String) {
        self.begin(out);
        if self.items.is_empty() {
            self.open(Item::Message { id: http::new_id("msg_"), text: String::new() }, out);
        }
        self.close_item(out);
    }

    /// Adds a piece of the output.
    fn piece(&mut self, piece: &Piece, call_ids: &[String], out: &mut String) {
        let goes_on = matches!(
            (piece, self.items.last()),
            (Piece::Reasoning(_), Some(Item::Reasoning { .. }))
                | (Piece::Content(_), Some(Item::Message { .. }))
                | (Piece::Arguments { .. }, _)
        );
        if !goes_on {
            let item = match piece {
                Piece::Reasoning(_) => Item::Reasoning { id: http::new_id("rs_"), text: String::new() },
                Piece::Call { index, name } => Item::Call {
                    id: http::new_id("fc_"),
                    call_id: call_ids[*index].clone(),
                    name: name.clone(),
                    arguments: String::new(),
                },
                Piece::Content(_) | Piece::Arguments { .. } => {
                    Item::Message { id: http::new_id("msg_"), text: String::new() }
                }
            };
            self.open(item, out);
        }
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last_mut() else { return };
        let mut value = json!({ "item_id": item.id(), "output_index": index });
        let name = match (piece, item) {
            (Piece::Reasoning(delta), Item::Reasoning { text, .. }) => {
                text.push_str(delta);
                (value["content_index"], value["delta"]) = (json!(0), json!(delta));
                "response.reasoning_text.delta"
            }
            (Piece::Content(delta), Item::Message { text, .. }) => {
                text.push_str(delta);
                (value["content_index"], value["delta"], value["logprobs"]) =
                    (json!(0), json!(delta), json!([]));
                "response.output_text.delta"
            }
            (Piece::Arguments { text: delta, .. }, Item::Call { arguments, .. }) => {
                arguments.push_str(delta);
                value["delta"] = json!(delta);
                "response.function_call_arguments.delta"
            }
            _ => return,
        };
        self.event(out, name, value);
    }
}

impl Writer for Items {
    fn write(&mut self, chunks: BTreeMap<usize, Chunk>, out: &mut String) -> Result<()> {
        self.begin(out);
        let mut deltas: Vec<Delta> = Vec::new();
        let result = self.reply.take(chunks, |_, delta| {
            deltas.push(delta);
            Ok(())
        });
        for delta in deltas {
            for piece in &delta.pieces {
                self.piece(piece, &delta.call_ids, out);
            }
            self.whole.finish = self.whole.finish.or(delta.finish);
        }
        result
    }

    fn finish(&mut self, out: &mut String) {
        self.close(out);
        let response = self.response("completed");
        let is_cut = response["status"] == "incomplete";
        let name = if is_cut { "response.incomplete" } else { "response.completed" };
        self.event(out, name, json!({ "response": response }));
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        self.begin(out);
        let mut response = self.response("failed");
        response["error"] = json!({ "code": "server_error", "message": error.message });
        self.event(out, "response.failed", json!({ "response": response }));
    }
}
