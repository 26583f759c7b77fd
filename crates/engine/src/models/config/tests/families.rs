//! The keys of Llama's relatives.

use super::*;

/// A configuration of a family whose class is like that of Llama.
fn relative(family: &str) -> Value {
    let mut config = llama();
    config["model_type"] = json!(family);
    config["head_dim"] = json!(32);
    config
}

#[test]
fn keys_of_olmo2_are_used_or_refused() {
    let own = [("mlp_bias", json!(true), NoEffect), ("sliding_window", json!(16), NoEffect)];
    let all = [common_keys(), decoder_keys(), own_biases_and_tables(), no_windows(), own.to_vec()];
    judge_class(&relative("olmo2"), all.concat());
    let mut bare = relative("olmo2");
    bare.as_object_mut().unwrap().remove("rms_norm_eps");
    assert_eq!(Config::from_json(&bare).unwrap().norm_eps, 1e-5);
}

#[test]
fn keys_of_qwen2_and_qwen3_are_used_or_refused() {
    for family in ["qwen2", "qwen3"] {
        let own = [
            // Not one of their keys.
            ("mlp_bias", json!(true), NoEffect),
            ("tie_word_embeddings", json!(true), Used),
            // Qwen2 always has biases, and no key for them.
            ("attention_bias", json!(true), if family == "qwen3" { Used } else { NoEffect }),
            // From layer 28 on, of which there are two.
            ("use_sliding_window", json!(true), NoEffect),
            ("use_sliding_window", json!("yes"), Refused),
            ("sliding_window", json!(16), NoEffect),
            ("sliding_window", json!("wide"), Refused),
            ("sliding_window", json!(1), Refused),
            ("max_window_layers", json!(1), NoEffect),
            ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
        ];
        judge_class(&relative(family), [common_keys(), decoder_keys(), own.to_vec()].concat());
        // A list of layers with windows asks for windows that are used.
        let mut listed = relative(family);
        listed["layer_types"] = json!(["full_attention", "sliding_attention"]);
        let told = Config::from_json(&listed).unwrap_err().to_string();
        assert!(told.contains("`sliding_window`"), "{told}");
        listed["use_sliding_window"] = json!(true);
        let windows = |config: &Value| {
            let layers = Config::from_json(config).unwrap().layers;
            layers.iter().map(|layer| layer.window).collect::<Vec<_>>()
        };
        assert_eq!(windows(&listed), [None, Some(4096)]);
        let mut with_window = relative(family);
        with_window["max_window_layers"] = json!(1);
        let own = vec![("use_sliding_window", json!(true), Used), ("sliding_window", json!(16), NoEffect)];
        judge_keys(&with_window, own);
        with_window["use_sliding_window"] = json!(true);
        with_window["sliding_window"] = json!(16);
        assert_eq!(windows(&with_window), [None, Some(16)]);
        let own = vec![("max_window_layers", json!(0), Used), ("max_window_layers", json!(2), Used)];
        judge_keys(&with_window, own);
        with_window["sliding_window"] = Value::Null;
        assert_eq!(Config::from_json(&with_window).unwrap(), Config::from_json(&relative(family)).unwrap());
        // What the class has without the keys.
        let mut bare = relative(family);
        bare.as_object_mut().unwrap().remove("head_dim");
        assert_eq!(Config::from_json(&bare).unwrap().head_dim, if family == "qwen3" { 128 } else { 32 });
        bare["head_dim"] = json!(32);
        bare["num_attention_heads"] = json!(64);
        bare.as_object_mut().unwrap().remove("num_key_value_heads");
        assert_eq!(Config::from_json(&bare).unwrap().num_kv_heads, 32);
    }
}

