//! The words of a formula.

use crate::error::{Error, Result};

/// A word and where it begins, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub kind: Kind,
    pub at: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Name(String),
    Int(i64),
    Float(f64),
    Sign(&'static str),
    End,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Name(name) => write!(f, "`{name}`"),
            Kind::Int(i) => write!(f, "`{i}`"),
            Kind::Float(x) => write!(f, "`{x}`"),
            Kind::Sign(sign) => write!(f, "`{sign}`"),
            Kind::End => f.write_str("the end"),
        }
    }
}

/// Longer ones first.
const SIGNS: [&str; 23] = [
    "**", "<=", ">=", "==", "!=", "+", "-", "*", "/", "<", ">", "&", "|", "^", "~", "(", ")", "[", "]", ",",
    "=", ";", ":",
];

/// A syntax error at a byte of the text.
pub(super) fn error_at(text: &str, at: usize, what: impl Into<String>) -> Error {
    let at = at.min(text.len());
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let line = text[start..].lines().next().unwrap_or_default();
    Error::Syntax { what: what.into(), line: line.into(), column: text[start..at].chars().count() }
}

/// Splits a formula into words. `#` begins a comment.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>> {
    let mut found = vec![];
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        }
        if c == '#' {
            at += text[at..].find('\n').unwrap_or(text.len() - at);
            continue;
        }
        let (kind, len) = if c.is_ascii_digit() || (c == '.' && digit_follows(&text[at + 1..])) {
            number(text, at)?
        } else if c.is_ascii_alphabetic() || c == '_' {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let len = text[at..].find(|c| !word(c)).unwrap_or(text.len() - at);
            (Kind::Name(text[at..at + len].into()), len)
        } else if let Some(sign) = SIGNS.iter().find(|sign| text[at..].starts_with(**sign)) {
            (Kind::Sign(sign), sign.len())
        } else {
            return Err(error_at(text, at, format!("`{}` has no meaning here", c.escape_default())));
        };
        found.push(Token { kind, at });
        at += len;
    }
    found.push(Token { kind: Kind::End, at: text.len() });
    Ok(found)
}

fn digit_follows(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_digit())
}

fn number(text: &str, at: usize) -> Result<(Kind, usize)> {
    let bytes = &text.as_bytes()[at..];
    let digits = |from: usize| bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    let mut len = digits(0);
    let mut whole = true;
    if bytes.get(len) == Some(&b'.') {
        whole = false;
        len += 1 + digits(len + 1);
    }
    if matches!(bytes.get(len), Some(b'e' | b'E')) {
        let sign = matches!(bytes.get(len + 1), Some(b'+' | b'-')) as usize;
        let exponent = digits(len + 1 + sign);
        if exponent > 0 {
            whole = false;
            len += 1 + sign + exponent;
        }
    }
    let word = &text[at..at + len];
    if text[at + len..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        return Err(error_at(text, at + len, format!("`{word}` runs into a name")));
    }
    let kind = match whole {
        true => word.parse().map(Kind::Int).ok(),
        false => word.parse().map(Kind::Float).ok(),
    };
    let kind = kind.ok_or_else(|| error_at(text, at, format!("`{word}` is too large")))?;
    Ok((kind, len))
}
