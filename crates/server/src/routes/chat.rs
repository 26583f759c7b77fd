//! `/v1/chat/completions`.

use super::generate::{self, Asked, Streaming, Totals, Writer};
use super::logprobs;
use crate::bridge::Facts;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::grammar::Form;
use crate::http::{self, DONE, Events, event};
use crate::keys::Tenant;
use crate::mailbox::{Chunk, Token};
use crate::output::{CallForm, Piece, Splitter, Start};
use crate::params;
use crate::prompt::{self, ToolChoice};
use crate::server::App;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use warpsmith_engine::SharedGrammar;

/// A request that was read.
struct Ask {
    asked: Asked,
    model: String,
    streaming: Streaming,
    logprobs: bool,
    shape: Shape,
}

/// What is looked for in the text of outputs.
#[derive(Clone)]
pub struct Shape {
    /// Where the prompt leaves the reasoning, if the model reasons.
    pub start: Option<Start>,
    /// The tools that may be called, and how.
    pub calls: Option<(CallForm, Vec<String>)>,
    /// The most calls of an answer: further ones are left out.
    pub most_calls: usize,
}

impl Shape {
    /// Finds it in the text of one output.
    pub fn splitter(&self) -> Splitter {
        Splitter::new(self.start, self.calls.clone())
    }
}

