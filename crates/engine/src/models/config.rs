//! What a model is made of: sizes and options, from `config.json` or from the keys of a GGUF file.

use crate::error::{Error, Result};
use serde_json::Value;

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

/// Reads one kind of key/value store with errors that name the key.
struct Keys<'a> {
    get: &'a dyn Fn(&str) -> Option<Value>,
}

impl Keys<'_> {
    fn size_or(&self, key: &str, default: Option<usize>) -> Result<usize> {
        match (self.get)(key).filter(|value| !value.is_null()) {
            None => default.ok_or_else(|| Error::config(key, "a number", "nothing")),
            Some(value) => value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|&n| (1..1 << 32).contains(&n))
                .ok_or_else(|| Error::config(key, "a whole number from 1 to below 2^32", value)),
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.size_or(key, None)
    }

    fn real_or(&self, key: &str, default: Option<f64>) -> Result<f64> {
        match (self.get)(key).filter(|value| !value.is_null()) {
            None => default.ok_or_else(|| Error::config(key, "a number", "nothing")),
            Some(value) => value
                .as_f64()
                .filter(|n| n.is_finite() && *n > 0.0)
                .ok_or_else(|| Error::config(key, "a number above zero", value)),
        }
    }

    /// A text that must be one of `known`, if it is there.
    fn one_of(&self, key: &str, known: &[&str]) -> Result<()> {
        match (self.get)(key).filter(|value| !value.is_null()) {
            Some(value) if !value.as_str().is_some_and(|text| known.contains(&text)) => {
                Err(Error::config(key, known.join(" or "), value))
            }
            _ => Ok(()),
        }
    }

    /// A switch that must be off, because what it turns on is not implemented.
    fn off(&self, key: &str) -> Result<()> {
        match (self.get)(key) {
            Some(Value::Bool(true)) => Err(Error::config(key, "false", true)),
            _ => Ok(()),
        }
    }
}

impl Config {
    /// Reads a `config.json`, as transformers writes it.
    ///
    /// # Errors
    /// Names the key that is missing, out of range or asks for something that is not implemented.
    pub fn from_json(json: &Value) -> Result<Config> {
        let keys = Keys { get: &|key| json.get(key).cloned() };
        let architecture = match json.get("model_type").and_then(Value::as_str) {
            Some(name) => name.to_owned(),
            None => return Err(Error::config("model_type", "the name of a model family", "nothing")),
        };
        if architecture == "gpt2" {
            keys.one_of("activation_function", &["gelu_new", "gelu_pytorch_tanh"])?;
            keys.off("scale_attn_by_inverse_layer_idx")?;
            let (hidden_size, num_heads) = (keys.size("n_embd")?, keys.size("n_head")?);
            return Config {
                architecture,
                vocab_size: keys.size("vocab_size")?,
                hidden_size,
                intermediate_size: keys.size_or("n_inner", Some(4 * hidden_size))?,
                num_layers: keys.size("n_layer")?,
                num_heads,
                num_kv_heads: num_heads,
                head_dim: hidden_size / num_heads,
                max_positions: keys.size("n_positions")?,
                norm_eps: keys.real_or("layer_norm_epsilon", Some(1e-5))? as f32,
                rope: None,
            }
            .checked();
        }
        keys.one_of("hidden_act", &["silu"])?;
        keys.off("use_sliding_window")?;
        let (hidden_size, num_heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        Config {
            architecture,
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_layers: keys.size("num_hidden_layers")?,
            num_heads,
            num_kv_heads: keys.size_or("num_key_value_heads", Some(num_heads))?,
            head_dim: keys.size_or("head_dim", Some(hidden_size / num_heads))?,
            max_positions: keys.size("max_position_embeddings")?,
            norm_eps: keys.real_or("rms_norm_eps", Some(1e-6))? as f32,
            rope: Some(rope_from_json(json)?),
        }
        .checked()
    }

    /// Reads the keys of a GGUF file. `get` gives the value of a key as JSON. `vocab_size` is the number of rows of the
    /// embedding table: not every file has a key for it.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_gguf(get: &dyn Fn(&str) -> Option<Value>, vocab_size: usize) -> Result<Config> {
        let architecture = match get("general.architecture") {
            Some(Value::String(name)) => name,
            other => {
                let got = other.map_or("nothing".into(), |value| value.to_string());
                return Err(Error::config("general.architecture", "the name of a model family", got));
            }
        };
        let own = |key: &str| get(&format!("{architecture}.{key}"));
        let keys = Keys { get: &own };
        let (hidden_size, num_heads) = (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        let learned_positions = architecture == "gpt2";
        let eps = if learned_positions {
            keys.real_or("attention.layer_norm_epsilon", Some(1e-5))?
        } else {
            keys.real_or("attention.layer_norm_rms_epsilon", Some(1e-6))?
        };
        let head_dim = keys.size_or("attention.key_length", Some(hidden_size / num_heads))?;
        let rotated = keys.size_or("rope.dimension_count", Some(head_dim))?;
        if !learned_positions && rotated != head_dim {
            return Err(Error::config("rope.dimension_count", head_dim.to_string(), rotated));
        }
        keys.one_of("rope.scaling.type", &["none", "linear"])?;
        let scaling = match own("rope.scaling.type").as_ref().and_then(Value::as_str) {
            Some("linear") => RopeScaling::Linear(keys.real_or("rope.scaling.factor", None)?),
            _ => RopeScaling::None,
        };
        let theta = keys.real_or("rope.freq_base", Some(10_000.0))?;
        Config {
            vocab_size,
            hidden_size,
            intermediate_size: keys.size("feed_forward_length")?,
            num_layers: keys.size("block_count")?,
            num_heads,
            num_kv_heads: keys.size_or("attention.head_count_kv", Some(num_heads))?,
            head_dim,
            max_positions: keys.size("context_length")?,
            norm_eps: eps as f32,
            rope: (!learned_positions).then_some(RopeConfig { theta, scaling }),
            architecture,
        }
        .checked()
    }

    /// Whether the numbers fit each other.
    fn checked(self) -> Result<Config> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.num_heads);
            return Err(Error::config("num_key_value_heads", expected, self.num_kv_heads));
        }
        if self.head_dim < 2 || !self.head_dim.is_multiple_of(2) {
            return Err(Error::config("head_dim", "an even number", self.head_dim));
        }
        Ok(self)
    }
}

