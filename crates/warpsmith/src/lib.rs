//! Warpsmith: LLM kernels for CUDA and CPU behind one API.
pub mod dtype;
pub mod env;
pub mod error;

pub use dtype::DType;
pub use error::{Error, Result};
