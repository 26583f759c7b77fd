//! What is found to be needed before a model runs is all that it then needs.

use crate::prompt;
use std::collections::HashSet;
use warpsmith::DType;
use warpsmith::device::DeviceInfo;
use warpsmith::op::survey::{Needed, survey};
use warpsmith::tensor::Random;
use warpsmith_engine::models::{Config, RandomWeights};
use warpsmith_engine::{Engine, EngineOptions, OpenOptions, Request, SamplingParams, needed_kernels};

fn hopper() -> DeviceInfo {
    DeviceInfo::typical_gpu("90a".parse().unwrap(), None)
}

/// A model of the shapes of Qwen3-0.6B, with fewer layers and tokens.
fn model() -> (Config, RandomWeights) {
    let mut json = RandomWeights::config("qwen3-0.6b").unwrap();
    (json["num_hidden_layers"], json["vocab_size"]) = (2.into(), 1000.into());
    let config = Config::from_json(&json).unwrap();
    let weights = RandomWeights::new(&config, true, 0).unwrap();
    (config, weights)
}

fn options(kv_dtype: Option<DType>) -> OpenOptions {
    OpenOptions {
        dtype: Some(DType::BF16),
        kv_dtype,
        max_positions: Some(6000),
        pool_tokens: Some(40_000),
        page_size: Some(64),
        engine: EngineOptions {
            max_running: 20,
            max_batch_tokens: 300,
            max_chunk: 200,
            fixed_decode: true,
            ..EngineOptions::default()
        },
        ..OpenOptions::default()
    }
}

fn names(needed: &[Needed]) -> HashSet<(&'static str, String)> {
    needed.iter().map(|needed| (needed.kernel.function, format!("{:?}", needed.defines))).collect()
}

/// Serves requests of all kinds, without computing them.
fn serve(kv_dtype: Option<DType>) {
    let (config, weights) = model();
    let mut engine = Engine::with_weights(&config, &weights, options(kv_dtype)).unwrap();
    let mut random = Random::new(8);
    for i in 0..60 {
        let len = 1 + random.below([40, 700, 5000][i % 3]) as usize;
        let mut params = SamplingParams { max_tokens: Some(1 + i % 30), seed: Some(1), ..Default::default() };
        params.n = [1, 1, 4][i % 3];
        params.logprobs = (i % 5 == 0).then_some(1);
        params.repetition_penalty = if i % 7 == 0 { 1.5 } else { 1.0 };
        engine
            .add_request(Request { prompt: prompt(&mut random, len, 1000), params, ..Request::default() })
            .unwrap();
        (0..random.below(9)).for_each(|_| drop(engine.step().unwrap()));
    }
    while engine.has_work() {
        engine.step().unwrap();
    }
    assert!(engine.stats().generated_tokens > 500);
}

#[test]
fn a_served_model_needs_nothing_more() {
    for kv_dtype in [None, Some(DType::F8E4M3)] {
        let (config, weights) = model();
        let found = names(&needed_kernels(&config, &weights, &options(kv_dtype), hopper()).unwrap());
        let ((), used) = survey(hopper(), || serve(kv_dtype)).unwrap();
        let missing: Vec<_> = names(&used).into_iter().filter(|name| !found.contains(name)).collect();
        assert!(missing.is_empty(), "{kv_dtype:?}: {} of {} missing: {missing:?}", missing.len(), used.len());
        assert!(used.len() > 10 && found.len() < 3 * used.len() + 20, "{} of {}", used.len(), found.len());
    }
}

#[test]
fn what_a_gpu_cannot_run_is_refused() {
    let (config, weights) = model();
    let error = needed_kernels(&config, &weights, &options(Some(DType::F16)), hopper()).err().unwrap();
    assert!(error.to_string().contains("`kv_dtype`"), "{error}");
}
