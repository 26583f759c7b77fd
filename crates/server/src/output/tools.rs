//! Calls of tools in the text of a model.

use super::call::{CallReader, Seen};
use super::{CallForm, Piece, add, partial};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

enum State {
    /// Text. Before the first character that is no space, if `true`.
    Text(bool),
    /// A call that began with this text.
    Call(Box<CallReader>, String),
    /// Behind a call.
    After,
}

/// Finds calls.
pub(super) struct Tools {
    form: CallForm,
    names: Vec<String>,
    state: State,
    held: String,
    calls: usize,
}

impl Tools {
    pub fn new(form: CallForm, names: Vec<String>) -> Tools {
        Tools { form, names, state: State::Text(true), held: String::new(), calls: 0 }
    }

    pub fn has_calls(&self) -> bool {
        self.calls > 0
    }

    pub fn push(&mut self, token: Option<i32>, text: &str, pieces: &mut Vec<Piece>) {
        if let CallForm::Bare { python_tag } = self.form
            && token.is_some()
            && token == python_tag
            && !matches!(self.state, State::Call(..))
        {
            self.flush(pieces);
            self.state = State::After;
        }
        self.held.push_str(text);
        while !self.held.is_empty() && self.advance(pieces) {}
    }

    /// Goes on with what is held. `false` if more is needed.
    fn advance(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Call(reader, opening) => {
                let mut seen = Vec::new();
                let text = std::mem::take(&mut self.held);
                reader.push(&text, &mut seen);
                for event in seen {
                    match event {
                        Seen::Name(name) => {
                            pieces.push(Piece::Call { index: self.calls, name });
                            self.calls += 1;
                        }
                        Seen::Arguments(text) => {
                            add(pieces, Piece::Arguments { index: self.calls.saturating_sub(1), text });
                        }
                        Seen::End(bytes) => {
                            self.held = text[bytes..].to_owned();
                            self.state = State::After;
                            return true;
                        }
                        Seen::Nothing => {
                            // What was told stays; anything else was text after all.
                            if !reader.is_call() {
                                let text = format!("{opening}{}", reader.raw());
                                add(pieces, Piece::Content(text));
                            }
                            self.state = State::Text(false);
                            return false;
                        }
                    }
                }
                false
            }
            State::After => self.after_call(),
            State::Text(at_start) => match self.form {
                CallForm::Tagged => self.tagged_text(pieces),
                CallForm::Bare { .. } => {
                    let at_start = *at_start;
                    self.bare_text(at_start, pieces)
                }
            },
        }
    }

    /// Skips what is between calls.
    fn after_call(&mut self) -> bool {
        let rest = self.held.trim_start_matches(|c: char| c.is_whitespace() || c == ';').to_owned();
        match self.form {
            CallForm::Tagged => {
                if let Some(rest) = rest.strip_prefix(CLOSE) {
                    self.held = rest.trim_start().to_owned();
                    self.state = State::Text(false);
                    return true;
                }
                if CLOSE.starts_with(&rest) {
                    self.held = rest;
                    return false;
                }
                self.state = State::Text(false);
                true
            }
            CallForm::Bare { .. } => {
                self.held = rest;
                if self.held.starts_with('{') {
                    self.state =
                        State::Call(Box::new(CallReader::new(Some(self.names.clone()))), String::new());
                } else if !self.held.is_empty() {
                    self.state = State::Text(false);
                }
                !self.held.is_empty()
            }
        }
    }

    fn tagged_text(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if let Some(at) = self.held.find(OPEN) {
            // Line breaks before a call are not part of the answer. They are text if it is none.
            let before = self.held[..at].trim_end().len();
            add(pieces, Piece::Content(self.held[..before].to_owned()));
            let opening = self.held[before..at].to_owned() + OPEN;
            self.held.drain(..at + OPEN.len());
            self.state = State::Call(Box::new(CallReader::new(None)), opening);
            return true;
        }
        let sure = self.held.len() - partial(&self.held, OPEN);
        let sure = self.held[..sure].trim_end().len();
        add(pieces, Piece::Content(self.held[..sure].to_owned()));
        self.held.drain(..sure);
        false
    }

    fn bare_text(&mut self, at_start: bool, pieces: &mut Vec<Piece>) -> bool {
        if at_start {
            let start = self.held.trim_start();
            if start.is_empty() {
                return false;
            }
            if start.starts_with('{') {
                self.state = State::Call(Box::new(CallReader::new(Some(self.names.clone()))), String::new());
                return true;
            }
        }
        self.state = State::Text(false);
        add(pieces, Piece::Content(std::mem::take(&mut self.held)));
        false
    }

    fn flush(&mut self, pieces: &mut Vec<Piece>) {
        add(pieces, Piece::Content(std::mem::take(&mut self.held)));
    }

    /// What was held back, at the end.
    pub fn finish(&mut self, pieces: &mut Vec<Piece>) {
        if let State::Call(reader, opening) = &self.state
            && !reader.is_call()
        {
            add(pieces, Piece::Content(format!("{opening}{}", reader.raw())));
        } else if !(matches!(self.state, State::After)
            || (self.has_calls() && OPEN.starts_with(self.held.trim())))
        {
            self.flush(pieces);
        }
        self.state = State::Text(false);
        self.held.clear();
    }
}
