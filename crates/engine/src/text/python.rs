//! Values as Python writes them: templates are written for Jinja in Python, and its words end up in prompts.

use super::template::meter;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output};
use std::fmt::Write;

/// Writes a value as `{{ value }}` does.
pub fn write_value(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    let made;
    let text = match value.as_str() {
        Some(text) => text,
        None => {
            made = text_of(value)?;
            &made
        }
    };
    meter::charge(text.len())?;
    out.write_str(text).map_err(Error::from)
}

/// A value as Python's `str` writes it.
pub fn text_of(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        ValueKind::Undefined => {}
        _ => represent(&mut out, value)?,
    }
    Ok(out)
}

/// The filter `string`.
pub fn string(value: &Value) -> Result<String, Error> {
    text_of(value)
}

/// Writes a value as Python's `repr` does.
fn represent(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => {
            let text = f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float);
            out.push_str(&text);
        }
        ValueKind::String => quote(out, value.as_str().unwrap_or_default())?,
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                represent(out, &item)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                represent(out, &key)?;
                out.push_str(": ");
                represent(out, &value.get_item(&key).unwrap_or_default())?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    meter::fits(out.len())
}

/// Writes a string in quotes: single ones, unless it has these and no double ones.
fn quote(out: &mut String, text: &str) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
        meter::fits(out.len())?;
    }
    out.push(quote);
    Ok(())
}

/// A floating-point number in the fewest digits that tell it apart.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() {
            "nan"
        } else if number > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .into();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("it has an exponent");
    let exponent: i32 = exponent.parse().expect("it is a number");
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The test `iterable`: none is not, though it can be looped over here.
pub fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || matches!(value.kind(), ValueKind::Iterable | ValueKind::Undefined)
}

/// The test `sequence`: Python counts all that has a length and elements.
pub fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// The filter `items`, which takes an undefined value for an empty one.
pub fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::from(Vec::<Value>::new())) } else { minijinja::filters::items(value) }
}

/// The filter `length`, likewise.
pub fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

/// The filter `tojson`, as transformers defines it: `json.dumps` that keeps characters outside of ASCII.
pub fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) => match (value.as_usize(), value.as_str()) {
            (Some(spaces), _) if spaces <= 64 => Some(" ".repeat(spaces)),
            (None, Some(text)) if text.len() <= 64 => Some(text.to_owned()),
            _ if value.is_none() => None,
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent must be at most 64")),
        },
    };
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"));
        }
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let style = Style {
        item,
        key,
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out.into())
}

struct Style {
    item: String,
    key: String,
    indent: Option<String>,
    ascii: bool,
    sort: bool,
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => {
                let number = f64::try_from(value.clone())?;
                match number {
                    _ if number.is_nan() => out.push_str("NaN"),
                    f64::INFINITY => out.push_str("Infinity"),
                    f64::NEG_INFINITY => out.push_str("-Infinity"),
                    _ => out.push_str(&float(number)),
                }
            }
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.group(out, ['[', ']'], &items, depth, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.group(out, ['{', '}'], &keys, depth, |out, key| {
                    self.string(out, &key_text(key)?)?;
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let message = format!("tojson: a value of type {kind} is no JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        meter::fits(out.len())
    }

    /// Items between brackets, on lines of their own if there is an indentation.
    fn group(
        &self,
        out: &mut String,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(brackets[0]);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            new_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn string(&self, out: &mut String, text: &str) -> Result<(), Error> {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) || (self.ascii && c == '\u{7f}') => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
            meter::fits(out.len())?;
        }
        out.push('"');
        Ok(())
    }
}

/// A key of an object: JSON allows strings alone.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        _ => text_of(key),
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// A time in UTC, in seconds since 1970, as Python's `strftime` writes it. Signs it does not know stay as they are.
pub fn strftime(seconds: u64, format: &str) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, day_of_year) = date(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let half_day = if hour < 12 { "AM" } else { "PM" };
    let mut out = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let written = match rest.next() {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{day_of_year:03}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(out, "{half_day}"),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{second:02}"),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
            None => write!(out, "%"),
        };
        written.expect("a string takes all text");
    }
    out
}

/// Year, month, day of the month and day of the year of a day counted from 1970 on.
fn date(mut days: u64) -> (u64, usize, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years have 146,097 days, wherever they start.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_in_python() {
        let cases =
            [(1.0, "1.0"), (0.1, "0.1"), (1e16, "1e+16"), (1e15, "1000000000000000.0"), (1e-5, "1e-05")];
        let more = [(0.0001, "0.0001"), (-2.5e-7, "-2.5e-07"), (1.5e300, "1.5e+300"), (-0.0, "-0.0")];
        for (number, text) in cases.into_iter().chain(more) {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn dates_are_written_as_in_python() {
        assert_eq!(strftime(0, "%d %b %Y %A %H:%M:%S %j"), "01 Jan 1970 Thursday 00:00:00 001");
        assert_eq!(strftime(951_782_400, "%Y-%m-%d %a"), "2000-02-29 Tue");
        assert_eq!(
            strftime(1_767_225_599, "%d %B %Y, %I:%M %p, %j %% %q"),
            "31 December 2025, 11:59 PM, 365 % %q"
        );
        assert_eq!(strftime(4_107_542_400, "%F %T %y %e"), "2100-03-01 00:00:00 00  1");
    }
}
