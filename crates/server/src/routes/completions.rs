//! `/v1/completions`.

use super::chat::{Head, is_told};
use super::generate::{self, Asked, Streaming, Totals, Writer};
use super::logprobs;
use crate::bridge::Job;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::http::{self, DONE, Events, event};
use crate::keys::Tenant;
use crate::mailbox::{Chunk, Token};
use crate::server::App;
use crate::{params, prompt};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of an answer where the request says nothing, as OpenAI has it.
const DEFAULT_LENGTH: usize = 16;

struct Ask {
    all: Vec<Asked>,
    /// The prompts as text, if they are part of the answer.
    echoes: Vec<Option<String>>,
    model: String,
    streaming: Streaming,
}

/// Continues prompts.
pub async fn serve(
    State(app): State<Arc<App>>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response> {
    let arrived = Instant::now();
    app.facts()?;
    let body = http::read_body(request, &app.options.limits).await?;
    app.check_room(1)?;
    let Ask { all, echoes, model, streaming } =
        app.prepare(move |app| read(app, tenant, &http::parse(&body, &app.options.limits)?)).await?;
    let params = all[0].params.clone();
    let text = |echo: &Option<String>| Continuation::new(echo.clone());
    let reply = Reply {
        app: app.clone(),
        head: Head { id: http::new_id("cmpl-"), model, created: http::now() },
        totals: Totals::of_prompts(all.iter().map(|asked| asked.prompt.len()).sum()),
        outputs: echoes.iter().flat_map(|echo| (0..params.n).map(move |_| text(echo))).collect(),
        ends: vec![false; all.len()],
        n: params.n,
        ignore_eos: params.ignore_eos,
        stop_ids: params.stop_ids,
        logprobs: params.logprobs,
        streaming,
    };
    let job = |(i, asked): (usize, Asked)| asked.job(&app, arrived, i * params.n);
    let jobs: Vec<Job> = all.into_iter().enumerate().map(job).collect();
    let ticket = app.submit(jobs, arrived)?;
    if streaming.stream {
        let (events, response) = Events::new(app.options.limits.stall_timeout);
        tokio::spawn(generate::stream(ticket, reply, events));
        return Ok(response);
    }
    let mut reply = reply;
    let mut whole: Vec<(String, Vec<Token>, Option<&str>)> = reply
        .outputs
        .iter_mut()
        .map(|output| (output.echo.take().unwrap_or_default(), vec![], None))
        .collect();
    generate::collect(ticket, |chunks| {
        reply.take(chunks, |index, part| {
            whole[index].0 += &part.text;
            whole[index].1.extend(part.tokens);
            whole[index].2 = part.finish;
            Ok(())
        })
    })
    .await?;
    let Some(facts) = app.bridge.facts() else { return Err(ApiError::server("no model")) };
    let choices: Vec<Value> = whole
        .into_iter()
        .enumerate()
        .map(|(index, (text, tokens, finish))| {
            let mut offset = reply.outputs[index].offset;
            let logprobs =
                reply.logprobs.map(|top| logprobs::of_completion(facts, tokens.iter(), &mut offset, top > 0));
            json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
        })
        .collect();
    Ok(http::json(&reply.head.json("text_completion", json!(choices), Some(reply.totals.json()))))
}

fn read(app: &App, tenant: Tenant, body: &Map<String, Value>) -> Result<Ask> {
    let (fields, facts, limits) = (Fields::new(body), app.facts()?, &app.options.limits);
    let model = generate::model(app, &fields)?;
    let streaming = Streaming::of(&fields)?;
    let (salt, priority) = generate::placing(app, tenant, &fields)?;
    generate::without_effect(&fields, limits)?;
    fields.refuse_unsupported(&["suffix", "prompt_embeds"])?;
    let mut params = params::sampling(&fields, limits, facts)?;
    params.logprobs = fields.size("logprobs", 0..=20)?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && params.logprobs.is_some() {
        let told = "log-probabilities of prompts are not supported: leave out `echo` or `logprobs`";
        return Err(fields.error("echo", told).code("unsupported_parameter"));
    }
    let length = params::max_tokens(&fields, &["max_tokens"])?;
    let form = params::form(&fields, limits)?;
    let first = fields.flag("add_special_tokens")?.unwrap_or(true);
    let prompts = prompts(app, &fields, params.n, first)?;
    let grammar = match form {
        Some((form, path)) => {
            let compiled = app.grammars(facts)?.compile(&form, None);
            Some(compiled.map_err(|why| ApiError::field(path, format!("cannot be used: {why}")))?)
        }
        None => None,
    };
    let (mut all, mut echoes) = (Vec::new(), Vec::new());
    for (prompt, text, field) in prompts {
        let mut params = params.clone();
        // The default gives way to a context that has no room for it.
        let default = DEFAULT_LENGTH.min(facts.room.saturating_sub(prompt.len()).max(1));
        params::fit(&mut params, &prompt, &field, length.or(Some((default, "max_tokens"))), facts)?;
        params.validate(facts.vocab_size).map_err(|error| ApiError::invalid(error.to_string()))?;
        let ids = || prompt.iter().map(|&id| id as u32).collect::<Vec<u32>>();
        let decoded =
            || facts.tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&ids())).unwrap_or_default();
        echoes.push(echo.then(|| text.unwrap_or_else(decoded)));
        let grammar = grammar.clone();
        let adapter = generate::adapter(app, &model);
        all.push(Asked { prompt, params, grammar, salt, priority, adapter });
    }
    Ok(Ask { all, echoes, model, streaming })
}

