//! `/v1/embeddings`.

use super::generate;
use crate::bridge::EmbedFailure;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::http;
use crate::keys::Tenant;
use crate::server::App;
use crate::{params, prompt};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;
use warpsmith_engine::Pooling;

struct Ask {
    inputs: Vec<Vec<i32>>,
    pooling: Pooling,
    is_base64: bool,
    model: String,
    adapter: Option<String>,
}

/// Vectors for texts.
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
    let Ask { inputs, pooling, is_base64, model, adapter } = ask;
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    let answer = app.embed(inputs, pooling, adapter, arrived)?;
    let vectors = match answer.await {
        Ok(Ok(vectors)) => vectors,
        Ok(Err(EmbedFailure::Late)) => {
            return Err(ApiError::timeout("the request took longer than the server allows"));
        }
        Ok(Err(EmbedFailure::Failed(why))) => return Err(ApiError::server(why)),
        // The engine has gone. If it failed, its state says why.
        Err(_) => {
            app.facts()?;
            return Err(ApiError::unavailable("the server is ending", None));
        }
    };
    let text = app.prepare(move |_| Ok(written(&vectors, is_base64, &model, tokens))).await?;
    Ok(http::text("application/json", text))
}

fn read(app: &App, tenant: Tenant, body: &Map<String, Value>) -> Result<Ask> {
    let (fields, facts) = (Fields::new(body), app.facts()?);
    let model = generate::model(app, &fields)?;
    // Nothing is kept in the cache or found there, so a salt has nothing to separate.
    generate::placing(app, tenant, &fields)?;
    generate::without_effect(&fields, &app.options.limits)?;
    fields.refuse_unsupported(&["messages", "truncate_prompt_tokens", "embed_dtype", "endianness"])?;
    let is_base64 = fields.choice("encoding_format", &["float", "base64"])? == Some("base64");
    if let Some(dimensions) = fields.size("dimensions", 1..=i64::from(i32::MAX))?
        && dimensions != facts.hidden_size
    {
        let width = facts.hidden_size;
        let told = format!(
            "expected {width}, the model's width, or none, got {dimensions}: a part of the vector says little where the \
             model was not trained for it, which its file does not tell"
        );
        return Err(fields.error("dimensions", told).code("unsupported_parameter"));
    }
    let pooling = match fields.choice("pooling", &Pooling::NAMES)? {
        Some(name) => name.parse().map_err(|error| fields.error("pooling", error))?,
        None => app.options.pooling,
    };
    if fields.flag("normalize")? == Some(false) {
        return Err(fields.error("normalize", "vectors have length 1 here").code("unsupported_parameter"));
    }
    let first = fields.flag("add_special_tokens")?.unwrap_or(true);
    let adapter = generate::adapter(app, &model);
    Ok(Ask { inputs: inputs(app, &fields, first)?, pooling, is_base64, model, adapter })
}

/// The tokens of all inputs.
fn inputs(app: &App, fields: &Fields<'_>, first: bool) -> Result<Vec<Vec<i32>>> {
    let facts = app.facts()?;
    let (most, vocab) = (facts.longest_input, facts.vocab_size as i64);
    let fits = |count: usize, path: &str| match count {
        0 => Err(ApiError::field(path, "expected at least one token, got none")),
        count if count > most => {
            let told = format!("has {count} tokens; at most {most} are possible");
            Err(ApiError::field(path, told).code("context_length_exceeded"))
        }
        _ => Ok(()),
    };
    let one = |value: &Value, path: String| {
        let ids = match value {
            Value::String(text) if text.is_empty() => Vec::new(),
            Value::String(text) => prompt::encode(facts, text, &path, first)?,
            Value::Array(values) => {
                fits(values.len(), &path)?;
                let id = |(i, value)| params::token(value, vocab, || format!("{path}[{i}]"));
                values.iter().enumerate().map(id).collect::<Result<Vec<i32>>>()?
            }
            other => return Err(ApiError::value(path, "a text or a list of tokens", other)),
        };
        fits(ids.len(), &path)?;
        Ok(ids)
    };
    match fields.required("input")? {
        Value::Array(values) if values.first().is_some_and(|first| !first.is_number()) => {
            let most = app.options.limits.max_inputs;
            if values.len() > most {
                let told = format!("expected at most {most} inputs, got {}", values.len());
                return Err(fields.error("input", told));
            }
            values.iter().enumerate().map(|(i, value)| one(value, format!("input[{i}]"))).collect()
        }
        value @ (Value::String(_) | Value::Array(_)) => Ok(vec![one(value, "input".into())?]),
        other => Err(ApiError::value("input", "a text, tokens, or a list of either", other)),
    }
}

/// The answer. It is written at once: as JSON values, many vectors would take several times the memory.
fn written(vectors: &[Vec<f32>], is_base64: bool, model: &str, tokens: usize) -> String {
    let mut text = String::from("{\"object\":\"list\",\"data\":[");
    for (index, vector) in vectors.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // Writing to a string does not fail.
        let _ = write!(text, "{comma}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":");
        if is_base64 {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            text.push('"');
            STANDARD.encode_string(bytes, &mut text);
            text.push_str("\"}");
        } else {
            for (i, x) in vector.iter().enumerate() {
                let _ = write!(text, "{}{x:?}", if i == 0 { '[' } else { ',' });
            }
            text.push_str("]}");
        }
    }
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    let _ = write!(text, "],\"model\":{},\"usage\":{usage}}}", json!(model));
    text
}
