//! Runs language models on the kernels of warpsmith: weights, text, models, scheduling.

mod adapters;
mod batch;
mod constraint;
mod decode;
mod engine;
pub mod env;
mod error;
#[cfg(feature = "hub")]
pub mod hub;
mod kv;
pub mod models;
mod open;
mod output;
pub mod pages;
mod request;
mod sampler;
pub mod scheduler;
mod sequence;
mod settings;
mod survey;
pub mod text;
pub mod weights;

pub use adapters::{Adapter, AdapterPath};
pub use batch::{Adapted, Batch, Chunk, Shared};
pub use constraint::{Constraint, Grammar, SharedGrammar};
pub use engine::{Engine, Pooling, SequenceView, View};
pub use error::{Error, Result};
pub use kv::{KvCache, KvShape};
pub use open::OpenOptions;
pub use pages::{Branch, Branches};
pub use request::{
    Event, EventKind, FinishReason, Request, RequestId, Salt, SamplingParams, TokenLogprob, Usage,
};
pub use sequence::{Key, Sequence};
pub use settings::{Cascade, EngineOptions, Stats};
pub use survey::needed_kernels;

/// The example of the guide, compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/engine.md")]
struct Guide;
