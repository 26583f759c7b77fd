//! Filters, tests, functions and methods of templates, each with a check of what it would make before it is called.

use super::compile::{FIT, MADE, TICK, bytes_of};
use super::weigh::{VALUE, made, size, size_without, text_bound};
use super::{MAX_VALUE, meter, python};
use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value, filters, functions, tests};
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest format of a date.
const MAX_DATE: usize = 1000;

/// Registers builtins by their names, each behind a check.
macro_rules! checked {
    ($environment:ident, $add:ident, $check:ident, $module:ident, $($name:literal => $function:ident),+ $(,)?) => {
        $(
            let inner = Value::from_function($module::$function);
            $environment.$add($name, move |state: &State<'_, '_>, args: Rest<Value>| -> Result<Value, Error> {
                $check($name, &args)?;
                made(inner.call(state, &args)?)
            });
        )+
    };
}

/// Everything a template can call.
pub fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| python::write_value(out, value));
    // It writes a value over many lines; no template wants that.
    environment.remove_filter("pprint");
    checked!(environment, add_filter, check_filter, filters,
        "safe" => safe, "escape" => escape, "e" => escape, "lower" => lower, "upper" => upper, "title" => title,
        "capitalize" => capitalize, "replace" => replace, "dictsort" => dictsort, "reverse" => reverse, "trim" => trim,
        "join" => join, "split" => split, "lines" => lines, "default" => default, "d" => default, "round" => round,
        "abs" => abs, "int" => int, "float" => float, "attr" => attr, "first" => first, "last" => last, "min" => min,
        "max" => max, "sort" => sort, "list" => list, "bool" => bool, "batch" => batch, "slice" => slice, "sum" => sum,
        "indent" => indent, "select" => select, "reject" => reject, "selectattr" => selectattr,
        "rejectattr" => rejectattr, "map" => map, "groupby" => groupby, "unique" => unique, "chain" => chain,
        "zip" => zip, "format" => format,
    );
    checked!(environment, add_filter, check_filter, python,
        "tojson" => tojson, "string" => string, "items" => items, "length" => length, "count" => length);
    // Those that read all of a value.
    checked!(environment, add_test, check_time, tests,
        "startingwith" => is_startingwith, "endingwith" => is_endingwith, "lower" => is_lower, "upper" => is_upper,
        "in" => is_in, "eq" => is_eq, "equalto" => is_eq, "==" => is_eq, "ne" => is_ne, "!=" => is_ne, "lt" => is_lt,
        "lessthan" => is_lt, "<" => is_lt, "le" => is_le, "<=" => is_le, "gt" => is_gt, "greaterthan" => is_gt,
        ">" => is_gt, "ge" => is_ge, ">=" => is_ge);
    environment.add_test("iterable", python::is_iterable);
    environment.add_test("sequence", python::is_sequence);
    checked!(environment, add_function, check_values, functions, "dict" => dict, "namespace" => namespace);
    environment.remove_global("debug");
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| -> Result<String, Error> {
        if format.len() > MAX_DATE {
            return Err(meter::exceed("format of dates in bytes", MAX_DATE as u64));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs());
        Ok(python::strftime(now, format))
    });
    environment.add_filter(FIT, fit);
    environment.add_filter(MADE, made);
    environment.add_filter(TICK, |value: Value| meter::charge(0).map(|()| value));
    environment
}

/// Checks the operands of an instruction. They are given back in the opposite order, as the machine unpacks them.
fn fit(operands: &Value, sign: &str) -> Result<Value, Error> {
    meter::charge(0)?;
    let mut operands: Vec<Value> = operands.try_iter()?.collect();
    match (sign, &operands[..]) {
        ("+" | "*" | "~", [left, right]) => meter::fits(bytes_of(sign, left, right)?)?,
        // A namespace is as limited as any other value.
        (sign, [value, namespace]) if sign.starts_with('=') => {
            let others = size_without(namespace, &sign[1..])?;
            meter::fits(size(value)?.bytes.saturating_add(others))?;
        }
        ("[:]", [value, start, stop, step]) => {
            if let Some(operands) = backwards(value, start, stop, step)? {
                return Ok(Value::from(operands.into_iter().rev().collect::<Vec<_>>()));
            }
        }
        _ => {
            let count = |value: &Value| value.len().unwrap_or(0);
            let all = operands.iter().map(count).fold(0, usize::saturating_add);
            meter::fits(all.saturating_mul(VALUE))?;
        }
    }
    operands.reverse();
    Ok(Value::from(operands))
}

