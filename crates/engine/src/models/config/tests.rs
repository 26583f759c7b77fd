//! Every key of the supported families' configurations that changes what a model computes: used, or refused by name.

mod families;
mod gguf;

use super::*;
use serde_json::json;

fn llama() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    })
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
        ("output_hidden_states", json!(true), NoEffect),
        ("return_dict", json!(false), NoEffect),
        ("problem_type", json!("regression"), NoEffect),
        ("_name_or_path", json!("somewhere"), NoEffect),
        ("tie_last_hidden_states", json!(true), NoEffect),
        ("bos_token_id", json!(5), NoEffect),
        ("eos_token_id", json!([5, 6]), NoEffect),
        ("pad_token_id", json!(5), NoEffect),
        ("a_key_that_nobody_knows", json!(5), NoEffect),
    ]
}

/// Packed weights of 4 bits, in all families but GPT-2.
fn int4_keys() -> Vec<(&'static str, Value, Fate)> {
    let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false});
    let awq =
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"});
    let with = |config: &Value, key: &str, value: Value| {
        let mut config = config.clone();
        config[key] = value;
        config
    };
    vec![
        ("quantization_config", gptq.clone(), Used),
        ("quantization_config", with(&gptq, "group_size", json!(-1)), Used),
        ("quantization_config", with(&gptq, "group_size", json!(0)), Refused),
        ("quantization_config", with(&gptq, "bits", json!(3)), Refused),
        ("quantization_config", with(&gptq, "desc_act", json!(true)), Used),
        ("quantization_config", with(&gptq, "checkpoint_format", json!("gptq_v2")), Used),
        ("quantization_config", with(&gptq, "checkpoint_format", json!("marlin")), Refused),
        ("quantization_config", with(&gptq, "is_marlin_format", json!(true)), Refused),
        ("quantization_config", with(&gptq, "dynamic", json!({"-:.*mlp.*": {}})), Refused),
        ("quantization_config", awq.clone(), Used),
        ("quantization_config", with(&awq, "bits", json!(8)), Refused),
        ("quantization_config", with(&awq, "version", json!("gemv")), Refused),
        ("quantization_config", with(&awq, "zero_point", json!(false)), Refused),
    ]
}

/// The keys that the classes of Llama and its relatives have, but for Gemma 3 and Phi-3.
fn decoder_keys() -> Vec<(&'static str, Value, Fate)> {
    [int4_keys(), own_decoder_keys()].concat()
}

fn own_decoder_keys() -> Vec<(&'static str, Value, Fate)> {
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
        ("tie_word_embeddings", json!("true"), Refused),
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
        ("rope_scaling", json!({"type": "yarn", "factor": 2.0}), Used),
        ("rope_scaling", json!({"type": "yarn", "factor": 0.0}), Refused),
        ("rope_scaling", json!({"type": "yarn", "beta_fast": "many"}), Refused),
        (
            "rope_scaling",
            json!({"type": "longrope", "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16]}),
            Used,
        ),
        (
            "rope_scaling",
            json!({"type": "longrope", "short_factor": vec![1.0; 15], "long_factor": vec![2.0; 16]}),
            Refused,
        ),
        ("rope_scaling", json!({"type": "longrope", "short_factor": vec![1.0; 16]}), Refused),
        ("rope_parameters", json!({"rope_theta": 7.0}), Used),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 7.0}}), Refused),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), Refused),
        ("partial_rotary_factor", json!(0.5), Refused),
        ("partial_rotary_factor", json!(1.0), NoEffect),
        ("layer_types", json!(["full_attention"]), Refused),
        ("layer_types", json!(["full_attention", "linear_attention"]), Refused),
    ]
}

/// What the classes of Llama, Qwen3 and OLMo 2 have beside.
fn own_biases_and_tables() -> Vec<(&'static str, Value, Fate)> {
    vec![
        ("tie_word_embeddings", json!(true), Used),
        ("attention_bias", json!(true), Used),
        ("attention_bias", json!(1), Refused),
    ]
}

