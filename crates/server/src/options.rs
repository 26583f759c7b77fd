//! How a server behaves.

use std::time::Duration;
use warpsmith_engine::Pooling;

/// The options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The names under which requests ask for the model; the first is the one that is told.
    pub served_names: Vec<String>,
    /// The adapters that the engine has. Requests name one as their model.
    pub adapters: Vec<String>,
    /// Keys that are accepted; everybody is served if there is none.
    pub api_keys: Vec<String>,
    /// How reasoning is found in the text of the model.
    pub reasoning: Parser,
    /// How calls of tools are found in it.
    pub tools: Parser,
    /// How embeddings are made from hidden states, where requests do not say.
    pub pooling: Pooling,
    /// What requests and connections may take.
    pub limits: Limits,
    /// How long running requests may go on after the server is told to end.
    pub shutdown_timeout: Duration,
    /// A step that takes longer makes the server unhealthy.
    pub watchdog: Duration,
}

/// How a part of the model's text is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parser {
    /// As the tokenizer and the template suggest.
    Auto,
    /// Not at all.
    Off,
    /// In the form with this name.
    Named(String),
}

/// What requests and connections may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a body.
    pub max_body: usize,
    /// Nesting of a body.
    pub max_depth: usize,
    /// Open connections.
    pub max_connections: usize,
    /// Outputs that wait, beyond those that run.
    pub max_waiting: usize,
    /// Time until the headers of a request are there.
    pub header_timeout: Duration,
    /// Time until the body of a request is there.
    pub body_timeout: Duration,
    /// Time until a request must have ended.
    pub request_timeout: Option<Duration>,
    /// Bytes of an answer that wait for a client that does not read.
    pub max_backlog: usize,
    /// Time that a client may read nothing while there is something to read.
    pub stall_timeout: Duration,
    /// Outputs for one prompt.
    pub max_n: usize,
    /// Outputs of one request, all prompts together.
    pub max_outputs: usize,
    /// Inputs of one request for embeddings.
    pub max_inputs: usize,
    /// Stop texts.
    pub max_stops: usize,
    /// Messages of a chat.
    pub max_messages: usize,
    /// Tools of a request.
    pub max_tools: usize,
    /// Bytes of a schema, a regular expression or a grammar.
    pub max_grammar: usize,
    /// Nesting of a schema or a grammar.
    pub max_grammar_depth: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_body: 2 << 20,
            max_depth: 64,
            max_connections: 2048,
            max_waiting: 256,
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            request_timeout: None,
            max_backlog: 1 << 20,
            stall_timeout: Duration::from_secs(60),
            max_n: 8,
            max_outputs: 64,
            max_inputs: 2048,
            max_stops: 4,
            max_messages: 4096,
            max_tools: 128,
            max_grammar: 64 << 10,
            max_grammar_depth: 32,
        }
    }
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            served_names: vec!["default".into()],
            adapters: Vec::new(),
            api_keys: Vec::new(),
            reasoning: Parser::Auto,
            tools: Parser::Auto,
            pooling: Pooling::default(),
            limits: Limits::default(),
            shutdown_timeout: Duration::from_secs(30),
            watchdog: Duration::from_secs(300),
        }
    }
}
