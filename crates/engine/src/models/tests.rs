//! Models that transformers saved, against the logits that it computes. `scripts/model_fixtures.py` makes both.

use super::names::WeightSource;
use super::{Config, LoadOptions, Model, load};
use crate::batch::{Batch, Chunk};
use crate::kv::KvCache;
use crate::weights::Checkpoint;
use std::path::PathBuf;
use warpsmith::{DType, Device, Stream, Tensor};

const PAGE_SIZE: usize = 8;

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
    let count = ids.len().div_ceil(PAGE_SIZE);
    let mut kv = KvCache::new(model.config(), count + 3, PAGE_SIZE, dtype, Device::Cpu).unwrap();
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

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_are_those_of_transformers() {
    for family in ["llama", "qwen3", "gpt2"] {
        let (ids, expected) = expected(family);
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let mut model = model(fixture(family), DType::F32);
        let got = logits(&mut *model, &ids, &[ids.len()], DType::F32);
        let difference = largest_difference(&got, &expected) / scale;
        assert!(difference < 2e-6, "{family}: {difference:e} of the largest logit, {scale}");
        for chunks in [&[1][..], &[5, 1, 9]] {
            let parts = logits(&mut *model, &ids, chunks, DType::F32);
            assert!(parts == got, "{family}: chunks of {chunks:?} change bits");
        }
    }
}

#[test]
fn logits_in_bf16_are_near_those_of_transformers() {
    for family in ["llama", "qwen3", "gpt2"] {
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
fn a_model_has_the_same_logits_from_gguf_and_safetensors() {
    let (ids, expected) = expected("llama");
    let mut from_folder = model(fixture("llama"), DType::F32);
    let mut from_gguf = model(fixture("llama/model.gguf"), DType::F32);
    assert_eq!(from_gguf.config().vocab_size, from_folder.config().vocab_size);
    let a = logits(&mut *from_folder, &ids, &[ids.len()], DType::F32);
    let b = logits(&mut *from_gguf, &ids, &[ids.len()], DType::F32);
    // The divisors of the angles are stored as f32, so the last bits may differ.
    let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    assert!(largest_difference(&a, &b) / scale < 2e-6);
    assert!(largest_difference(&b, &expected) / scale < 2e-6);
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
