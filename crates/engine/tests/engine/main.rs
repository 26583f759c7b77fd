//! The engine as a whole: tokens do not depend on what else runs, pages are conserved, everything ends.
//!
//! Models run on the CPU, or where `WARPSMITH_TEST_DEVICE` says, such as `cuda`, with `WARPSMITH_TEST_DTYPE`, f32 or bf16,
//! for the small Llama.

mod adapters;
mod determinism;
mod embeddings;
mod families;
mod grammars;
mod graphs;
mod oracle;
mod pressure;
mod profile;
mod random_walk;
mod refusals;
mod survey;
mod text;

use warpsmith::tensor::Random;
use warpsmith::{DType, Device};
use warpsmith_engine::models::Model;
use warpsmith_engine::{
    Engine, EngineOptions, EventKind, FinishReason, Request, RequestId, SamplingParams, Usage,
};

/// What became of one output.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Done {
    tokens: Vec<i32>,
    logprobs: Vec<Option<f32>>,
    reason: FinishReason,
    usage: Usage,
}

/// Tokens of an output so far, and their log-probabilities.
type Tokens = (Vec<i32>, Vec<Option<f32>>);

/// Collects events by request and output.
#[derive(Default)]
pub(crate) struct Log {
    open: std::collections::BTreeMap<(RequestId, usize), Tokens>,
    done: std::collections::BTreeMap<(RequestId, usize), Done>,
}

impl Log {
    fn step(&mut self, engine: &mut Engine) {
        for event in engine.step().unwrap() {
            let at = (event.request, event.index);
            assert!(!self.done.contains_key(&at), "{at:?} has ended");
            match event.kind {
                EventKind::Token { token, logprob, .. } => {
                    let (tokens, logprobs) = self.open.entry(at).or_default();
                    tokens.push(token);
                    logprobs.push(logprob);
                }
                EventKind::Finished { reason, usage, .. } => {
                    let (tokens, logprobs) = self.open.remove(&at).unwrap_or_default();
                    assert_eq!(usage.output_tokens, tokens.len());
                    self.done.insert(at, Done { tokens, logprobs, reason, usage });
                }
            }
        }
    }

    /// Steps until nothing is left to do.
    fn finish(mut self, engine: &mut Engine) -> Log {
        while engine.has_work() {
            self.step(engine);
        }
        assert!(self.open.is_empty(), "some outputs have not ended");
        self
    }
}

/// All outputs of some requests that arrive together.
fn run_all(engine: &mut Engine, requests: &[Request]) -> Vec<Done> {
    for request in requests {
        engine.add_request(request.clone()).unwrap();
    }
    Log::default().finish(engine).done.into_values().collect()
}

fn test_device() -> Device {
    std::env::var("WARPSMITH_TEST_DEVICE").map_or(Device::Cpu, |name| name.parse().unwrap())
}

fn test_dtype() -> DType {
    std::env::var("WARPSMITH_TEST_DTYPE").map_or(DType::F32, |name| name.parse().unwrap())
}

fn engine(model: Box<dyn Model>, options: EngineOptions) -> Engine {
    let mut options = on_test_device(options);
    if model.config().head_dim == oracle::HEAD_DIM {
        // Its keys are positions, which have no room in 16 bits.
        options.dtype = DType::F32;
    }
    Engine::new(model, options).unwrap()
}

/// Options for models on the device of the tests.
fn on_test_device(options: EngineOptions) -> EngineOptions {
    let (device, dtype) = (test_device(), test_dtype());
    // On Hopper, in 16 bits, attention adds up the rows of long chunks in another order than those of short ones.
    let max_chunk = match (device, dtype) {
        (Device::Cpu, _) | (_, DType::F32) => options.max_chunk,
        _ => options.max_chunk.min(16),
    };
    EngineOptions { device, dtype, max_chunk, ..options }
}

fn prompt(random: &mut Random, len: usize, vocab: usize) -> Vec<i32> {
    (0..len).map(|_| random.below(vocab as u64) as i32).collect()
}

/// Options of many kinds.
fn some_params(random: &mut Random, max_tokens: usize) -> SamplingParams {
    let mut params = SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() };
    if random.below(2) == 0 {
        params.temperature = 0.8;
        params.seed = Some(random.bits());
        params.top_k = [0, 5][random.below(2) as usize];
        params.top_p = [1.0, 0.9][random.below(2) as usize];
        params.min_p = [0.0, 0.05][random.below(2) as usize];
    }
    if random.below(4) == 0 {
        params.repetition_penalty = 1.2;
        params.frequency_penalty = 0.1;
    }
    if random.below(4) == 0 {
        params.logprobs = Some(2);
    }
    params
}
