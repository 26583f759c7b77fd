//! A small HTTP client, for measuring servers and for tests.

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{HeaderMap, Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::io;
use tokio::net::TcpStream;

/// A server.
#[derive(Debug, Clone)]
pub struct Target {
    /// Host and port.
    authority: String,
    /// In front of all paths.
    prefix: String,
    key: Option<String>,
}

/// An answer that was read.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

fn wrong(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::other(error)
}

impl Target {
    /// A server by its address, such as `http://127.0.0.1:30000`, and the key to it.
    ///
    /// # Errors
    /// If the address is of another form.
    pub fn new(url: &str, key: Option<String>) -> Result<Target, String> {
        let rest =
            url.strip_prefix("http://").ok_or_else(|| format!("expected http://HOST:PORT, got `{url}`"))?;
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            return Err(format!("expected http://HOST:PORT, got `{url}`"));
        }
        let prefix = prefix.trim_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("/{prefix}") };
        Ok(Target { authority: authority.into(), prefix, key })
    }

    async fn open(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<Response<Incoming>> {
        let has_port = self.authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if has_port { self.authority.clone() } else { format!("{}:80", self.authority) };
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(wrong)?;
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header("host", &self.authority)
            .header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::new(Bytes::from(body))).map_err(wrong)?;
        sender.send_request(request).await.map_err(wrong)
    }

    /// Sends a request, and reads the answer.
    ///
    /// # Errors
    /// If there is no answer.
    pub async fn send(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<Answer> {
        let response = self.open(method, path, body).await?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(wrong)?.to_bytes();
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body })
    }

    /// Asks for a stream; `each` gets the data of its events, and says whether to go on. The answer has a body only if it is
    /// no stream.
    ///
    /// # Errors
    /// If there is no answer, or it breaks off.
    pub async fn stream(
        &self,
        path: &str,
        body: &Value,
        mut each: impl FnMut(&str) -> bool,
    ) -> io::Result<Answer> {
        let response = self.open("POST", path, Some(body)).await?;
        let (head, mut body) = response.into_parts();
        let status = head.status.as_u16();
        if status != 200 {
            let body = body.collect().await.map_err(wrong)?.to_bytes();
            return Ok(Answer { status, headers: head.headers, body });
        }
        let mut held: Vec<u8> = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(wrong)?.into_data() else { continue };
            held.extend_from_slice(&data);
            let mut start = 0;
            while let Some(length) = held[start..].windows(2).position(|two| two == b"\n\n") {
                let event = String::from_utf8_lossy(&held[start..start + length]);
                start += length + 2;
                let data = event.lines().find_map(|line| line.strip_prefix("data: "));
                if data.is_some_and(|data| !each(data)) {
                    return Ok(Answer { status, headers: head.headers, body: Bytes::new() });
                }
            }
            held.drain(..start);
        }
        Ok(Answer { status, headers: head.headers, body: Bytes::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_one_form() {
        let target = Target::new("http://localhost:8000/v9/", None).unwrap();
        assert_eq!((target.authority.as_str(), target.prefix.as_str()), ("localhost:8000", "/v9"));
        for wrong in ["localhost:8000", "https://x", "http://", "http:///x"] {
            assert!(Target::new(wrong, None).is_err(), "{wrong}");
        }
    }
}