/// Other operands for a slice with a negative step that has no elements, which the machine takes for one with some.
fn backwards(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Option<[Value; 4]>, Error> {
    let Some(step) = step.as_i64().filter(|&step| step < 0) else { return Ok(None) };
    if step == i64::MIN {
        return Err(Error::new(ErrorKind::InvalidOperation, "the step of a slice is out of range"));
    }
    let Some(len) = value.len() else { return Ok(None) };
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let place =
        |bound: &Value| bound.as_i64().map(|at| if at < 0 { (len + at).max(-1) } else { at.min(len - 1) });
    let first = place(start).unwrap_or(len - 1);
    let is_empty = len == 0 || first < 0 || place(stop).is_some_and(|last| last >= first);
    let none = || Value::from(());
    let nothing = if value.as_str().is_some() { Value::from("") } else { Value::from(Vec::<Value>::new()) };
    Ok(is_empty.then(|| [nothing, none(), none(), none()]))
}

/// What a builtin would make of its arguments must fit.
fn check_filter(name: &str, args: &[Value]) -> Result<(), Error> {
    meter::charge(0)?;
    let Some(value) = args.first() else { return Ok(()) };
    let text = |i: usize| args.get(i).and_then(Value::as_str);
    let number = |i: usize, key: &str| {
        let named = args.last().filter(|last| last.is_kwargs()).and_then(|last| last.get_attr(key).ok());
        let given =
            args.get(i).and_then(Value::as_usize).or_else(|| named.and_then(|named| named.as_usize()));
        given.unwrap_or(0)
    };
    let len = value.as_str().map_or(0, str::len);
    // A list of the characters of a text, or of the elements of anything else.
    let elements = || value.len().unwrap_or(0).max(len);
    let bytes = match name {
        "escape" | "e" => text_bound(value)?.saturating_mul(6),
        "lower" | "upper" | "title" | "capitalize" => text_bound(value)?.saturating_mul(3),
        "replace" => match (value.as_str(), text(1), text(2)) {
            (Some(value), Some(old), Some(new)) => replaced(value, old, new),
            _ => text_bound(value)?.saturating_mul(args.get(2).map_or(Ok(1), text_bound)?.max(1)),
        },
        "join" => joined(value, text(1).unwrap_or_default())?,
        "split" => parts(value, text(1)),
        "lines" => parts(value, Some("\n")),
        "batch" | "slice" => elements().saturating_add(number(1, "count")).saturating_mul(4 * VALUE),
        "indent" => {
            let lines = value.as_str().map_or(0, |text| text.bytes().filter(|&byte| byte == b'\n').count());
            len.saturating_add(number(1, "width").saturating_mul(lines + 2))
        }
        "zip" => elements().saturating_mul(args.len()).saturating_mul(2 * VALUE),
        "list" | "sort" | "unique" | "groupby" | "map" | "select" | "reject" | "selectattr"
        | "rejectattr" | "min" | "max" | "chain" | "dictsort" | "items" => elements().saturating_mul(VALUE),
        "format" => formatted(value.as_str().unwrap_or_default(), '%', &args[1..])?,
        "sum" => {
            let is_number = |item: Value| item.is_number() || item.is_undefined();
            if value.len().is_some() && !value.try_iter()?.all(is_number) {
                return Err(Error::new(ErrorKind::InvalidOperation, "sum: not all values are numbers"));
            }
            0
        }
        _ => 0,
    };
    meter::fits(bytes)
}

/// Only the clock.
fn check_time(_: &str, _: &[Value]) -> Result<(), Error> {
    meter::charge(0)
}

/// All arguments can be part of a value.
fn check_values(_: &str, args: &[Value]) -> Result<(), Error> {
    args.iter().try_for_each(|value| meter::fits(size(value)?.bytes))
}

/// Methods of Python's strings, lists and dictionaries.
fn method(state: &State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    meter::charge(0)?;
    let text = |i: usize| args.get(i).and_then(Value::as_str);
    if let Some(value) = value.as_str() {
        let bytes = match name {
            "upper" | "lower" | "title" | "capitalize" => value.len().saturating_mul(3),
            "replace" => replaced(value, text(0).unwrap_or_default(), text(1).unwrap_or_default()),
            "split" => parts(&Value::from(value), text(0)),
            "splitlines" => parts(&Value::from(value), Some("\n")),
            "join" => args.first().map_or(Ok(0), |values| joined(values, value))?,
            "format" => formatted(value, '{', args)?,
            // The library looks for it forever.
            "count" if text(0) == Some("") => return Ok(Value::from(value.chars().count() + 1)),
            _ => 0,
        };
        meter::fits(bytes)?;
    }
    made(minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)?)
}

