//! The fields of a request, read one by one: every refusal names the field.

use crate::error::{ApiError, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// An object of a request, and where it is.
#[derive(Clone)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Empty for the request itself.
    path: String,
}

/// Parses the body of a request.
///
/// # Errors
/// If it is not a JSON object, or nested more deeply than `max_depth`.
pub fn parse(body: &[u8], max_depth: usize) -> Result<Map<String, Value>> {
    let text = std::str::from_utf8(body).map_err(|error| {
        ApiError::invalid(format!("the body is not UTF-8 at byte {}", error.valid_up_to()))
    })?;
    if is_deeper(body, max_depth) {
        let told = format!("the body is nested more than {max_depth} deep");
        return Err(ApiError::invalid(told).code("json_too_deep"));
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(ApiError::invalid(format!(
            "the body must be a JSON object, got {}",
            crate::error::shown(&other)
        ))),
        Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}")).code("invalid_json")),
    }
}

/// Whether brackets are nested more deeply than that. Strings are skipped; what is no JSON is found later.
fn is_deeper(body: &[u8], most: usize) -> bool {
    let (mut depth, mut in_text, mut escaped) = (0usize, false, false);
    for &byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b'[' | b'{' if !in_text => {
                depth += 1;
                if depth > most {
                    return true;
                }
            }
            b']' | b'}' if !in_text => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// How deep a value is nested.
pub fn depth(value: &Value) -> usize {
    match value {
        Value::Array(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

impl<'a> Fields<'a> {
    /// The fields of the request.
    pub fn new(object: &'a Map<String, Value>) -> Fields<'a> {
        Fields { object, path: String::new() }
    }

    /// The fields of a value somewhere in the request.
    pub fn of(value: &'a Value, path: String) -> Result<Fields<'a>> {
        match value {
            Value::Object(object) => Ok(Fields { object, path }),
            other => Err(ApiError::value(path, "an object", other)),
        }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// The error of a field.
    pub fn error(&self, name: &str, why: impl std::fmt::Display) -> ApiError {
        ApiError::field(self.path(name), why)
    }

    /// A field with a value. Null is none.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub fn required(&self, name: &str) -> Result<&'a Value> {
        self.get(name).ok_or_else(|| self.error(name, "is missing"))
    }

    fn refuse<T>(&self, name: &str, expected: impl std::fmt::Display, got: &Value) -> Result<T> {
        Err(ApiError::value(self.path(name), expected, got))
    }

    /// True or false.
    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => self.refuse(name, "true or false", other),
        }
    }

    /// A real number in a range.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let expected = format!("a number from {} to {}", range.start(), range.end());
                self.refuse(name, expected, value)
            }
        }
    }

    /// A whole number in a range.
    pub fn count(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // Some clients write whole numbers as 5.0.
        let exact = |number: f64| (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64);
        let number = value.as_i64().or_else(|| value.as_f64().and_then(exact));
        match number.filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let expected = match *range.end() {
                    i64::MAX => format!("a whole number from {}", range.start()),
                    most => format!("a whole number from {} to {most}", range.start()),
                };
                self.refuse(name, expected, value)
            }
        }
    }

    /// A count as a size.
    pub fn size(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<usize>> {
        Ok(self.count(name, range)?.map(|count| count as usize))
    }

    /// A text of at most this many bytes.
    pub fn text(&self, name: &str, most: usize) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if text.len() <= most => Ok(Some(text)),
            Some(Value::String(text)) => {
                Err(self.error(name, format_args!("expected at most {most} bytes, got {}", text.len())))
            }
            Some(other) => self.refuse(name, "a string", other),
        }
    }

    /// One of some texts.
    pub fn choice(&self, name: &str, choices: &[&'static str]) -> Result<Option<&'static str>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match choices.iter().find(|choice| value.as_str() == Some(choice)) {
            Some(choice) => Ok(Some(choice)),
            None => {
                let quoted: Vec<String> = choices.iter().map(|choice| format!("\"{choice}\"")).collect();
                self.refuse(name, quoted.join(" or "), value)
            }
        }
    }

    /// A list of at most this many values.
    pub fn list(&self, name: &str, most: usize) -> Result<Option<&'a [Value]>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(values)) if values.len() <= most => Ok(Some(values)),
            Some(Value::Array(values)) => {
                Err(self.error(name, format_args!("expected at most {most} values, got {}", values.len())))
            }
            Some(other) => self.refuse(name, "a list", other),
        }
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name).map(|value| Fields::of(value, self.path(name))).transpose()
    }

    /// The names of all fields.
    pub fn names(&self) -> impl Iterator<Item = &'a String> {
        self.object.keys()
    }

    /// Refuses fields that ask for something that is not done here, rather than leaving it out silently.
    pub fn refuse_unsupported(&self, names: &[&str]) -> Result<()> {
        let is_asked = |value: &Value| match value {
            Value::Bool(flag) => *flag,
            Value::Array(values) => !values.is_empty(),
            _ => true,
        };
        match names.iter().find(|name| self.get(name).is_some_and(is_asked)) {
            Some(name) => {
                Err(self.error(name, "is not supported by this server").code("unsupported_parameter"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_body_is_an_object_of_limited_depth() {
        assert!(parse(b"{\"a\": \"[[[[{{{{\\\"[[[\"}", 2).is_ok());
        for (body, told) in [
            (&b"[1]"[..], "a JSON object"),
            (b"{\"a\"", "not JSON"),
            (b"\xff", "not UTF-8"),
            (b"{\"a\": [[[1]]]}", "more than 3 deep"),
        ] {
            let message = parse(body, 3).unwrap_err().message;
            assert!(message.contains(told), "{message}");
        }
        assert_eq!(depth(&json!({ "a": [1, [2]] })), 3);
    }

    #[test]
    fn fields_are_named_with_their_path() {
        let body = json!({ "a": { "b": 7, "c": "x" }, "n": null, "whole": 5.0 });
        let fields = Fields::new(body.as_object().unwrap());
        assert_eq!(fields.count("whole", 0..=9).unwrap(), Some(5));
        assert_eq!(fields.flag("n").unwrap(), None);
        let inner = fields.object("a").unwrap().unwrap();
        for error in [
            inner.count("b", 0..=5).unwrap_err(),
            inner.text("b", 5).unwrap_err(),
            inner.flag("b").unwrap_err(),
            inner.list("b", 5).unwrap_err(),
        ] {
            assert_eq!(error.param.as_deref(), Some("a.b"));
            assert!(error.message.contains("got 7"), "{}", error.message);
        }
        assert!(inner.choice("c", &["y", "z"]).unwrap_err().message.contains("\"y\" or \"z\""));
        assert!(fields.required("missing").unwrap_err().message.contains("is missing"));
    }
}
