//! What a model says between `<think>` and `</think>`.

use super::partial;

/// Begins reasoning.
pub const OPEN: &str = "<think>";
/// Ends it.
pub const CLOSE: &str = "</think>";

/// Where the prompt has left the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// It may begin with the output.
    Unknown,
    /// The prompt has begun it.
    Inside,
    /// The prompt has ended it: the output is an answer.
    Closed,
}

impl Start {
    /// As the end of the prompt says.
    pub fn of(prompt: &str) -> Start {
        let end = prompt.trim_end();
        match () {
            () if end.ends_with(OPEN) => Start::Inside,
            () if end.ends_with(CLOSE) => Start::Closed,
            () => Start::Unknown,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The tag may come.
    Before,
    /// Behind the tag. Nothing but line breaks came so far.
    Begun,
    Inside,
    /// Behind the end. Nothing but line breaks came so far.
    Ended,
    Answer,
}

/// Separates reasoning from the answer.
pub(super) struct Reasoning {
    state: State,
    held: String,
}

impl Reasoning {
    pub fn new(start: Start) -> Reasoning {
        let state = match start {
            Start::Unknown => State::Before,
            Start::Inside => State::Begun,
            Start::Closed => State::Answer,
        };
        Reasoning { state, held: String::new() }
    }

    pub fn is_inside(&self) -> bool {
        matches!(self.state, State::Begun | State::Inside)
    }

    /// Takes text, and adds what is certain to be reasoning or answer.
    pub fn push(&mut self, text: &str, thought: &mut String, answer: &mut String) {
        self.held.push_str(text);
        loop {
            match self.state {
                State::Before => {
                    let start = self.held.trim_start();
                    if start.is_empty() || (start.len() < OPEN.len() && OPEN.starts_with(start)) {
                        return;
                    }
                    match start.strip_prefix(OPEN) {
                        Some(rest) => {
                            self.held = rest.to_owned();
                            self.state = State::Begun;
                        }
                        None => self.state = State::Answer,
                    }
                }
                State::Begun | State::Ended => {
                    self.held = self.held.trim_start_matches(['\n', '\r']).to_owned();
                    if self.held.is_empty() {
                        return;
                    }
                    self.state = if self.state == State::Begun { State::Inside } else { State::Answer };
                }
                State::Inside => {
                    if let Some(at) = self.held.find(CLOSE) {
                        thought.push_str(self.held[..at].trim_end());
                        self.held.drain(..at + CLOSE.len());
                        self.state = State::Ended;
                        continue;
                    }
                    // Space at the end belongs to it only if more comes.
                    let sure = self.held.len() - partial(&self.held, CLOSE);
                    let sure = self.held[..sure].trim_end().len();
                    thought.push_str(&self.held[..sure]);
                    self.held.drain(..sure);
                    return;
                }
                State::Answer => {
                    answer.push_str(&std::mem::take(&mut self.held));
                    return;
                }
            }
        }
    }

    /// What was held back.
    pub fn finish(&mut self, thought: &mut String, answer: &mut String) {
        let rest = std::mem::take(&mut self.held);
        match self.is_inside() {
            true => thought.push_str(&rest),
            false => answer.push_str(&rest),
        }
    }
}
