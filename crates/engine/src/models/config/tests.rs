//! Every key of the supported families' configurations that changes what a model computes: used, or refused by name.

use super::*;
use serde_json::json;
use std::collections::BTreeMap;
use weights::{Array, Value as Gguf};

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    })
}

fn qwen3() -> Value {
    let mut config = llama();
    config["model_type"] = json!("qwen3");
    config["head_dim"] = json!(32);
    config
}

fn gpt2() -> Value {
    json!({ "model_type": "gpt2", "vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512 })
}

/// What becomes of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// The configuration is another one.
    Used,
    /// An error names it.
    Refused,
    /// It changes nothing: transformers does not read it, or only for training, speed or other outputs.
    NoEffect,
}
use Fate::{NoEffect, Refused, Used};

/// The keys of all families: those of `PreTrainedConfig`, and of what quantises.
fn common_keys() -> Vec<(&'static str, Value, Fate)> {
    let fp8 = json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
    let tensors = |weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    };
    let float = json!({"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": true});
    vec![
        ("model_type", json!("mamba"), Refused),
        ("model_type", json!(7), Refused),
        ("vocab_size", json!(100), Used),
        ("vocab_size", json!("many"), Refused),
        ("vocab_size", json!(0), Refused),
        ("vocab_size", json!(u64::MAX), Refused),
        ("vocab_size", json!(-1), Refused),
        ("architectures", json!(["LlamaForSequenceClassification"]), Refused),
        ("architectures", json!(["LlamaForCausalLM"]), NoEffect),
        ("is_encoder_decoder", json!(true), Refused),
        ("is_causal", json!(false), Refused),
        ("per_layer_config", json!({"0": {"hidden_size": 32}}), Refused),
        ("per_layer_config", json!({}), NoEffect),
        ("pruned_heads", json!({"0": [1]}), Refused),
        ("quantization_config", fp8.clone(), Used),
        ("compression_config", tensors(float.clone()), Used),
        ("quantization_config", json!({"quant_method": "fbgemm_fp8"}), Used),
        ("quantization_config", tensors(json!({"type": "int", "num_bits": 8})), Refused),
        ("quantization_config", tensors(json!({"type": "float", "num_bits": 4})), Refused),
        (
            "quantization_config",
            tensors(json!({"type": "float", "num_bits": 8, "strategy": "group"})),
            Refused,
        ),
        (
            "quantization_config",
            tensors(json!({"type": "float", "num_bits": 8, "symmetric": false})),
            Refused,
        ),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            Refused,
        ),
        ("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), Refused),
        ("quantization_config", json!({"quant_method": "fp8", "fmt": "e5m2"}), Refused),
        ("quantization_config", json!({"load_in_4bit": true}), Refused),
        ("quantization_config", json!("fp8"), Refused),
        ("quantization_config", Value::Null, NoEffect),
        ("dtype", json!("float16"), NoEffect),
        ("torch_dtype", json!("float16"), NoEffect),
        ("chunk_size_feed_forward", json!(8), NoEffect),
        ("use_cache", json!(false), NoEffect),
        ("initializer_range", json!(0.5), NoEffect),
        ("output_attentions", json!(true), NoEffect),
        ("tie_last_hidden_states", json!(true), NoEffect),
        ("bos_token_id", json!(5), NoEffect),
        ("eos_token_id", json!([5, 6]), NoEffect),
        ("pad_token_id", json!(5), NoEffect),
        ("a_key_that_nobody_knows", json!(5), NoEffect),
    ]
}

