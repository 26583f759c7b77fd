//! What a model is made of: sizes and options, from `config.json` or from the keys of a GGUF file. A key that would change
//! the result is used, or refused by name.

mod gguf;
mod json;
mod keys;
mod quantization;
#[cfg(test)]
mod tests;

pub use quantization::Fp8Config;

use crate::error::{Error, Result};
use crate::weights::{self, Metadata};
use keys::{Keys, Setting};
use serde_json::Value;
use warpsmith::ops::linear::Activation;
use warpsmith::ops::paged_attention::HEAD_DIMS;

/// The sizes and options of a model. What a family does not have is zero or `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The family, as `model_type` in `config.json` and `general.architecture` in GGUF name it.
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
    /// How weights of 8 bits are scaled, if the model has such.
    pub quantization: Option<Fp8Config>,
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
            activation: Activation::Silu,
            attention_bias: None,
            mlp_bias: None,
            tied: None,
            scale_scores: true,
            scale_scores_by_layer: false,
            quantization: None,
        }
    }
}

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// What is done to the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// How the frequencies of rope are changed for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All angles are divided by a factor.
    Linear(f64),
    /// Llama 3: low frequencies are divided by a factor, high ones stay, and there is a smooth passage between them.
    Llama3 {
        /// Divides low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Positions the model was first trained with.
        original: f64,
    },
    /// A divisor for each frequency, as GGUF stores it in `rope_freqs.weight`.
    Divisors(Vec<f32>),
}

impl RopeConfig {
    /// What the angle of each pair is divided by; `None` if all are divided by the same number.
    pub fn divisors(&self, head_dim: usize) -> Option<Vec<f64>> {
        let pairs = head_dim / 2;
        match &self.scaling {
            RopeScaling::None | RopeScaling::Linear(_) => None,
            RopeScaling::Divisors(divisors) => Some(divisors.iter().map(|&d| f64::from(d)).collect()),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let divisor = |pair: usize| {
                    let frequency = self.theta.powf(-2.0 * pair as f64 / head_dim as f64);
                    let wavelength = std::f64::consts::TAU / frequency;
                    if wavelength > original / low_freq_factor {
                        return factor;
                    }
                    if wavelength < original / high_freq_factor {
                        return 1.0;
                    }
                    let smooth =
                        (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                };
                Some((0..pairs).map(divisor).collect())
            }
        }
    }
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

    /// The factor of the scores in a layer; `None` for one over the root of the head size.
    pub fn score_scale(&self, layer: usize) -> Option<f32> {
        let by_head = if self.scale_scores { (self.head_dim as f64).sqrt() } else { 1.0 };
        let by_layer = if self.scale_scores_by_layer { (layer + 1) as f64 } else { 1.0 };
        (!self.scale_scores || by_layer != 1.0).then_some((1.0 / (by_head * by_layer)) as f32)
    }

    /// Whether norms subtract the mean and have biases.
    pub(super) fn has_layer_norms(&self) -> bool {
        self.architecture == "gpt2"
    }

    /// Whether the numbers fit each other. `kv_heads` is the key of the heads of keys and values.
    fn checked(self, kv_heads: &str) -> Result<Config> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.num_heads);
            return Err(Error::config(kv_heads, expected, self.num_kv_heads));
        }
        Ok(self)
    }
}

/// The family that a key names.
fn known_family(keys: &Keys<'_>, key: &str) -> Result<String> {
    let expected = || format!("a family that is supported: {}", super::family_names());
    match keys.find(key) {
        Some(Setting::Text(name)) if super::is_family(&name) => Ok(name),
        Some(other) => Err(keys.wrong(key, expected(), other)),
        None => Err(keys.wrong(key, expected(), "nothing")),
    }
}

/// Whether attention has kernels for heads of this size.
fn check_head_dim(keys: &Keys<'_>, key: &str, head_dim: usize) -> Result<()> {
    if HEAD_DIMS.contains(&head_dim) {
        return Ok(());
    }
    let known: Vec<String> = HEAD_DIMS.iter().map(usize::to_string).collect();
    Err(keys.wrong(key, format!("a head size that is supported: {}", known.join(", ")), head_dim))
}