/// A prompt: its tokens, its text where it came as such, and its field.
type Named = (Vec<i32>, Option<String>, String);

/// The prompts of a request.
fn prompts(app: &App, fields: &Fields<'_>, n: usize, first: bool) -> Result<Vec<Named>> {
    let (facts, vocab) = (app.facts()?, app.facts()?.vocab_size as i64);
    let ids = |values: &[Value], path: &str| {
        if values.len() >= facts.room {
            let told = format!("has {} tokens; at most {} are possible", values.len(), facts.room - 1);
            return Err(ApiError::field(path, told).code("context_length_exceeded"));
        }
        let id = |(i, value)| params::token(value, vocab, || format!("{path}[{i}]"));
        values.iter().enumerate().map(id).collect::<Result<Vec<i32>>>()
    };
    let one = |value: &Value, path: String| match value {
        Value::String(text) => Ok((prompt::encode(facts, text, &path, first)?, Some(text.clone()), path)),
        Value::Array(values) => Ok((ids(values, &path)?, None, path)),
        other => Err(ApiError::value(path, "a text or a list of tokens", other)),
    };
    match fields.required("prompt")? {
        Value::Array(values) if values.first().is_some_and(|first| !first.is_number()) => {
            let most = app.options.limits.max_outputs / n;
            if values.len() > most {
                let told = format!("expected at most {most} prompts with `n` of {n}, got {}", values.len());
                return Err(fields.error("prompt", told));
            }
            values.iter().enumerate().map(|(i, value)| one(value, format!("prompt[{i}]"))).collect()
        }
        Value::Array(values) if values.is_empty() => Err(fields.error("prompt", "is empty")),
        value => match value {
            Value::String(_) | Value::Array(_) => Ok(vec![one(value, "prompt".into())?]),
            other => Err(ApiError::value("prompt", "a text, tokens, or a list of either", other)),
        },
    }
}

/// One output while it comes.
struct Continuation {
    /// The prompt, until it was sent.
    echo: Option<String>,
    /// Where the text of the next token begins, in characters.
    offset: usize,
}

impl Continuation {
    fn new(echo: Option<String>) -> Continuation {
        Continuation { offset: echo.as_ref().map_or(0, |text| text.chars().count()), echo }
    }
}

/// What came for one output.
struct Part {
    text: String,
    tokens: Vec<Token>,
    finish: Option<&'static str>,
}

struct Reply {
    app: Arc<App>,
    head: Head,
    totals: Totals,
    outputs: Vec<Continuation>,
    /// Whether an output of each prompt has ended.
    ends: Vec<bool>,
    n: usize,
    ignore_eos: bool,
    stop_ids: Vec<i32>,
    logprobs: Option<usize>,
    streaming: Streaming,
}

impl Reply {
    fn take(
        &mut self,
        chunks: BTreeMap<usize, Chunk>,
        mut each: impl FnMut(usize, Part) -> Result<()>,
    ) -> Result<()> {
        let Some(facts) = self.app.bridge.facts() else { return Err(ApiError::server("no model")) };
        for (index, chunk) in chunks {
            self.totals.add(chunk.tokens.len(), 0);
            let mut text: String = chunk.tokens.iter().map(|token| token.text.as_str()).collect();
            text += &chunk.rest;
            let finish = match &chunk.end {
                Some((reason, usage)) => {
                    let is_first = !std::mem::replace(&mut self.ends[index / self.n], true);
                    self.totals.end(usage, is_first);
                    Some(generate::finish_reason(reason, false)?)
                }
                None => None,
            };
            let mut tokens = chunk.tokens;
            tokens.retain(|token| is_told(facts, token, self.ignore_eos, &self.stop_ids));
            each(index, Part { text, tokens, finish })?;
        }
        Ok(())
    }
}

impl Writer for Reply {
    fn write(&mut self, chunks: BTreeMap<usize, Chunk>, out: &mut String) -> Result<()> {
        let mut parts = Vec::new();
        let result = self.take(chunks, |index, part| {
            parts.push((index, part));
            Ok(())
        });
        let app = self.app.clone();
        let Some(facts) = app.bridge.facts() else { return result };
        for (index, part) in parts {
            let output = &mut self.outputs[index];
            let text = output.echo.take().unwrap_or_default() + &part.text;
            let logprobs = self
                .logprobs
                .filter(|_| !part.tokens.is_empty())
                .map(|top| logprobs::of_completion(facts, part.tokens.iter(), &mut output.offset, top > 0));
            // Without a tokenizer no token has a text. Each is still sent: clients measure times by them.
            let is_counted = facts.tokenizer.is_none() && !part.tokens.is_empty();
            if text.is_empty() && logprobs.is_none() && part.finish.is_none() && !is_counted {
                continue;
            }
            let choice =
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": part.finish });
            let usage = self.streaming.running_usage.then(|| self.totals.json());
            let mut value = self.head.json("text_completion", json!([choice]), usage);
            if self.streaming.usage && !self.streaming.running_usage {
                value["usage"] = Value::Null;
            }
            event(out, &value);
        }
        result
    }

    fn finish(&mut self, out: &mut String) {
        if self.streaming.usage {
            event(out, &self.head.json("text_completion", json!([]), Some(self.totals.json())));
        }
        out.push_str(DONE);
    }
}