/// The keys of `LlamaConfig` and `Qwen3Config`.
fn decoder_keys() -> Vec<(&'static str, Value, Fate)> {
    let llama3 =
        json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
    vec![
        ("hidden_size", json!(128), Used),
        ("intermediate_size", json!(100), Used),
        ("num_hidden_layers", json!(3), Used),
        ("num_attention_heads", json!(1), Used),
        ("num_attention_heads", json!(0), Refused),
        ("num_key_value_heads", json!(2), Used),
        ("num_key_value_heads", json!(3), Refused),
        ("num_key_value_heads", Value::Null, Used),
        ("head_dim", json!(128), Used),
        ("head_dim", json!(33), Refused),
        ("head_dim", json!(48), Refused),
        ("hidden_act", json!("gelu"), Used),
        ("hidden_act", json!("gelu_pytorch_tanh"), Used),
        ("hidden_act", json!("relu"), Used),
        ("hidden_act", json!("swish"), NoEffect),
        ("hidden_act", json!("tanh"), Refused),
        ("hidden_act", json!(["silu"]), Refused),
        ("max_position_embeddings", json!(100), Used),
        ("rms_norm_eps", json!(1e-3), Used),
        ("rms_norm_eps", json!(0), Refused),
        ("tie_word_embeddings", json!(true), Used),
        ("tie_word_embeddings", json!("true"), Refused),
        ("attention_bias", json!(true), Used),
        ("attention_bias", json!(1), Refused),
        ("attention_dropout", json!(0.5), NoEffect),
        ("rope_theta", json!(1e6), Used),
        ("rope_theta", json!(0), Refused),
        ("rope_theta", json!("NaN"), Refused),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0}), Used),
        ("rope_scaling", json!({"type": "linear"}), Refused),
        ("rope_scaling", json!({"rope_type": "default", "factor": 2.0}), NoEffect),
        ("rope_scaling", json!({}), NoEffect),
        ("rope_scaling", json!("linear"), Refused),
        ("rope_scaling", llama3.clone(), Used),
        ("rope_parameters", llama3, Used),
        ("rope_parameters", json!({"rope_theta": 7.0}), Used),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 7.0}}), Refused),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), Refused),
        ("partial_rotary_factor", json!(0.5), Refused),
        ("partial_rotary_factor", json!(1.0), NoEffect),
        ("use_sliding_window", json!("yes"), Refused),
        ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
        ("layer_types", json!(["full_attention", "sliding_attention"]), Refused),
        ("layer_types", json!(["full_attention"]), Refused),
    ]
}

