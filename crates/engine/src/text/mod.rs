//! Text to tokens and back: tokenizers, chat templates, streams of text.
//!
//! ```no_run
//! use warpsmith_engine::text::{Chat, ChatTemplate, TextStream, Tokenizer};
//! use warpsmith_engine::weights::Checkpoint;
//! let checkpoint = Checkpoint::open("model.gguf")?;
//! let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
//! let template = ChatTemplate::from_checkpoint(&checkpoint)?.expect("an instruct model has one");
//! let chat = Chat::new(serde_json::json!([{ "role": "user", "content": "Why is the sky blue?" }]));
//! let prompt = tokenizer.encode_chat(&template, &chat)?;
//! let mut stream = TextStream::new(&["\n\n".to_owned()])?;
//! for id in prompt.ids {
//!     let delta = stream.push(tokenizer.bytes(id));
//!     print!("{}", delta.text);
//! }
//! print!("{}", stream.finish());
//! # Ok::<(), warpsmith_engine::text::Error>(())
//! ```

mod byte_level;
mod chat;
mod error;
mod from_gguf;
mod from_json;
mod marks;
mod pre;
mod python;
mod stops;
mod stream;
mod template;
mod tokenizer;
mod utf8;
mod vocabulary;

pub use chat::{Chat, ChatPrompt};
pub use error::{Error, Result};
pub use stops::StopStrings;
pub use stream::{Delta, TextStream};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use utf8::Utf8Stream;
