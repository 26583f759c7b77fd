//! An OpenAI-compatible HTTP server on the engine.
//!
//! The engine runs on a thread of its own ([`bridge`]); HTTP never waits for it and it never waits for HTTP. What requests may
//! contain and take is limited ([`Limits`]): what is refused never reaches the engine.

pub mod bench;
pub mod bridge;
pub mod client;
mod error;
mod fields;
mod grammar;
mod http;
mod keys;
mod mailbox;
mod metrics;
mod options;
pub mod output;
mod page;
mod params;
mod prompt;
mod routes;
mod server;

pub use mailbox::Room;
pub use metrics::Metrics;
pub use options::{Limits, Parser, ServerOptions};
pub use server::{Ended, Server};