/// Compares what becomes of keys with what is written down.
fn judge_keys(base: &Value, keys: Vec<(&'static str, Value, Fate)>) {
    let plain = Config::from_json(base).unwrap();
    for (key, value, expected) in keys {
        let mut changed = base.clone();
        changed[key] = value.clone();
        let (fate, told) = match Config::from_json(&changed) {
            Ok(config) if config == plain => (NoEffect, String::new()),
            Ok(_) => (Used, String::new()),
            Err(error) => (Refused, error.to_string()),
        };
        let family = &plain.architecture;
        assert_eq!(fate, expected, "{family}: {key} = {value}: {told}");
        assert!(fate != Refused || told.contains(&format!("`{key}")), "{family}: {key} = {value}: {told}");
    }
}

#[test]
fn keys_of_llama_are_used_or_refused() {
    let own = [
        ("mlp_bias", json!(true), Used),
        ("pretraining_tp", json!(4), NoEffect),
        ("use_sliding_window", json!(true), Refused),
    ];
    judge_keys(&llama(), [common_keys(), decoder_keys(), own.to_vec()].concat());
}

#[test]
fn keys_of_qwen3_are_used_or_refused() {
    let own = [
        // Not one of its keys.
        ("mlp_bias", json!(true), NoEffect),
        // From layer 28 on, of which there are two.
        ("use_sliding_window", json!(true), NoEffect),
        ("sliding_window", json!(16), NoEffect),
        ("max_window_layers", json!(1), NoEffect),
    ];
    judge_keys(&qwen3(), [common_keys(), decoder_keys(), own.to_vec()].concat());
    let mut with_window = qwen3();
    with_window["max_window_layers"] = json!(1);
    judge_keys(&with_window, vec![("use_sliding_window", json!(true), Refused)]);
    with_window["use_sliding_window"] = json!(true);
    with_window["sliding_window"] = Value::Null;
    assert_eq!(Config::from_json(&with_window).unwrap(), Config::from_json(&qwen3()).unwrap());
    // What its class has without the keys.
    let mut bare = qwen3();
    bare.as_object_mut().unwrap().remove("head_dim");
    assert_eq!(Config::from_json(&bare).unwrap().head_dim, 128);
    bare["num_attention_heads"] = json!(64);
    bare.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(Config::from_json(&bare).unwrap().num_kv_heads, 32);
}

#[test]
fn keys_of_gpt2_are_used_or_refused() {
    let own = [
        ("n_embd", json!(128), Used),
        ("n_embd", json!(65), Refused),
        ("n_embd", json!(72), Refused),
        ("n_layer", json!(3), Used),
        ("n_head", json!(1), Used),
        ("n_positions", json!(100), Used),
        ("n_inner", json!(100), Used),
        ("n_inner", Value::Null, NoEffect),
        ("activation_function", json!("gelu"), Used),
        ("activation_function", json!("relu"), Used),
        ("activation_function", json!("gelu_fast"), NoEffect),
        ("activation_function", json!("tanh"), Refused),
        ("layer_norm_epsilon", json!(1e-3), Used),
        ("scale_attn_weights", json!(false), Used),
        ("scale_attn_by_inverse_layer_idx", json!(true), Used),
        ("scale_attn_by_inverse_layer_idx", json!("true"), Refused),
        ("reorder_and_upcast_attn", json!(true), NoEffect),
        ("add_cross_attention", json!(true), Refused),
        ("tie_word_embeddings", json!(false), Used),
        ("n_ctx", json!(7), NoEffect),
        ("attn_pdrop", json!(0.5), NoEffect),
        ("embd_pdrop", json!(0.5), NoEffect),
        ("resid_pdrop", json!(0.5), NoEffect),
        ("summary_type", json!("last"), NoEffect),
        ("summary_activation", json!("tanh"), NoEffect),
        ("summary_use_proj", json!(false), NoEffect),
        ("summary_first_dropout", json!(0.5), NoEffect),
        ("summary_proj_to_labels", json!(false), NoEffect),
    ];
    judge_keys(&gpt2(), [common_keys(), own.to_vec()].concat());
}

#[test]
fn other_rotations_and_methods_are_refused_by_name() {
    for kind in ["dynamic", "yarn", "longrope", "proportional", "mrope", "ntk"] {
        let mut config = llama();
        config["rope_scaling"] = json!({"rope_type": kind, "factor": 2.0});
        let told = Config::from_json(&config).unwrap_err().to_string();
        assert!(told.contains("`rope_scaling.rope_type`") && told.contains(kind), "{told}");
        assert!(told.contains("default, linear or llama3"), "{told}");
    }
    for method in [
        "aqlm",
        "auto-round",
        "awq",
        "bitnet",
        "bitsandbytes",
        "eetq",
        "gptq",
        "higgs",
        "hqq",
        "modelopt",
        "mxfp4",
        "quanto",
        "quark",
        "spqr",
        "torchao",
        "vptq",
    ] {
        let mut config = llama();
        config["quantization_config"] = json!({"quant_method": method, "bits": 4});
        let told = Config::from_json(&config).unwrap_err().to_string();
        assert!(told.contains("`quantization_config.quant_method`") && told.contains(method), "{told}");
        assert!(told.contains("fp8") && told.contains("compressed-tensors"), "{told}");
    }
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
    // As in transformers: the value beside it goes before, and the context is what holds without either.
    let original = |config: &Value| match Config::from_json(config).unwrap().rope.unwrap().scaling {
        RopeScaling::Llama3 { original, .. } => original,
        other => panic!("{other:?}"),
    };
    assert_eq!(original(&old), 64.0);
    old["original_max_position_embeddings"] = json!(32);
    assert_eq!(original(&old), 32.0);
    old.as_object_mut().unwrap().remove("original_max_position_embeddings");
    old["rope_scaling"].as_object_mut().unwrap().remove("original_max_position_embeddings");
    assert_eq!(original(&old), 512.0);
}

#[test]
fn family_and_head_size_are_judged_before_anything_else() {
    for (json, told) in [
        (json!({"model_type": "mamba", "head_dim": 7}), "llama, qwen3, gpt2, got \"mamba\""),
        (json!({}), "`model_type`: expected a family that is supported: llama, qwen3, gpt2, got nothing"),
        (json!([1, 2]), "`model_type`"),
        (
            json!({"model_type": "llama", "head_dim": 48}),
            "`head_dim`: expected a head size that is supported: 32, 64, 80",
        ),
        (
            json!({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 2}),
            "`hidden_size / num_attention_heads`: expected a head size that is supported: 32, 64, 80, 96, 128, 160, 192, 256, got 48",
        ),
        (json!({"model_type": "gpt2", "n_embd": 96, "n_head": 4}), "`n_embd / n_head`: expected a head size"),
    ] {
        let error = Config::from_json(&json).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        if let Value::Object(config) = json {
            assert_eq!(Config::judge(&Metadata::Config(config)).unwrap_err().to_string(), error);
        }
    }
    // Nothing else is asked for then.
    let Value::Object(little) = json!({"model_type": "qwen3"}) else { unreachable!() };
    Config::judge(&Metadata::Config(little)).unwrap();
}

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
        ("rope.scaling.type", text("yarn"), Refused),
        ("rope.scaling.attn_factor", real(2.0), Refused),
        ("rope.scaling.original_context_length", Gguf::U32(100), NoEffect),
        ("rope.scaling.finetuned", Gguf::Bool(true), NoEffect),
    ];
    let of_gpt2 = vec![
        ("attention.head_count_kv", Gguf::U32(1), Refused),
        ("attention.key_length", Gguf::U32(64), Refused),
        ("attention.layer_norm_epsilon", real(1e-3), Used),
        ("attention.layer_norm_epsilon", real(0.0), Refused),
    ];
    for (family, own) in [("llama", &of_rope), ("qwen3", &of_rope), ("gpt2", &of_gpt2)] {
        let plain = read_gguf(&gguf(family)).unwrap();
        for (key, value, expected) in of_all.iter().chain(own) {
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
