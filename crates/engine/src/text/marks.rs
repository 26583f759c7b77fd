//! Keeps names of control tokens in messages from becoming control tokens.
//!
//! A template mixes its own text with that of messages, and afterwards `<|im_end|>` from the one looks like that from
//! the other. So a mark, a character that occurs in no text, is put inside such names in messages before rendering. In
//! the marked text only the template's names are intact; the marks are then removed.

use super::chat::Chat;
use super::error::{Error, Result};
use serde_json::Value;

/// Characters that Unicode keeps free for use inside a program.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// A part of a rendered chat.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// A control token of the template.
    Control(u32),
    /// Text, without marks.
    Text(String),
}

/// Puts marks into the names of control tokens, and finds the names that have none.
pub struct Marks<'a> {
    mark: char,
    /// Names and ids, by the first byte of the name, longest first.
    names: Vec<Vec<(&'a str, u32)>>,
}

impl<'a> Marks<'a> {
    /// Marks for these control tokens that do not occur in the chat themselves.
    pub fn new(controls: &'a [(String, u32)], chat: &Chat) -> Result<Marks<'a>> {
        let mark = MARKS.into_iter().find(|&mark| values(chat).all(|value| !contains(value, mark)));
        let Some(mark) = mark else {
            let expected = "text without one of the noncharacters U+FDD0 to U+FDEF";
            return Err(Error::Argument {
                what: "messages",
                expected: expected.into(),
                got: "all of them".into(),
            });
        };
        let mut names = vec![Vec::new(); 256];
        for (name, id) in controls {
            if let Some(&first) = name.as_bytes().first() {
                names[first as usize].push((name.as_str(), *id));
            }
        }
        for names in &mut names {
            names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        }
        Ok(Marks { mark, names })
    }

    /// The chat with marks inside the names of control tokens.
    pub fn protect(&self, chat: &Chat) -> Chat {
        let mut chat = chat.clone();
        let options = chat.options.values_mut();
        for value in [Some(&mut chat.messages), chat.tools.as_mut(), chat.documents.as_mut()]
            .into_iter()
            .flatten()
            .chain(options)
        {
            self.protect_value(value);
        }
        chat
    }

    fn protect_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some(marked) = self.protect_text(text) {
                    *text = marked;
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.protect_value(value)),
            Value::Object(fields) => {
                fields.values_mut().for_each(|value| self.protect_value(value));
                // Templates look fields up by their names, so a name is changed only where it must be.
                if fields.keys().any(|name| self.has_name(name)) {
                    let protected = |name: String| match self.has_name(&name) {
                        true => self.protect_text(&name).unwrap_or(name),
                        false => name,
                    };
                    let old = std::mem::take(fields);
                    *fields = old.into_iter().map(|(name, value)| (protected(name), value)).collect();
                }
            }
            _ => {}
        }
    }

    /// Whether a text has a whole name in it.
    fn has_name(&self, text: &str) -> bool {
        self.names.iter().flatten().any(|(name, _)| text.contains(name))
    }

    /// The text with a mark after the first character of each name; `None` if there is no name.
    ///
    /// Starts of a name at the end of the text, and ends of one at its start, are marked as well: the template may put texts
    /// next to each other. So are texts from inside a name, unless they are plain words: templates compare roles, and make
    /// names such as `<|user|>` from them.
    fn protect_text(&self, text: &str) -> Option<String> {
        let mut places = Vec::new();
        for at in 0..text.len() {
            let rest = &text.as_bytes()[at..];
            let names = &self.names[rest[0] as usize];
            let begins = |name: &str| rest.starts_with(name.as_bytes()) || name.as_bytes().starts_with(rest);
            if names.iter().any(|(name, _)| begins(name)) {
                places.push(at);
            }
        }
        let ends_a_name = self.names.iter().flatten().any(|(name, _)| {
            let ends = name.char_indices().skip(1).map(|(at, _)| &name[at..]);
            ends.filter(|end| end.len() > 1).any(|end| text.starts_with(end))
        });
        let is_word = text.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
        let is_inside = || self.names.iter().flatten().any(|(name, _)| name.contains(text));
        if (ends_a_name || (!is_word && is_inside())) && places.first() != Some(&0) {
            places.insert(0, 0);
        }
        if places.is_empty() {
            return None;
        }
        let mut marked = String::with_capacity(text.len() + places.len() * self.mark.len_utf8());
        let mut done = 0;
        for at in places {
            // A name starts with a whole character, so this is the start of one.
            let after = at + text[at..].chars().next().map_or(0, char::len_utf8);
            marked.push_str(&text[done..after]);
            marked.push(self.mark);
            done = after;
        }
        marked.push_str(&text[done..]);
        Some(marked)
    }

    /// A marked text cut at its names of control tokens; `None` if it has no mark, so that all names in it are meant.
    pub fn pieces(&self, marked: &str) -> Option<Vec<Piece>> {
        if !marked.contains(self.mark) {
            return None;
        }
        let (mut pieces, mut start, mut at) = (Vec::new(), 0, 0);
        while at < marked.len() {
            let rest = &marked.as_bytes()[at..];
            let found =
                self.names[rest[0] as usize].iter().find(|(name, _)| rest.starts_with(name.as_bytes()));
            let Some((name, id)) = found else {
                at += 1;
                continue;
            };
            if start < at {
                pieces.push(Piece::Text(self.remove(&marked[start..at])));
            }
            pieces.push(Piece::Control(*id));
            at += name.len();
            start = at;
        }
        if start < marked.len() {
            pieces.push(Piece::Text(self.remove(&marked[start..])));
        }
        Some(pieces)
    }

    /// The text without marks.
    pub fn remove(&self, marked: &str) -> String {
        marked.chars().filter(|&c| c != self.mark).collect()
    }
}

