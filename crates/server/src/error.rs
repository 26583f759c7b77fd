//! Answers to requests that cannot be served, in OpenAI's form.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// `Result` of a handler.
pub type Result<T, E = ApiError> = std::result::Result<T, E>;

/// The most characters of a message: values of requests are quoted in part.
const MAX_MESSAGE: usize = 600;

/// Why a request is not served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Of the answer.
    pub status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    /// The field at fault.
    pub param: Option<String>,
    /// What is said to the client.
    pub message: String,
    /// Seconds after which another try makes sense.
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let mut message: String = message.into();
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
            message.truncate(end);
            message.push('…');
        }
        ApiError { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// The request is wrong as a whole.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong.
    pub fn field(param: impl Into<String>, why: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        ApiError { param: Some(param.clone()), ..ApiError::invalid(format!("`{param}`: {why}")) }
    }

    /// A field has a value that is not possible.
    pub fn value(param: impl Into<String>, expected: impl std::fmt::Display, got: &Value) -> ApiError {
        ApiError::field(param, format_args!("expected {expected}, got {}", shown(got)))
    }

    /// With a code that programs can compare.
    #[must_use]
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// With another status.
    #[must_use]
    pub fn status(self, status: StatusCode) -> ApiError {
        ApiError { status, ..self }
    }

    /// The key is missing or wrong.
    pub fn unauthorized() -> ApiError {
        let told = "a valid API key is needed, as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", told).code("invalid_api_key")
    }

    /// There is nothing of this name.
    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code("not_found")
    }

    /// There are too many requests.
    pub fn busy(retry_after: u64) -> ApiError {
        let told = "too many requests are waiting; try again later";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", told);
        ApiError { retry_after: Some(retry_after), ..error.code("rate_limit_exceeded") }
    }

    /// The server cannot serve anybody.
    pub fn unavailable(message: impl Into<String>, retry_after: Option<u64>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message);
        ApiError { retry_after, ..error.code("service_unavailable") }
    }

    /// The server failed.
    pub fn server(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The request took too long. Clients must not try it again by themselves.
    pub fn timeout(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("timeout")
    }

    /// The body of the answer.
    pub fn json(&self) -> Value {
        let ApiError { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.json().to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::REQUEST_TIMEOUT || self.status == StatusCode::INTERNAL_SERVER_ERROR {
            // Clients of OpenAI try such requests twice more: the work would be done three times.
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// The start of a value, for messages.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Array(values) => format!("a list of {}", values.len()),
        Value::Object(fields) => format!("an object with {} fields", fields.len()),
        Value::String(text) => {
            let start: String = text.chars().take(60).collect();
            let more = if start.len() < text.len() { "…" } else { "" };
            format!("{}{more}", Value::String(start))
        }
        other => other.to_string(),
    }
}
