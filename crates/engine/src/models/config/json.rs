//! Configurations as transformers writes them. Its classes decide what a key means and what holds without it; keys that have
//! no effect there have none here. `tests.rs` lists them all.

mod experts;
mod layers;
mod rope;

use super::super::names::Naming;
use super::keys::{Keys, Setting};
use super::{Config, Fp8Config, Int4Config, check_head_dim, known_family};
use crate::error::Result;
use serde_json::Value;
use warpsmith::ops::linear::Activation;

/// Transformers' names of activations.
const ACTIVATIONS: [(&str, Activation); 10] = [
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_fast", Activation::GeluTanh),
    ("gelu_accurate", Activation::GeluTanh),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_python_tanh", Activation::GeluTanh),
    ("relu", Activation::Relu),
];

/// What a class of transformers has for keys that are not there, and which of them it has.
struct Class {
    /// Elements of a head, whatever the other sizes are; `None` if these decide.
    head_dim: Option<usize>,
    /// Heads of keys and values; `None` for as many as there are of queries.
    kv_heads: Option<usize>,
    norm_eps: f64,
    theta: f64,
    tied: bool,
    activation: (&'static str, Activation),
    attention_bias: Bias,
    /// Whether there is a key for the biases of feed-forward layers. Without it there are none.
    has_mlp_bias: bool,
}

/// Whether attention has biases.
enum Bias {
    Always,
    Never,
    /// The key `attention_bias` decides.
    Key,
}

impl Class {
    /// That of a family other than GPT-2.
    fn of(family: &str) -> Class {
        let llama = Class {
            head_dim: None,
            kv_heads: None,
            norm_eps: 1e-6,
            theta: 10_000.0,
            tied: false,
            activation: ("hidden_act", Activation::Silu),
            attention_bias: Bias::Key,
            has_mlp_bias: false,
        };
        match family {
            "qwen2" => Class { kv_heads: Some(32), attention_bias: Bias::Always, ..llama },
            "qwen3" => Class { head_dim: Some(128), kv_heads: Some(32), ..llama },
            "qwen3_moe" => Class { kv_heads: Some(4), ..llama },
            "mixtral" => {
                Class { kv_heads: Some(8), norm_eps: 1e-5, theta: 1e6, attention_bias: Bias::Never, ..llama }
            }
            "mistral" => Class { kv_heads: Some(8), attention_bias: Bias::Never, ..llama },
            "gemma3_text" => Class {
                head_dim: Some(256),
                kv_heads: Some(4),
                theta: 1e6,
                tied: true,
                activation: ("hidden_activation", Activation::GeluTanh),
                ..llama
            },
            "phi3" => Class { norm_eps: 1e-5, attention_bias: Bias::Never, ..llama },
            "smollm3" => Class { kv_heads: Some(4), theta: 2e6, tied: true, has_mlp_bias: true, ..llama },
            "olmo2" => Class { norm_eps: 1e-5, ..llama },
            _ => Class { has_mlp_bias: true, ..llama },
        }
    }
}

/// Family and head size, before anything else is asked for.
fn family_and_head(keys: &Keys<'_>) -> Result<(String, usize)> {
    let (family, _) = known_family(keys, "model_type", Naming::Transformers)?;
    let (hidden, heads) = match family.as_str() {
        "gpt2" => ("n_embd", "n_head"),
        _ => ("hidden_size", "num_attention_heads"),
    };
    let own = match family.as_str() {
        "gpt2" => None,
        family => match (keys.size_if_any("head_dim")?, Class::of(family).head_dim) {
            (None, default) => default,
            (own, _) => own,
        },
    };
    if let Some(head_dim) = own {
        check_head_dim(keys, "head_dim", head_dim)?;
        return Ok((family, head_dim));
    }
    let (hidden_size, num_heads) = (keys.size(hidden)?, keys.size(heads)?);
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(keys.wrong(hidden, format!("a multiple of the {num_heads} heads"), hidden_size));
    }
    let named = format!("{hidden} / {}{heads}", keys.prefix);
    check_head_dim(keys, &named, hidden_size / num_heads)?;
    Ok((family, hidden_size / num_heads))
}

fn keys_of<'a>(prefix: &str, get: &'a dyn Fn(&str) -> Option<Setting>) -> Keys<'a> {
    Keys { prefix: prefix.into(), get }
}

/// Whether the model is of a family, and has heads, that can be run.
pub fn judge(json: &Value) -> Result<()> {
    let get = |key: &str| json.get(key).and_then(Setting::from_json);
    family_and_head(&keys_of("", &get)).map(drop)
}

