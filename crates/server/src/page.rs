//! The page at `/`. Its files are part of the program, and it loads nothing from elsewhere.
//!
//! It needs no key: there is nothing in it that is not public, and whoever opens it cannot send a key before it has loaded. What it
//! shows comes from routes that need one.

use crate::error::ApiError;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::sync::LazyLock;

/// What browsers let the page do: only what comes from this server, and no code in the HTML.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'";

/// A file of the page.
struct File {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
    /// Changes with the text.
    tag: HeaderValue,
}

/// A file with its type.
macro_rules! files {
    ($($name:literal $kind:literal),*) => {
        [$(($name, $kind, include_str!(concat!("page/", $name)))),*]
    };
}

static FILES: LazyLock<Vec<File>> = LazyLock::new(|| {
    let files = files![
        "index.html" "text/html; charset=utf-8",
        "style.css" "text/css; charset=utf-8",
        "icon.svg" "image/svg+xml",
        "api.js" "text/javascript; charset=utf-8",
        "app.js" "text/javascript; charset=utf-8",
        "chat.js" "text/javascript; charset=utf-8",
        "dom.js" "text/javascript; charset=utf-8",
        "markdown.js" "text/javascript; charset=utf-8",
        "panels.js" "text/javascript; charset=utf-8",
        "timeline.js" "text/javascript; charset=utf-8",
        "tree.js" "text/javascript; charset=utf-8"
    ];
    let file = |(name, kind, text): (&'static str, &'static str, &'static str)| {
        let tag = format!("\"{}\"", &blake3::hash(text.as_bytes()).to_hex()[..32]);
        File { name, kind, text, tag: HeaderValue::try_from(tag).expect("digits and quotes") }
    };
    files.into_iter().map(file).collect()
});

/// Whether a path is the page's: they need no key.
pub fn has(path: &str) -> bool {
    path == "/" || path.strip_prefix("/page/").is_some_and(|name| find(name).is_some())
}

fn find(name: &str) -> Option<&'static File> {
    FILES.iter().find(|file| file.name == name)
}

/// The page itself.
pub async fn index(headers: HeaderMap) -> Response {
    answer("index.html", &headers)
}

/// A file of the page.
pub async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    answer(&name, &headers)
}

fn answer(name: &str, headers: &HeaderMap) -> Response {
    let Some(file) = find(name) else {
        let shown: String = name.chars().take(100).collect();
        return ApiError::not_found(format!("the page has no file `{shown}`")).into_response();
    };
    let known = headers.get_all(header::IF_NONE_MATCH).iter().any(|given| matches(given, &file.tag));
    let mut response = match known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => file.text.into_response(),
    };
    for (name, value) in [
        (header::CONTENT_TYPE, file.kind),
        // Browsers ask each time whether it has changed: a new server brings a new page.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response.headers_mut().insert(header::ETAG, file.tag.clone());
    response
}

/// Whether a list of tags has this one. Proxies that compress mark tags as weak.
fn matches(given: &HeaderValue, tag: &HeaderValue) -> bool {
    let (Ok(given), Ok(tag)) = (given.to_str(), tag.to_str()) else { return false };
    given.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_the_page_names_is_there_and_none_is_elsewhere() {
        let mut named = std::collections::BTreeSet::from(["index.html"]);
        for file in FILES.iter() {
            assert!(!file.text.contains("innerHTML") && !file.text.contains("eval("), "{}", file.name);
            let words = file.text.split(['"', '\'', '(', ')']);
            for word in words {
                // `xmlns` is a name and no address.
                assert!(
                    !word.starts_with("http")
                        || word == "http://www.w3.org/2000/svg"
                        || word == "https:"
                        || word == "http:",
                    "{word}"
                );
                let local = word.strip_prefix("page/").or_else(|| word.strip_prefix("./"));
                if let Some(name) = local.filter(|name| name.contains('.')) {
                    assert!(find(name).is_some(), "{} names {name}", file.name);
                    named.insert(name);
                }
            }
        }
        assert_eq!(named.len(), FILES.len(), "files that nothing names");
        let html = find("index.html").unwrap().text;
        assert!(!html.contains(" style=") && !html.contains(" onclick=") && !html.contains("<style"));
    }

    #[test]
    fn a_known_file_is_not_sent_again() {
        let mut headers = HeaderMap::new();
        let first = answer("style.css", &headers);
        let tag = first.headers()[header::ETAG].clone();
        assert_eq!(
            (first.status(), first.headers()[header::CONTENT_TYPE].as_bytes()),
            (StatusCode::OK, &b"text/css; charset=utf-8"[..])
        );
        for (given, status) in [
            (tag.to_str().unwrap().to_owned(), StatusCode::NOT_MODIFIED),
            (format!("\"other\", W/{}", tag.to_str().unwrap()), StatusCode::NOT_MODIFIED),
            ("\"other\"".into(), StatusCode::OK),
        ] {
            headers.insert(header::IF_NONE_MATCH, given.parse().unwrap());
            let response = answer("style.css", &headers);
            assert_eq!(response.status(), status, "{given}");
            assert_eq!(response.headers()[header::CONTENT_SECURITY_POLICY], POLICY);
        }
        assert_eq!(answer("../page.rs", &headers).status(), StatusCode::NOT_FOUND);
        assert!(has("/") && has("/page/app.js"));
        assert!(!has("/page/") && !has("/page/app.jsx") && !has("/pages") && !has("/debug/state"));
    }
}
