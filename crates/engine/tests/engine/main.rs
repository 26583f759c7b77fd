//! The engine as a whole, on the CPU: tokens do not depend on what else runs, pages are conserved, everything ends.

mod determinism;
mod oracle;
mod pressure;
mod random_walk;
mod refusals;
mod text;

use warpsmith::tensor::Random;
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

fn engine(model: Box<dyn Model>, options: EngineOptions) -> Engine {
    Engine::new(model, options).unwrap()
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
