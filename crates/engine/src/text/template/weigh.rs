//! Values with a known size.
//!
//! Lists and maps share their elements, so a few steps of `{% set x = [x, x] %}` make a small value that takes forever to
//! write or compare, and many steps of `{% set x = [x] %}` one too deep to be dropped. So every list and map that a
//! template makes or is given carries its size as it would be written, and its depth; both are limited when it is made.

use super::{MAX_DEPTH, meter};
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt;
use std::sync::Arc;

/// Bytes of a value beside its text.
pub const VALUE: usize = 32;
/// Bytes of a list or map beside its elements, and of an entry of a map beside key and value.
const OBJECT: usize = 96;
const ENTRY: usize = 32;

/// The size of a value with everything in it, counted as often as it occurs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Size {
    pub bytes: usize,
    pub depth: usize,
}

impl Size {
    fn add(&mut self, part: Size) -> Result<(), Error> {
        self.bytes = self.bytes.saturating_add(part.bytes);
        self.depth = self.depth.max(part.depth + 1);
        if self.depth > MAX_DEPTH {
            return Err(meter::exceed("depth of values", MAX_DEPTH as u64));
        }
        meter::fits(self.bytes)
    }
}

/// A list or a map, and its size.
#[derive(Debug)]
struct Weighed {
    inner: DynObject,
    size: Size,
}

impl Object for Weighed {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.inner.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.inner.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.inner.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.inner.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.inner.enumerator_len()
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.inner.is_true()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.render(f)
    }
}

fn wrap(inner: &Value, size: Size) -> Value {
    match inner.as_object() {
        Some(object) => Value::from_object(Weighed { inner: object.clone(), size }),
        None => inner.clone(),
    }
}

/// Whether a value is part of the machinery: a namespace, a loop, a macro. Its contents change, or lead back to itself.
fn is_machinery(object: &DynObject) -> bool {
    let name = object.type_name();
    name.contains("::vm::") || name.contains("Namespace")
}

/// The size of a value. `fresh` grows by the bytes that have not been counted before.
fn measure(value: &Value, fresh: &mut usize) -> Result<Size, Error> {
    let text = value.as_str().map(str::len).or_else(|| value.as_bytes().map(<[u8]>::len));
    let Some(object) = value.as_object().filter(|_| text.is_none()) else {
        return Ok(Size { bytes: VALUE + text.unwrap_or(0), depth: 0 });
    };
    if let Some(weighed) = object.downcast_ref::<Weighed>() {
        return Ok(weighed.size);
    }
    if is_machinery(object) {
        let message = "a namespace, loop or macro cannot be part of another value";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let mut size = Size { bytes: OBJECT, depth: 1 };
    let before = *fresh;
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                size.add(measure(&key, fresh)?)?;
                size.add(measure(&value.get_item(&key)?, fresh)?)?;
                size.bytes += ENTRY;
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                size.add(measure(&item, fresh)?)?;
            }
        }
        _ => {}
    }
    *fresh = before.saturating_add(size.bytes);
    Ok(size)
}

/// The size of a value.
pub fn size(value: &Value) -> Result<Size, Error> {
    measure(value, &mut 0)
}

/// The size of everything in a namespace, but for one name in it.
pub fn size_without(namespace: &Value, name: &str) -> Result<usize, Error> {
    let Some(object) = namespace.as_object().filter(|_| namespace.kind() == ValueKind::Map) else {
        return Ok(0);
    };
    let others = namespace.try_iter()?.filter(|key| key.as_str() != Some(name));
    let sizes = others.filter_map(|key| object.get_value(&key)).map(|value| Ok(size(&value)?.bytes));
    sizes.sum()
}

/// The most bytes of a value as text.
pub fn text_bound(value: &Value) -> Result<usize, Error> {
    let bytes = match (value.as_str(), value.as_object()) {
        (Some(text), _) => return Ok(text.len()),
        (None, None) => return Ok(512),
        (None, Some(object)) if is_machinery(object) => size_without(value, "")?.saturating_add(512),
        (None, Some(_)) => size(value)?.bytes,
    };
    // Quoted, a byte takes up to ten.
    Ok(bytes.saturating_mul(10))
}

/// A value that was just made: counted, limited, and with its size if it is a list or map. What is computed when it is
/// looped over is computed now.
pub fn made(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        meter::fits(text.len())?;
        meter::charge(VALUE + text.len())?;
        return Ok(value);
    }
    let Some(object) = value.as_object() else { return Ok(value) };
    // Named arguments are told apart by their type.
    if object.downcast_ref::<Weighed>().is_some() || is_machinery(object) || value.is_kwargs() {
        return Ok(value);
    }
    match value.kind() {
        ValueKind::Map => {
            let mut fresh = 0;
            let size = measure(&value, &mut fresh)?;
            meter::charge(fresh)?;
            Ok(wrap(&value, size))
        }
        ValueKind::Seq | ValueKind::Iterable => list(value.try_iter()?),
        _ => Ok(value),
    }
}

/// A list of values.
pub fn list(values: impl Iterator<Item = Value>) -> Result<Value, Error> {
    let (mut items, mut fresh, mut size) = (Vec::new(), OBJECT, Size { bytes: OBJECT, depth: 1 });
    for item in values {
        size.add(measure(&item, &mut fresh)?)?;
        fresh += VALUE;
        items.push(item);
    }
    meter::charge(fresh)?;
    Ok(wrap(&Value::from(items), size))
}

/// What a template is given.
pub fn from_json(json: &serde_json::Value) -> Result<Value, Error> {
    use serde_json::Value::{Array, Object, String};
    match json {
        Array(items) => {
            let items: Vec<Value> = items.iter().map(from_json).collect::<Result<_, _>>()?;
            let value = Value::from(items);
            Ok(wrap(&value, size(&value)?))
        }
        Object(entries) => {
            let entry = |(name, value): (&std::string::String, &serde_json::Value)| {
                Ok((Value::from(name.as_str()), from_json(value)?))
            };
            let entries: Vec<(Value, Value)> = entries.iter().map(entry).collect::<Result<_, Error>>()?;
            let value: Value = entries.into_iter().collect();
            Ok(wrap(&value, size(&value)?))
        }
        String(text) => Ok(Value::from(text.as_str())),
        scalar => Ok(Value::from_serialize(scalar)),
    }
}