/// `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.
fn rope_from_json(json: &Value) -> Result<RopeConfig> {
    let nested =
        ["rope_parameters", "rope_scaling"].iter().find_map(|key| json.get(*key).filter(|v| v.is_object()));
    let find = |key: &str| nested.and_then(|inner| inner.get(key)).or_else(|| json.get(key)).cloned();
    let keys = Keys { get: &find };
    let theta = keys.real_or("rope_theta", Some(10_000.0))?;
    let kind = nested.and_then(|inner| inner.get("rope_type").or_else(|| inner.get("type")));
    let scaling = match kind.map(|kind| (kind, kind.as_str())) {
        None | Some((_, Some("default"))) => RopeScaling::None,
        Some((_, Some("linear"))) => RopeScaling::Linear(keys.real_or("factor", None)?),
        Some((_, Some("llama3"))) => RopeScaling::Llama3 {
            factor: keys.real_or("factor", None)?,
            low_freq_factor: keys.real_or("low_freq_factor", None)?,
            high_freq_factor: keys.real_or("high_freq_factor", None)?,
            original: keys.real_or("original_max_position_embeddings", None)?,
        },
        Some((kind, _)) => return Err(Error::config("rope_type", "default, linear or llama3", kind)),
    };
    Ok(RopeConfig { theta, scaling })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        })
    }

    #[test]
    fn both_ways_to_write_rope_mean_the_same() {
        let mut old = llama();
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        old["rope_scaling"] = scaling.clone();
        let mut new = llama();
        new.as_object_mut().unwrap().remove("rope_theta");
        new["rope_parameters"] = scaling;
        new["rope_parameters"]["rope_theta"] = json!(500000.0);
        assert_eq!(Config::from_json(&old).unwrap(), Config::from_json(&new).unwrap());
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        for (key, value) in [
            ("hidden_act", json!("relu")),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 2.0})),
            ("num_attention_heads", json!(0)),
            ("vocab_size", json!("many")),
            ("num_key_value_heads", json!(3)),
            ("head_dim", json!(33)),
        ] {
            let mut config = llama();
            config[key] = value;
            let told = Config::from_json(&config).unwrap_err().to_string();
            let named = if key == "rope_scaling" { "rope_type" } else { key };
            assert!(told.contains(named), "{told}");
        }
        assert!(Config::from_json(&json!([1, 2])).is_err());
    }

    #[test]
    fn keys_of_gguf_have_their_defaults() {
        let keys = json!({
            "general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 2,
            "llama.feed_forward_length": 96, "llama.block_count": 2, "llama.context_length": 512,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        });
        let config = Config::from_gguf(&|key| keys.get(key).cloned(), 128).unwrap();
        assert_eq!((config.num_kv_heads, config.head_dim), (2, 32));
        assert_eq!(config.rope, Some(RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }));
    }
}
