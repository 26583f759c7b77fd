//! What chats, completions and responses have in common.

use crate::bridge::{Job, Ticket};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::http::{Events, Gone};
use crate::keys::Tenant;
use crate::mailbox::{Broken, Chunk};
use crate::options::Limits;
use crate::server::App;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use warpsmith_engine::{FinishReason, Request, Salt, SamplingParams, SharedGrammar, Usage};

/// Whether and how an answer is streamed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Streaming {
    /// Event by event, or at once.
    pub stream: bool,
    /// Whether counts come at the end.
    pub usage: bool,
    /// Whether counts come with each event.
    pub running_usage: bool,
}

impl Streaming {
    /// From the fields of a request.
    ///
    /// # Errors
    /// If one is wrong.
    pub fn of(fields: &Fields<'_>) -> Result<Streaming> {
        let stream = fields.flag("stream")?.unwrap_or(false);
        let mut streaming = Streaming { stream, ..Streaming::default() };
        if let Some(options) = fields.object("stream_options")? {
            if !stream {
                return Err(fields.error("stream_options", "needs `stream`"));
            }
            streaming.usage = options.flag("include_usage")?.unwrap_or(false);
            streaming.running_usage = options.flag("continuous_usage_stats")?.unwrap_or(false);
        }
        Ok(streaming)
    }
}

/// The model that a request asks for, under the name that it uses.
///
/// # Errors
/// If there is none of that name.
pub fn model(app: &App, fields: &Fields<'_>) -> Result<String> {
    match fields.text("model", 256)? {
        Some(name) => {
            app.check_model(name)?;
            Ok(name.to_owned())
        }
        None => Ok(app.model_name().to_owned()),
    }
}

/// The adapter that a model's name stands for, if it is one's.
pub fn adapter(app: &App, model: &str) -> Option<String> {
    app.options.adapters.iter().find(|adapter| *adapter == model).cloned()
}

/// What separates cached prefixes, and how urgent a request is.
///
/// # Errors
/// If a field is wrong.
pub fn placing(app: &App, tenant: Tenant, fields: &Fields<'_>) -> Result<(Option<Salt>, i32)> {
    let own = fields.text("cache_salt", 256)?;
    if own == Some("") {
        return Err(fields.error("cache_salt", "expected a text, got an empty one"));
    }
    let priority = fields.count("priority", -1000..=1000)?.unwrap_or(0);
    Ok((app.keys.salt(tenant, own), priority as i32))
}

/// Checks fields that have no effect here, so that a wrong one is still told.
///
/// # Errors
/// Names the first that is wrong.
pub fn without_effect(fields: &Fields<'_>, limits: &Limits) -> Result<()> {
    fields.text("user", 1024)?;
    fields.object("metadata")?;
    fields.flag("store")?;
    fields.text("service_tier", 64)?;
    fields.text("safety_identifier", 1024)?;
    fields.text("prompt_cache_key", 1024)?;
    fields.text("request_id", limits.max_grammar)?;
    Ok(())
}

/// A request to the engine.
pub struct Asked {
    /// The prompt.
    pub prompt: Vec<i32>,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// What the answer must look like.
    pub grammar: Option<SharedGrammar>,
    /// What separates its prefixes.
    pub salt: Option<Salt>,
    /// Lower is served first.
    pub priority: i32,
    /// What the model is adapted with.
    pub adapter: Option<String>,
}

impl Asked {
    /// As a job whose outputs have numbers from `offset` on.
    pub fn job(self, app: &App, arrived: Instant, offset: usize) -> Job {
        let Asked { prompt, params, grammar, salt, priority, adapter } = self;
        let deadline = app.deadline(arrived);
        Job { request: Request { prompt, params, priority, deadline, grammar, salt, adapter }, offset }
    }
}

