//! Bodies of requests and answers.

use crate::error::{ApiError, Result};
use crate::fields;
use crate::options::Limits;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body as HttpBody, Frame};
use serde_json::{Map, Value};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;

/// Reads the body of a request that says it is JSON.
///
/// # Errors
/// If it is too long or too slow.
pub async fn read_body(request: Request, limits: &Limits) -> Result<Vec<u8>> {
    let kind = request.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let essence = kind.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if !essence.eq_ignore_ascii_case(b"application/json") {
        let told = "the header `Content-Type` must be application/json";
        return Err(ApiError::invalid(told).status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
    }
    let too_long = || {
        let told = format!("the body is longer than {} bytes", limits.max_body);
        ApiError::invalid(told).status(StatusCode::PAYLOAD_TOO_LARGE).code("body_too_large")
    };
    // The announced length is known before anything is read.
    if request.body().size_hint().lower() > limits.max_body as u64 {
        return Err(too_long());
    }
    let body = async {
        let mut body = Limited::new(request.into_body(), limits.max_body);
        // In one piece from the start: a client may send single bytes, each of which would be a piece with a size and an owner.
        let mut text = Vec::new();
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame?.into_data() {
                text.extend_from_slice(&data);
            }
        }
        Ok::<Vec<u8>, axum::BoxError>(text)
    };
    match tokio::time::timeout(limits.body_timeout, body).await {
        Err(_) => {
            let told = format!("the body did not arrive within {} s", limits.body_timeout.as_secs_f64());
            Err(ApiError::timeout(told))
        }
        Ok(Err(error)) if error.downcast_ref::<LengthLimitError>().is_some() => Err(too_long()),
        Ok(Err(error)) => Err(ApiError::invalid(format!("the body cannot be read: {error}"))),
        Ok(Ok(text)) => Ok(text),
    }
}

/// The object that is the body of a request. As values it takes many times its memory, so this belongs on the thread that
/// prepares the request: there are few of them, and what waits for one is still text.
///
/// # Errors
/// If it is no JSON.
pub fn parse(body: &[u8], limits: &Limits) -> Result<Map<String, Value>> {
    fields::parse(body, limits.max_depth)
}

/// JSON as an answer.
pub fn json(value: &Value) -> Response {
    let mut response = value.to_string().into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Text as an answer.
pub fn text(kind: &'static str, text: String) -> Response {
    let mut response = text.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// Where the events of a stream go.
pub struct Events {
    sender: mpsc::Sender<Bytes>,
    stall: Duration,
}

/// The client has gone, or does not read.
#[derive(Debug)]
pub struct Gone;

impl Events {
    /// A stream of events, and the answer that carries them. The client is given up if it reads nothing for so long.
    pub fn new(stall: Duration) -> (Events, Response) {
        // What does not fit waits in the mailbox of the request, where it is merged.
        let (sender, receiver) = mpsc::channel(4);
        let mut response = Response::new(Body::new(EventBody(receiver)));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Proxies must not collect events.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        (Events { sender, stall }, response)
    }

    /// Sends text that is made of whole events.
    pub async fn send(&self, events: String) -> Result<(), Gone> {
        if events.is_empty() {
            return Ok(());
        }
        match tokio::time::timeout(self.stall, self.sender.send(events.into())).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Gone),
        }
    }

    /// Ends when the client has gone.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }
}

/// An event with JSON, at the end of `out`.
pub fn event(out: &mut String, value: &Value) {
    out.push_str("data: ");
    out.push_str(&value.to_string());
    out.push_str("\n\n");
}

/// An event with a name, as the Responses API has them.
pub fn named_event(out: &mut String, name: &str, value: &Value) {
    out.push_str("event: ");
    out.push_str(name);
    out.push('\n');
    event(out, value);
}

/// The end of a stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// The body of an answer whose parts come from a channel.
struct EventBody(mpsc::Receiver<Bytes>);

impl HttpBody for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part))))
    }
}

/// A new name for an answer.
pub fn new_id(prefix: &str) -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let random = || RandomState::new().build_hasher().finish();
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
