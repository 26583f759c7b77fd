//! The configuration of a model: sizes and options, from `config.json` or from the keys of a GGUF file. A key that
//! would change the result is used, or refused by name.

mod experts;
mod gguf;
mod json;
mod keys;
mod quantization;
mod rope;
#[cfg(test)]
mod tests;

pub use experts::ExpertsConfig;
pub use quantization::{Fp8Config, Int4Config, Int4Packing};
pub use rope::{RopeConfig, RopeScaling};

use super::names::Naming;
use crate::error::{Error, Result};
use crate::kv::KvShape;
use crate::weights::{self, Metadata};
use keys::{Keys, Setting};
use serde_json::Value;
use warpsmith::ops::linear::Activation;
use warpsmith::ops::paged_attention::HEAD_DIMS;

/// The sizes and options of a model. What a family does not have is zero or `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The family, as `model_type` in `config.json` names it.
    pub architecture: String,
    /// Rows of the embedding table, and columns of the logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_layers: usize,
    /// Query heads of a layer.
    pub num_heads: usize,
    /// Key and value heads of a layer.
    pub num_kv_heads: usize,
    /// Elements of a head. Not always `hidden_size / num_heads`.
    pub head_dim: usize,
    /// The most tokens of a sequence.
    pub max_positions: usize,
    /// Added to the mean square or the variance in norms.
    pub norm_eps: f32,
    /// How positions rotate queries and keys; `None` for learned positions.
    pub rope: Option<RopeConfig>,
    /// How they do in layers whose [`LayerConfig::rotation`] is local.
    pub local_rope: Option<RopeConfig>,
    /// The first elements of a head that are rotated; `None` for all.
    pub rotary_dim: Option<usize>,
    /// What differs between layers, one for each; nothing does if there are none.
    pub layers: Vec<LayerConfig>,
    /// The experts of the feed-forward layers, if these have some.
    pub experts: Option<ExpertsConfig>,
    /// The function in the feed-forward layers.
    pub activation: Activation,
    /// Whether queries, keys, values and the product after attention have biases; `None` if the file has those that it needs.
    pub attention_bias: Option<bool>,
    /// Whether the products of the feed-forward layers have biases; `None` as above.
    pub mlp_bias: Option<bool>,
    /// Whether the embedding table may be the matrix of the logits, where the file has no other; `None` if it may.
    pub tied: Option<bool>,
    /// Whether the scores of attention are divided by the root of the head size.
    pub scale_scores: bool,
    /// Whether they are divided by the number of the layer, counted from 1.
    pub scale_scores_by_layer: bool,
    /// The number whose root divides scores in place of the head size's.
    pub score_divisor: Option<f64>,
    /// What the vectors of tokens are multiplied by, rounded to the type of the activations.
    pub embedding_scale: Option<f64>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f64>,
    /// How weights of 8 bits are scaled, if the model has such.
    pub quantization: Option<Fp8Config>,
    /// How weights of 4 bits are packed, if the model has such.
    pub int4: Option<Int4Config>,
}

impl Default for Config {
    /// No sizes, and options that change nothing.
    fn default() -> Config {
        Config {
            architecture: String::new(),
            vocab_size: 0,
            hidden_size: 0,
            intermediate_size: 0,
            num_layers: 0,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            max_positions: 0,
            norm_eps: 0.0,
            rope: None,
            local_rope: None,
            rotary_dim: None,
            layers: Vec::new(),
            experts: None,
            activation: Activation::Silu,
            attention_bias: None,
            mlp_bias: None,
            tied: None,
            scale_scores: true,
            scale_scores_by_layer: false,
            score_divisor: None,
            embedding_scale: None,
            logit_softcap: None,
            quantization: None,
            int4: None,
        }
    }
}

/// What is particular about a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerConfig {
    /// Keys that a query sees, its own among them; `None` for all.
    pub window: Option<usize>,
    /// How queries and keys are rotated.
    pub rotation: Rotation,
}

/// Which of a model's rotations a layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rotation {
    /// [`Config::rope`].
    #[default]
    Main,
    /// [`Config::local_rope`].
    Local,
    /// None: such layers know no positions.
    None,
}

impl Config {
    /// Reads a `config.json`, as transformers writes it.
    ///
    /// # Errors
    /// Names the key that is missing, out of range or asks for something that is not implemented.
    pub fn from_json(json: &Value) -> Result<Config> {
        json::read(json)
    }

    /// Reads the keys of a GGUF file. `vocab_size` is the number of rows of the embedding table: not every file has a key for
    /// it.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_gguf(get: &dyn Fn(&str) -> Option<weights::Value>, vocab_size: usize) -> Result<Config> {
        gguf::read(get, vocab_size)
    }

    /// Judges the family and the size of the heads alone, which needs no tensor.
    ///
    /// # Errors
    /// If there are no such models here: with the list of those that there are.
    pub fn judge(metadata: &Metadata) -> Result<()> {
        match metadata {
            Metadata::Config(config) => json::judge(&Value::Object(config.clone())),
            Metadata::Gguf(keys) => gguf::judge(&|key| keys.value(key).cloned()),
        }
    }

    /// What the model keeps of a token.
    pub fn kv_shape(&self) -> KvShape {
        KvShape { layers: self.num_layers, heads: self.num_kv_heads, head_dim: self.head_dim }
    }

    /// The factor of the scores in a layer; `None` for one over the root of the head size.
    pub fn score_scale(&self, layer: usize) -> Option<f32> {
        let by_head = match self.score_divisor {
            Some(divisor) => divisor.sqrt(),
            None if self.scale_scores => (self.head_dim as f64).sqrt(),
            None => 1.0,
        };
        let by_layer = if self.scale_scores_by_layer { (layer + 1) as f64 } else { 1.0 };
        let is_usual = self.scale_scores && self.score_divisor.is_none() && by_layer == 1.0;
        (!is_usual).then_some((1.0 / (by_head * by_layer)) as f32)
    }

    /// What is particular about a layer.
    pub fn layer(&self, layer: usize) -> LayerConfig {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    /// Whether norms subtract the mean and have biases.
    pub(super) fn has_layer_norms(&self) -> bool {
        self.architecture == "gpt2"
    }

    /// Whether the numbers are consistent. `kv_heads` is the key of the heads of keys and values.
    fn checked(self, kv_heads: &str) -> Result<Config> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.num_heads);
            return Err(Error::config(kv_heads, expected, self.num_kv_heads));
        }
        Ok(self)
    }
}

/// The family that a key names, and the name it has there.
fn known_family(keys: &Keys<'_>, key: &str, naming: Naming) -> Result<(String, String)> {
    let expected = || format!("a family that is supported: {}", super::family_names(naming));
    let found = keys.find(key);
    if let Some(Setting::Text(name)) = &found
        && let Some(family) = super::family_named(name, naming)
    {
        return Ok((family.into(), name.clone()));
    }
    let got = found.map_or_else(|| "nothing".into(), |other| other.to_string());
    Err(keys.wrong(key, expected(), got))
}

/// Whether attention has kernels for heads of this size.
fn check_head_dim(keys: &Keys<'_>, key: &str, head_dim: usize) -> Result<()> {
    if HEAD_DIMS.contains(&head_dim) {
        return Ok(());
    }
    let known: Vec<String> = HEAD_DIMS.iter().map(usize::to_string).collect();
    Err(keys.wrong(key, format!("a head size that is supported: {}", known.join(", ")), head_dim))
}
