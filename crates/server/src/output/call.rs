//! A call of a tool, while it is written: `{"name": "f", "arguments": {...}}`.
//!
//! Arguments leave as they come, byte for byte.

use serde_json::Value;

/// What more text of a call means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The name of the tool.
    Name(String),
    /// More of its arguments.
    Arguments(String),
    /// The object has ended, after this many bytes of the text.
    End(usize),
    /// It is no call.
    Nothing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    /// A key or the end.
    BeforeKey,
    Key(usize),
    Colon,
    BeforeValue,
    /// A string, an object or list, or anything else.
    Text(usize),
    Nested(usize),
    Plain(usize),
    AfterValue,
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Other,
}

/// Reads one object.
pub(super) struct CallReader {
    /// Everything so far.
    raw: String,
    state: State,
    escaped: bool,
    in_text: bool,
    depth: usize,
    key: Key,
    /// Only these keys and names make a call; any, if there are none.
    names: Option<Vec<String>>,
    name: Option<String>,
    has_told_name: bool,
    /// Where the arguments begin, and whether they are an object rather than a string.
    arguments: Option<(usize, bool)>,
    told: usize,
    /// How much of `raw` was looked at.
    read: usize,
}

impl CallReader {
    /// With `names`, only calls of these tools count, and objects with other keys do not.
    pub fn new(names: Option<Vec<String>>) -> CallReader {
        CallReader {
            raw: String::new(),
            state: State::Start,
            escaped: false,
            in_text: false,
            depth: 0,
            key: Key::Other,
            names,
            name: None,
            has_told_name: false,
            arguments: None,
            told: 0,
            read: 0,
        }
    }

    /// Everything that was read.
    pub fn raw(&self) -> &str {
        &self.raw
    }

    /// Whether it is certain that this is a call.
    pub fn is_call(&self) -> bool {
        self.has_told_name
    }

    /// Takes more text.
    pub fn push(&mut self, text: &str, seen: &mut Vec<Seen>) {
        let before = self.raw.len();
        self.raw.push_str(text);
        let mut at = before;
        while at < self.raw.len() {
            let byte = self.raw.as_bytes()[at];
            self.read = at;
            if !self.step(byte, at, seen) {
                seen.push(Seen::Nothing);
                return;
            }
            at += 1;
            if self.state == State::End {
                self.read = at;
                self.tell_name(seen, true);
                if !self.has_told_name {
                    seen.push(Seen::Nothing);
                    return;
                }
                if self.arguments.is_none() {
                    seen.push(Seen::Arguments("{}".into()));
                }
                seen.push(Seen::End(at - before));
                return;
            }
        }
        self.tell_arguments(at, seen);
    }

    /// One byte. `false` if this is no call.
    fn step(&mut self, byte: u8, at: usize, seen: &mut Vec<Seen>) -> bool {
        let is_space = byte.is_ascii_whitespace();
        match self.state {
            State::Start if byte == b'{' => self.state = State::BeforeKey,
            State::BeforeKey if byte == b'"' => self.state = State::Key(at),
            State::BeforeKey if byte == b'}' => self.state = State::End,
            State::Colon if byte == b':' => self.state = State::BeforeValue,
            State::AfterValue if byte == b',' => self.state = State::BeforeKey,
            State::AfterValue if byte == b'}' => self.state = State::End,
            State::Start | State::BeforeKey | State::Colon | State::BeforeValue | State::AfterValue
                if is_space => {}
            State::Key(start) => {
                if self.ends_text(byte) {
                    self.state = State::Colon;
                    return self.take_key(start, at);
                }
            }
            State::BeforeValue => {
                self.state = match byte {
                    b'"' => State::Text(at),
                    b'{' | b'[' => {
                        self.depth = 1;
                        State::Nested(at)
                    }
                    b',' | b'}' | b']' | b':' => return false,
                    _ => State::Plain(at),
                };
                if self.key == Key::Arguments {
                    self.arguments = Some((at, byte != b'"'));
                    self.told = at;
                    self.tell_name(seen, false);
                }
            }
            State::Text(start) => {
                if self.ends_text(byte) {
                    self.state = State::AfterValue;
                    return self.take_value(start, at + 1, seen);
                }
            }
            State::Nested(start) => {
                if self.in_text {
                    self.in_text = !self.ends_text(byte);
                } else {
                    match byte {
                        b'"' => self.in_text = true,
                        b'{' | b'[' => self.depth += 1,
                        b'}' | b']' => self.depth -= 1,
                        _ => {}
                    }
                }
                if self.depth == 0 {
                    self.state = State::AfterValue;
                    return self.take_value(start, at + 1, seen);
                }
            }
            State::Plain(start) => {
                if is_space || byte == b',' || byte == b'}' {
                    self.state = State::AfterValue;
                    return self.take_value(start, at, seen) && self.step(byte, at, seen);
                }
            }
            _ => return false,
        }
        true
    }

