//! Models: their configurations, the sources of their weights, and their forward passes.
//!
//! A model is one file that puts layers ([`layers`]) together, and one line in [`FAMILIES`]. It sees neither requests nor
//! files: a forward pass takes a [`Batch`] and the pages of the keys and values, and the weights come from any
//! [`WeightSource`], under the names that [`names`] knows.

pub(crate) mod config;
mod decoder;
mod experts;
mod gemma3;
mod gpt2;
mod int4;
pub mod layers;
mod llama;
mod loader;
mod lora;
mod matrix;
mod mistral;
mod mixtral;
pub mod names;
mod olmo2;
mod phi3;
pub mod products;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod random;
mod rotation;
mod scaled;
mod smollm3;
mod source;
#[cfg(test)]
mod tests;
mod watched;

pub use config::{
    Config, ExpertsConfig, Fp8Config, Int4Config, Int4Packing, LayerConfig, RopeConfig, RopeScaling, Rotation,
};
pub use loader::{LoadOptions, Loader};
pub use matrix::Matrix;
pub use random::RandomWeights;
pub use source::{WeightSource, open};
pub use watched::{LoadProgress, Watched};

use crate::adapters::Adapter;
use crate::batch::Batch;
use crate::error::{Error, Result};
use crate::kv::KvCache;
use names::Naming;
use warpsmith::{DType, Stream, TensorViewMut};

/// A model that is ready to run.
pub trait Model: Send {
    /// Its configuration.
    fn config(&self) -> &Config;

    /// The stream that its weights were made on, if it is known. Passes on another stream wait for this one.
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

    /// As [`forward`](Self::forward), but writes what the head reads instead of logits: the rows after the final norm,
    /// `[rows, hidden_size]` in the type of the activations.
    ///
    /// # Errors
    /// If an op refuses the batch, or the model does not give its hidden states, as by default.
    fn hidden(&mut self, _batch: &Batch, _kv: &mut KvCache, _rows: TensorViewMut<'_>) -> Result<()> {
        let expected = "a model that gives its hidden states";
        Err(Error::request("pooling", expected, format!("one of family `{}`", self.config().architecture)))
    }
}

/// Makes a model of a family from its weights.
type Load = fn(&Config, &Loader<'_>) -> Result<Box<dyn Model>>;

/// The families, one line each, under their names in `config.json` and in GGUF, where Mistral and Mixtral are Llamas.
static FAMILIES: &[(&str, &str, Load)] = &[
    ("llama", "llama", llama::load),
    ("qwen2", "qwen2", qwen2::load),
    ("qwen3", "qwen3", qwen3::load),
    ("qwen3_moe", "qwen3moe", qwen3_moe::load),
    ("mistral", "", mistral::load),
    ("mixtral", "", mixtral::load),
    ("gemma3_text", "gemma3", gemma3::load),
    ("phi3", "phi3", phi3::load),
    ("smollm3", "smollm3", smollm3::load),
    ("olmo2", "olmo2", olmo2::load),
    ("gpt2", "gpt2", gpt2::load),
];

/// The name of a family in a format; empty if it has none there.
fn name_in((transformers, gguf, _): &(&'static str, &'static str, Load), naming: Naming) -> &'static str {
    match naming {
        Naming::Transformers => transformers,
        Naming::Gguf => gguf,
    }
}

/// The family with this name in a format, as `config.json` names it.
fn family_named(name: &str, naming: Naming) -> Option<&'static str> {
    let family = FAMILIES.iter().find(|family| !name.is_empty() && name_in(family, naming) == name);
    family.map(|(name, ..)| *name)
}

/// The names of all families in a format, for messages.
fn family_names(naming: Naming) -> String {
    let names = FAMILIES.iter().map(|family| name_in(family, naming));
    names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ")
}

/// Loads a model.
///
/// # Errors
/// If there is no such family, or a tensor is missing, has another shape than the configuration asks for, or is one that the
/// model does not read: then the file holds another model than the configuration describes.
pub fn load(config: &Config, weights: &dyn WeightSource, options: LoadOptions) -> Result<Box<dyn Model>> {
    load_adapted(config, weights, options, &[])
}

/// As [`load`], with adapters that tokens of a batch may have.
///
/// # Errors
/// As [`load`], and if an adapter is not one of this model.
pub fn load_adapted(
    config: &Config,
    weights: &dyn WeightSource,
    options: LoadOptions,
    adapters: &[Adapter],
) -> Result<Box<dyn Model>> {
    let Some((.., load)) = FAMILIES.iter().find(|(name, ..)| *name == config.architecture) else {
        let names = family_names(Naming::Transformers);
        return Err(Error::config("architecture", names, &config.architecture));
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
    let unpacked = config.int4.map(|int4| int4::Unpacked::new(weights, int4));
    let weights = unpacked.as_ref().map_or(weights, |unpacked| unpacked as &dyn WeightSource);
    let loader = Loader::new(weights, &config, options)?.with_adapters(adapters);
    loader.refuse_other_adapters()?;
    let model = load(&config, &loader)?;
    loader.refuse_unread()?;
    adapters.iter().try_for_each(|adapter| adapter.refuse_unused(&config.architecture))?;
    Ok(model)
}
