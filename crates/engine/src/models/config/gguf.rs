//! Configurations in the keys of a GGUF file. llama.cpp decides what a key means and what holds without it. `tests.rs` lists
//! them all.

use super::super::names::Naming;
use super::keys::{Keys, Setting};
use super::{
    Config, ExpertsConfig, LayerConfig, RopeConfig, RopeScaling, Rotation, check_head_dim, known_family,
};
use crate::error::Result;
use crate::weights;
use warpsmith::ops::linear::Activation;

/// Looks up a key of the file.
pub type Lookup<'a> = dyn Fn(&str) -> Option<weights::Value> + 'a;

/// Experts of a layer; zero is none.
const EXPERT_COUNT: &str = "expert_count";

/// What the file says of its model before anything else is asked for.
struct Judged {
    /// The family, as `config.json` names it.
    family: String,
    /// As the file does.
    name: String,
    head_dim: usize,
}

fn judged(get: &Lookup<'_>) -> Result<Judged> {
    let all = |key: &str| get(key).as_ref().map(Setting::from_gguf);
    let keys = Keys { prefix: String::new(), get: &all };
    let (mut family, name) = known_family(&keys, "general.architecture", Naming::Gguf)?;
    // Files have one name for Llama and Mixtral.
    let experts = all(&format!("{name}.{EXPERT_COUNT}"));
    if family == "llama" && experts.is_some_and(|count| !matches!(count, Setting::Whole(0))) {
        family = "mixtral".into();
    }
    let head_dim = head_dim(get, &name)?;
    Ok(Judged { family, name, head_dim })
}

