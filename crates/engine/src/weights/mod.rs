//! Weights of models in files: GGUF and safetensors behind one view, mapped into memory.
//!
//! ```no_run
//! use warpsmith::DType;
//! use warpsmith_engine::weights::Checkpoint;
//! let checkpoint = Checkpoint::open("model.gguf")?; // or a .safetensors file, or a folder with config.json
//! for tensor in checkpoint.tensors() {
//!     println!("{} {} {:?}", tensor.name(), tensor.encoding(), tensor.shape());
//! }
//! let norm = checkpoint.tensor("output_norm.weight")?.to_tensor(DType::F32)?;
//! # Ok::<(), warpsmith_engine::weights::Error>(())
//! ```
//!
//! Files come from strangers. Every size is compared with the bytes that are there before anything is allocated for it,
//! all arithmetic on sizes is checked, and tensors must follow each other without gap or overlap. What is wrong becomes
//! an [`Error`] that names the file, the key or tensor, what was expected and what was there.

#[cfg(target_endian = "big")]
compile_error!("the formats are little-endian, and their tensors are used as they lie in the file");

mod checkpoint;
mod convert;
mod encoding;
mod error;
pub mod gguf;
mod json;
mod metadata;
mod quantization;
pub mod safetensors;
mod stored;
mod value;

#[cfg(feature = "hub")]
pub(crate) use checkpoint::shard_files;
pub use checkpoint::{Checkpoint, Format};
pub(crate) use checkpoint::{read_json, read_limited};
pub use encoding::Encoding;
pub(crate) use error::shown;
pub use error::{Error, Result};
pub use metadata::{FromValue, Keys, Metadata};
pub use quantization::Quantization;
pub use stored::{StoredTensor, TensorInfo};
pub use value::{Array, Strings, Value};
