//! Models that transformers saved, against the logits that it computes. `scripts/model_fixtures.py` makes both.

mod adapters;
mod fp8;
mod int4;
mod table;
mod variants;

use super::names::Naming;
use super::source::WeightSource;
use super::{Config, LoadOptions, Model, load};
use crate::batch::{Batch, Chunk};
use crate::error::Result;
use crate::kv::KvCache;
use crate::weights::Checkpoint;
use std::collections::HashMap;
use std::path::PathBuf;
use warpsmith::ops::QuantFormat;
use warpsmith::{DType, Device, Stream, Tensor};

const PAGE_SIZE: usize = 8;
/// How far logits in f32 may be from those of transformers, in parts of the largest. Both round: on the tiers of the CPU
/// differences of up to 2.7e-6 were seen, and a key that is ignored makes one of at least 1e-4.
const F32_LIMIT: f32 = 4e-6;
/// The folders of the fixtures, one for each family.
const FAMILIES: [&str; 11] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma3_text",
    "phi3",
    "smollm3",
    "olmo2",
    "gpt2",
];
/// Those that are there as GGUF too.
const IN_GGUF: [&str; 9] =
    ["llama", "qwen2", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "phi3", "smollm3", "olmo2"];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

fn expected(family: &str) -> (Vec<i32>, Vec<f32>) {
    let expected = Checkpoint::open(fixture(family).join("expected.safetensors")).unwrap();
    let ids = expected.tensor("ids").unwrap().to_tensor(DType::I32).unwrap();
    let logits = expected.tensor("logits").unwrap().to_tensor(DType::F32).unwrap();
    (ids.to_vec().unwrap(), logits.to_vec().unwrap())
}

fn model(path: PathBuf, dtype: DType) -> Box<dyn Model> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    load(&config, &checkpoint, LoadOptions { dtype, ..LoadOptions::default() }).unwrap()
}

/// The logits of all tokens, computed in chunks of these sizes, through pages in no order.
fn logits(model: &mut dyn Model, ids: &[i32], chunks: &[usize], dtype: DType) -> Vec<f32> {
    logits_with(model, ids, chunks, dtype, None)
}

/// The same with an adapter.
fn logits_with(
    model: &mut dyn Model,
    ids: &[i32],
    chunks: &[usize],
    dtype: DType,
    adapter: Option<usize>,
) -> Vec<f32> {
    let count = ids.len().div_ceil(PAGE_SIZE);
    let mut kv = KvCache::new(model.config().kv_shape(), count + 3, PAGE_SIZE, dtype, Device::Cpu).unwrap();
    let pages: Vec<i32> = (0..count as i32).rev().map(|page| page + 2).collect();
    let (mut start, mut all) = (0, Vec::new());
    for &size in chunks.iter().cycle() {
        let end = (start + size).min(ids.len());
        // One row at a time has logits in a batch; so each token of a chunk is the last of a sequence of its own.
        let parts: Vec<Chunk<'_>> = vec![Chunk {
            tokens: &ids[start..end],
            start,
            pages: &pages[..end.div_ceil(PAGE_SIZE)],
            wants_logits: true,
            adapter,
        }];
        let mut batch = Batch::new(&parts, PAGE_SIZE, &Stream::Host).unwrap();
        let rows: Vec<i32> = (0..(end - start) as i32).collect();
        batch.logit_rows = Some(Tensor::from_slice(&rows, &[rows.len()], Device::Cpu).unwrap());
        let shape = [rows.len(), model.config().vocab_size];
        let mut logits = Tensor::empty(&shape, DType::F32, Device::Cpu).unwrap();
        model.forward(&batch, &mut kv, logits.view_mut()).unwrap();
        all.extend(logits.to_vec::<f32>().unwrap());
        start = end;
        if start == ids.len() {
            return all;
        }
    }
    unreachable!("the chunks cycle until all tokens are computed")
}

/// The root of the mean square of the difference, in parts of that of `b`.
fn relative_difference(a: &[f32], b: &[f32]) -> f32 {
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| a - b));
    (difference / squares(&mut b.iter().copied())).sqrt() as f32
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_those_of_transformers() {
    for family in FAMILIES {
        let (ids, expected) = expected(family);
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let mut model = model(fixture(family), DType::F32);
        let got = logits(&mut *model, &ids, &[ids.len()], DType::F32);
        let difference = largest_difference(&got, &expected) / scale;
        assert!(difference < F32_LIMIT, "{family}: {difference:e} of the largest logit, {scale}");
        for chunks in [&[1][..], &[5, 1, 9]] {
            let parts = logits(&mut *model, &ids, chunks, DType::F32);
            assert!(parts == got, "{family}: chunks of {chunks:?} change bits");
        }
    }
}

#[test]
fn logits_in_bf16_are_near_those_of_transformers() {
    for family in FAMILIES {
        let (ids, expected) = expected(family);
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let mut model = model(fixture(family), DType::BF16);
        let got = logits(&mut *model, &ids, &[ids.len()], DType::BF16);
        let difference = largest_difference(&got, &expected) / scale;
        assert!(difference < 0.04, "{family}: {difference:e} of the largest logit, {scale}");
        assert!(logits(&mut *model, &ids, &[7], DType::BF16) == got, "{family}: chunks change bits");
    }
}

