//! Keys of a configuration, from JSON or GGUF, read with errors that name the key and what the file has there.

use crate::error::{Error, Result};
use crate::weights;
use serde_json::Value;
use std::fmt;

/// The value of a key. JSON's null is no value.
#[derive(Debug, Clone, PartialEq)]
pub enum Setting {
    Flag(bool),
    Whole(i128),
    Real(f64),
    Text(String),
    /// An object or a list, as it is shown in messages.
    Other(String),
}

impl Setting {
    pub fn from_json(value: &Value) -> Option<Setting> {
        Some(match value {
            Value::Null => return None,
            Value::Bool(flag) => Setting::Flag(*flag),
            Value::String(text) => Setting::Text(text.clone()),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(whole), ..) => Setting::Whole(whole.into()),
                (_, Some(whole), _) => Setting::Whole(whole.into()),
                (.., Some(real)) => Setting::Real(real),
                _ => Setting::Other(number.to_string()),
            },
            Value::Array(_) | Value::Object(_) => Setting::Other(weights::shown(&value.to_string())),
        })
    }

    pub fn from_gguf(value: &weights::Value) -> Setting {
        use weights::Value as Gguf;
        match value {
            Gguf::U8(n) => Setting::Whole((*n).into()),
            Gguf::I8(n) => Setting::Whole((*n).into()),
            Gguf::U16(n) => Setting::Whole((*n).into()),
            Gguf::I16(n) => Setting::Whole((*n).into()),
            Gguf::U32(n) => Setting::Whole((*n).into()),
            Gguf::I32(n) => Setting::Whole((*n).into()),
            Gguf::U64(n) => Setting::Whole((*n).into()),
            Gguf::I64(n) => Setting::Whole((*n).into()),
            // The shortest decimal of an f32 is what was meant: 1e-5, not 9.99999974737875e-6. It rounds back to the same f32.
            Gguf::F32(n) => Setting::Real(n.to_string().parse().unwrap_or(f64::from(*n))),
            Gguf::F64(n) => Setting::Real(*n),
            Gguf::Bool(flag) => Setting::Flag(*flag),
            Gguf::String(text) => Setting::Text(text.clone()),
            Gguf::Array(_) => Setting::Other(value.to_string()),
        }
    }

    fn number(&self) -> Option<f64> {
        match self {
            Setting::Whole(number) => Some(*number as f64),
            Setting::Real(number) => Some(*number),
            _ => None,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Flag(flag) => write!(f, "{flag}"),
            Setting::Whole(number) => write!(f, "{number}"),
            Setting::Real(number) => write!(f, "{number:?}"),
            Setting::Text(text) => write!(f, "\"{}\"", weights::shown(text)),
            Setting::Other(shown) => f.write_str(shown),
        }
    }
}

/// Keys that begin alike.
pub struct Keys<'a> {
    /// What stands before each key, with its dot.
    pub prefix: String,
    pub get: &'a dyn Fn(&str) -> Option<Setting>,
}

impl Keys<'_> {
    pub fn wrong(&self, key: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        Error::config(&format!("{}{key}", self.prefix), expected, got)
    }

    pub fn find(&self, key: &str) -> Option<Setting> {
        (self.get)(key)
    }

    fn missing(&self, key: &str) -> Error {
        self.wrong(key, "a number", "nothing")
    }

    pub fn size_if_any(&self, key: &str) -> Result<Option<usize>> {
        let Some(found) = self.find(key) else { return Ok(None) };
        match found {
            Setting::Whole(n) if (1..1 << 32).contains(&n) => Ok(Some(n as usize)),
            _ => Err(self.wrong(key, "a whole number from 1 to below 2^32", found)),
        }
    }

    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.size_if_any(key)?.unwrap_or(default))
    }

    /// As [`Keys::size_or`], where zero is a size too.
    pub fn size_or_zero(&self, key: &str, default: usize) -> Result<usize> {
        match self.find(key) {
            Some(Setting::Whole(0)) => Ok(0),
            _ => self.size_or(key, default),
        }
    }

    pub fn size(&self, key: &str) -> Result<usize> {
        self.size_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn real_if_any(&self, key: &str) -> Result<Option<f64>> {
        let Some(found) = self.find(key) else { return Ok(None) };
        match found.number() {
            Some(n) if n.is_finite() && n > 0.0 => Ok(Some(n)),
            _ => Err(self.wrong(key, "a finite number above zero", found)),
        }
    }

    /// A number where zero stands for none.
    pub fn real_if_positive(&self, key: &str) -> Result<Option<f64>> {
        match self.find(key) {
            Some(found) if found.number() == Some(0.0) => Ok(None),
            _ => self.real_if_any(key),
        }
    }

    pub fn real_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.real_if_any(key)?.unwrap_or(default))
    }

    pub fn real(&self, key: &str) -> Result<f64> {
        self.real_if_any(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.find(key) {
            None => Ok(default),
            Some(Setting::Flag(flag)) => Ok(flag),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    pub fn text_if_any(&self, key: &str) -> Result<Option<String>> {
        match self.find(key) {
            None => Ok(None),
            Some(Setting::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a text", other)),
        }
    }

    /// A switch that must be as it is by default, because the other way is not implemented.
    pub fn must_be(&self, key: &str, only: bool) -> Result<()> {
        match self.flag_or(key, only)? == only {
            true => Ok(()),
            false => Err(self.wrong(key, only.to_string(), !only)),
        }
    }

    /// A second name of a size, which must not say otherwise than the first.
    pub fn must_be_as(&self, other: &str, key: &str) -> Result<()> {
        match (self.size_if_any(key)?, self.size_if_any(other)?) {
            (Some(size), Some(said)) if said != size => {
                Err(self.wrong(other, format!("{size}, as `{}{key}` is", self.prefix), said))
            }
            _ => Ok(()),
        }
    }

    /// A number that must be one of those that change nothing, because others are not implemented.
    pub fn must_be_one_of(&self, key: &str, neutral: &[f64]) -> Result<()> {
        match self.find(key) {
            Some(found) if !found.number().is_some_and(|n| neutral.contains(&n)) => {
                let neutral: Vec<String> = neutral.iter().map(f64::to_string).collect();
                Err(self.wrong(key, neutral.join(" or "), found))
            }
            _ => Ok(()),
        }
    }
}
