//! Lines typed with editing and history, or lines from a pipe.

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{BufRead, ErrorKind, IsTerminal};
use warpsmith::{Error, Result};

/// What was read: a message, or the reason there is none.
pub enum Line {
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupt,
    /// A line that is not UTF-8.
    NotText,
    End,
}

pub enum Input {
    Terminal(Box<DefaultEditor>),
    Pipe,
}

impl Input {
    /// A terminal if both standard input and output are.
    pub fn new() -> Result<Input> {
        if !(std::io::stdin().is_terminal() && std::io::stdout().is_terminal()) {
            return Ok(Input::Pipe);
        }
        Ok(Input::Terminal(Box::new(DefaultEditor::new().map_err(|error| failed(&error))?)))
    }

    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line.
    pub fn line(&mut self) -> Result<Line> {
        match self {
            Input::Terminal(editor) => match editor.readline("> ") {
                Ok(line) => {
                    // A line that history cannot keep can still be sent.
                    let _ = editor.add_history_entry(line.as_str());
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupt),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => Ok(Line::NotText),
                Err(error) => Err(failed(&error)),
            },
            Input::Pipe => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut bytes);
                match read.map_err(|error| Error::io("standard input", "reading", &error))? {
                    0 => Ok(Line::End),
                    _ => Ok(String::from_utf8(bytes).map_or(Line::NotText, Line::Text)),
                }
            }
        }
    }
}

fn failed(error: &ReadlineError) -> Error {
    Error::io("the terminal", "reading from", &std::io::Error::other(error.to_string()))
}
