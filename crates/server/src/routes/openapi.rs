//! What there is, as an OpenAPI document.

use crate::http;
use axum::response::Response;
use serde_json::{Map, Value, json};

/// A route, and what it does. The tests compare them with those that are served.
const ROUTES: &[(&str, &str, &str)] = &[
    (
        "get",
        "/health",
        "Whether requests would be served; beside the page at `/` the one route without a key",
    ),
    ("get", "/metrics", "Figures for Prometheus, under vLLM's names"),
    ("get", "/server_info", "Settings and figures"),
    ("get", "/debug/state", "Pages, the prefix tree and requests with their times: sizes, no text"),
    ("post", "/flush_cache", "Forget cached prefixes that nobody uses"),
    ("get", "/openapi.json", "This document"),
    ("get", "/v1/models", "The names of the model"),
    ("get", "/v1/models/{model}", "One of them"),
    ("post", "/v1/chat/completions", "Answer a chat"),
    ("post", "/v1/completions", "Continue prompts"),
    ("post", "/v1/responses", "Answer a chat, in the form of the Responses API; nothing is stored"),
    ("post", "/v1/embeddings", "Vectors for texts, from the hidden states of the model"),
    ("post", "/tokenize", "The tokens of a text or a chat"),
    ("post", "/detokenize", "The text of tokens"),
];

/// The document.
pub async fn document() -> Response {
    http::json(&make())
}

fn typed(kind: &str, what: &str) -> Value {
    json!({ "type": kind, "description": what })
}

fn range(kind: &str, least: f64, most: f64, what: &str) -> Value {
    json!({ "type": kind, "minimum": least, "maximum": most, "description": what })
}