    /// Whether a string ends with this byte.
    fn ends_text(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' => self.escaped = true,
            b'"' => return true,
            _ => {}
        }
        false
    }

    fn take_key(&mut self, start: usize, end: usize) -> bool {
        self.key = match &self.raw[start + 1..end] {
            "name" => Key::Name,
            "arguments" | "parameters" => Key::Arguments,
            "type" | "id" => Key::Other,
            _ if self.names.is_some() => return false,
            _ => Key::Other,
        };
        true
    }

    /// A value has ended.
    fn take_value(&mut self, start: usize, end: usize, seen: &mut Vec<Seen>) -> bool {
        match self.key {
            Key::Name => {
                let Ok(Value::String(name)) = serde_json::from_str(&self.raw[start..end]) else {
                    return false;
                };
                if self.names.as_ref().is_some_and(|names| !names.contains(&name)) {
                    return false;
                }
                self.name = Some(name);
                // A bare object counts as a call only once it has arguments.
                self.tell_name(seen, self.names.is_none());
            }
            Key::Arguments => match self.arguments {
                Some((_, true)) => {
                    self.tell_arguments(end, seen);
                    // Nothing behind the value belongs to it.
                    self.told = usize::MAX;
                }
                _ => {
                    let Ok(Value::String(text)) = serde_json::from_str(&self.raw[start..end]) else {
                        return false;
                    };
                    if self.has_told_name {
                        seen.push(Seen::Arguments(text));
                        self.told = usize::MAX;
                    } else {
                        self.told = usize::MAX - 1;
                        self.arguments = Some((start, false));
                    }
                }
            },
            Key::Other => {}
        }
        true
    }

    /// Tells the name once it is known and there are arguments, or `now`.
    fn tell_name(&mut self, seen: &mut Vec<Seen>, now: bool) {
        let Some(name) = self.name.as_ref().filter(|_| !self.has_told_name) else { return };
        if !now && self.arguments.is_none() {
            return;
        }
        seen.push(Seen::Name(name.clone()));
        self.has_told_name = true;
        // Arguments that came before the name.
        if let Some((start, is_object)) = self.arguments {
            let end = self.end_of_value(start);
            if let Some(end) = end {
                let value = &self.raw[start..end];
                let text = match is_object {
                    true => Some(value.to_owned()),
                    false => serde_json::from_str(value).ok(),
                };
                seen.extend(text.map(Seen::Arguments));
                self.told = usize::MAX;
            }
        }
    }

    /// Where the value that begins at `start` ends, if it has ended.
    fn end_of_value(&self, start: usize) -> Option<usize> {
        let mut values =
            serde_json::Deserializer::from_str(self.raw.get(start..self.read)?).into_iter::<Value>();
        values.next()?.ok()?;
        Some(start + values.byte_offset())
    }

    /// Tells the arguments up to `end`, if they are an object and the name is told.
    fn tell_arguments(&mut self, end: usize, seen: &mut Vec<Seen>) {
        if let Some((_, true)) = self.arguments
            && self.has_told_name
            && self.told < end
        {
            seen.push(Seen::Arguments(self.raw[self.told..end].to_owned()));
            self.told = end;
        }
    }
}
