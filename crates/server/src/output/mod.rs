//! What the text of a model consists of: reasoning, an answer, calls of tools.
//!
//! Text comes token by token and leaves as soon as it is certain what it is. Nothing here fails: what is no call is text.

mod call;
mod reasoning;
mod tools;

use crate::options::Parser;
use reasoning::Reasoning;
pub use reasoning::{CLOSE, OPEN, Start};
use tools::Tools;
use warpsmith_engine::text::Tokenizer;

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// What the model says to itself.
    Reasoning(String),
    /// What it answers.
    Content(String),
    /// A call of a tool begins. Calls are counted from 0.
    Call {
        /// Its number.
        index: usize,
        /// The tool.
        name: String,
    },
    /// More of the arguments of a call, as the model wrote them.
    Arguments {
        /// The call's number.
        index: usize,
        /// JSON, in parts.
        text: String,
    },
}

/// How models write calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallForm {
    /// `<tool_call>` around an object with `name` and `arguments`: Qwen2.5, Qwen3, Hermes.
    Tagged,
    /// An object with `name` and `parameters`, which may follow a token of its own: Llama 3.
    Bare {
        /// That token.
        python_tag: Option<i32>,
    },
}

/// What a model's output may have in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forms {
    /// Whether there is reasoning between `<think>` and `</think>`.
    pub reasoning: bool,
    /// How calls are written, if the model knows them.
    pub calls: Option<CallForm>,
}

impl Forms {
    /// The names of forms of calls.
    pub const CALLS: [&str; 4] = ["qwen", "qwen25", "hermes", "llama3"];
    /// The names of forms of reasoning.
    pub const REASONING: [&str; 1] = ["qwen3"];

    /// As the options say, and where they leave it open as the tokens of the model suggest.
    ///
    /// # Errors
    /// If a name is not known.
    pub fn new(tokenizer: Option<&Tokenizer>, reasoning: &Parser, tools: &Parser) -> Result<Forms, String> {
        let id_of = |name: &str| tokenizer.and_then(|tokenizer| tokenizer.id_of(name)).map(|id| id as i32);
        let python_tag = id_of("<|python_tag|>");
        let calls = match tools {
            Parser::Off => None,
            Parser::Auto if id_of("<tool_call>").is_some() => Some(CallForm::Tagged),
            Parser::Auto => python_tag.map(|tag| CallForm::Bare { python_tag: Some(tag) }),
            Parser::Named(name) => match name.as_str() {
                "qwen" | "qwen25" | "hermes" => Some(CallForm::Tagged),
                "llama3" => Some(CallForm::Bare { python_tag }),
                _ => {
                    return Err(format!("tool-call-parser: expected {}, got {name}", Self::CALLS.join(", ")));
                }
            },
        };
        let reasoning = match reasoning {
            Parser::Off => false,
            Parser::Auto => id_of("<think>").is_some() && id_of("</think>").is_some(),
            Parser::Named(name) if name == "qwen3" => true,
            Parser::Named(name) => {
                return Err(format!("reasoning-parser: expected {}, got {name}", Self::REASONING.join(", ")));
            }
        };
        Ok(Forms { reasoning, calls })
    }
}

/// Splits one output into pieces.
pub struct Splitter {
    reasoning: Option<Reasoning>,
    tools: Option<Tools>,
}

impl Splitter {
    /// `start` is where the prompt has left the reasoning; `None` if there is none. `names` are the tools that may be called,
    /// if any, in the form of the model.
    pub fn new(start: Option<Start>, calls: Option<(CallForm, Vec<String>)>) -> Splitter {
        Splitter {
            reasoning: start.map(Reasoning::new),
            tools: calls.map(|(form, names)| Tools::new(form, names)),
        }
    }

    /// Whether the output is in its reasoning now.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(Reasoning::is_inside)
    }

    /// Takes a token with its text.
    pub fn push(&mut self, token: Option<i32>, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut answer = String::new();
        match &mut self.reasoning {
            Some(reasoning) => {
                let mut thought = String::new();
                reasoning.push(text, &mut thought, &mut answer);
                add(&mut pieces, Piece::Reasoning(thought));
            }
            None => answer.push_str(text),
        }
        match &mut self.tools {
            Some(tools) if !self.reasoning.as_ref().is_some_and(Reasoning::is_inside) => {
                tools.push(token, &answer, &mut pieces);
            }
            _ => add(&mut pieces, Piece::Content(answer)),
        }
        pieces
    }

    /// What was held back, at the end.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut answer = String::new();
        if let Some(reasoning) = &mut self.reasoning {
            let mut thought = String::new();
            reasoning.finish(&mut thought, &mut answer);
            add(&mut pieces, Piece::Reasoning(thought));
        }
        match &mut self.tools {
            Some(tools) => {
                tools.push(None, &answer, &mut pieces);
                tools.finish(&mut pieces);
            }
            None => add(&mut pieces, Piece::Content(answer)),
        }
        pieces
    }

    /// Whether a tool was called.
    pub fn has_calls(&self) -> bool {
        self.tools.as_ref().is_some_and(Tools::has_calls)
    }
}

