//! `/debug/state`: what the page shows. Sizes, counts and times; never text or tokens of anybody.

use crate::bridge::{Look, State as Life, Times};
use crate::http;
use crate::keys::Tenant;
use crate::server::App;
use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use warpsmith_engine::FinishReason;

/// The state of the engine, as somebody with this key may see it.
///
/// With several keys, each sees its own requests and prefixes; of the others it sees how many requests and tokens there are.
pub async fn state(State(app): State<Arc<App>>, Extension(tenant): Extension<Tenant>) -> Response {
    let life = match app.bridge.state() {
        Life::Loading => "loading",
        Life::Ready => "ready",
        Life::Draining | Life::Ended => "draining",
        Life::Failed(_) => "failed",
    };
    let look = app.bridge.look(app.keys.scope(tenant)).await;
    let model = app.bridge.facts().map(|facts| {
        json!({
            "name": app.model_name(),
            "device": facts.device,
            "dtype": facts.dtype,
            "max_model_len": facts.room,
        })
    });
    let page_size = app.bridge.facts().map_or(0, |facts| facts.pages.1);
    let start = app.bridge.start_time();
    let now = millis(start, Instant::now());
    http::json(&json!({
        "now_ms": now,
        "age_ms": look.as_ref().map(|look| now - millis(start, look.at)),
        "state": life,
        "model": model,
        "engine": look.map(|look| engine(&look, start, page_size, app.bridge.snapshot().arriving)),
    }))
}

fn millis(start: Instant, at: Instant) -> u64 {
    at.saturating_duration_since(start).as_millis() as u64
}

fn engine(look: &Look, start: Instant, page_size: usize, arriving: usize) -> Value {
    let view = &look.view;
    let in_use = view.num_pages - view.free_pages - view.cached_pages;
    let branches = view.tree.shown.iter().map(|branch| {
        json!({
            "id": branch.id,
            "parent": branch.parent,
            "tokens": branch.tokens,
            "users": branch.users,
            "subtree_tokens": branch.subtree_tokens,
        })
    });
    let requests = view.sequences.iter().zip(&look.times).map(|(sequence, times)| {
        let mut request = json!({
            "id": sequence.request.0,
            "output": sequence.index,
            "state": if sequence.is_running { "running" } else { "waiting" },
            "prompt_tokens": sequence.prompt_tokens,
            "cached_tokens": sequence.cached_tokens,
            "computed_tokens": sequence.computed_tokens,
            "output_tokens": sequence.output_tokens,
            "pages": sequence.pages,
            "preemptions": sequence.preemptions,
        });
        // One that is not known by its times came with the server itself.
        add_times(
            &mut request,
            times.unwrap_or(Times { arrived: look.at, started: None, first: None }),
            start,
        );
        request
    });
    let finished = look.past.iter().take(32).map(|past| {
        let mut request = json!({
            "id": past.request,
            "output": past.index,
            "reason": reason(&past.reason),
            "prompt_tokens": past.usage.prompt_tokens,
            "cached_tokens": past.usage.cached_tokens,
            "output_tokens": past.usage.output_tokens,
            "preemptions": past.usage.preemptions,
            "ended_ms": millis(start, past.ended),
        });
        add_times(&mut request, past.times, start);
        request
    });
    json!({
        "pages": {
            "total": view.num_pages,
            "free": view.free_pages,
            "cached": view.cached_pages,
            "in_use": in_use,
            "page_size": page_size,
        },
        "tree": {
            "nodes": view.tree.total.0,
            "tokens": view.tree.total.1,
            "other_tokens": view.tree.other_tokens,
            "branches": branches.collect::<Vec<_>>(),
        },
        "requests": requests.collect::<Vec<_>>(),
        "others": { "running": view.others.0, "waiting": view.others.1 },
        "arriving": arriving,
        "finished": finished.collect::<Vec<_>>(),
        "totals": {
            "steps": look.stats.steps,
            "generated_tokens": look.stats.generated_tokens,
            "preemptions": look.stats.preemptions,
        },
    })
}

fn add_times(request: &mut Value, times: Times, start: Instant) {
    request["arrived_ms"] = json!(millis(start, times.arrived));
    request["started_ms"] = json!(times.started.map(|at| millis(start, at)));
    request["first_token_ms"] = json!(times.first.map(|at| millis(start, at)));
}

fn reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Failed(_) => "failed",
    }
}
