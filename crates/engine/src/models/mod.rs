//! Models: what they are made of, where their weights come from, and their forward passes.
//!
//! A model is one file that puts layers ([`layers`]) together, and one line in [`FAMILIES`]. It sees neither requests nor
//! files: a forward pass takes a [`Batch`] and the pages of the keys and values, and the weights come from any
//! [`WeightSource`], under the names that [`names`] knows.

mod config;
mod gpt2;
pub mod layers;
mod llama;
pub mod names;
pub mod products;
mod qwen3;
mod random;
mod scaled;
mod source;
#[cfg(test)]
mod tests;

pub use config::{Config, Fp8Config, RopeConfig, RopeScaling};
pub use random::RandomWeights;
pub use source::open;

use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use names::{Loader, WeightSource};
use warpsmith::{DType, Device, Stream, TensorViewMut};

/// A model that is ready to run.
pub trait Model: Send {
    /// What it is made of.
    fn config(&self) -> &Config;

    /// The stream that its weights were made on. Passes run on it where that is known: on any other they are ordered with it.
    fn stream(&self) -> Option<&Stream> {
        None
    }

    /// Computes the batch's tokens, stores their keys and values, and writes the logits of the rows that the batch asks
    /// for to `logits`, `[rows, vocab_size]` in f32, all in the order of the batch's stream.
    ///
    /// The bits of a row depend on the tokens of its own sequence alone: not on other rows, on pages, or on how the
    /// sequence was divided into batches.
    ///
    /// # Errors
    /// If an op refuses the batch. Keys and values of its tokens are undefined then.
    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, logits: TensorViewMut<'_>) -> Result<()>;
}

/// Makes a model of a family from its weights.
type Load = fn(&Config, &Loader<'_>) -> Result<Box<dyn Model>>;

/// The families, one line each, under their names in `config.json` and GGUF.
static FAMILIES: &[(&str, Load)] = &[("llama", llama::load), ("qwen3", qwen3::load), ("gpt2", gpt2::load)];

/// Whether there is a family of this name.
fn is_family(name: &str) -> bool {
    FAMILIES.iter().any(|(known, _)| *known == name)
}

/// The names of all families, for messages.
fn family_names() -> String {
    FAMILIES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// How a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// The type of weights and activations.
    pub dtype: DType,
    /// Where it runs.
    pub device: Device,
    /// Whether quantised matrices are multiplied as they are, with activations rounded to eight bits. Otherwise they are
    /// expanded to `dtype` first.
    pub quantized: bool,
    /// The most positions it is used with, at most the configuration's; these if `None`.
    pub max_positions: Option<usize>,
    /// Tokens of a pass for which there is room from the start. Larger passes make room for themselves.
    pub reserve_tokens: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            dtype: DType::F32,
            device: Device::Cpu,
            quantized: true,
            max_positions: None,
            reserve_tokens: 0,
        }
    }
}

/// Loads a model.
///
/// # Errors
/// If there is no such family, or a tensor is missing, has another shape than the configuration asks for, or is one that the
/// model does not read: then the file holds another model than the configuration describes.
pub fn load(config: &Config, weights: &dyn WeightSource, options: LoadOptions) -> Result<Box<dyn Model>> {
    let Some((_, load)) = FAMILIES.iter().find(|(name, _)| *name == config.architecture) else {
        return Err(Error::config("architecture", family_names(), &config.architecture));
    };
    if ![DType::F32, DType::F16, DType::BF16].contains(&options.dtype) {
        return Err(Error::settings("dtype", "f32, f16 or bf16", options.dtype));
    }
    let mut config = config.clone();
    if let Some(asked) = options.max_positions {
        if !(1..=config.max_positions).contains(&asked) {
            let expected = format!("a context of 1 to {} tokens, as the model has", config.max_positions);
            return Err(Error::settings("max_positions", expected, asked));
        }
        config.max_positions = asked;
    }
    let loader = Loader::new(weights, &config, options)?;
    let model = load(&config, &loader)?;
    loader.refuse_unread()?;
    Ok(model)
}
