//! Every family in the whole engine: chunks, steps in fixed memory, cached and shared prefixes change no bits. Windows hide
//! keys of shared prefixes from some layers and not from others.

use crate::graphs::same;
use crate::{engine, prompt, run_all, test_device, test_dtype};
use std::path::Path;
use warpsmith::tensor::Random;
use warpsmith_engine::models::{self, Config, LoadOptions, Model, load};
use warpsmith_engine::{Cascade, EngineOptions, Request, SamplingParams};

pub(crate) const FAMILIES: [&str; 11] = [
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

pub(crate) fn model(family: &str) -> Box<dyn Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
    let checkpoint = models::open(path).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let options = LoadOptions { device: test_device(), dtype: test_dtype(), ..LoadOptions::default() };
    load(&config, &checkpoint, options).unwrap()
}

/// Prompts with a common beginning that is longer than every window, and ends of their own.
fn requests(vocab: usize) -> Vec<Request> {
    let mut random = Random::new(5);
    let beginning = prompt(&mut random, 33, vocab);
    let request = |i: usize| {
        let prompt = [&beginning[..], &prompt(&mut random, i % 4, vocab)].concat();
        let params =
            SamplingParams { max_tokens: Some(6 + i), logprobs: Some(0), ..SamplingParams::greedy() };
        Request { prompt, params, ..Request::default() }
    };
    (0..7).map(request).collect()
}

#[test]
fn no_family_depends_on_what_else_runs() {
    for family in FAMILIES {
        let options = |max_running, cascade| EngineOptions {
            page_size: 8,
            num_pages: 100,
            max_running,
            cascade,
            ..EngineOptions::default()
        };
        let requests = requests(model(family).config().vocab_size);
        let mut alone = engine(model(family), options(1, Cascade::Off));
        let expected = run_all(&mut alone, &requests);
        let together = EngineOptions { max_chunk: 5, fixed_decode: true, ..options(7, Cascade::Always) };
        let mut together = engine(model(family), together);
        for time in ["cold", "warm"] {
            same(&expected, &run_all(&mut together, &requests), &format!("{family}, {time}"));
        }
        assert!(together.stats().cascade_steps > 0, "{family}: {:?}", together.stats());
        together.check().unwrap();
    }
}
