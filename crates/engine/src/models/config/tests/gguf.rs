//! The keys of GGUF files.

use super::*;
use std::collections::BTreeMap;
use weights::{Array, Value as Gguf};

type GgufKeys = BTreeMap<String, Gguf>;

fn gguf(family: &str) -> GgufKeys {
    let epsilon = if family == "gpt2" { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
    let own = [
        ("embedding_length", Gguf::U32(64)),
        ("attention.head_count", Gguf::U32(2)),
        ("feed_forward_length", Gguf::U32(96)),
        ("block_count", Gguf::U32(2)),
        ("context_length", Gguf::U32(512)),
    ];
    let own = own.into_iter().map(|(key, value)| (format!("{family}.{key}"), value));
    own.chain([
        ("general.architecture".to_owned(), Gguf::String(family.into())),
        (format!("{family}.attention.{epsilon}"), Gguf::F32(1e-5)),
    ])
    .collect()
}

fn read_gguf(keys: &GgufKeys) -> Result<Config> {
    Config::from_gguf(&|key| keys.get(key).cloned(), 128)
}

#[test]
fn keys_of_gguf_have_their_defaults() {
    let config = read_gguf(&gguf("llama")).unwrap();
    assert_eq!((config.num_kv_heads, config.head_dim, config.norm_eps), (2, 32, 1e-5));
    assert_eq!(config.rope, Some(RopeConfig { theta: 10_000.0, scaling: RopeScaling::None }));
    assert_eq!((config.attention_bias, config.mlp_bias, config.tied), (None, None, None));
    let config = read_gguf(&gguf("qwen2")).unwrap();
    assert_eq!((config.attention_bias, config.mlp_bias), (Some(true), None));
    let mut gemma = gguf("gemma3");
    gemma.insert("gemma3.attention.sliding_window".into(), Gguf::U32(16));
    gemma.insert("gemma3.block_count".into(), Gguf::U32(7));
    let config = read_gguf(&gemma).unwrap();
    assert_eq!((config.architecture.as_str(), config.activation), ("gemma3_text", Activation::GeluTanh));
    assert_eq!((config.embedding_scale, config.score_divisor), (Some(8.0), None));
    let local = |layer: usize| (config.layer(layer).window, config.layer(layer).rotation);
    assert_eq!(
        (local(4), local(5), local(6)),
        ((Some(16), Rotation::Local), (None, Rotation::Main), local(0))
    );
    gemma.insert("gemma3.block_count".into(), Gguf::U32(62));
    assert_eq!(read_gguf(&gemma).unwrap().score_divisor, Some(32.0));
    let mut smollm3 = gguf("smollm3");
    smollm3.insert("smollm3.block_count".into(), Gguf::U32(4));
    let rotations =
        read_gguf(&smollm3).unwrap().layers.iter().map(|layer| layer.rotation).collect::<Vec<_>>();
    assert_eq!(rotations, [Rotation::Main, Rotation::Main, Rotation::Main, Rotation::None]);
    let mut yarn = gguf("llama");
    yarn.insert("llama.rope.scaling.type".into(), Gguf::String("yarn".into()));
    let told = read_gguf(&yarn).unwrap_err().to_string();
    assert!(told.contains("`llama.rope.scaling.factor`"), "{told}");
    yarn.insert("llama.rope.scaling.factor".into(), Gguf::F32(4.0));
    let RopeScaling::Yarn { original, attention_factor, .. } =
        read_gguf(&yarn).unwrap().rope.unwrap().scaling
    else {
        panic!("yarn");
    };
    assert_eq!((original, attention_factor), (512.0, 1.0 + 0.1 * 4f64.ln()));
    yarn.insert("llama.rope.scaling.yarn_ext_factor".into(), Gguf::F32(0.5));
    let told = read_gguf(&yarn).unwrap_err().to_string();
    assert!(told.contains("`llama.rope.scaling.yarn_ext_factor`"), "{told}");
    let config = read_gguf(&gguf("gpt2")).unwrap();
    assert_eq!((config.rope, config.attention_bias, config.mlp_bias), (None, Some(true), Some(true)));
}

#[test]
fn keys_of_gguf_are_used_or_refused() {
    let real = Gguf::F32;
    let text = |text: &str| Gguf::String(text.into());
    let of_all: Vec<(&str, Gguf, Fate)> = vec![
        ("embedding_length", Gguf::U64(128), Used),
        ("embedding_length", Gguf::U64(u64::MAX), Refused),
        ("embedding_length", Gguf::I32(-64), Refused),
        ("attention.head_count", Gguf::U32(1), Used),
        ("attention.head_count", Gguf::Array(Array::U32(vec![2, 2])), Refused),
        ("feed_forward_length", Gguf::U32(100), Used),
        ("feed_forward_length", Gguf::Array(Array::U32(vec![96, 96])), Refused),
        ("block_count", Gguf::U32(3), Used),
        ("context_length", Gguf::U32(100), Used),
        ("attention.head_count_kv", Gguf::U32(2), NoEffect),
        ("attention.head_count_kv", Gguf::Array(Array::I32(vec![1, 1])), Refused),
        ("attention.key_length", Gguf::U32(48), Refused),
        ("attention.value_length", Gguf::U32(32), NoEffect),
        ("attention.value_length", Gguf::U32(64), Refused),
        ("attention.causal", Gguf::Bool(false), Refused),
        ("attention.causal", Gguf::Bool(true), NoEffect),
        ("attention.max_alibi_bias", real(8.0), Refused),
        ("attention.clamp_kqv", real(8.0), Refused),
        ("attention.scale", real(0.5), Refused),
        ("attention.scale", real(0.0), NoEffect),
        ("attention.sliding_window", Gguf::U32(16), Refused),
        ("attn_logit_softcapping", real(30.0), Refused),
        ("final_logit_softcapping", real(30.0), Refused),
        ("logit_scale", real(0.5), Refused),
        ("logit_scale", real(1.0), NoEffect),
        ("residual_scale", real(0.5), Refused),
        ("embedding_scale", real(0.5), Refused),
        ("expert_count", Gguf::U32(8), Refused),
        ("expert_count", Gguf::U32(0), NoEffect),
        ("expert_used_count", Gguf::U32(2), Refused),
        ("nextn_predict_layers", Gguf::U32(1), Refused),
        ("use_parallel_residual", Gguf::Bool(true), Refused),
        ("vocab_size", Gguf::U32(7), NoEffect),
        ("pooling_type", Gguf::U32(1), NoEffect),
        ("tensor_data_layout", text("Meta AI original pth"), NoEffect),
    ];
    let of_rope: Vec<(&str, Gguf, Fate)> = vec![
        ("attention.head_count_kv", Gguf::U32(1), Used),
        ("attention.key_length", Gguf::U32(64), Used),
        ("attention.layer_norm_rms_epsilon", real(1e-3), Used),
        ("attention.layer_norm_rms_epsilon", real(f32::NAN), Refused),
        ("rope.freq_base", real(1e6), Used),
        ("rope.freq_base", Gguf::F64(1e6), Used),
        ("rope.freq_base", real(f32::NAN), Refused),
        ("rope.freq_base", real(f32::INFINITY), Refused),
        ("rope.freq_base", real(-1.0), Refused),
        ("rope.freq_base", text("10000"), Refused),
        ("rope.dimension_count", Gguf::U32(32), NoEffect),
        ("rope.dimension_count", Gguf::U32(16), Refused),
        ("rope.dimension_sections", Gguf::Array(Array::I32(vec![8, 8])), Refused),
        // Linear, where no kind is given.
        ("rope.scaling.factor", real(2.0), Used),
        ("rope.scale_linear", real(2.0), Used),
        ("rope.scaling.type", text("none"), NoEffect),
        ("rope.scaling.type", text("longrope"), Refused),
        ("rope.scaling.attn_factor", real(2.0), Refused),
        ("rope.scaling.original_context_length", Gguf::U32(100), NoEffect),
        ("rope.scaling.finetuned", Gguf::Bool(true), NoEffect),
    ];
    // What other keys mean in files of these two.
    let of_gemma3 = vec![
        ("attention.sliding_window", Gguf::U32(16), Used),
        ("attention.sliding_window", Gguf::U32(0), NoEffect),
        ("attention.sliding_window", Gguf::U32(1), Refused),
        ("attention.sliding_window_pattern", Gguf::U32(2), NoEffect),
        ("rope.freq_base_swa", real(100.0), Used),
        ("final_logit_softcapping", real(30.0), Used),
        ("final_logit_softcapping", real(0.0), NoEffect),
        ("rope.scaling.factor", real(8.0), Used),
        ("rope.scaling.attn_factor", real(2.0), Refused),
    ];
    let of_phi3 = vec![
        ("attention.sliding_window", Gguf::U32(16), Used),
        ("attention.sliding_window", Gguf::U32(0), NoEffect),
        ("final_logit_softcapping", real(30.0), Refused),
        ("rope.dimension_count", Gguf::U32(24), Used),
        ("rope.dimension_count", Gguf::U32(23), Refused),
        ("rope.dimension_count", Gguf::U32(34), Refused),
        ("rope.scaling.attn_factor", real(1.2), Used),
        ("rope.scaling.original_context_length", Gguf::U32(100), Used),
        ("rope.scaling.type", text("longrope"), NoEffect),
        ("rope.scaling.type", text("dynamic"), Refused),
        ("rope.scaling.factor", real(2.0), Used),
    ];
    let of_gpt2 = vec![
        ("attention.head_count_kv", Gguf::U32(1), Refused),
        ("attention.key_length", Gguf::U32(64), Refused),
        ("attention.layer_norm_epsilon", real(1e-3), Used),
        ("attention.layer_norm_epsilon", real(0.0), Refused),
    ];
    for (family, own) in [
        ("llama", &of_rope),
        ("qwen2", &of_rope),
        ("qwen3", &of_rope),
        ("smollm3", &of_rope),
        ("olmo2", &of_rope),
        ("gemma3", &of_gemma3),
        ("phi3", &of_phi3),
        ("gpt2", &of_gpt2),
    ] {
        let plain = read_gguf(&gguf(family)).unwrap();
        // A Llama with experts is a Mixtral.
        let is_own =
            |key: &str| own.iter().any(|(own, ..)| *own == key) || (family, key) == ("llama", "expert_count");
        for (key, value, expected) in of_all.iter().filter(|(key, ..)| !is_own(key)).chain(own) {
            let mut keys = gguf(family);
            keys.insert(format!("{family}.{key}"), value.clone());
            let (fate, told) = match read_gguf(&keys) {
                Ok(config) if config == plain => (NoEffect, String::new()),
                Ok(_) => (Used, String::new()),
                Err(error) => (Refused, error.to_string()),
            };
            assert_eq!(fate, *expected, "{family}.{key} = {value}: {told}");
            assert!(fate != Refused || told.contains(&format!("`{family}.{key}")), "{key} = {value}: {told}");
        }
        for (key, value) in [("general.type", "adapter"), ("general.architecture", "mamba")] {
            let mut keys = gguf(family);
            keys.insert(key.into(), text(value));
            let told = read_gguf(&keys).unwrap_err().to_string();
            assert!(told.contains(&format!("`{key}`")) && told.contains(value), "{told}");
        }
    }
}

#[test]
fn experts_of_gguf_make_another_family() {
    let with = |family: &str, more: &[(&str, Gguf)]| {
        let mut keys = gguf(family);
        keys.extend(more.iter().map(|(key, value)| (format!("{family}.{key}"), value.clone())));
        read_gguf(&keys)
    };
    let counts = [("expert_count", Gguf::U32(8)), ("expert_used_count", Gguf::U32(2))];
    let mixtral = with("llama", &counts).unwrap();
    let experts = mixtral.experts.clone().unwrap();
    assert_eq!((mixtral.architecture.as_str(), experts.count, experts.used), ("mixtral", 8, 2));
    assert_eq!((experts.intermediate_size, experts.normalize), (96, true));
    let own = ("expert_feed_forward_length", Gguf::U32(40));
    let qwen3 = with("qwen3moe", &[&counts[..], std::slice::from_ref(&own)].concat()).unwrap();
    assert_eq!(qwen3.experts, Some(ExpertsConfig { intermediate_size: 40, ..experts }));
    for (key, value) in [
        ("expert_count", Gguf::U32(1)),
        ("expert_used_count", Gguf::U32(9)),
        ("expert_gating_func", Gguf::U32(2)),
        ("expert_weights_norm", Gguf::Bool(false)),
        ("expert_weights_scale", Gguf::F32(2.5)),
        ("expert_shared_count", Gguf::U32(1)),
        ("expert_shared_feed_forward_length", Gguf::U32(64)),
        ("leading_dense_block_count", Gguf::U32(1)),
        ("expert_group_count", Gguf::U32(4)),
    ] {
        let told = with("llama", &[&counts[..], &[(key, value)]].concat()).unwrap_err().to_string();
        assert!(told.contains("`llama.expert") || told.contains(&format!("`llama.{key}`")), "{key}: {told}");
    }
    for missing in ["expert_count", "expert_used_count", "expert_feed_forward_length"] {
        let keys: Vec<_> = counts.iter().chain([&own]).filter(|(key, _)| *key != missing).cloned().collect();
        let told = with("qwen3moe", &keys).unwrap_err().to_string();
        assert!(told.contains(&format!("`qwen3moe.{missing}`")), "{told}");
    }
    // Zero is none.
    let none = with("llama", &[("expert_count", Gguf::U32(0))]).unwrap();
    assert_eq!((none.architecture.as_str(), none.experts), ("llama", None));
}

#[test]
fn numbers_in_messages_are_those_of_the_file() {
    let mut keys = gguf("llama");
    keys.insert("llama.block_count".into(), Gguf::U64(u64::MAX));
    let told = read_gguf(&keys).unwrap_err().to_string();
    assert!(told.ends_with("got 18446744073709551615"), "{told}");
    let mut config = llama();
    config["num_hidden_layers"] = json!(u64::MAX);
    let told = Config::from_json(&config).unwrap_err().to_string();
    assert!(told.ends_with("got 18446744073709551615"), "{told}");
    keys.insert("llama.block_count".into(), Gguf::I64(-1));
    assert!(read_gguf(&keys).unwrap_err().to_string().ends_with("got -1"));
    keys = gguf("llama");
    keys.insert("llama.rope.freq_base".into(), Gguf::F32(f32::NAN));
    let told = read_gguf(&keys).unwrap_err().to_string();
    assert!(told.contains("`llama.rope.freq_base`") && told.ends_with("got NaN"), "{told}");
}