#[test]
fn logits_with_keys_and_values_of_8_bits_are_near_those_of_the_activations_type() {
    for family in FAMILIES {
        for dtype in [DType::F32, DType::BF16] {
            let (ids, _) = expected(family);
            let mut model = model(fixture(family), dtype);
            let exact = logits(&mut *model, &ids, &[ids.len()], dtype);
            let got = logits(&mut *model, &ids, &[ids.len()], DType::F8E4M3);
            // The mantissa has 3 bits: a key or a value is off by up to a sixteenth, and scores of random weights are large.
            let difference = relative_difference(&got, &exact);
            assert!(difference > 1e-3 && difference < 0.2, "{family} {dtype}: {difference:e}");
            for chunks in [&[1][..], &[5, 1, 9]] {
                let parts = logits(&mut *model, &ids, chunks, DType::F8E4M3);
                assert!(parts == got, "{family} {dtype}: chunks of {chunks:?} change bits");
            }
        }
    }
}

/// Matrices and tables of 16 bits stay as they are on the CPU, which changes no bit.
#[test]
fn weights_of_16_bits_give_the_logits_of_the_same_numbers_in_f32() {
    for family in FAMILIES {
        let (ids, _) = expected(family);
        let checkpoint = Checkpoint::open(fixture(family)).unwrap();
        let config = Config::from_checkpoint(&checkpoint).unwrap();
        for dtype in [DType::F16, DType::BF16] {
            let rounded = |tensor: crate::weights::StoredTensor<'_>| {
                (tensor.name().to_string(), tensor.to_tensor(dtype).unwrap())
            };
            let narrow: HashMap<String, Tensor> = checkpoint.tensors().map(rounded).collect();
            let widened = narrow.iter().map(|(name, t)| (name.clone(), t.to_dtype(DType::F32).unwrap()));
            let wide: HashMap<String, Tensor> = widened.collect();
            let of = |weights: &HashMap<String, Tensor>, chunks: &[usize]| {
                let mut model = load(&config, weights, LoadOptions::default()).unwrap();
                logits(&mut *model, &ids, chunks, DType::F32)
            };
            let expected = of(&wide, &[ids.len()]);
            assert!(of(&narrow, &[ids.len()]) == expected, "{family} {dtype}");
            assert!(of(&narrow, &[1]) == expected, "{family} {dtype}, token by token");
        }
    }
}

/// Weights of a file, with some more, or others in place of its own.
struct With<'a>(&'a Checkpoint, HashMap<String, Tensor>);

impl WeightSource for With<'_> {
    fn naming(&self) -> Naming {
        self.0.naming()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        WeightSource::shape(&self.1, name).or_else(|| WeightSource::shape(self.0, name))
    }

    fn names(&self) -> Vec<String> {
        // A layer whose feed-forward layer is added is no mixture of experts.
        let is_replaced = |name: &String| {
            let layer = name
                .split(".mlp.")
                .next()
                .filter(|_| name.contains(".mlp.gate.") || name.contains(".experts."));
            layer.is_some_and(|layer| self.1.contains_key(&format!("{layer}.mlp.gate_proj.weight")))
        };
        let own = WeightSource::names(self.0).into_iter().filter(|name| !is_replaced(name));
        own.chain(WeightSource::names(&self.1)).collect()
    }

    fn stored_dtype(&self, name: &str) -> Option<DType> {
        self.1.stored_dtype(name).or_else(|| self.0.stored_dtype(name))
    }

    fn blocks(&self, _: &str) -> Result<Option<(Tensor, QuantFormat)>> {
        Ok(None)
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        match self.1.contains_key(name) {
            true => {
                let tensor = self.1.tensor(name, dtype)?;
                assert!(tensor.shape() != [7], "read although its shape is wrong");
                Ok(tensor)
            }
            false => WeightSource::tensor(self.0, name, dtype),
        }
    }
}