#[test]
fn keys_of_mistral_are_used_or_refused() {
    let own = [
        ("mlp_bias", json!(true), NoEffect),
        ("attention_bias", json!(true), NoEffect),
        ("tie_word_embeddings", json!(true), Used),
        // Without the key the class has a window of 4096.
        ("sliding_window", json!(4096), NoEffect),
        ("sliding_window", json!(16), Used),
        ("sliding_window", Value::Null, Used),
        ("sliding_window", json!(1), Refused),
        ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
        ("layer_types", json!(["full_attention", "sliding_attention"]), Refused),
    ];
    judge_class(&relative("mistral"), [common_keys(), decoder_keys(), own.to_vec()].concat());
    let mut bare = relative("mistral");
    bare.as_object_mut().unwrap().remove("num_key_value_heads");
    bare["num_attention_heads"] = json!(16);
    assert_eq!(Config::from_json(&bare).unwrap().num_kv_heads, 8);
}

#[test]
fn keys_of_mixtures_of_experts_are_used_or_refused() {
    let common = [
        ("mlp_bias", json!(true), NoEffect),
        ("tie_word_embeddings", json!(true), Used),
        ("num_local_experts", json!(12), Used),
        ("num_local_experts", json!(0), Refused),
        ("num_experts", json!(12), Used),
        ("num_experts_per_tok", json!(1), Used),
        ("num_experts_per_tok", json!(200), Refused),
        ("num_experts_per_tok", json!("all"), Refused),
        // For training.
        ("router_aux_loss_coef", json!(0.5), NoEffect),
        ("output_router_logits", json!(true), NoEffect),
        ("router_jitter_noise", json!(0.5), NoEffect),
        ("max_window_layers", json!(1), NoEffect),
        ("sliding_window", json!(1), Refused),
        ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
        ("layer_types", json!(["full_attention", "sliding_attention"]), Refused),
    ];
    let of_qwen3 = [
        ("attention_bias", json!(true), Used),
        ("moe_intermediate_size", json!(768), NoEffect),
        ("moe_intermediate_size", json!(100), Used),
        ("norm_topk_prob", json!(false), NoEffect),
        ("norm_topk_prob", json!(true), Used),
        ("norm_topk_prob", json!(1), Refused),
        ("decoder_sparse_step", json!(1), NoEffect),
        ("decoder_sparse_step", json!(2), Used),
        ("decoder_sparse_step", json!(0), Refused),
        ("mlp_only_layers", json!([]), NoEffect),
        ("mlp_only_layers", json!([1]), Used),
        ("mlp_only_layers", json!([7]), NoEffect),
        ("mlp_only_layers", json!(1), Refused),
        ("mlp_only_layers", json!([-1]), Refused),
        ("use_sliding_window", json!(true), Used),
        ("sliding_window", json!(16), NoEffect),
    ];
    let of_mixtral = [
        ("attention_bias", json!(true), NoEffect),
        ("moe_intermediate_size", json!(100), NoEffect),
        ("norm_topk_prob", json!(false), NoEffect),
        ("mlp_only_layers", json!([1]), NoEffect),
        ("use_sliding_window", json!(true), NoEffect),
        ("sliding_window", json!(16), Used),
        ("sliding_window", Value::Null, NoEffect),
    ];
    for (family, own) in [("qwen3_moe", &of_qwen3[..]), ("mixtral", &of_mixtral)] {
        let all = [common_keys(), decoder_keys(), common.to_vec(), own.to_vec()];
        judge_class(&relative(family), all.concat());
    }
    let mut twice = relative("mixtral");
    twice["num_local_experts"] = json!(8);
    judge_keys(&twice, vec![("num_experts", json!(8), NoEffect), ("num_experts", json!(4), Refused)]);
    let experts = |config: &Value| Config::from_json(config).unwrap().experts.unwrap();
    let expected = |count, used, intermediate_size, normalize| ExpertsConfig {
        count,
        used,
        intermediate_size,
        normalize,
        dense_layers: Vec::new(),
    };
    // What the classes have without the keys.
    assert_eq!(experts(&relative("qwen3_moe")), expected(128, 8, 768, false));
    assert_eq!(experts(&relative("mixtral")), expected(8, 2, 96, true));
    let mut mixed = relative("qwen3_moe");
    mixed["num_hidden_layers"] = json!(6);
    mixed["decoder_sparse_step"] = json!(2);
    mixed["mlp_only_layers"] = json!([3, 9]);
    assert_eq!(experts(&mixed).dense_layers, [0, 2, 3, 4]);
    let mut bare = relative("mixtral");
    for key in ["rope_theta", "rms_norm_eps"] {
        bare.as_object_mut().unwrap().remove(key);
    }
    let bare = Config::from_json(&bare).unwrap();
    assert_eq!((bare.rope.unwrap().theta, bare.norm_eps), (1e6, 1e-5));
}