/// The error of a request that came to no end.
pub fn broken(broken: Broken) -> ApiError {
    match broken {
        Broken::Slow => ApiError::timeout("the client did not read the answer in time"),
        Broken::Engine(why) => ApiError::unavailable(format!("the engine cannot go on: {why}"), None),
        Broken::Refused(why) => ApiError::invalid(why),
    }
}

/// How OpenAI calls the end of an output.
///
/// # Errors
/// If it is none that has a name: the request has failed.
pub fn finish_reason(reason: &FinishReason, has_calls: bool) -> Result<&'static str> {
    match reason {
        FinishReason::Stop if has_calls => Ok("tool_calls"),
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Cancelled => Err(ApiError::unavailable("the server is ending", None)),
        FinishReason::Deadline => Err(ApiError::timeout("the request took longer than the server allows")),
        FinishReason::Failed(why) => Err(ApiError::server(why.clone())),
    }
}

/// Counts of a request with all its outputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    prompt: usize,
    cached: usize,
    output: usize,
    reasoning: usize,
}

impl Totals {
    /// The prompts, before anything is known.
    pub fn of_prompts(tokens: usize) -> Totals {
        Totals { prompt: tokens, ..Totals::default() }
    }

    /// More tokens of an output.
    pub fn add(&mut self, tokens: usize, reasoning: usize) {
        self.output += tokens;
        self.reasoning += reasoning;
    }

    /// An output has ended, the first of its prompt if `is_first`.
    pub fn end(&mut self, usage: &Usage, is_first: bool) {
        if is_first {
            self.cached += usage.cached_tokens;
        }
    }

    /// As OpenAI tells them.
    pub fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": { "cached_tokens": self.cached },
            "completion_tokens_details": { "reasoning_tokens": self.reasoning },
        })
    }

    /// As the Responses API tells them.
    pub fn json_of_response(&self) -> Value {
        json!({
            "input_tokens": self.prompt,
            "input_tokens_details": { "cached_tokens": self.cached },
            "output_tokens": self.output,
            "output_tokens_details": { "reasoning_tokens": self.reasoning },
            "total_tokens": self.prompt + self.output,
        })
    }
}

/// What makes the text of an answer from what the engine says.
pub trait Writer: Send + 'static {
    /// Adds the events for what came to `out`.
    ///
    /// # Errors
    /// If the request has failed.
    fn write(&mut self, chunks: BTreeMap<usize, Chunk>, out: &mut String) -> Result<()>;

    /// Adds the last events.
    fn finish(&mut self, out: &mut String);

    /// Adds the event of a failure.
    fn fail(&mut self, error: &ApiError, out: &mut String) {
        crate::http::event(out, &error.json());
    }
}

/// Streams an answer until it ends or the client leaves. Dropping the ticket ends the request.
pub async fn stream(ticket: Ticket, mut writer: impl Writer, events: Events) {
    let _ = pump(&ticket, &mut writer, &events).await;
}

async fn pump(ticket: &Ticket, writer: &mut impl Writer, events: &Events) -> Result<(), Gone> {
    loop {
        let next = tokio::select! {
            biased;
            () = events.closed() => return Err(Gone),
            next = ticket.mailbox().next() => next,
        };
        let mut out = String::new();
        let result = match next {
            Ok(Some(chunks)) => writer.write(chunks, &mut out),
            Ok(None) => {
                writer.finish(&mut out);
                return events.send(out).await;
            }
            Err(why) => Err(broken(why)),
        };
        if let Err(error) = result {
            writer.fail(&error, &mut out);
            return events.send(out).await;
        }
        events.send(out).await?;
    }
}

/// Collects an answer. Dropping the future ends the request.
///
/// # Errors
/// If the request fails.
pub async fn collect(
    ticket: Ticket,
    mut take: impl FnMut(BTreeMap<usize, Chunk>) -> Result<()>,
) -> Result<()> {
    while let Some(chunks) = ticket.mailbox().next().await.map_err(broken)? {
        take(chunks)?;
    }
    Ok(())
}
