//! Text to tokens and back.

use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::server::App;
use crate::{http, params, prompt};
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::json;
use std::sync::Arc;

/// The most tokens that are turned into text.
const MAX_TOKENS: usize = 1 << 20;

/// The tokens of a text or a chat.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    app.facts()?;
    let body = http::read_body(request, &app.options.limits).await?;
    let work = move |app: &App| {
        let body = http::parse(&body, &app.options.limits)?;
        let (fields, facts) = (Fields::new(&body), app.facts()?);
        check_model(app, &fields)?;
        let ids = if fields.get("messages").is_some() {
            if fields.get("prompt").is_some() {
                return Err(fields.error("prompt", "cannot be combined with `messages`"));
            }
            let limits = &app.options.limits;
            let messages = prompt::messages(&fields, limits)?;
            let (tools, _) = prompt::tools(&fields, limits)?;
            prompt::render(facts, &prompt::chat(&fields, messages, tools)?)?.ids
        } else {
            fields.required("prompt")?;
            let text = fields.text("prompt", usize::MAX)?.unwrap_or_default();
            let first = fields.flag("add_special_tokens")?.unwrap_or(true);
            prompt::encode(facts, text, "prompt", first)?
        };
        let strings = fields.flag("return_token_strs")?.unwrap_or(false).then(|| {
            let text = |&id: &i32| super::logprobs::text_of(facts, id);
            ids.iter().map(text).collect::<Vec<String>>()
        });
        Ok(json!({ "count": ids.len(), "max_model_len": facts.room, "tokens": ids, "token_strs": strings }))
    };
    Ok(http::json(&app.prepare(work).await?))
}

/// The text of tokens.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response> {
    app.facts()?;
    let body = http::read_body(request, &app.options.limits).await?;
    let work = move |app: &App| {
        let body = http::parse(&body, &app.options.limits)?;
        let (fields, facts) = (Fields::new(&body), app.facts()?);
        check_model(app, &fields)?;
        fields.required("tokens")?;
        let list = fields.list("tokens", MAX_TOKENS)?.unwrap_or_default();
        let token = |(i, value)| params::token(value, facts.vocab_size as i64, || format!("tokens[{i}]"));
        let ids = list.iter().enumerate().map(token).collect::<Result<Vec<i32>>>()?;
        let Some(tokenizer) = &facts.tokenizer else {
            return Err(ApiError::field("tokens", "this model has no tokenizer"));
        };
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        Ok(json!({ "prompt": tokenizer.decode(&ids) }))
    };
    Ok(http::json(&app.prepare(work).await?))
}

fn check_model(app: &App, fields: &Fields<'_>) -> Result<()> {
    match fields.text("model", 256)? {
        Some(name) => app.check_model(name),
        None => Ok(()),
    }
}