fn head_dim(get: &Lookup<'_>, family: &str) -> Result<usize> {
    let own = |key: &str| get(&format!("{family}.{key}")).as_ref().map(Setting::from_gguf);
    let keys = Keys { prefix: format!("{family}."), get: &own };
    const LENGTH: &str = "attention.key_length";
    if let Some(head_dim) = keys.size_if_any(LENGTH)? {
        check_head_dim(&keys, LENGTH, head_dim)?;
        return Ok(head_dim);
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
    Ok(hidden_size / num_heads)
}

/// Whether the model is of a family, and has heads, that can be run.
pub fn judge(get: &Lookup<'_>) -> Result<()> {
    judged(get).map(drop)
}

pub fn read(get: &Lookup<'_>, vocab_size: usize) -> Result<Config> {
    let Judged { family, name, head_dim } = judged(get)?;
    let all = |key: &str| get(key).as_ref().map(Setting::from_gguf);
    let general = Keys { prefix: String::new(), get: &all };
    if let Some(kind) = general.text_if_any("general.type")?.filter(|kind| kind != "model") {
        return Err(general.wrong("general.type", "\"model\"", Setting::Text(kind)));
    }
    let own = |key: &str| get(&format!("{name}.{key}")).as_ref().map(Setting::from_gguf);
    let keys = Keys { prefix: format!("{name}."), get: &own };
    refuse_what_is_not_implemented(&keys, &family, head_dim)?;
    let num_heads = keys.size("attention.head_count")?;
    let learned_positions = family == "gpt2";
    if learned_positions {
        // Its queries, keys and values are one matrix, three times as wide as the model.
        keys.must_be_one_of("attention.head_count_kv", &[num_heads as f64])?;
        keys.must_be_one_of("attention.key_length", &[(keys.size("embedding_length")? / num_heads) as f64])?;
    }
    let (epsilon, activation) = match learned_positions {
        true => ("attention.layer_norm_epsilon", Activation::GeluTanh),
        false if family == "gemma3_text" => ("attention.layer_norm_rms_epsilon", Activation::GeluTanh),
        false => ("attention.layer_norm_rms_epsilon", Activation::Silu),
    };
    let max_positions = keys.size("context_length")?;
    // Files do not say whether biases are part of the model: it has those that are there. All of GPT-2's are, and those of
    // Qwen2's queries, keys and values.
    let biases = learned_positions.then_some(true);
    let attention_bias = if family == "qwen2" { Some(true) } else { biases };
    let (hidden_size, num_layers) = (keys.size("embedding_length")?, keys.size("block_count")?);
    let rotary_dim = if learned_positions { None } else { rotary_dim(&keys, &family, head_dim)? };
    let layers = layers(&keys, &family, num_layers)?;
    let intermediate_size = keys.size("feed_forward_length")?;
    let mut config = Config {
        vocab_size,
        hidden_size,
        intermediate_size,
        experts: experts(&keys, &family, intermediate_size)?,
        num_layers,
        num_heads,
        num_kv_heads: keys.size_or("attention.head_count_kv", num_heads)?,
        head_dim,
        max_positions,
        norm_eps: keys.real(epsilon)? as f32,
        rope: if learned_positions { None } else { Some(rope(&keys, &family, max_positions)?) },
        rotary_dim,
        layers,
        activation,
        attention_bias,
        mlp_bias: biases,
        architecture: family,
        ..Config::default()
    };
    if config.architecture == "gemma3_text" {
        // The local rotation is never scaled. Of the published models, only that of 62 layers divides scores by another
        // number than the head size, and files have no key for it.
        let theta = keys.real_or("rope.freq_base_swa", 10_000.0)?;
        config.local_rope = Some(RopeConfig { theta, scaling: RopeScaling::None });
        config.embedding_scale = Some((hidden_size as f64).sqrt());
        config.logit_softcap = keys.real_if_positive("final_logit_softcapping")?;
        config.score_divisor = (num_layers == 62).then_some(hidden_size as f64 / num_heads as f64);
    }
    config.checked(&format!("{name}.attention.head_count_kv"))
}

/// Keys that change what a model computes, where their value is not the one that changes nothing.
fn refuse_what_is_not_implemented(keys: &Keys<'_>, family: &str, head_dim: usize) -> Result<()> {
    keys.must_be("attention.causal", true)?;
    keys.must_be("use_parallel_residual", false)?;
    keys.must_be_one_of("attention.value_length", &[head_dim as f64])?;
    if !["qwen3_moe", "mixtral"].contains(&family) {
        keys.must_be_one_of(EXPERT_COUNT, &[0.0])?;
        keys.must_be_one_of("expert_used_count", &[0.0])?;
    }
    for key in [
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "leading_dense_block_count",
        "expert_group_count",
        "expert_group_used_count",
        "attn_logit_softcapping",
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "attention.scale",
        "nextn_predict_layers",
    ] {
        keys.must_be_one_of(key, &[0.0])?;
    }
    if family != "gemma3_text" {
        keys.must_be_one_of("final_logit_softcapping", &[0.0])?;
        if family != "phi3" {
            keys.must_be_one_of("attention.sliding_window", &[0.0])?;
        }
    }
    for key in ["logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"] {
        keys.must_be_one_of(key, &[0.0, 1.0])?;
    }
    Ok(())
}

/// The experts of a family that has some. Their weights are probabilities, divided by the sum of those that are used.
fn experts(keys: &Keys<'_>, family: &str, feed_forward: usize) -> Result<Option<ExpertsConfig>> {
    let intermediate_size = match family {
        "qwen3_moe" => keys.size("expert_feed_forward_length")?,
        "mixtral" => feed_forward,
        _ => return Ok(None),
    };
    // Softmax is 1.
    keys.must_be_one_of("expert_gating_func", &[0.0, 1.0])?;
    keys.must_be("expert_weights_norm", true)?;
    let (count, used) = (keys.size(EXPERT_COUNT)?, keys.size("expert_used_count")?);
    if used > count {
        return Err(keys.wrong("expert_used_count", format!("at most the {count} experts"), used));
    }
    Ok(Some(ExpertsConfig { count, used, intermediate_size, normalize: true, dense_layers: Vec::new() }))
}

/// The elements of a head that are rotated, if not all are.
fn rotary_dim(keys: &Keys<'_>, family: &str, head_dim: usize) -> Result<Option<usize>> {
    const COUNT: &str = "rope.dimension_count";
    if family != "phi3" {
        keys.must_be_one_of(COUNT, &[head_dim as f64])?;
        return Ok(None);
    }
    match keys.size_or(COUNT, head_dim)? {
        count if count == head_dim => Ok(None),
        count if count < head_dim && count % 2 == 0 => Ok(Some(count)),
        count => Err(keys.wrong(COUNT, format!("an even number up to the head size, {head_dim}"), count)),
    }
}

/// What differs between layers.
fn layers(keys: &Keys<'_>, family: &str, num_layers: usize) -> Result<Vec<LayerConfig>> {
    const WINDOW: &str = "attention.sliding_window";
    // Zero is none.
    let window = match keys.size_or_zero(WINDOW, 0)? {
        0 => None,
        1 => return Err(keys.wrong(WINDOW, "2 keys or more", 1)),
        window => Some(window),
    };
    // One layer in this many sees all keys.
    let period = match (family, window) {
        ("gemma3_text", Some(_)) => keys.size_or("attention.sliding_window_pattern", 6)?,
        _ => 1,
    };
    let layer = |layer: usize| {
        let is_last_of = |period: usize| (layer + 1).is_multiple_of(period);
        match family {
            "phi3" => LayerConfig { window, rotation: Rotation::Main },
            "gemma3_text" if !is_last_of(period) => LayerConfig { window, rotation: Rotation::Local },
            // No key says so.
            "smollm3" if is_last_of(4) => LayerConfig { window: None, rotation: Rotation::None },
            _ => LayerConfig::default(),
        }
    };
    let layers: Vec<LayerConfig> = (0..num_layers).map(layer).collect();
    let nothing = layers.iter().all(|layer| *layer == LayerConfig::default());
    Ok(if nothing { Vec::new() } else { layers })
}

fn rope(keys: &Keys<'_>, family: &str, max_positions: usize) -> Result<RopeConfig> {
    if let Some(found) = keys.find("rope.dimension_sections") {
        return Err(keys.wrong("rope.dimension_sections", "nothing: positions have one axis", found));
    }
    let theta = keys.real_or("rope.freq_base", 10_000.0)?;
    let original = keys.real_or("rope.scaling.original_context_length", max_positions as f64)?;
    let kind = keys.text_if_any("rope.scaling.type")?;
    let factor = match keys.real_if_any("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The name of old files.
        None => keys.real_if_any("rope.scale_linear")?,
    };
    let has_divisors = match kind.as_deref() {
        None => factor.is_none(),
        Some(kind) => kind == "longrope",
    };
    if family == "phi3" && has_divisors {
        keys.must_be_one_of("rope.scaling.factor", &[1.0])?;
        // The divisors are tensors. Without them nothing is scaled.
        let attention_factor = keys.real_if_positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let scaling =
            RopeScaling::LongRope { short: Vec::new(), long: Vec::new(), original, attention_factor };
        return Ok(RopeConfig { theta, scaling });
    }
    keys.must_be_one_of("rope.scaling.attn_factor", &[0.0, 1.0])?;
    // A factor without a kind is linear.
    let scaling = match (kind.as_deref(), factor) {
        (Some("none"), _) | (None, None) => RopeScaling::None,
        (Some("linear") | None, Some(factor)) => RopeScaling::Linear(factor),
        (Some("linear" | "yarn"), None) => {
            return Err(keys.wrong("rope.scaling.factor", "a number", "nothing"));
        }
        (Some("yarn"), Some(factor)) => {
            for (key, neutral) in
                [("ext_factor", [1.0, -1.0]), ("attn_factor", [1.0; 2]), ("log_multiplier", [0.0; 2])]
            {
                keys.must_be_one_of(&format!("rope.scaling.yarn_{key}"), &neutral)?;
            }
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast: keys.real_or("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: keys.real_or("rope.scaling.yarn_beta_slow", 1.0)?,
                truncate: true,
                attention_factor: if factor > 1.0 { 1.0 + 0.1 * factor.ln() } else { 1.0 },
            }
        }
        (Some(other), _) => {
            return Err(keys.wrong("rope.scaling.type", "none, linear or yarn", Setting::Text(other.into())));
        }
    };
    Ok(RopeConfig { theta, scaling })
}