/// Answers a chat.
pub async fn serve(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response> {
    let arrived = Instant::now();
    app.facts()?;
    let body = http::read_body(request, &app.options.limits).await?;
    app.check_room(1)?;
    let ask = app.prepare(move |app| read(app, tenant, &http::parse(&body, &app.options.limits)?)).await?;
    let Ask { asked, model, streaming, logprobs, shape } = ask;
    let outputs = asked.params.n;
    let head = Head { id: http::new_id("chatcmpl-"), model, created: http::now() };
    let reply = Reply {
        app: app.clone(),
        totals: Totals::of_prompts(asked.prompt.len()),
        ignore_eos: asked.params.ignore_eos,
        stop_ids: asked.params.stop_ids.clone(),
        choices: (0..outputs).map(|_| Choice::new(shape.splitter())).collect(),
        most_calls: shape.most_calls,
        logprobs,
        has_end: false,
    };
    let ticket = app.submit(vec![asked.job(&app, arrived, 0)], arrived)?;
    if streaming.stream {
        let (events, response) = Events::new(app.options.limits.stall_timeout);
        let writer = Chunks { head, reply, streaming, has_begun: false };
        tokio::spawn(generate::stream(ticket, writer, events));
        return Ok(response);
    }
    let mut reply = reply;
    let mut whole: Vec<Whole> = (0..outputs).map(|_| Whole::default()).collect();
    generate::collect(ticket, |chunks| {
        reply.take(chunks, |index, delta| {
            whole[index].add(delta);
            Ok(())
        })
    })
    .await?;
    let choices: Vec<Value> = whole.into_iter().enumerate().map(|(i, whole)| whole.json(i)).collect();
    Ok(http::json(&head.json("chat.completion", json!(choices), Some(reply.totals.json()))))
}

fn read(app: &App, tenant: Tenant, body: &Map<String, Value>) -> Result<Ask> {
    let (fields, facts, limits) = (Fields::new(body), app.facts()?, &app.options.limits);
    let model = generate::model(app, &fields)?;
    let streaming = Streaming::of(&fields)?;
    let (salt, priority) = generate::placing(app, tenant, &fields)?;
    generate::without_effect(&fields, limits)?;
    fields.refuse_unsupported(&["audio", "prediction", "web_search_options", "echo"])?;
    if let Some(modalities) = fields.list("modalities", 8)?
        && let Some(i) = modalities.iter().position(|kind| kind != "text")
    {
        return Err(ApiError::value(format!("modalities[{i}]"), "\"text\"", &modalities[i]));
    }
    fields.choice("reasoning_effort", &["none", "minimal", "low", "medium", "high", "xhigh"])?;
    fields.choice("verbosity", &["low", "medium", "high"])?;
    let mut params = params::sampling(&fields, limits, facts)?;
    let logprobs = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.size("top_logprobs", 0..=20)?;
    if top.is_some_and(|top| top > 0) && !logprobs {
        return Err(fields.error("top_logprobs", "needs `logprobs`"));
    }
    params.logprobs = logprobs.then_some(top.unwrap_or(0));
    let asked_length = params::max_tokens(&fields, &["max_completion_tokens", "max_tokens"])?;
    let form = params::form(&fields, limits)?;
    let (tool_values, tools) = prompt::tools(&fields, limits)?;
    let choice = prompt::tool_choice(&fields, &tools)?;
    let several = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    let forms = app.forms(facts);
    let messages = prompt::messages(&fields, limits)?;
    let shown = if choice == ToolChoice::None { Vec::new() } else { tool_values };
    let chat = prompt::chat(&fields, messages, shown)?;
    let rendered = prompt::render(facts, &chat)?;
    params::fit(&mut params, &rendered.ids, "messages", asked_length, facts)?;
    let start = forms.reasoning.then_some(rendered.start);
    let (calls, forced) = calls(forms.calls, &tools, &choice, several);
    let grammar = grammar(app, facts, forced, form, start)?;
    params.validate(facts.vocab_size).map_err(|error| ApiError::invalid(error.to_string()))?;
    let adapter = generate::adapter(app, &model);
    let asked = Asked { prompt: rendered.ids, params, grammar, salt, priority, adapter };
    Ok(Ask {
        asked,
        model,
        streaming,
        logprobs,
        shape: Shape { start, calls, most_calls: most_calls(several) },
    })
}

/// The most calls of an answer, by whether there may be several.
pub fn most_calls(several: bool) -> usize {
    if several { usize::MAX } else { 1 }
}

/// How calls are found in outputs, and what these must look like if they must have some.
pub fn calls(
    known: Option<CallForm>,
    tools: &[prompt::Tool],
    choice: &ToolChoice,
    several: bool,
) -> (Option<(CallForm, Vec<String>)>, Option<Form>) {
    if *choice == ToolChoice::None {
        return (None, None);
    }
    let names = tools.iter().map(|tool| tool.name.clone()).collect();
    // A model that knows no form of calls can still be made to write one.
    let form = known.unwrap_or(CallForm::Tagged);
    let forced = prompt::forced_calls(form, tools, choice, several);
    let is_looked_for = known.is_some() || forced.is_some();
    (is_looked_for.then_some((form, names)), forced)
}

/// The grammar of an answer: that of the calls it must have, or that of its form, with the field that says so.
pub fn grammar(
    app: &App,
    facts: &Facts,
    forced: Option<Form>,
    form: Option<(Form, String)>,
    start: Option<Start>,
) -> Result<Option<SharedGrammar>> {
    let (form, path) = match (forced, form) {
        (Some(_), Some((_, path))) => {
            let told = "cannot be combined with a `tool_choice` that asks for a call";
            return Err(ApiError::field(path, told));
        }
        (Some(forced), None) => {
            forced.check_calls("tools", &app.options.limits)?;
            (forced, "tools".to_owned())
        }
        (None, Some(form)) => form,
        (None, None) => return Ok(None),
    };
    let compiled = app.grammars(facts)?.compile(&form, start);
    compiled.map(Some).map_err(|why| ApiError::field(path, format!("cannot be used: {why}")))
}

/// What all parts of an answer begin with.
pub struct Head {
    /// Its name.
    pub id: String,
    /// As the request has called it.
    pub model: String,
    /// When.
    pub created: u64,
}

impl Head {
    /// An answer, or a part of one.
    pub fn json(&self, object: &str, choices: Value, usage: Option<Value>) -> Value {
        let mut value = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        });
        if let Some(usage) = usage {
            value["usage"] = usage;
        }
        value
    }
}

/// One output while it comes.
pub struct Choice {
    splitter: Splitter,
    /// Names of the calls.
    calls: Vec<String>,
}