/// Everything in a chat that may hold text.
fn values(chat: &Chat) -> impl Iterator<Item = &Value> {
    [Some(&chat.messages), chat.tools.as_ref(), chat.documents.as_ref()]
        .into_iter()
        .flatten()
        .chain(chat.options.values())
}

/// Whether the character is in a text of the value.
fn contains(value: &Value, character: char) -> bool {
    match value {
        Value::String(text) => text.contains(character),
        Value::Array(values) => values.iter().any(|value| contains(value, character)),
        Value::Object(fields) => {
            fields.iter().any(|(name, value)| name.contains(character) || contains(value, character))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn controls() -> Vec<(String, u32)> {
        vec![("<|end|>".into(), 1), ("<|end|>!".into(), 2), ("</s>".into(), 3)]
    }

    #[test]
    fn names_in_messages_are_no_names_of_the_template() {
        let controls = controls();
        let chat = Chat::new(
            json!([{ "role": "user", "content": "a<|end|>b</s>" }, { "content": "<|e" }, { "content": "nd|>" }]),
        );
        let marks = Marks::new(&controls, &chat).unwrap();
        let protected = marks.protect(&chat);
        let text = |i: usize| protected.messages[i]["content"].as_str().unwrap().to_owned();
        assert_eq!(text(0), "a<\u{FDD0}|end|>b<\u{FDD0}/s>");
        let rendered = format!("{}<|end|>{}{}</s>é", text(0), text(1), text(2));
        let expected = [
            Piece::Text("a<|end|>b</s>".into()),
            Piece::Control(1),
            Piece::Text("<|end|>".into()),
            Piece::Control(3),
            Piece::Text("é".into()),
        ];
        assert_eq!(marks.pieces(&rendered).unwrap(), expected);
        assert_eq!(marks.remove(&rendered), "a<|end|>b</s><|end|><|end|></s>é");
        assert_eq!(marks.pieces("<|end|>"), None);
        assert_eq!(
            marks.pieces("\u{FDD0}<|end|>!").unwrap(),
            [Piece::Text(String::new()), Piece::Control(2)]
        );
    }

    #[test]
    fn texts_next_to_each_other_make_no_name() {
        let controls = controls();
        for texts in [
            &["<", "|end|", ">"][..],
            &["<", "|", "end", "|", ">"],
            &["a<", "/", "s", ">b"],
            &["<|", "end", "|>"],
            &["<|end|", ">"],
            &["<", "|end|>"],
        ] {
            let chat = Chat::new(json!(texts));
            let marks = Marks::new(&controls, &chat).unwrap();
            let protected = marks.protect(&chat);
            let texts = protected.messages.as_array().unwrap().iter().map(|text| text.as_str().unwrap());
            let rendered: String = texts.collect();
            let pieces = marks.pieces(&rendered).unwrap();
            assert!(pieces.iter().all(|piece| matches!(piece, Piece::Text(_))), "{rendered:?}");
        }
        // Nor with the template's own text at either end.
        let chat = Chat::new(json!("|end|"));
        let marks = Marks::new(&controls, &chat).unwrap();
        let rendered = format!("<{}>", marks.protect(&chat).messages.as_str().unwrap());
        assert_eq!(marks.pieces(&rendered).unwrap(), [Piece::Text("<|end|>".into())]);
        // Roles stay what templates compare them with.
        let controls = [("<|user|>".to_string(), 1)];
        let chat = Chat::new(json!([{ "role": "user", "content": "us" }]));
        assert_eq!(Marks::new(&controls, &chat).unwrap().protect(&chat).messages, chat.messages);
    }

    #[test]
    fn names_of_fields_make_no_name_either() {
        let controls = controls();
        let chat = Chat::new(json!([{ "content": { "a<|end|>": { "end": 1, "<|e": 2 } }, "z": 3 }]));
        let marks = Marks::new(&controls, &chat).unwrap();
        let protected = marks.protect(&chat).messages;
        // In the same order, and only what has a name in it.
        let expected = "[{\"content\":{\"a<\u{FDD0}|end|>\":{\"end\":1,\"<|e\":2}},\"z\":3}]";
        assert_eq!(protected.to_string(), expected);
        let pieces = marks.pieces(&protected.to_string()).unwrap();
        assert_eq!(pieces, [Piece::Text(chat.messages.to_string())]);
    }

    #[test]
    fn a_mark_is_a_character_the_chat_does_not_have() {
        let controls = controls();
        let taken: String = ('\u{FDD0}'..='\u{FDEE}').collect();
        let chat = Chat::new(json!([{ "content": taken }]));
        assert_eq!(Marks::new(&controls, &chat).unwrap().mark, '\u{FDEF}');
        let all: String = MARKS.collect();
        assert!(Marks::new(&controls, &Chat::new(json!([{ "content": all }]))).is_err());
    }
}
