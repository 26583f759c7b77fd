//! Runs language models on the kernels of warpsmith: weights, text, models, scheduling.

mod batch;
mod engine;
mod error;
mod kv;
pub mod models;
mod open;
mod output;
pub mod pages;
mod request;
mod sampler;
pub mod scheduler;
mod sequence;
pub mod text;
pub mod weights;

pub use batch::{Batch, Chunk};
pub use engine::{Engine, EngineOptions, Stats};
pub use error::{Error, Result};
pub use kv::KvCache;
pub use open::OpenOptions;
pub use request::{Event, EventKind, FinishReason, Request, RequestId, SamplingParams, TokenLogprob, Usage};
pub use sequence::{Key, Sequence};
