//! The routes.

mod chat;
mod completions;
mod debug;
mod embeddings;
mod generate;
mod info;
mod logprobs;
mod openapi;
mod responses;
mod tokens;

use crate::error::ApiError;
use crate::page;
use crate::server::App;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::sync::Arc;

/// Whether a path needs no key. Whoever starts and stops servers has none; and browsers cannot send one with an address, so the
/// page has to ask for it.
fn is_open(path: &str) -> bool {
    path == "/health" || page::has(path)
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::index))
        .route("/page/{name}", get(page::file))
        .route("/debug/state", get(debug::state))
        .route("/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/server_info", get(info::server_info))
        .route("/flush_cache", post(info::flush_cache))
        .route("/openapi.json", get(openapi::document))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*name}", get(info::model))
        .route("/v1/chat/completions", post(chat::serve))
        .route("/v1/completions", post(completions::serve))
        .route("/v1/responses", post(responses::serve))
        .route("/v1/embeddings", post(embeddings::serve))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .fallback(|request: Request| async move {
            let told =
                format!("there is no `{}` here; /openapi.json lists what there is", request.uri().path());
            ApiError::not_found(told)
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let told = format!("`{}` does not take {}", request.uri().path(), request.method());
            ApiError::invalid(told).status(StatusCode::METHOD_NOT_ALLOWED)
        })
        .layer(from_fn_with_state(app.clone(), admit))
        .with_state(app)
}

/// Lets those in who have a key, and counts the answers.
async fn admit(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let response = match app.keys.tenant(request.headers()) {
        Err(error) if !is_open(request.uri().path()) => error.into_response(),
        Err(_) => next.run(request).await,
        Ok(tenant) => {
            request.extensions_mut().insert(tenant);
            next.run(request).await
        }
    };
    app.bridge.metrics().answered(response.status().as_u16());
    response
}