fn replaced(text: &str, old: &str, new: &str) -> usize {
    // At most so often.
    let count = if old.len() < 2 { text.len() + 1 } else { text.len() / old.len() };
    let bound = text.len().saturating_add(count.saturating_mul(new.len()));
    if bound <= MAX_VALUE {
        return bound;
    }
    let count = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() };
    text.len().saturating_add(count.saturating_mul(new.len()))
}

fn joined(values: &Value, separator: &str) -> Result<usize, Error> {
    // Elements of a text are its characters.
    let count = values.as_str().map(str::len).or_else(|| values.len()).unwrap_or(0);
    Ok(text_bound(values)?.saturating_add(count.saturating_mul(separator.len())))
}

/// A text that is cut: at a separator, or at white space.
fn parts(value: &Value, separator: Option<&str>) -> usize {
    let Some(text) = value.as_str() else { return 0 };
    let count = match separator {
        Some("") => text.len(),
        Some(separator) => text.matches(separator).count(),
        None => text.bytes().filter(u8::is_ascii_whitespace).count() + text.len() / 16,
    };
    text.len().saturating_add((count + 1).saturating_mul(2 * VALUE))
}

/// A text with places for arguments: each as wide as the largest number in it says, or as the largest argument is.
fn formatted(format: &str, place: char, args: &[Value]) -> Result<usize, Error> {
    let number =
        |digits: &str| digits.parse::<usize>().unwrap_or(if digits.is_empty() { 0 } else { usize::MAX });
    let width = format.split(|c: char| !c.is_ascii_digit()).map(number).max().unwrap_or(0);
    let largest =
        args.iter().map(text_bound).try_fold(512, |most, bound| bound.map(|bound| most.max(bound)))?;
    let places = format.chars().filter(|&c| c == place).count();
    Ok(format.len().saturating_add(places.saturating_mul(width.saturating_add(largest))))
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn predictions_are_upper_bounds() {
        for (text, old, new) in [("aaaa", "a", "bcd"), ("", "", "x"), ("abab", "ab", ""), ("é", "", "yy")] {
            assert!(replaced(text, old, new) >= text.replace(old, new).len());
        }
        let big = "a".repeat(1 << 20);
        assert_eq!(replaced(&big, "b", &big), big.len());
        assert!(replaced(&big, "a", &big) > MAX_VALUE);
        assert!(formatted("{:>99999999999999999999}", '{', &[]).unwrap() > MAX_VALUE);
        assert!(formatted("{:>10} of {}", '{', &[Value::from("x")]).unwrap() < 2000);
    }

    #[test]
    fn slices_backwards_that_have_no_elements() {
        let value = Value::from("abc");
        let at = |at: i64| Value::from(at);
        let is_empty =
            |start: Value, stop: Value| backwards(&value, &start, &stop, &at(-1)).unwrap().is_some();
        assert!(is_empty(at(0), at(2)) && is_empty(at(1), at(1)) && is_empty(at(-9), Value::from(())));
        assert!(!is_empty(at(2), at(0)) && !is_empty(Value::from(()), Value::from(())));
        assert!(backwards(&Value::from(""), &Value::from(()), &Value::from(()), &at(-1)).unwrap().is_some());
    }
}
