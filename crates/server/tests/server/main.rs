//! The server as clients see it, on the CPU, with a small random model.

mod adapters;
mod embeddings;
mod formats;
mod goodput;
mod harness;
mod life;
mod malformed;
mod page;
mod safety;
mod streams;
