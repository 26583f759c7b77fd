//! Configurations as transformers writes them. Its classes decide what a key means and what holds without it; keys that have
//! no effect there have none here. `tests.rs` lists them all.

use super::keys::{Keys, Setting};
use super::{Config, Fp8Config, RopeConfig, RopeScaling, check_head_dim, known_family};
use crate::error::{Error, Result};
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

/// Family and head size, before anything else is asked for.
fn family_and_head(keys: &Keys<'_>) -> Result<(String, usize)> {
    let family = known_family(keys, "model_type")?;
    let (hidden, heads) = match family.as_str() {
        "gpt2" => ("n_embd", "n_head"),
        _ => ("hidden_size", "num_attention_heads"),
    };
    let own = match family.as_str() {
        "gpt2" => None,
        // The class has a size of its own, whatever the others are.
        "qwen3" => Some(keys.size_or("head_dim", 128)?),
        _ => keys.size_if_any("head_dim")?,
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
    if family == "gpt2" {
        return gpt2(&keys, head_dim, quantization);
    }
    let (num_heads, num_layers) = (keys.size("num_attention_heads")?, keys.size("num_hidden_layers")?);
    // Without the key, not with null.
    let without = if family == "qwen3" && json.get("num_key_value_heads").is_none() { 32 } else { num_heads };
    refuse_windows(json, &keys, &family, num_layers)?;
    let max_positions = keys.size("max_position_embeddings")?;
    Config {
        vocab_size: keys.size("vocab_size")?,
        hidden_size: keys.size("hidden_size")?,
        intermediate_size: keys.size("intermediate_size")?,
        num_layers,
        num_heads,
        num_kv_heads: keys.size_or("num_key_value_heads", without)?,
        head_dim,
        max_positions,
        norm_eps: keys.real_or("rms_norm_eps", 1e-6)? as f32,
        rope: Some(rope(json, &keys, max_positions)?),
        activation: activation(&keys, "hidden_act", Activation::Silu)?,
        attention_bias: Some(keys.flag_or("attention_bias", false)?),
        // Qwen3 has no such key.
        mlp_bias: Some(family == "llama" && keys.flag_or("mlp_bias", false)?),
        tied: Some(keys.flag_or("tie_word_embeddings", false)?),
        quantization,
        architecture: family,
        ..Config::default()
    }
    .checked("num_key_value_heads")
}

fn gpt2(keys: &Keys<'_>, head_dim: usize, quantization: Option<Fp8Config>) -> Result<Config> {
    let (hidden_size, num_heads) = (keys.size("n_embd")?, keys.size("n_head")?);
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

/// Layers that see only the last tokens are not implemented.
fn refuse_windows(json: &Value, keys: &Keys<'_>, family: &str, num_layers: usize) -> Result<()> {
    match json.get("layer_types") {
        None | Some(Value::Null) => {}
        Some(types) => {
            let is_full = |kind: &Value| matches!(kind.as_str(), Some("full_attention" | "attention"));
            let all =
                types.as_array().is_some_and(|types| types.len() == num_layers && types.iter().all(is_full));
            if !all {
                let got = keys.find("layer_types").map_or_else(String::new, |found| found.to_string());
                return Err(keys.wrong(
                    "layer_types",
                    format!("full_attention for {num_layers} layers"),
                    got,
                ));
            }
            return Ok(());
        }
    }
    // What the class of Qwen3 has for keys that are not there. Null turns windows off.
    let full_layers = if family == "qwen3" { keys.size_or("max_window_layers", 28)? } else { 0 };
    let has_window = !matches!(json.get("sliding_window"), Some(Value::Null));
    if keys.flag_or("use_sliding_window", false)? && has_window && full_layers < num_layers {
        return Err(keys.wrong("use_sliding_window", "false: windows are not supported", true));
    }
    Ok(())
}

/// `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.
fn rope(json: &Value, keys: &Keys<'_>, max_positions: usize) -> Result<RopeConfig> {
    let mut nested = None;
    for key in ["rope_scaling", "rope_parameters"] {
        match json.get(key) {
            None | Some(Value::Null) => {}
            Some(Value::Object(entries)) if nested.is_none() && !entries.is_empty() => {
                nested = Some((key, entries))
            }
            Some(Value::Object(_)) => {}
            Some(other) => return Err(Error::config(key, "an object", other)),
        }
    }
    let get = |key: &str| nested.and_then(|(_, entries)| entries.get(key)).and_then(Setting::from_json);
    let inner = keys_of(&nested.map_or(String::new(), |(key, _)| format!("{key}.")), &get);
    if let Some((_, entries)) = nested {
        // One for each kind of layer.
        if let Some((key, value)) = entries.iter().find(|(_, value)| value.is_object()) {
            return Err(inner.wrong(key, "one rotation for all layers", weights_shown(value)));
        }
    }
    for keys in [&inner, keys] {
        keys.must_be_one_of("partial_rotary_factor", &[1.0])?;
    }
    let theta = match inner.real_if_any("rope_theta")? {
        Some(theta) => theta,
        None => keys.real_or("rope_theta", 10_000.0)?,
    };
    let kind = match inner.text_if_any("rope_type")? {
        Some(kind) => Some(kind),
        None => inner.text_if_any("type")?,
    };
    let scaling = match kind.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear(inner.real("factor")?),
        Some("llama3") => RopeScaling::Llama3 {
            factor: inner.real("factor")?,
            low_freq_factor: inner.real("low_freq_factor")?,
            high_freq_factor: inner.real("high_freq_factor")?,
            original: match keys.real_if_any("original_max_position_embeddings")? {
                Some(original) => original,
                None => inner.real_or("original_max_position_embeddings", max_positions as f64)?,
            },
        },
        Some(other) => {
            return Err(inner.wrong("rope_type", "default, linear or llama3", Setting::Text(other.into())));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

fn weights_shown(value: &Value) -> String {
    crate::weights::shown(&value.to_string())
}
