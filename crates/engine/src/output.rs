//! One output of a request: its options, what it has so far, and when it ends.

use crate::error::Result;
use crate::request::{EventKind, FinishReason, SamplingParams};
use crate::sampler::{self, Choice, History};
use crate::text::{TextStream, Tokenizer};
use std::sync::Arc;

/// An output that has not ended.
pub(crate) struct Output {
    params: Arc<SamplingParams>,
    seed: u64,
    history: History,
    /// Turns tokens into text, in an engine with a tokenizer.
    text: Option<(Arc<Tokenizer>, TextStream)>,
    pub prompt_len: usize,
    /// Tokens so far.
    pub num_tokens: usize,
}

impl Output {
    pub fn new(
        params: Arc<SamplingParams>,
        seed: u64,
        prompt: &[i32],
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Output> {
        let history = History::new(&params, prompt);
        let text = match tokenizer {
            Some(tokenizer) => Some((tokenizer, TextStream::new(&params.stop)?)),
            None => None,
        };
        Ok(Output { params, seed, history, text, prompt_len: prompt.len(), num_tokens: 0 })
    }

    /// The token at `position` of the sequence; `None` if the logits are not numbers.
    pub fn choose(&self, logits: &mut [f32], vocab: usize, position: usize) -> Option<Choice> {
        sampler::choose(logits, vocab, &self.params, self.seed, position, &self.history)
    }

    /// Adds a token. Returns what to tell, and why the output ends, if it does. `ends` says whether it is one of the
    /// model's end tokens.
    pub fn push(&mut self, choice: Choice, ends: bool) -> (EventKind, Option<FinishReason>) {
        let token = choice.token;
        self.num_tokens += 1;
        self.history.push(&self.params, token);
        let mut stops = (ends && !self.params.ignore_eos) || self.params.stop_ids.contains(&token);
        let mut text = String::new();
        if let Some((tokenizer, stream)) = &mut self.text
            && !stops
            && !tokenizer.is_control(token as u32)
        {
            let delta = stream.push(tokenizer.bytes(token as u32));
            text = delta.text;
            stops = delta.stop.is_some();
        }
        let kind = EventKind::Token { token, text, logprob: choice.logprob, top_logprobs: choice.top };
        (kind, stops.then_some(FinishReason::Stop))
    }

    /// The text that was held back and belongs to the output after all. After a stop text there is none.
    pub fn rest(mut self) -> String {
        self.text.as_mut().map(|(_, stream)| stream.finish()).unwrap_or_default()
    }
}