#[test]
fn scales_of_a_checkpoint_keep_keys_and_values_in_the_range_of_8_bits() {
    let (ids, _) = expected("llama");
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let loaded = |scales: &[(&str, Vec<f32>)]| {
        let scales = scales.iter().flat_map(|(name, values)| {
            let tensor = Tensor::from_slice(values, &[values.len()], Device::Cpu).unwrap();
            (0..config.num_layers)
                .map(move |i| (format!("model.layers.{i}.self_attn.{name}"), tensor.clone()))
        });
        load(&config, &With(&checkpoint, scales.collect()), LoadOptions::default())
    };
    let of = |scales: &[(&str, Vec<f32>)], kv: DType| {
        logits(&mut *loaded(scales).unwrap(), &ids, &[ids.len()], kv)
    };
    let (exact, plain) = (of(&[], DType::F32), of(&[], DType::F8E4M3));
    let off = |logits: &[f32]| relative_difference(logits, &exact);
    let heads = config.num_kv_heads;
    // A power of two moves the exponent alone, but for numbers that are too small for one of their own.
    let fitting = of(&[("k_scale", vec![1.0 / 64.0]), ("v_scale", vec![1.0 / 64.0; heads])], DType::F8E4M3);
    let moved = relative_difference(&fitting, &plain);
    assert!(moved > 0.0 && moved < 0.1 * off(&plain), "{moved:e} of {:e}", off(&plain));
    let placed = [("k_proj.k_scale", vec![1.0 / 64.0; heads]), ("attn.v_scale", vec![1.0 / 64.0])];
    assert!(of(&placed, DType::F8E4M3) == fitting, "the same scales, in other places");
    // Divided by so small a scale, all are too large: what is stored is a sign.
    let saturating = [("k_scale", vec![1e-4]), ("v_scale", vec![1e-4])];
    let broken = of(&saturating, DType::F8E4M3);
    assert!(off(&broken) > 3.0 * off(&fitting), "{:e} and {:e}", off(&broken), off(&fitting));
    assert!(of(&saturating, DType::F32) == exact, "without 8 bits there is nothing to scale");
    for (scales, told) in [
        (vec![("k_scale", vec![0.5])], "v_scale"),
        (vec![("k_scale", vec![0.0]), ("v_scale", vec![1.0])], "above 0"),
        (vec![("k_scale", vec![1.0; 7]), ("v_scale", vec![1.0])], "one number"),
    ] {
        let error = loaded(&scales).err().unwrap().to_string();
        assert!(error.contains(told) && error.contains("self_attn"), "{error}");
    }
}

#[test]
fn a_model_has_the_same_logits_from_gguf_and_safetensors() {
    for family in IN_GGUF {
        let (ids, expected) = expected(family);
        let mut from_folder = match family {
            // Files know no window of a Mistral, which they call a Llama.
            "mistral" => {
                let checkpoint = Checkpoint::open(fixture(family)).unwrap();
                let config = Config::from_checkpoint(&checkpoint).unwrap();
                let config = Config { layers: Vec::new(), ..config };
                load(&config, &checkpoint, LoadOptions::default()).unwrap()
            }
            _ => model(fixture(family), DType::F32),
        };
        let mut from_gguf = model(fixture(family).join("model.gguf"), DType::F32);
        assert_eq!(from_gguf.config().vocab_size, from_folder.config().vocab_size);
        let a = logits(&mut *from_folder, &ids, &[ids.len()], DType::F32);
        let b = logits(&mut *from_gguf, &ids, &[ids.len()], DType::F32);
        // The divisors of the angles are stored as f32, so the last bits may differ.
        let scale = a.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let difference = largest_difference(&a, &b) / scale;
        assert!(difference < F32_LIMIT, "{family}: {difference:e}");
        if family != "mistral" {
            assert!(largest_difference(&b, &expected) / scale < F32_LIMIT, "{family}");
        }
    }
}

/// The most likely token of each row.
fn most_likely(logits: &[f32], vocab: usize) -> Vec<i32> {
    let best = |row: &[f32]| (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    logits.chunks(vocab).map(|row| best(row) as i32).collect()
}

/// Token by token, each computed from the pages of those before.
#[test]
fn greedy_tokens_are_those_of_transformers() {
    for family in FAMILIES {
        let (ids, _) = expected(family);
        let stored = Checkpoint::open(fixture(family).join("expected.safetensors")).unwrap();
        let greedy: Vec<i32> =
            stored.tensor("greedy").unwrap().to_tensor(DType::I32).unwrap().to_vec().unwrap();
        let mut model = model(fixture(family), DType::F32);
        let vocab = model.config().vocab_size;
        let all = [&ids[..], &greedy].concat();
        // If each token is the one that follows those before it, generating gives them all.
        let chunks = [&[ids.len()][..], &vec![1; greedy.len()]].concat();
        let rows = most_likely(&logits(&mut *model, &all, &chunks, DType::F32), vocab);
        assert_eq!(rows[ids.len() - 1..all.len() - 1], greedy, "{family}");
    }
}

#[test]
fn weights_that_do_not_fit_the_configuration_are_refused_by_name() {
    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let refusal = |config: Config| match load(&config, &checkpoint, LoadOptions::default()) {
        Ok(_) => panic!("{config:?} was loaded"),
        Err(error) => error.to_string(),
    };
    let told = refusal(Config { num_layers: 3, ..config.clone() });
    assert!(told.contains("model.layers.2.input_layernorm.weight"), "{told}");
    let told = refusal(Config { intermediate_size: 81, ..config.clone() });
    assert!(told.contains("mlp.gate_proj.weight") && told.contains("[81, 64]"), "{told}");
    let told = refusal(Config { architecture: "mamba".into(), ..config.clone() });
    assert!(told.contains("mamba") && told.contains("qwen3"), "{told}");
    assert_eq!(checkpoint.shape("lm_head.weight"), Some(vec![96, 64]));
}
