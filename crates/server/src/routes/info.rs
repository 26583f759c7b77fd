//! What the server is, and how it is doing.

use crate::bridge::State as Life;
use crate::error::{ApiError, Result};
use crate::http;
use crate::server::App;
use axum::extract::{Path, State};
use axum::response::Response;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whether requests would be served: 200 from the first token that the model has made, 503 before, while the server ends, and
/// when the engine has failed or is stuck.
pub async fn health(State(app): State<Arc<App>>) -> Result<Response> {
    let step = app.bridge.step_time();
    if step > app.options.watchdog {
        let told = format!("the engine has been in one step for {} s", step.as_secs());
        return Err(ApiError::unavailable(told, None));
    }
    app.facts()?;
    Ok(http::json(&json!({ "status": "ok" })))
}

/// Figures for Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.bridge.metrics().text(&app.bridge.snapshot());
    http::text("application/openmetrics-text; version=1.0.0; charset=utf-8", text)
}

fn card(app: &App, name: &str) -> serde_json::Value {
    let room = app.bridge.facts().map(|facts| facts.room);
    let mut card = json!({
        "id": name,
        "object": "model",
        "created": app.started,
        "owned_by": "warpsmith",
        "max_model_len": room,
    });
    // An adapter tells what it adapts.
    if app.options.adapters.iter().any(|adapter| adapter == name) {
        card["parent"] = json!(app.model_name());
    }
    card
}

/// The names of the model, once it can be used: some wait for this answer before they send requests.
pub async fn models(State(app): State<Arc<App>>) -> Result<Response> {
    app.facts()?;
    let names = app.options.served_names.iter().chain(&app.options.adapters);
    let cards: Vec<_> = names.map(|name| card(&app, name)).collect();
    Ok(http::json(&json!({ "object": "list", "data": cards })))
}

/// One of them.
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response> {
    app.facts()?;
    app.check_model(&name)?;
    Ok(http::json(&card(&app, &name)))
}

/// Settings and figures.
pub async fn server_info(State(app): State<Arc<App>>) -> Response {
    let life = match app.bridge.state() {
        Life::Loading => "loading",
        Life::Ready => "ready",
        Life::Draining | Life::Ended => "draining",
        Life::Failed(_) => "failed",
    };
    let now = app.bridge.snapshot();
    let limits = &app.options.limits;
    let model = app.bridge.facts().map(|facts| {
        json!({
            "architecture": facts.architecture,
            "vocab_size": facts.vocab_size,
            "context_length": facts.context,
            "max_model_len": facts.room,
            "embedding_size": facts.hidden_size,
            "pooling": app.options.pooling.name(),
            "device": facts.device,
            "dtype": facts.dtype,
            "chat_template": facts.template.is_some(),
            "reasoning": app.forms(facts).reasoning,
            "tool_calls": app.forms(facts).calls.is_some(),
        })
    });
    let engine = app.bridge.facts().map(|facts| {
        json!({
            "max_running_requests": facts.max_running,
            "chunked_prefill_size": facts.max_batch_tokens,
            "page_size": facts.pages.1,
            "num_pages": facts.pages.0,
            "prefix_cache": facts.prefix_cache,
        })
    });
    http::json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "state": life,
        "served_model_names": app.options.served_names,
        "adapters": app.options.adapters,
        "model": model,
        "engine": engine,
        "limits": {
            "max_body_bytes": limits.max_body,
            "max_queued_requests": limits.max_waiting,
            "max_connections": limits.max_connections,
            "max_n": limits.max_n,
            "max_stops": limits.max_stops,
        },
        "now": {
            "submitted_requests": app.bridge.submitted(),
            "open_outputs": app.bridge.open_outputs(),
            "running": now.stats.running,
            "waiting": now.stats.waiting + now.arriving,
            "available_pages": now.stats.available_pages,
            "cached_pages": now.stats.cached_pages,
            "preemptions": now.stats.preemptions,
            "steps": now.stats.steps,
            "generated_tokens": now.stats.generated_tokens,
            "graphs": now.stats.graphs,
            "step_seconds": now.busy[0].as_secs_f64(),
            "between_steps_seconds": now.busy[1].as_secs_f64(),
            "connections": app.connections.load(Ordering::Relaxed),
        },
    }))
}

/// Forgets the prefixes that nobody uses.
pub async fn flush_cache(State(app): State<Arc<App>>) -> Result<Response> {
    app.facts()?;
    let left = app.bridge.flush().await;
    let left = left.ok_or_else(|| ApiError::unavailable("the engine has ended", None))?;
    Ok(http::json(&json!({ "flushed": true, "cached_pages": left })))
}
