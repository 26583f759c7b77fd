//! What files say about a model beside its weights.

use super::error::{Error, Result};
use super::value::{Array, Strings, Value};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What is known about a model beside its weights.
#[derive(Debug, Clone)]
pub enum Metadata {
    /// The keys of a GGUF file.
    Gguf(Keys),
    /// The object in `config.json` beside safetensors; empty for a lone file.
    Config(serde_json::Map<String, serde_json::Value>),
}

/// The keys of a GGUF file and their values.
#[derive(Debug, Clone)]
pub struct Keys {
    file: PathBuf,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Keys {
    pub(super) fn new(file: &Path) -> Keys {
        Keys { file: file.into(), entries: Vec::new(), index: HashMap::new() }
    }

    /// Adds a key; `false` if it is there already.
    pub(super) fn insert(&mut self, key: String, value: Value) -> bool {
        if self.index.contains_key(&key) {
            return false;
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        true
    }

    /// All keys and values in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The file they come from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The value of a key, whatever its type.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// The value of a key as a `T`: a number, `bool`, `&str`, `&Strings` or a slice of numbers. `None` without such a key.
    ///
    /// # Errors
    /// If the value is something else. Integers of any size fit any other as long as their value does.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match T::from_value(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                let got = format!("{} {value}", value.type_name());
                Err(Error::format(&self.file, format!("key `{key}`"), T::EXPECTED, got))
            }
        }
    }

    /// Like [`get`](Keys::get) for a key that must be there.
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T> {
        self.get(key)?.ok_or_else(|| Error::missing(&self.file, format!("key `{key}`"), None))
    }
}

/// What the value of a key can be read as.
pub trait FromValue<'a>: Sized {
    /// For messages.
    const EXPECTED: &'static str;

    /// The value, if it is one of these.
    fn from_value(value: &'a Value) -> Option<Self>;
}

/// A value that is an integer, whatever its size.
fn integer(value: &Value) -> Option<i128> {
    Some(match value {
        Value::U8(n) => (*n).into(),
        Value::I8(n) => (*n).into(),
        Value::U16(n) => (*n).into(),
        Value::I16(n) => (*n).into(),
        Value::U32(n) => (*n).into(),
        Value::I32(n) => (*n).into(),
        Value::U64(n) => (*n).into(),
        Value::I64(n) => (*n).into(),
        _ => return None,
    })
}

macro_rules! from_integers {
    ($($type:ty: $expected:literal),* $(,)?) => {$(
        impl FromValue<'_> for $type {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: &Value) -> Option<Self> {
                integer(value)?.try_into().ok()
            }
        }
    )*};
}
from_integers! {
    usize: "an integer of at least 0",
    u64: "an integer of at least 0",
    u32: "an integer from 0 to 2^32-1",
    i64: "an integer",
    i32: "an integer of 32 bits",
}

impl FromValue<'_> for f64 {
    const EXPECTED: &'static str = "a floating-point number";
    fn from_value(value: &Value) -> Option<f64> {
        match value {
            Value::F32(number) => Some(f64::from(*number)),
            Value::F64(number) => Some(*number),
            _ => None,
        }
    }
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a floating-point number";
    fn from_value(value: &Value) -> Option<f32> {
        f64::from_value(value).map(|number| number as f32)
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a bool";
    fn from_value(value: &Value) -> Option<bool> {
        if let Value::Bool(value) = value { Some(*value) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &'a Value) -> Option<&'a str> {
        if let Value::String(text) = value { Some(text) } else { None }
    }
}

impl<'a> FromValue<'a> for &'a Strings {
    const EXPECTED: &'static str = "an array of strings";
    fn from_value(value: &'a Value) -> Option<&'a Strings> {
        if let Value::Array(Array::String(strings)) = value { Some(strings) } else { None }
    }
}

macro_rules! from_arrays {
    ($($type:ty, $variant:ident: $expected:literal),* $(,)?) => {$(
        impl<'a> FromValue<'a> for &'a [$type] {
            const EXPECTED: &'static str = $expected;
            fn from_value(value: &'a Value) -> Option<Self> {
                if let Value::Array(Array::$variant(elements)) = value { Some(elements) } else { None }
            }
        }
    )*};
}
from_arrays! {
    u8, U8: "an array of u8",
    u32, U32: "an array of u32",
    i32, I32: "an array of i32",
    f32, F32: "an array of f32",
}
