//! Configurations that differ from a family's usual one, against transformers; and files that hold another model than theirs.

use super::*;
use serde_json::Value;

/// One token in this many has logits, as in `scripts/model_fixtures.py`.
const STEP: usize = 9;

/// The configuration of a fixture, with some keys changed.
fn config(family: &str, keys: &Value) -> Config {
    let text = std::fs::read_to_string(fixture(family).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    Config::from_json(&config).unwrap()
}

#[test]
fn logits_of_other_configurations_are_those_of_transformers() {
    for family in FAMILIES {
        let (ids, usual) = expected(family);
        let checkpoint = Checkpoint::open(fixture(family)).unwrap();
        let stored = Checkpoint::open(fixture(family).join("variants.safetensors")).unwrap();
        let variants = std::fs::read_to_string(fixture(family).join("variants.json")).unwrap();
        let Value::Object(variants) = serde_json::from_str(&variants).unwrap() else { panic!("an object") };
        for (variant, keys) in &variants {
            let config = config(family, keys);
            let (mut more, mut expected) = (HashMap::new(), Vec::<f32>::new());
            for tensor in stored.tensors() {
                match tensor.name().split_once('.') {
                    Some((of, "logits")) if of == variant => {
                        expected = tensor.to_tensor(DType::F32).unwrap().to_vec().unwrap();
                    }
                    Some((of, name)) if of == variant => {
                        more.insert(name.to_owned(), tensor.to_tensor(DType::F32).unwrap());
                    }
                    _ => {}
                }
            }
            let (weights, vocab) = (With(&checkpoint, more), config.vocab_size);
            // LongRoPE has other divisors where the context is no longer than the one the model was first trained with.
            let max_positions = (variant == "short").then_some(64);
            let options = LoadOptions { max_positions, ..LoadOptions::default() };
            let mut model = load(&config, &weights, options).unwrap();
            let all = logits(&mut *model, &ids, &[7], DType::F32);
            let rows =
                |logits: &[f32]| logits.chunks(vocab).step_by(STEP).flatten().copied().collect::<Vec<f32>>();
            let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
            let difference = largest_difference(&rows(&all), &expected) / scale;
            assert!(
                difference < F32_LIMIT,
                "{family} {variant}: {difference:e} of the largest logit, {scale}"
            );
            let usual = largest_difference(&rows(&usual), &expected) / scale;
            assert!(usual > 1e-4, "{family} {variant}: {usual:e}: the keys change nothing");
        }
    }
}

#[test]
fn biases_and_heads_are_there_exactly_where_the_configuration_says_so() {
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let llama = |keys: Value| config("llama", &keys);
    let vector = |len: usize| Tensor::zeros(&[len], DType::F32, Device::Cpu).unwrap();
    let refusal = |config: &Config, more: &[(&str, usize)]| {
        let more = more.iter().map(|(name, len)| ((*name).to_owned(), vector(*len))).collect();
        load(config, &With(&checkpoint, more), LoadOptions::default()).err().map(|error| error.to_string())
    };
    assert_eq!(refusal(&llama(serde_json::json!({})), &[]), None);
    for (keys, missing) in [
        (serde_json::json!({"attention_bias": true}), "model.layers.0.self_attn.q_proj.bias"),
        (serde_json::json!({"mlp_bias": true}), "model.layers.0.mlp.gate_proj.bias"),
    ] {
        let told = refusal(&llama(keys), &[]).expect(missing);
        assert!(told.contains(missing) && told.contains("no such tensor"), "{told}");
    }
    for (name, len) in [
        ("model.layers.1.self_attn.q_proj.bias", 64),
        ("model.layers.0.mlp.down_proj.bias", 64),
        // A norm with a bias would be another norm.
        ("model.layers.0.input_layernorm.bias", 64),
        ("model.norm.bias", 64),
        ("lm_head.bias", 96),
        ("model.layers.0.self_attn.q_norm.weight", 32),
        ("model.layers.2.input_layernorm.weight", 64),
        ("score.weight", 64),
    ] {
        let told = refusal(&llama(serde_json::json!({})), &[(name, len)]).expect(name);
        assert!(told.contains(&format!("tensor `{name}`")) && told.contains("no use for"), "{told}");
    }
    // What follows from the configuration may be there too.
    assert_eq!(
        refusal(&llama(serde_json::json!({})), &[("model.layers.0.self_attn.rotary_emb.inv_freq", 16)]),
        None
    );
    let tied = Checkpoint::open(fixture("qwen3")).unwrap();
    let told = load(
        &config("qwen3", &serde_json::json!({"tie_word_embeddings": false})),
        &tied,
        LoadOptions::default(),
    );
    let told = told.err().expect("no head of its own").to_string();
    assert!(told.contains("lm_head.weight") && told.contains("no such tensor"), "{told}");
}

#[test]
fn a_context_beyond_the_models_is_refused() {
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let with = |max_positions| {
        let options = LoadOptions { max_positions: Some(max_positions), ..LoadOptions::default() };
        load(&config, &checkpoint, options).map(|model| model.config().max_positions)
    };
    assert_eq!(with(config.max_positions).unwrap(), config.max_positions);
    assert_eq!(with(1).unwrap(), 1);
    for wrong in [0, config.max_positions + 1, usize::MAX] {
        let told = with(wrong).unwrap_err().to_string();
        assert!(told.contains("`max_positions`") && told.contains("1 to 128 tokens"), "{told}");
        assert!(told.ends_with(&format!("got {wrong}")), "{told}");
    }
    for dtype in [DType::I32, DType::F8E4M3] {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let told = load(&config, &checkpoint, options).err().expect("an error").to_string();
        assert!(told.contains("`dtype`") && told.contains("f32, f16 or bf16"), "{told}");
    }
}