impl Choice {
    /// Nothing yet.
    pub fn new(splitter: Splitter) -> Choice {
        Choice { splitter, calls: Vec::new() }
    }
}

/// What came for one output.
pub struct Delta {
    /// In order.
    pub pieces: Vec<Piece>,
    /// Of its tokens, if asked for.
    pub logprobs: Vec<Value>,
    /// Names of the calls so far, by their numbers.
    pub call_ids: Vec<String>,
    /// Why it ended, if it did.
    pub finish: Option<&'static str>,
}

/// All outputs of a request.
pub struct Reply {
    /// For the tokenizer.
    pub app: Arc<App>,
    /// Counts.
    pub totals: Totals,
    /// Whether the model's ends are tokens like others.
    pub ignore_eos: bool,
    /// Tokens that end an output.
    pub stop_ids: Vec<i32>,
    /// By number.
    pub choices: Vec<Choice>,
    /// The most calls of an output.
    pub most_calls: usize,
    /// Whether log-probabilities are wanted.
    pub logprobs: bool,
    /// Whether an output has ended.
    pub has_end: bool,
}

impl Reply {
    /// Takes what came, and hands it on output by output.
    ///
    /// # Errors
    /// If an output has failed.
    pub fn take(
        &mut self,
        chunks: BTreeMap<usize, Chunk>,
        mut each: impl FnMut(usize, Delta) -> Result<()>,
    ) -> Result<()> {
        let app = self.app.clone();
        let Some(facts) = app.bridge.facts() else { return Err(ApiError::server("no model")) };
        for (index, chunk) in chunks {
            let choice = &mut self.choices[index];
            let mut delta = Delta { pieces: vec![], logprobs: vec![], call_ids: vec![], finish: None };
            for token in &chunk.tokens {
                let was_reasoning = choice.splitter.is_reasoning();
                delta.pieces.extend(choice.splitter.push(Some(token.id), &token.text));
                self.totals.add(1, usize::from(was_reasoning || choice.splitter.is_reasoning()));
                if self.logprobs && is_told(facts, token, self.ignore_eos, &self.stop_ids) {
                    delta.logprobs.push(logprobs::of_chat(facts, token));
                }
            }
            if !chunk.rest.is_empty() {
                delta.pieces.extend(choice.splitter.push(None, &chunk.rest));
            }
            if let Some((reason, usage)) = &chunk.end {
                delta.pieces.extend(choice.splitter.finish());
                self.totals.end(usage, !std::mem::replace(&mut self.has_end, true));
                delta.finish = Some(generate::finish_reason(reason, choice.splitter.has_calls())?);
            }
            delta.pieces.retain(|piece| match piece {
                Piece::Call { index, .. } | Piece::Arguments { index, .. } => *index < self.most_calls,
                Piece::Content(_) | Piece::Reasoning(_) => true,
            });
            for piece in &delta.pieces {
                if let Piece::Call { .. } = piece {
                    choice.calls.push(http::new_id("call_"));
                }
            }
            delta.call_ids.clone_from(&choice.calls);
            each(index, delta)?;
        }
        Ok(())
    }
}

/// Whether a token is part of the output, rather than its end.
pub fn is_told(facts: &Facts, token: &Token, ignore_eos: bool, stop_ids: &[i32]) -> bool {
    (ignore_eos || !facts.end_ids.contains(&token.id)) && !stop_ids.contains(&token.id)
}

/// An answer as chunks.
struct Chunks {
    head: Head,
    reply: Reply,
    streaming: Streaming,
    has_begun: bool,
}

impl Chunks {
    /// A chunk for one output.
    fn chunk(
        &self,
        index: usize,
        delta: Value,
        logprobs: Option<Value>,
        finish: Option<&str>,
        out: &mut String,
    ) {
        let choice = json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        let usage = self.streaming.running_usage.then(|| self.reply.totals.json());
        let mut value = self.head.json("chat.completion.chunk", json!([choice]), usage);
        if self.streaming.usage && !self.streaming.running_usage {
            value["usage"] = Value::Null;
        }
        event(out, &value);
    }

    fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            for index in 0..self.reply.choices.len() {
                self.chunk(index, json!({ "role": "assistant", "content": "" }), None, None, out);
            }
        }
    }
}

impl Writer for Chunks {
    fn write(&mut self, chunks: BTreeMap<usize, Chunk>, out: &mut String) -> Result<()> {
        self.begin(out);
        let mut deltas = Vec::new();
        let result = self.reply.take(chunks, |index, delta| {
            deltas.push((index, delta));
            Ok(())
        });
        for (index, delta) in deltas {
            let mut logprobs = Some(delta.logprobs).filter(|list| !list.is_empty());
            let mut wrap = || logprobs.take().map(|content| json!({ "content": content }));
            for piece in joined(delta.pieces) {
                let value = match piece {
                    Piece::Content(text) => json!({ "content": text }),
                    Piece::Reasoning(text) => json!({ "reasoning": text, "reasoning_content": text }),
                    Piece::Call { index, name } => json!({ "tool_calls": [{
                        "index": index, "id": delta.call_ids[index], "type": "function",
                        "function": { "name": name, "arguments": "" },
                    }] }),
                    Piece::Arguments { index, text } => {
                        json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] })
                    }
                };
                self.chunk(index, value, wrap(), None, out);
            }
            if let Some(list) = wrap() {
                // Tokens whose text is held back, or that have none.
                self.chunk(index, json!({ "content": "" }), Some(list), None, out);
            }
            if let Some(finish) = delta.finish {
                self.chunk(index, json!({}), None, Some(finish), out);
            }
        }
        result
    }

    fn finish(&mut self, out: &mut String) {
        self.begin(out);
        if self.streaming.usage {
            let usage = Some(self.reply.totals.json());
            event(out, &self.head.json("chat.completion.chunk", json!([]), usage));
        }
        out.push_str(DONE);
    }
}

/// Neighbouring pieces of one kind as one.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (all.last_mut(), &piece) {
            (Some(Piece::Content(text)), Piece::Content(more))
            | (Some(Piece::Reasoning(text)), Piece::Reasoning(more)) => text.push_str(more),
            (Some(Piece::Arguments { index, text }), Piece::Arguments { index: same, text: more })
                if index == same =>
            {
                text.push_str(more);
            }
            _ => all.push(piece),
        }
    }
    all
}

/// An output as a whole.
#[derive(Default)]
pub struct Whole {
    /// The answer.
    pub content: String,
    /// What the model said to itself.
    pub reasoning: String,
    /// Name of the call, tool, arguments.
    pub calls: Vec<(String, String, String)>,
    logprobs: Vec<Value>,
    has_logprobs: bool,
    /// Why it ended.
    pub finish: Option<&'static str>,
}

impl Whole {
    /// Adds what came.
    pub fn add(&mut self, delta: Delta) {
        for piece in delta.pieces {
            match piece {
                Piece::Content(text) => self.content += &text,
                Piece::Reasoning(text) => self.reasoning += &text,
                Piece::Call { index, name } => {
                    self.calls.push((delta.call_ids[index].clone(), name, String::new()));
                }
                Piece::Arguments { index, text } => self.calls[index].2 += &text,
            }
        }
        self.has_logprobs |= !delta.logprobs.is_empty();
        self.logprobs.extend(delta.logprobs);
        self.finish = self.finish.or(delta.finish);
    }

    fn json(self, index: usize) -> Value {
        let content = match self.content.is_empty() && !self.calls.is_empty() {
            true => Value::Null,
            false => json!(self.content),
        };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !self.reasoning.is_empty() {
            message["reasoning"] = json!(self.reasoning);
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            let call = |(id, name, arguments): &(String, String, String)| json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } });
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        let logprobs = self.has_logprobs.then(|| json!({ "content": self.logprobs }));
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish })
    }
}
