//! One output of a request: its options, what it has so far, and when it ends.

use crate::request::{EventKind, FinishReason, SamplingParams};
use crate::sampler::{self, Choice, History};
use std::sync::Arc;

/// An output that has not ended.
pub(crate) struct Output {
    params: Arc<SamplingParams>,
    seed: u64,
    history: History,
    pub prompt_len: usize,
    /// Tokens so far.
    pub num_tokens: usize,
}

impl Output {
    pub fn new(params: Arc<SamplingParams>, seed: u64, prompt: &[i32]) -> Output {
        let history = History::new(&params, prompt);
        Output { params, seed, history, prompt_len: prompt.len(), num_tokens: 0 }
    }

    /// The token at `position` of the sequence; `None` if the logits are not numbers.
    pub fn choose(&self, logits: &mut [f32], vocab: usize, position: usize) -> Option<Choice> {
        sampler::choose(logits, vocab, &self.params, self.seed, position, &self.history)
    }

    /// Adds a token. Returns what to tell, and why the output ends, if it does. `ends` says whether it is one of the
    /// model's end tokens.
    pub fn push(&mut self, choice: Choice, ends: bool) -> (EventKind, Option<FinishReason>) {
        self.num_tokens += 1;
        self.history.push(&self.params, choice.token);
        let stops = (ends && !self.params.ignore_eos) || self.params.stop_ids.contains(&choice.token);
        let text = String::new();
        let kind =
            EventKind::Token { token: choice.token, text, logprob: choice.logprob, top_logprobs: choice.top };
        (kind, stops.then_some(FinishReason::Stop))
    }

    /// The text that was held back and belongs to the output after all.
    pub fn rest(self, _reason: &FinishReason) -> String {
        String::new()
    }
}