/// Adds a piece that is not empty.
fn add(pieces: &mut Vec<Piece>, piece: Piece) {
    let is_empty = match &piece {
        Piece::Reasoning(text) | Piece::Content(text) | Piece::Arguments { text, .. } => text.is_empty(),
        Piece::Call { .. } => false,
    };
    if !is_empty {
        pieces.push(piece);
    }
}

/// The length of the longest end of `text` that is a start of `tag`, but not all of it.
fn partial(text: &str, tag: &str) -> usize {
    let most = text.len().min(tag.len() - 1);
    (1..=most).rev().find(|&len| text.as_bytes().ends_with(&tag.as_bytes()[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces of a text, joined by kind, cut into parts of this many bytes.
    fn split(
        make: impl Fn() -> Splitter,
        text: &str,
        size: usize,
    ) -> (String, String, Vec<(String, String)>) {
        let mut splitter = make();
        let mut pieces = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for part in chars.chunks(size) {
            pieces.extend(splitter.push(None, &part.iter().collect::<String>()));
        }
        pieces.extend(splitter.finish());
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => reasoning += &text,
                Piece::Content(text) => content += &text,
                Piece::Call { index, name } => {
                    assert_eq!(index, calls.len());
                    calls.push((name, String::new()));
                }
                Piece::Arguments { index, text } => {
                    assert_eq!(index + 1, calls.len());
                    calls[index].1 += &text;
                }
            }
        }
        assert_eq!(splitter.has_calls(), !calls.is_empty());
        (reasoning, content, calls)
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.into(), arguments.into())
    }

    fn tagged(start: Option<Start>) -> Splitter {
        Splitter::new(start, Some((CallForm::Tagged, vec!["f".into(), "g".into()])))
    }

    fn bare() -> Splitter {
        Splitter::new(None, Some((CallForm::Bare { python_tag: Some(9) }, vec!["f".into(), "g".into()])))
    }

    #[test]
    fn reasoning_and_calls_are_found_however_the_text_is_cut() {
        let text = "<think>\nIs it <b>?\n</think>\n\nWait.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}</tool_call>{\", \"b\": [1, {}]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\"}\n</tool_call>";
        for size in 1..=text.len() {
            let (reasoning, content, calls) = split(|| tagged(Some(Start::Unknown)), text, size);
            assert_eq!(reasoning, "Is it <b>?", "{size}");
            assert_eq!(content, "Wait.", "{size}");
            let first = call("f", "{\"a\": \"}</tool_call>{\", \"b\": [1, {}]}");
            assert_eq!(calls, [first, call("g", "{}")], "{size}");
        }
        for size in [1, 3, 100] {
            let open = split(|| tagged(Some(Start::Inside)), "hm\n</think>\n\nyes", size);
            assert_eq!(open, ("hm".into(), "yes".into(), vec![]));
            let closed = split(|| tagged(Some(Start::Closed)), "a <think> b", size);
            assert_eq!(closed, ("".into(), "a <think> b".into(), vec![]));
            let none = split(|| tagged(Some(Start::Unknown)), "  no <thinking", size);
            assert_eq!(none, ("".into(), "  no <thinking".into(), vec![]));
            let cut = split(|| tagged(Some(Start::Unknown)), "<think>\nand so </th", size);
            assert_eq!(cut, ("and so </th".into(), "".into(), vec![]));
        }
    }

    #[test]
    fn what_is_no_call_is_text() {
        for size in [1, 2, 5, 100] {
            for text in [
                "a <tool_call> b",
                "<tool_call>\n[1]",
                "x <tool_ca",
                "<tool_call>{\"name\": 3}</tool_call>",
                "<tool_call>\n{\"arguments\": {}}\n</tool_call>",
                "spaces at the end  \n",
            ] {
                let (_, content, calls) = split(|| tagged(None), text, size);
                assert_eq!((content.as_str(), calls), (text, vec![]), "{size}");
            }
            for text in [
                "{\"name\": \"other\", \"parameters\": {}}",
                "{\"name\": \"f\", \"age\": 3}",
                "{1",
                "x {",
                "{\"answer\": 42}",
            ] {
                let (_, content, calls) = split(bare, text, size);
                assert_eq!((content.as_str(), calls), (text, vec![]), "{size}");
            }
        }
    }

    #[test]
    fn calls_of_llama_are_found() {
        for size in [1, 2, 3, 7, 200] {
            let text = "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"q\": \"a;b\"}}; {\"parameters\": {\"x\": 1.5}, \"name\": \"g\"}";
            let (_, content, calls) = split(bare, text, size);
            assert_eq!(content, "");
            assert_eq!(calls, [call("f", "{\"q\": \"a;b\"}"), call("g", "{\"x\": 1.5}")]);
            // Arguments in a string, as some models write them.
            let text = "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}";
            assert_eq!(split(bare, text, size).2, [call("f", "{\"a\": 1}")]);
        }
        let mut splitter = bare();
        let mut pieces = splitter.push(Some(9), "");
        pieces.extend(splitter.push(Some(3), "{\"name\": \"f\", \"parameters\": {}}"));
        assert_eq!(pieces[0], Piece::Call { index: 0, name: "f".into() });
    }

    #[test]
    fn a_call_that_is_cut_off_keeps_what_it_has() {
        let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"lo";
        assert_eq!(split(|| tagged(None), text, 4).2, [call("f", "{\"a\": \"lo")]);
    }
}