#[test]
fn keys_of_smollm3_are_used_or_refused() {
    let own = [
        ("mlp_bias", json!(true), Used),
        ("attention_bias", json!(true), Used),
        // So it is without the key.
        ("tie_word_embeddings", json!(true), NoEffect),
        ("tie_word_embeddings", json!(false), Used),
        ("no_rope_layers", json!([1, 1]), NoEffect),
        ("no_rope_layers", json!([1, 0]), Used),
        ("no_rope_layers", json!([1]), Refused),
        ("no_rope_layers", json!([1, 2]), Refused),
        ("no_rope_layer_interval", json!(2), Used),
        ("no_rope_layer_interval", json!(0), Refused),
        // Layers without rope have windows, and there is none of two.
        ("use_sliding_window", json!(true), NoEffect),
        ("sliding_window", json!(16), NoEffect),
        ("layer_types", json!(["full_attention", "full_attention"]), NoEffect),
    ];
    judge_class(&relative("smollm3"), [common_keys(), decoder_keys(), own.to_vec()].concat());
    let mut config = relative("smollm3");
    config.as_object_mut().unwrap().remove("rope_theta");
    config["no_rope_layer_interval"] = json!(2);
    config["use_sliding_window"] = json!(true);
    config["sliding_window"] = json!(16);
    let read = Config::from_json(&config).unwrap();
    assert_eq!(read.rope.unwrap().theta, 2e6);
    let layers: Vec<_> = read.layers.iter().map(|layer| (layer.window, layer.rotation)).collect();
    assert_eq!(layers, [(None, Rotation::Main), (Some(16), Rotation::None)]);
}

#[test]
fn keys_of_phi3_are_used_or_refused() {
    let longrope =
        |kind: &str| json!({"type": kind, "short_factor": vec![1.0; 16], "long_factor": vec![2.0; 16]});
    let no_scaling = ["rope_scaling", "rope_parameters", "partial_rotary_factor"];
    let decoder = decoder_keys().into_iter().filter(|(key, ..)| !no_scaling.contains(key)).collect();
    let own = vec![
        ("mlp_bias", json!(true), NoEffect),
        ("attention_bias", json!(true), NoEffect),
        ("tie_word_embeddings", json!(true), Used),
        ("resid_pdrop", json!(0.5), NoEffect),
        ("embd_pdrop", json!(0.5), NoEffect),
        ("sliding_window", json!(16), Used),
        ("sliding_window", Value::Null, NoEffect),
        ("layer_types", json!(["full_attention", "sliding_attention"]), Refused),
        ("partial_rotary_factor", json!(0.5), Used),
        ("partial_rotary_factor", json!(1.0), NoEffect),
        ("partial_rotary_factor", json!(1.5), Refused),
        ("partial_rotary_factor", json!(0.1), Refused),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), Used),
        ("rope_scaling", longrope("longrope"), Used),
        ("rope_scaling", longrope("su"), Used),
        ("rope_scaling", longrope("yarn"), Used),
        ("rope_scaling", longrope("linear"), Refused),
        ("rope_scaling", json!({"type": "longrope"}), Refused),
        ("rope_scaling", json!({"type": "llama3", "factor": 8.0}), Refused),
        // Read beside LongRoPE alone.
        ("original_max_position_embeddings", json!(64), NoEffect),
    ];
    judge_class(&relative("phi3"), [common_keys(), decoder, own].concat());
    let mut config = relative("phi3");
    config["rope_scaling"] = longrope("longrope");
    judge_keys(&config, vec![("original_max_position_embeddings", json!(64), Used)]);
}

