//! `warpsmith chat`: a conversation in the terminal.

mod input;
mod interrupt;

use crate::model::{ModelArgs, SamplingArgs, answer_until, print};
use input::{Input, Line};
use interrupt::Interrupts;
use serde_json::{Value, json};
use std::process::ExitCode;
use warpsmith_engine::text::Chat;
use warpsmith_engine::{Engine, EngineOptions, Error, FinishReason, Request, Result};

/// Chat with a language model in the terminal
///
/// Each line is a message, and the answer is printed as it is generated. The model sees the whole conversation; earlier
/// turns are not computed again. A message that cannot be answered is dropped. Lines can be edited, and the arrow keys
/// recall earlier ones. Ctrl-C stops an answer; twice in a row, it ends the chat.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Print the speed after each answer
    #[arg(long)]
    stats: bool,
}

const EXAMPLES: &str = "\
In the chat:
  /help         these commands
  /clear        begin a new conversation
  /system TEXT  another system message for the answers to come; no TEXT, none
  /exit         end, as does the end of the input (Ctrl-D)
  //TEXT        a message that begins with a slash

Examples:
  warpsmith chat --model model.gguf
  warpsmith chat --model model.gguf --system \"Answer in one sentence.\" \\
      --temperature 0.7 --stats
  printf 'My name is Ada.\\nWhat is my name?\\n' | \\
      warpsmith chat --model model.gguf";

const HELP: &str = "\
/help         these commands
/clear        begin a new conversation
/system TEXT  another system message for the answers to come; no TEXT, none
/exit         end, as does Ctrl-D
//TEXT        a message that begins with a slash
Ctrl-C stops an answer; twice in a row, it ends the chat.
";

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Asked<'a> {
    Nothing,
    Message(&'a str),
    Help,
    Clear,
    System(&'a str),
    Exit,
    Unknown(&'a str),
}

impl Asked<'_> {
    fn parse(line: &str) -> Asked<'_> {
        let line = line.trim();
        if line.is_empty() {
            return Asked::Nothing;
        }
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let Some(name) = word.strip_prefix('/') else { return Asked::Message(line) };
        match name {
            "help" | "?" => Asked::Help,
            "clear" => Asked::Clear,
            "system" => Asked::System(rest.trim()),
            "exit" | "quit" => Asked::Exit,
            _ if name.starts_with('/') => Asked::Message(&line[1..]),
            // Such as a path.
            _ if name.contains('/') => Asked::Message(line),
            _ => Asked::Unknown(word),
        }
    }
}

/// The messages so far.
struct Conversation {
    system: Option<String>,
    messages: Vec<Value>,
}

impl Conversation {
    fn push(&mut self, role: &str, text: &str) {
        self.messages.push(json!({ "role": role, "content": text }));
    }

    /// With the message of the system.
    fn chat(&self) -> Chat {
        let system = self.system.iter().map(|text| json!({ "role": "system", "content": text }));
        Chat::new(system.chain(self.messages.iter().cloned()).collect())
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.model.on_threads(|| talk(args))
}

fn talk(args: &Args) -> Result<ExitCode> {
    args.model.adapter()?;
    let mut engine = args.model.open(EngineOptions::default())?;
    if engine.template().is_none() {
        let got = "one without, which only continues text: see `warpsmith generate`";
        return Err(warpsmith::Error::parse("model", "one with a chat template", got).into());
    }
    let mut input = Input::new()?;
    if input.is_terminal() {
        print("/help shows the commands.\n")?;
    }
    let mut talk = Conversation { system: args.system.clone(), messages: Vec::new() };
    let mut interrupted = false;
    loop {
        let line = match input.line()? {
            Line::End => break,
            Line::Interrupt if interrupted => break,
            Line::Interrupt => {
                eprintln!("Ctrl-C again ends the chat.");
                interrupted = true;
                continue;
            }
            Line::NotText => {
                eprintln!("error: the line is not UTF-8; it was not sent");
                continue;
            }
            Line::Text(line) => line,
        };
        interrupted = false;
        match Asked::parse(&line) {
            Asked::Nothing => {}
            Asked::Exit => break,
            Asked::Help => print(HELP)?,
            Asked::Clear => talk.messages.clear(),
            Asked::System(text) => talk.system = Some(text.to_owned()).filter(|text| !text.is_empty()),
            Asked::Unknown(word) => eprintln!("error: unknown command {word}; /help shows the commands"),
            Asked::Message(text) => {
                talk.push("user", text);
                match reply(&mut engine, &talk, args)? {
                    Reply::Whole(text) => talk.push("assistant", &text),
                    Reply::Part(text) => {
                        interrupted = true;
                        talk.push("assistant", &text);
                    }
                    // The conversation continues as if the message had not been sent.
                    Reply::None(why) => {
                        talk.messages.pop();
                        eprintln!("error: {why}");
                    }
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// An answer, the part of it before it was stopped, or why there is none.
enum Reply {
    Whole(String),
    Part(String),
    None(String),
}

/// The answer to a conversation, shown as it is generated. An error ends the command.
fn reply(engine: &mut Engine, talk: &Conversation, args: &Args) -> Result<Reply> {
    // The template may refuse a message.
    let prompt = match engine.encode_chat(&talk.chat()) {
        Ok(prompt) => prompt,
        Err(error) => return Ok(Reply::None(error.to_string())),
    };
    let adapter = args.model.adapter()?;
    let request = Request { prompt, params: args.sampling.params(), adapter, ..Request::default() };
    let interrupts = Interrupts::catch();
    let answer = match answer_until(engine, request, print, || interrupts.any()) {
        Ok(answer) => answer,
        // The conversation has become too long, for example. It can be cleared.
        Err(error @ Error::Request { .. }) => return Ok(Reply::None(error.to_string())),
        Err(error) => return Err(error),
    };
    print("\n")?;
    match answer.reason {
        FinishReason::Failed(why) => return Ok(Reply::None(why)),
        FinishReason::Cancelled => {
            eprintln!("(stopped)");
            return Ok(Reply::Part(answer.text));
        }
        _ => {}
    }
    if let Some(summary) = answer.summary().filter(|_| args.stats) {
        eprintln!("{summary}");
    }
    Ok(Reply::Whole(answer.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, asked) in [
            ("  \n", Asked::Nothing),
            ("hello /clear\n", Asked::Message("hello /clear")),
            ("/clear", Asked::Clear),
            (" /exit \n", Asked::Exit),
            ("/system  Be brief. ", Asked::System("Be brief.")),
            ("/system", Asked::System("")),
            ("/sytsem Be brief.", Asked::Unknown("/sytsem")),
            ("//clear", Asked::Message("/clear")),
            ("/usr/bin holds what?", Asked::Message("/usr/bin holds what?")),
            ("/", Asked::Unknown("/")),
        ] {
            assert_eq!(Asked::parse(line), asked, "{line:?}");
        }
    }

    #[test]
    fn the_system_speaks_first() {
        let mut talk = Conversation { system: None, messages: Vec::new() };
        talk.push("user", "a");
        assert_eq!(talk.chat().messages, json!([{ "role": "user", "content": "a" }]));
        talk.system = Some("b".into());
        assert_eq!(talk.chat().messages[0], json!({ "role": "system", "content": "b" }));
        assert!(HELP.lines().filter(|line| line.starts_with('/')).all(|line| EXAMPLES.contains(&line[..12])));
    }
}
