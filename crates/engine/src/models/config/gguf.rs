//! Configurations in the keys of a GGUF file. llama.cpp decides what a key means and what holds without it. `tests.rs` lists
//! them all.

use super::keys::{Keys, Setting};
use super::{Config, RopeConfig, RopeScaling, check_head_dim, known_family};
use crate::error::Result;
use crate::weights;
use warpsmith::ops::linear::Activation;

/// Looks up a key of the file.
pub type Lookup<'a> = dyn Fn(&str) -> Option<weights::Value> + 'a;

/// Family and head size, before anything else is asked for.
fn family_and_head(get: &Lookup<'_>) -> Result<(String, usize)> {
    let all = |key: &str| get(key).as_ref().map(Setting::from_gguf);
    let family = known_family(&Keys { prefix: String::new(), get: &all }, "general.architecture")?;
    let own = |key: &str| get(&format!("{family}.{key}")).as_ref().map(Setting::from_gguf);
    let keys = Keys { prefix: format!("{family}."), get: &own };
    const LENGTH: &str = "attention.key_length";
    if let Some(head_dim) = keys.size_if_any(LENGTH)? {
        check_head_dim(&keys, LENGTH, head_dim)?;
        return Ok((family, head_dim));
    }
    let (hidden_size, num_heads) = (keys.size("embedding_length")?, keys.size("attention.head_count")?);
    if !hidden_size.is_multiple_of(num_heads) {
        return Err(keys.wrong(
            "embedding_length",
            format!("a multiple of the {num_heads} heads"),
            hidden_size,
        ));
    }
    let named = format!("embedding_length / {family}.attention.head_count");
    check_head_dim(&keys, &named, hidden_size / num_heads)?;
    Ok((family, hidden_size / num_heads))
}

/// Whether the model is of a family, and has heads, that can be run.
pub fn judge(get: &Lookup<'_>) -> Result<()> {
    family_and_head(get).map(drop)
}

pub fn read(get: &Lookup<'_>, vocab_size: usize) -> Result<Config> {
    let (family, head_dim) = family_and_head(get)?;
    let all = |key: &str| get(key).as_ref().map(Setting::from_gguf);
    let general = Keys { prefix: String::new(), get: &all };
    if let Some(kind) = general.text_if_any("general.type")?.filter(|kind| kind != "model") {
        return Err(general.wrong("general.type", "\"model\"", Setting::Text(kind)));
    }
    let own = |key: &str| get(&format!("{family}.{key}")).as_ref().map(Setting::from_gguf);
    let keys = Keys { prefix: format!("{family}."), get: &own };
    refuse_what_is_not_implemented(&keys, head_dim)?;
    let num_heads = keys.size("attention.head_count")?;
    let learned_positions = family == "gpt2";
    if learned_positions {
        // Its queries, keys and values are one matrix, three times as wide as the model.
        keys.must_be_one_of("attention.head_count_kv", &[num_heads as f64])?;
        keys.must_be_one_of("attention.key_length", &[(keys.size("embedding_length")? / num_heads) as f64])?;
    }
    let (epsilon, activation) = match learned_positions {
        true => ("attention.layer_norm_epsilon", Activation::GeluTanh),
        false => ("attention.layer_norm_rms_epsilon", Activation::Silu),
    };
    let max_positions = keys.size("context_length")?;
    // Files do not say whether biases are part of the model: it has those that are there. All of GPT-2's are.
    let biases = learned_positions.then_some(true);
    Config {
        vocab_size,
        hidden_size: keys.size("embedding_length")?,
        intermediate_size: keys.size("feed_forward_length")?,
        num_layers: keys.size("block_count")?,
        num_heads,
        num_kv_heads: keys.size_or("attention.head_count_kv", num_heads)?,
        head_dim,
        max_positions,
        norm_eps: keys.real(epsilon)? as f32,
        rope: if learned_positions { None } else { Some(rope(&keys, head_dim)?) },
        activation,
        attention_bias: biases,
        mlp_bias: biases,
        architecture: family.clone(),
        ..Config::default()
    }
    .checked(&format!("{family}.attention.head_count_kv"))
}

/// Keys that change what a model computes, where their value is not the one that changes nothing.
fn refuse_what_is_not_implemented(keys: &Keys<'_>, head_dim: usize) -> Result<()> {
    keys.must_be("attention.causal", true)?;
    keys.must_be("use_parallel_residual", false)?;
    keys.must_be_one_of("attention.value_length", &[head_dim as f64])?;
    for key in [
        "expert_count",
        "expert_used_count",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "attention.scale",
        "attention.sliding_window",
        "nextn_predict_layers",
    ] {
        keys.must_be_one_of(key, &[0.0])?;
    }
    for key in ["logit_scale", "residual_scale", "embedding_scale"] {
        keys.must_be_one_of(key, &[0.0, 1.0])?;
    }
    Ok(())
}

fn rope(keys: &Keys<'_>, head_dim: usize) -> Result<RopeConfig> {
    keys.must_be_one_of("rope.dimension_count", &[head_dim as f64])?;
    keys.must_be_one_of("rope.scaling.attn_factor", &[0.0, 1.0])?;
    if let Some(found) = keys.find("rope.dimension_sections") {
        return Err(keys.wrong("rope.dimension_sections", "nothing: positions have one axis", found));
    }
    let factor = match keys.real_if_any("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The name of old files.
        None => keys.real_if_any("rope.scale_linear")?,
    };
    // A factor without a kind is linear.
    let kind = keys.text_if_any("rope.scaling.type")?;
    let scaling = match (kind.as_deref(), factor) {
        (Some("none"), _) | (None, None) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear(factor),
        (Some("linear"), None) => return Err(keys.wrong("rope.scaling.factor", "a number", "nothing")),
        (Some(other), _) => {
            return Err(keys.wrong("rope.scaling.type", "none or linear", Setting::Text(other.into())));
        }
    };
    Ok(RopeConfig { theta: keys.real_or("rope.freq_base", 10_000.0)?, scaling })
}