/// Layers with windows, where a class has none.
fn no_windows() -> Vec<(&'static str, Value, Fate)> {
    vec![
        ("use_sliding_window", json!(true), Refused),
        ("use_sliding_window", json!("yes"), Refused),
        ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
        ("layer_types", json!(["full_attention", "sliding_attention"]), Refused),
    ]
}

/// The keys that transformers' class of a family has, and what holds without each. `scripts/config_keys.py` writes them down.
fn class_keys(family: &str) -> serde_json::Map<String, Value> {
    let all: Value = serde_json::from_str(include_str!("../../../tests/fixtures/config_keys.json")).unwrap();
    all[family]
        .as_object()
        .unwrap_or_else(|| panic!("{family}: scripts/config_keys.py lacks its class"))
        .clone()
}

/// As [`judge_keys`], where every key of the family's class must be among them.
fn judge_class(base: &Value, keys: Vec<(&'static str, Value, Fate)>) {
    let family = base["model_type"].as_str().unwrap();
    let is_judged = |key: &String| keys.iter().any(|(judged, ..)| judged == key);
    let missing: Vec<String> =
        class_keys(family).into_iter().map(|(key, _)| key).filter(|key| !is_judged(key)).collect();
    assert!(missing.is_empty(), "{family}: nobody says what becomes of {missing:?}");
    judge_keys(base, keys);
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
    let own = [("mlp_bias", json!(true), Used), ("pretraining_tp", json!(4), NoEffect)];
    let all = [common_keys(), decoder_keys(), own_biases_and_tables(), no_windows(), own.to_vec()];
    judge_class(&llama(), all.concat());
}

#[test]
fn keys_of_gpt2_are_used_or_refused() {
    let own = [
        ("quantization_config", json!({"quant_method": "awq", "bits": 4}), Refused),
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
        // Second names, which must say the same.
        ("hidden_size", json!(64), NoEffect),
        ("hidden_size", json!(128), Refused),
        ("num_attention_heads", json!(1), Refused),
        ("num_hidden_layers", json!(3), Refused),
        ("max_position_embeddings", json!(1024), Refused),
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
    judge_class(&gpt2(), [common_keys(), own.to_vec()].concat());
}

/// A file without a key means what transformers' class has for it, or is refused by that key.
#[test]
fn without_a_key_holds_what_the_class_has() {
    for (family, ..) in crate::models::FAMILIES {
        let mut base = if *family == "gpt2" { gpt2() } else { llama() };
        if *family != "gpt2" {
            base["model_type"] = json!(family);
            // As many heads as classes have of keys and values, and heads of the same size with the key as without.
            base["num_attention_heads"] = json!(64);
            base["hidden_size"] = json!(64 * 32);
            base["head_dim"] = json!(32);
        }
        for (key, default) in class_keys(family) {
            let (mut without, mut with) = (base.clone(), base.clone());
            without.as_object_mut().unwrap().remove(&key);
            with[&key] = default.clone();
            match Config::from_json(&without) {
                Ok(without) => {
                    let with = Config::from_json(&with);
                    assert_eq!(with.ok(), Some(without), "{family}: without {key}, {default} holds");
                }
                Err(error) => {
                    assert!(error.to_string().contains(&format!("`{key}`")), "{family}: {key}: {error}");
                }
            }
        }
    }
}

#[test]
fn other_rotations_and_methods_are_refused_by_name() {
    for kind in ["dynamic", "proportional", "mrope", "ntk"] {
        let mut config = llama();
        config["rope_scaling"] = json!({"rope_type": kind, "factor": 2.0});
        let told = Config::from_json(&config).unwrap_err().to_string();
        assert!(told.contains("`rope_scaling.rope_type`") && told.contains(kind), "{told}");
        assert!(told.contains("default, linear, llama3, yarn or longrope"), "{told}");
    }
    for method in [
        "aqlm",
        "auto-round",
        "bitnet",
        "bitsandbytes",
        "eetq",
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
        (
            json!({"model_type": "mamba", "head_dim": 7}),
            "llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma3_text, phi3, smollm3, olmo2, gpt2, got \"mamba\"",
        ),
        (
            json!({}),
            "`model_type`: expected a family that is supported: llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma3_text, phi3, smollm3, olmo2, gpt2, got nothing",
        ),
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