/// Fields that all routes which generate have.
fn sampling() -> Map<String, Value> {
    let fields = json!({
        "model": typed("string", "A name of the model; left out, the first"),
        "stream": typed("boolean", "Whether the answer comes as events"),
        "temperature": range("number", 0.0, 2.0, "Divides logits; 0 takes the likeliest token"),
        "top_p": range("number", 0.0, 1.0, "The likeliest tokens whose probabilities add up to this"),
        "top_k": typed("integer", "So many of the likeliest tokens; 0 or -1 for all"),
        "min_p": range("number", 0.0, 1.0, "Tokens at least this probable, relative to the likeliest"),
        "repetition_penalty": range("number", 0.01, 100.0, "Weakens tokens of prompt and answer"),
        "presence_penalty": range("number", -2.0, 2.0, "Weakens tokens of the answer"),
        "frequency_penalty": range("number", -2.0, 2.0, "Weakens tokens of the answer, each time"),
        "seed": typed("integer", "The same seed gives the same answer"),
        "n": typed("integer", "Answers"),
        "stop": json!({ "oneOf": [typed("string", ""), { "type": "array", "items": { "type": "string" } }],
            "description": "Texts that end the answer and are not part of it" }),
        "stop_token_ids": json!({ "type": "array", "items": { "type": "integer" } }),
        "ignore_eos": typed("boolean", "Go on when the model wants to end"),
        "logit_bias": typed("object", "Added to the logits of tokens, by their ids"),
        "response_format": typed("object",
            "`{\"type\": ...}` of text, json_object, json_schema, regex or grammar (in llguidance's form of Lark)"),
        "cache_salt": typed("string", "Separates cached prefixes from those of other salts"),
        "priority": typed("integer", "Lower is served first"),
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn with(fields: Value) -> Value {
    let mut all = sampling();
    if let Value::Object(fields) = fields {
        all.extend(fields);
    }
    json!({ "type": "object", "properties": all })
}

/// The body of a route, if it has one.
fn body(path: &str) -> Option<Value> {
    let list = |kind: &str| json!({ "type": "array", "items": { "type": kind } });
    Some(match path {
        "/v1/chat/completions" => with(json!({
            "messages": list("object"), "max_completion_tokens": typed("integer", "The longest answer, in tokens"),
            "max_tokens": typed("integer", "The same, by its older name"), "logprobs": typed("boolean", ""),
            "top_logprobs": range("integer", 0.0, 20.0, ""), "tools": list("object"),
            "tool_choice": typed("string", "none, auto, required, or an object that names a function"),
            "parallel_tool_calls": typed("boolean", ""), "stream_options": typed("object", ""),
            "chat_template_kwargs": typed("object", "Variables of the template, such as enable_thinking"),
        })),
        "/v1/completions" => with(json!({
            "prompt": typed("string", "A text, tokens, or a list of either"),
            "max_tokens": typed("integer", "The longest answer, in tokens; 16"),
            "logprobs": range("integer", 0.0, 20.0, ""), "echo": typed("boolean", "Prompts are part of the answer"),
            "stream_options": typed("object", ""),
        })),
        "/v1/responses" => with(json!({
            "input": typed("string", "A text, or a list of messages, calls and their outputs"),
            "instructions": typed("string", "The system message"),
            "max_output_tokens": typed("integer", ""), "text": typed("object", "The format of the answer"),
            "tools": list("object"), "tool_choice": typed("string", ""),
        })),
        "/v1/embeddings" => json!({ "type": "object", "required": ["input"], "properties": {
            "model": typed("string", "A name of the model; left out, the first"),
            "input": typed("string", "A text, tokens, or a list of either"),
            "encoding_format": json!({ "type": "string", "enum": ["float", "base64"],
                "description": "Numbers, or the bytes of 32-bit little-endian floats" }),
            "dimensions": typed("integer", "The model's width: vectors are not cut"),
            "pooling": json!({ "type": "string", "enum": ["last", "mean"],
                "description": "The hidden state of the last token, or the mean of all; left out, as the server was started" }),
            "add_special_tokens": typed("boolean", "Whether texts begin with the token that prompts begin with"),
            "user": typed("string", "Has no effect"),
        } }),
        "/tokenize" => json!({ "type": "object", "properties": {
            "prompt": typed("string", ""), "messages": list("object"),
            "add_special_tokens": typed("boolean", ""), "return_token_strs": typed("boolean", ""),
        } }),
        "/detokenize" => json!({ "type": "object", "properties": { "tokens": list("integer") } }),
        _ => return None,
    })
}

fn make() -> Value {
    let mut paths = Map::new();
    for (method, path, summary) in ROUTES {
        let error = json!({ "description": "refused", "content": { "application/json": {
            "schema": { "$ref": "#/components/schemas/Error" } } } });
        let mut operation = json!({
            "summary": summary,
            "responses": { "200": { "description": "done" }, "4XX": error, "5XX": error },
        });
        if *path == "/health" {
            operation["security"] = json!([]);
        }
        if path.contains('{') {
            let parameter =
                json!({ "name": "model", "in": "path", "required": true, "schema": { "type": "string" } });
            operation["parameters"] = json!([parameter]);
        }
        if let Some(schema) = body(path) {
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        }
        let of_path = paths.entry(*path).or_insert_with(|| json!({}));
        of_path[*method] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Warpsmith", "version": env!("CARGO_PKG_VERSION"), "license": { "name": "Apache-2.0" } },
        "security": [{ "key": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } },
            "schemas": { "Error": { "type": "object", "properties": { "error": { "type": "object", "properties": {
                "message": { "type": "string" }, "type": { "type": "string" },
                "param": { "type": ["string", "null"] }, "code": { "type": ["string", "null"] },
            } } } } },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_exactly_the_routes_that_are_served() {
        // As they stand in the router. The files of the page are for browsers.
        let source = include_str!("mod.rs");
        let mut served: Vec<(String, String)> = source
            .lines()
            .filter(|line| !line.contains("get(page::"))
            .filter_map(|line| line.trim().strip_prefix(".route(\""))
            .map(|line| {
                let (path, rest) = line.split_once('"').unwrap();
                let method = if rest.contains("post(") { "post" } else { "get" };
                (method.to_owned(), path.replace("{*name}", "{model}"))
            })
            .collect();
        let mut told: Vec<(String, String)> =
            ROUTES.iter().map(|(method, path, _)| (method.to_string(), path.to_string())).collect();
        served.sort();
        told.sort();
        assert_eq!(told, served);
        let document = make();
        assert_eq!(document["paths"].as_object().unwrap().len(), ROUTES.len());
        assert_eq!(document["paths"]["/health"]["get"]["security"], json!([]));
    }
}
