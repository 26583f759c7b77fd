//! Random weights, for measuring models without their files.

use super::Config;
use super::names::{Naming, Part};
use super::source::WeightSource;
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use warpsmith::op::survey;
use warpsmith::ops::{Copy, QuantFormat};
use warpsmith::tensor::Random;
use warpsmith::{DType, Device, Tensor};

/// Numbers that are drawn; all matrices repeat them, each from another place on. A prime, so that no two of
/// this many rows of a matrix are alike.
const BLOCK: usize = 1_048_573;
/// The deviation of matrices, as models are initialised with.
const DEVIATION: f64 = 0.02;

/// Weights that depend on a seed alone: normal matrices, norms of ones, and biases of zeros. Making them takes seconds for any size.
pub struct RandomWeights {
    shapes: BTreeMap<String, Vec<usize>>,
    seed: u64,
    /// As many numbers as the largest matrix has, of the type that was asked for last.
    pool: Mutex<Option<Tensor>>,
}

impl RandomWeights {
    /// Weights for a model of the form of Llama, Qwen3 or Qwen3-MoE. With `tied`, the head is the embedding table.
    ///
    /// # Errors
    /// If the family is another, or the model too large for any memory.
    pub fn new(config: &Config, tied: bool, seed: u64) -> Result<RandomWeights> {
        if !["llama", "qwen3", "qwen3_moe"].contains(&config.architecture.as_str()) {
            let expected = "llama, qwen3 or qwen3_moe, for random weights";
            return Err(Error::config("architecture", expected, &config.architecture));
        }
        let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
        let width = |key: &str, heads: usize| {
            let width = heads.checked_mul(config.head_dim);
            width.ok_or_else(|| Error::config(key, format!("fewer heads of {}", config.head_dim), heads))
        };
        let queries = width("num_attention_heads", config.num_heads)?;
        let keys = width("num_key_value_heads", config.num_kv_heads)?;
        let mut shapes = BTreeMap::new();
        // Of any type, and as many again for where matrices begin.
        const MOST: usize = isize::MAX as usize / 16;
        // Of all experts together, or of the one feed-forward layer.
        let (experts, most_inner) = match &config.experts {
            Some(experts) => (experts.count, experts.count.checked_mul(experts.intermediate_size)),
            None => (0, Some(0)),
        };
        let most_inner = most_inner.map(|all| all.max(inner)).unwrap_or(usize::MAX);
        let layer = [queries, keys, keys, queries, experts, most_inner, most_inner, most_inner]
            .iter()
            .try_fold(hidden, |sum, rows| sum.checked_add(rows.checked_mul(hidden)?));
        let all = layer.and_then(|layer| layer.checked_mul(config.num_layers)).and_then(|layers| {
            let tables = vocab.checked_mul(hidden)?.checked_mul(2)?;
            layers.checked_add(tables)?.checked_add(BLOCK)
        });
        if all.is_none_or(|all| all > MOST) {
            let sizes = format!("{} layers, sizes {hidden} and {inner}, {vocab} tokens", config.num_layers);
            return Err(Error::config("hidden_size", "a model that a memory can hold", sizes));
        }
        let mut add = |part: Part, layer: usize, shape: &[usize]| {
            let name = part.names()[1].replace("{}", &layer.to_string());
            let has_bias = match part {
                Part::Query | Part::Key | Part::Value | Part::AttentionOut => config.attention_bias,
                Part::Gate | Part::Up | Part::Down => config.mlp_bias,
                _ => None,
            };
            if has_bias == Some(true) {
                shapes.insert(format!("{name}.bias"), vec![shape[0]]);
            }
            shapes.insert(name + ".weight", shape.to_vec());
        };
        add(Part::Embedding, 0, &[vocab, hidden]);
        add(Part::FinalNorm, 0, &[hidden]);
        if !tied {
            add(Part::Head, 0, &[vocab, hidden]);
        }
        for layer in 0..config.num_layers {
            add(Part::AttentionNorm, layer, &[hidden]);
            add(Part::Query, layer, &[queries, hidden]);
            add(Part::Key, layer, &[keys, hidden]);
            add(Part::Value, layer, &[keys, hidden]);
            add(Part::AttentionOut, layer, &[hidden, queries]);
            add(Part::MlpNorm, layer, &[hidden]);
            match config.experts.as_ref().filter(|experts| experts.are_in(layer)) {
                Some(experts) => add(Part::Router, layer, &[experts.count, hidden]),
                None => {
                    add(Part::Gate, layer, &[inner, hidden]);
                    add(Part::Up, layer, &[inner, hidden]);
                    add(Part::Down, layer, &[hidden, inner]);
                }
            }
            if config.architecture != "llama" {
                add(Part::QueryNorm, layer, &[config.head_dim]);
                add(Part::KeyNorm, layer, &[config.head_dim]);
            }
        }
        if let Some(experts) = &config.experts {
            let inner = experts.intermediate_size;
            let parts = [("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])];
            for layer in (0..config.num_layers).filter(|layer| experts.are_in(*layer)) {
                for expert in 0..experts.count {
                    let name = |part| format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight");
                    shapes.extend(parts.map(|(part, shape)| (name(part), shape.to_vec())));
                }
            }
        }
        Ok(RandomWeights { shapes, seed, pool: Mutex::new(None) })
    }

    /// Numbers in all tensors.
    pub fn parameters(&self) -> usize {
        self.shapes.values().map(|shape| shape.iter().product::<usize>()).sum()
    }

    /// The names of [`config`](Self::config).
    pub const KNOWN: [&str; 7] =
        ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b", "llama-3.1-8b"];

    /// The `config.json` of a model whose sizes are known here.
    pub fn config(name: &str) -> Option<Value> {
        let qwen3 = |hidden: usize, inner: usize, layers: usize, heads: usize, tied: bool| {
            json!({
                "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
                "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
                "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                "tie_word_embeddings": tied,
            })
        };
        let llama = |hidden: usize, inner: usize, layers: usize, head_dim: usize, factor: f64, tied: bool| {
            json!({
                "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden, "intermediate_size": inner,
                "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": head_dim, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
                "rope_scaling": { "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 },
                "tie_word_embeddings": tied,
            })
        };
        Some(match name {
            "qwen3-0.6b" => qwen3(1024, 3072, 28, 16, true),
            "qwen3-1.7b" => qwen3(2048, 6144, 28, 16, true),
            "qwen3-4b" => qwen3(2560, 9728, 36, 32, true),
            "qwen3-8b" => qwen3(4096, 12288, 36, 32, false),
            "qwen3-30b-a3b" => json!({
                "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
                "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
                "tie_word_embeddings": false,
            }),
            "llama-3.2-1b" => llama(2048, 8192, 16, 64, 32.0, true),
            "llama-3.1-8b" => llama(4096, 14336, 32, 128, 8.0, false),
            _ => return None,
        })
    }

    /// The numbers that all matrices are cut from.
    fn pool(&self, dtype: DType) -> Result<Tensor> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pool.as_ref().filter(|pool| pool.dtype() == dtype) {
            return Ok(pool.clone());
        }
        let largest = self.shapes.values().map(|shape| shape.iter().product::<usize>()).max().unwrap_or(0);
        let count = largest + BLOCK;
        if survey::is_running() {
            // Nothing is computed, the copies below neither. What they leave must not be kept for when something is.
            return Ok(Tensor::empty(&[count], dtype, Device::Cpu)?);
        }
        let mut random = Random::new(self.seed);
        let mut block = vec![0; BLOCK * dtype.size()];
        block
            .chunks_exact_mut(dtype.size())
            .for_each(|place| dtype.write(DEVIATION * random.normal(), place));
        let block = Tensor::from_bytes(&block, &[BLOCK], dtype, Device::Cpu)?;
        // In place, because it may be a large part of the memory.
        let (mut filled, stream) =
            (Tensor::empty(&[count], dtype, Device::Cpu)?, Device::Cpu.default_stream()?);
        for start in (0..count).step_by(BLOCK) {
            let len = BLOCK.min(count - start);
            let part = block.narrow(0, 0, len).expect("at most a block");
            let place = filled.view_mut().narrow(0, start, len).expect("within the pool");
            Copy::new(&part).run_into(place, &stream)?;
        }
        Ok(pool.insert(filled).clone())
    }
}

impl WeightSource for RandomWeights {
    fn naming(&self) -> Naming {
        Naming::Transformers
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.shapes.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }

    fn stored_dtype(&self, _: &str) -> Option<DType> {
        None
    }

    fn blocks(&self, _: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        Ok(None)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let shape = self.shapes.get(name).ok_or_else(|| Error::tensor(name, "a tensor", "nothing"))?;
        if let &[len] = &shape[..] {
            let number = if name.ends_with(".bias") { 0.0 } else { 1.0 };
            return Ok(Tensor::from_f64(&vec![number; len], &[len], dtype, Device::Cpu)?);
        }
        let hash =
            name.bytes().fold(0u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let (start, count) = ((hash % BLOCK as u64) as usize, shape.iter().product());
        let part =
            self.pool(dtype)?.narrow(0, start, count).expect("the pool is longer than any matrix by a block");
        Ok(part.reshape(shape).expect("as many numbers as the matrix has"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{LoadOptions, load};

    #[test]
    fn known_models_have_as_many_parameters_as_they_should() {
        for (name, millions) in
            RandomWeights::KNOWN.into_iter().zip([596.0, 1720.6, 4022.5, 8190.7, 30532.1, 1235.8, 8030.3])
        {
            let json = RandomWeights::config(name).unwrap();
            let tied = json["tie_word_embeddings"].as_bool().unwrap();
            let weights = RandomWeights::new(&Config::from_json(&json).unwrap(), tied, 0).unwrap();
            assert!(
                (weights.parameters() as f64 / 1e6 - millions).abs() < 0.1,
                "{name}: {}",
                weights.parameters()
            );
        }
        assert!(RandomWeights::config("gpt-5").is_none());
    }

    #[test]
    fn sizes_that_no_memory_has_are_refused() {
        for keys in [
            ["hidden_size", "vocab_size"],
            ["hidden_size", "intermediate_size"],
            ["num_attention_heads", "head_dim"],
        ] {
            let mut json = RandomWeights::config("qwen3-0.6b").unwrap();
            keys.iter().for_each(|key| json[key] = (1u64 << 31).into());
            let told =
                Config::from_json(&json).and_then(|config| RandomWeights::new(&config, false, 0)).err();
            assert!(matches!(told, Some(Error::Config { .. })), "{keys:?}: {told:?}");
        }
    }

    #[test]
    fn the_pool_repeats_its_block() {
        let mut json = RandomWeights::config("qwen3-0.6b").unwrap();
        json["vocab_size"] = 3000.into();
        let weights = RandomWeights::new(&Config::from_json(&json).unwrap(), true, 0).unwrap();
        let pool: Vec<f32> = weights.pool(DType::F32).unwrap().to_vec().unwrap();
        assert!(pool.len() > 3 * BLOCK && pool[..BLOCK] == pool[2 * BLOCK..3 * BLOCK]);
        assert_eq!(pool[pool.len() - 1], pool[(pool.len() - 1) % BLOCK]);
    }

    #[test]
    fn weights_depend_on_seed_and_name_and_make_a_model() {
        let mut json = RandomWeights::config("qwen3-0.6b").unwrap();
        for (key, value) in
            [("vocab_size", 50), ("hidden_size", 64), ("intermediate_size", 96), ("head_dim", 32)]
        {
            json[key] = value.into();
        }
        json["num_hidden_layers"] = 2.into();
        let config = Config::from_json(&json).unwrap();
        let weights = |seed| RandomWeights::new(&config, true, seed).unwrap();
        let read = |seed: u64, name: &str| {
            let name = format!("model.layers.{name}.weight");
            weights(seed).tensor(&name, DType::BF16).unwrap().to_f64().unwrap()
        };
        let first = read(0, "0.mlp.up_proj");
        assert!(first == read(0, "0.mlp.up_proj") && first != read(1, "0.mlp.up_proj"));
        assert!(first != read(0, "0.mlp.gate_proj") && first != read(0, "1.mlp.up_proj"));
        let deviation = (first.iter().map(|x| x * x).sum::<f64>() / first.len() as f64).sqrt();
        assert!((0.018..0.022).contains(&deviation), "{deviation}");
        assert!(read(0, "0.input_layernorm").iter().all(|&x| x == 1.0));
        load(&config, &weights(0), LoadOptions::default()).unwrap();
    }
}
