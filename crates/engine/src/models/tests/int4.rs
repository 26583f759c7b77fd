//! Weights of 4 bits, packed as GPTQ and AWQ pack them, against transformers with the numbers that they stand for.
//! `scripts/int4_fixtures.py` makes the files.

use super::super::int4::Unpacked;
use super::*;
use serde_json::Value;

const FORMS: [&str; 5] = ["gptq", "gptq_symmetric", "gptq_scattered", "gptq_one_group", "awq"];

/// The tensors of a file, but for those that a model does not have, in memory.
struct Fixture {
    config: Config,
    weights: HashMap<String, Tensor>,
    ids: Vec<i32>,
    logits: Vec<f32>,
}

fn int4(name: &str) -> Fixture {
    let path = |end: &str| fixture("../int4").join(format!("{name}.{end}"));
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path("json")).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(path("safetensors")).unwrap();
    let stored = |tensor: crate::weights::StoredTensor<'_>| {
        let dtype = WeightSource::stored_dtype(&checkpoint, tensor.name()).unwrap();
        (tensor.name().to_owned(), tensor.to_tensor(dtype).unwrap())
    };
    let mut weights: HashMap<String, Tensor> = checkpoint.tensors().map(stored).collect();
    let ids = weights.remove("expected.ids").unwrap().to_vec().unwrap();
    let logits = weights.remove("expected.logits").unwrap().to_vec().unwrap();
    Fixture { config: Config::from_json(&json).unwrap(), weights, ids, logits }
}

#[test]
fn packed_weights_give_the_logits_of_the_numbers_they_stand_for() {
    for name in FORMS {
        let Fixture { config, weights, ids, logits: expected } = int4(name);
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let of = |quantized| {
            let options = LoadOptions { quantized, ..LoadOptions::default() };
            logits(&mut *load(&config, &weights, options).unwrap(), &ids, &[ids.len()], DType::F32)
        };
        let expanded = of(false);
        let difference = largest_difference(&expanded, &expected) / scale;
        assert!(difference < F32_LIMIT, "{name}: {difference:e} of the largest logit, {scale}");
        // Activations are rounded to eight bits beside blocks.
        let difference = largest_difference(&of(true), &expected) / scale;
        let has_blocks = name != "gptq_scattered";
        assert!(difference < 0.05 && (difference > 1e-5) == has_blocks, "{name}: {difference:e} in blocks");
        let vocab = config.vocab_size;
        assert_eq!(most_likely(&expanded, vocab), most_likely(&expected, vocab), "{name}");
        // From the file itself: nothing is left over but what this test put there.
        let file = Checkpoint::open(fixture("../int4").join(format!("{name}.safetensors"))).unwrap();
        let told = load(&config, &file, LoadOptions::default()).err().expect("an error").to_string();
        assert!(told.contains("`expected.ids`") && told.contains("nor for 1 others"), "{name}: {told}");
    }
}

/// Blocks hold the same numbers, bit for bit, and are there wherever a matrix has whole ones.
#[test]
fn packed_weights_lose_nothing_in_blocks() {
    for name in FORMS {
        let Fixture { config, weights, .. } = int4(name);
        let source = Unpacked::new(&weights, config.int4.unwrap());
        let matrix = |part: &str| format!("model.layers.0.{part}.weight");
        for part in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"] {
            let name_of = matrix(part);
            let Some((blocks, format)) = source.blocks(&name_of).unwrap() else {
                assert_eq!(name, "gptq_scattered", "{part}");
                continue;
            };
            let is_symmetric = ["gptq_symmetric", "gptq_one_group"].contains(&name);
            let expected = if is_symmetric { QuantFormat::Q4_0 } else { QuantFormat::Q8_0 };
            assert_eq!(format, expected, "{name} {part}");
            let expanded: Vec<f32> = source.tensor(&name_of, DType::F32).unwrap().to_vec().unwrap();
            let mut numbers = vec![0.0; expanded.len()];
            let (bytes, row) = (blocks.to_vec::<u8>().unwrap(), blocks.shape()[1]);
            for (bytes, numbers) in bytes.chunks(row).zip(numbers.chunks_mut(64)) {
                format.dequantize(bytes, numbers).unwrap();
            }
            assert_eq!(numbers, expanded, "{name} {part}");
        }
        assert!(source.blocks(&matrix("mlp.down_proj")).unwrap().is_none(), "{name}: 80 inputs");
    }
}

#[test]
fn packed_weights_that_do_not_fit_together_are_refused_by_name() {
    let q_proj = |part: &str| format!("model.layers.0.self_attn.q_proj.{part}");
    let refusal = |change: &dyn Fn(&mut Fixture)| {
        let mut fixture = int4("gptq");
        change(&mut fixture);
        let loaded = load(&fixture.config, &fixture.weights, LoadOptions::default());
        loaded.err().expect("an error").to_string()
    };
    let words = |shape: &[usize]| Tensor::zeros(shape, DType::I32, Device::Cpu).unwrap();
    for (part, told) in [("qzeros", "no such tensor"), ("scales", "no such tensor")] {
        let error = refusal(&|fixture| drop(fixture.weights.remove(&q_proj(part))));
        assert!(error.contains(&q_proj(part)) && error.contains(told), "{error}");
    }
    for (part, tensor, told) in [
        ("qweight", words(&[8, 72]), "[64, 64]"),
        ("qweight", words(&[8, 7]), "[64, 64]"),
        ("qweight", words(&[8]), "[64, 64]"),
        ("qzeros", words(&[2, 7]), "shape [2, 8]"),
        ("scales", Tensor::zeros(&[3, 64], DType::F16, Device::Cpu).unwrap(), "shape [2, 64]"),
        ("g_idx", words(&[63]), "shape [64]"),
        ("g_idx", Tensor::from_slice(&[2i32; 64], &[64], Device::Cpu).unwrap(), "below 2"),
        ("g_idx", Tensor::from_slice(&[-1i32; 64], &[64], Device::Cpu).unwrap(), "below 2"),
        ("qzeros", Tensor::zeros(&[2, 8], DType::F32, Device::Cpu).unwrap(), "i32"),
    ] {
        let error = refusal(&|fixture| drop(fixture.weights.insert(q_proj(part), tensor.clone())));
        assert!(error.contains("self_attn.q_proj") && error.contains(told), "{part}: {error}");
    }
    let error =
        refusal(&|fixture| drop(fixture.weights.insert("model.extra.qweight".into(), words(&[8, 64]))));
    assert!(error.contains("model.extra.weight") && error.contains("no use for"), "{error}");
}