#[test]
fn keys_of_gemma3_are_used_or_refused() {
    let mut gemma = relative("gemma3_text");
    gemma["num_hidden_layers"] = json!(7);
    gemma.as_object_mut().unwrap().remove("num_key_value_heads");
    gemma["num_attention_heads"] = json!(4);
    // Those that mean something else there.
    let others = [
        "hidden_act",
        "layer_types",
        "num_attention_heads",
        "num_key_value_heads",
        "rope_parameters",
        "rope_scaling",
    ];
    let decoder = decoder_keys().into_iter().filter(|(key, ..)| !others.contains(key)).collect();
    let types = |last: &'static str| [vec!["sliding_attention"; 6], vec![last]].concat();
    let own = vec![
        ("num_attention_heads", json!(8), Used),
        ("num_key_value_heads", json!(4), NoEffect),
        ("num_key_value_heads", json!(2), Used),
        ("hidden_activation", json!("silu"), Used),
        ("hidden_activation", json!("gelu_pytorch_tanh"), NoEffect),
        ("hidden_activation", json!("tanh"), Refused),
        ("hidden_act", json!("silu"), NoEffect),
        ("attention_bias", json!(true), Used),
        ("mlp_bias", json!(true), NoEffect),
        ("tie_word_embeddings", json!(true), NoEffect),
        ("tie_word_embeddings", json!(false), Used),
        ("query_pre_attn_scalar", json!(256), NoEffect),
        ("query_pre_attn_scalar", json!(168), Used),
        ("query_pre_attn_scalar", json!(0), Refused),
        ("final_logit_softcapping", json!(30.0), Used),
        ("final_logit_softcapping", Value::Null, NoEffect),
        ("final_logit_softcapping", json!(-1), Refused),
        // Its class does not read it.
        ("attn_logit_softcapping", json!(50.0), NoEffect),
        ("use_bidirectional_attention", json!(true), Refused),
        ("use_bidirectional_attention", json!(false), NoEffect),
        ("sliding_window", json!(512), Used),
        ("sliding_window", json!(4096), NoEffect),
        ("sliding_window", Value::Null, Refused),
        ("sliding_window_pattern", json!(6), NoEffect),
        ("sliding_window_pattern", json!(2), Used),
        ("sliding_window_pattern", json!(0), Refused),
        // Written, and not read.
        ("_sliding_window_pattern", json!(2), NoEffect),
        ("layer_types", json!(types("full_attention")), Used),
        ("layer_types", json!(types("chunked_attention")), Refused),
        ("layer_types", json!(["full_attention"]), Refused),
        ("rope_local_base_freq", json!(10000.0), NoEffect),
        ("rope_local_base_freq", json!(500.0), Used),
        ("rope_scaling", json!({"rope_type": "linear", "factor": 8.0}), Used),
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 8.0}), Refused),
        ("rope_parameters", json!({"full_attention": {"rope_type": "linear", "factor": 8.0}}), Used),
        ("rope_parameters", json!({"sliding_attention": {"rope_theta": 7.0}}), Used),
        ("rope_parameters", json!({"sliding_attention": null}), NoEffect),
        ("rope_parameters", json!({"rope_theta": 7.0}), Refused),
        ("rope_parameters", json!({"full_attention": 7}), Refused),
    ];
    judge_class(&gemma, [common_keys(), decoder, own].concat());
    let config = Config::from_json(&gemma).unwrap();
    let windows: Vec<bool> = config.layers.iter().map(|layer| layer.window.is_some()).collect();
    assert_eq!(windows, [true, true, true, true, true, false, true]);
    assert_eq!((config.embedding_scale, config.local_rope.unwrap().theta), (Some(8.0), 10_000.0));
    gemma.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(Config::from_json(&gemma).unwrap().rope.unwrap().theta, 1e6);
    gemma["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
    gemma["rope_parameters"] = json!({"full_attention": {}});
    let told = Config::from_json(&gemma).unwrap_err().to_string();
    assert!(told.contains("`rope_scaling`") && told.contains("rope_parameters"), "{told}");
    gemma["model_type"] = json!("gemma3");
    let told = Config::from_json(&gemma).unwrap_err().to_string();
    assert!(told.contains("`model_type`") && told.contains("gemma3_text"), "{told}");
}