pub fn read(json: &Value) -> Result<Config> {
    let get = |key: &str| json.get(key).and_then(Setting::from_json);
    let keys = keys_of("", &get);
    let (family, head_dim) = family_and_head(&keys)?;
    refuse_other_models(json, &keys)?;
    let quantization = Fp8Config::from_json(json)?;
    let int4 = Int4Config::from_json(json)?;
    if family == "gpt2" {
        if int4.is_some() {
            let expected = "fp8, fbgemm_fp8 or compressed-tensors, because the model is a GPT-2";
            return Err(keys.wrong("quantization_config", expected, "packed weights of 4 bits"));
        }
        return gpt2(&keys, head_dim, quantization);
    }
    let class = Class::of(&family);
    let (num_heads, num_layers) = (keys.size("num_attention_heads")?, keys.size("num_hidden_layers")?);
    // Without the key, not with null.
    let has_kv_heads = json.get("num_key_value_heads").is_some();
    let without = class.kv_heads.filter(|_| !has_kv_heads).unwrap_or(num_heads);
    let max_positions = keys.size("max_position_embeddings")?;
    let attention_bias = match class.attention_bias {
        Bias::Always => true,
        Bias::Never => false,
        Bias::Key => keys.flag_or("attention_bias", false)?,
    };
    let (activation_key, usual) = class.activation;
    let about = rope::About { family: &family, theta: class.theta, head_dim, max_positions };
    let rope::Ropes { rope, local_rope, rotary_dim } = rope::read(json, &keys, &about)?;
    let intermediate_size = keys.size("intermediate_size")?;
    let mut config = Config {
        vocab_size: keys.size("vocab_size")?,
        hidden_size: keys.size("hidden_size")?,
        intermediate_size,
        num_layers,
        num_heads,
        num_kv_heads: keys.size_or("num_key_value_heads", without)?,
        head_dim,
        max_positions,
        norm_eps: keys.real_or("rms_norm_eps", class.norm_eps)? as f32,
        rope: Some(rope),
        local_rope,
        rotary_dim,
        layers: layers::read(json, &keys, &family, num_layers)?,
        experts: experts::read(json, &keys, &family, num_layers, intermediate_size)?,
        activation: activation(&keys, activation_key, usual)?,
        attention_bias: Some(attention_bias),
        mlp_bias: Some(class.has_mlp_bias && keys.flag_or("mlp_bias", false)?),
        tied: Some(keys.flag_or("tie_word_embeddings", class.tied)?),
        quantization,
        int4,
        architecture: family,
        ..Config::default()
    };
    if config.architecture == "gemma3_text" {
        keys.must_be("use_bidirectional_attention", false)?;
        config.score_divisor = Some(keys.real_or("query_pre_attn_scalar", 256.0)?);
        config.embedding_scale = Some((config.hidden_size as f64).sqrt());
        config.logit_softcap = keys.real_if_any("final_logit_softcapping")?;
    }
    config.checked("num_key_value_heads")
}

fn gpt2(keys: &Keys<'_>, head_dim: usize, quantization: Option<Fp8Config>) -> Result<Config> {
    let (hidden_size, num_heads) = (keys.size("n_embd")?, keys.size("n_head")?);
    // Other names of the same keys. Of two values, nobody knows which is meant.
    for (other, key) in [
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
    ] {
        keys.must_be_as(other, key)?;
    }
    keys.must_be("add_cross_attention", false)?;
    // Only how attention is rounded. Sums are in f32 here in any case.
    keys.flag_or("reorder_and_upcast_attn", false)?;
    Config {
        architecture: "gpt2".into(),
        vocab_size: keys.size("vocab_size")?,
        hidden_size,
        intermediate_size: keys.size_or("n_inner", 4 * hidden_size)?,
        num_layers: keys.size("n_layer")?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim,
        max_positions: keys.size("n_positions")?,
        norm_eps: keys.real_or("layer_norm_epsilon", 1e-5)? as f32,
        activation: activation(keys, "activation_function", Activation::GeluTanh)?,
        attention_bias: Some(true),
        mlp_bias: Some(true),
        tied: Some(keys.flag_or("tie_word_embeddings", true)?),
        scale_scores: keys.flag_or("scale_attn_weights", true)?,
        scale_scores_by_layer: keys.flag_or("scale_attn_by_inverse_layer_idx", false)?,
        quantization,
        ..Config::default()
    }
    .checked("n_head")
}

fn activation(keys: &Keys<'_>, key: &str, default: Activation) -> Result<Activation> {
    let Some(name) = keys.text_if_any(key)? else { return Ok(default) };
    match ACTIVATIONS.iter().find(|(known, _)| *known == name) {
        Some((_, activation)) => Ok(*activation),
        None => {
            let known = ACTIVATIONS.map(|(name, _)| name).join(", ");
            Err(keys.wrong(key, format!("one of {known}"), Setting::Text(name)))
        }
    }
}

/// What makes another model of the same family.
fn refuse_other_models(json: &Value, keys: &Keys<'_>) -> Result<()> {
    keys.must_be("is_encoder_decoder", false)?;
    keys.must_be("is_causal", true)?;
    for key in ["per_layer_config", "pruned_heads"] {
        let is_empty = match json.get(key) {
            None | Some(Value::Null) => true,
            Some(Value::Object(entries)) => entries.is_empty(),
            Some(Value::Array(entries)) => entries.is_empty(),
            Some(_) => false,
        };
        if !is_empty {
            return Err(keys.wrong(
                key,
                "nothing: all layers are alike",
                keys.find(key).map_or_else(String::new, |v| v.to_string()),
            ));
        }
    }
    let classes = json.get("architectures").and_then(Value::as_array);
    for class in classes.into_iter().flatten() {
        let gives_logits =
            |name: &str| ["ForCausalLM", "LMHeadModel", "Model"].iter().any(|end| name.ends_with(end));
        if !class.as_str().is_some_and(gives_logits) {
            return Err(keys.wrong(
                "architectures",
                "a class that ends in ForCausalLM, LMHeadModel or Model",
                class,
            ));
        }
    }
    Ok(())
}
