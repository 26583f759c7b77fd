//! One output of a request: its options, what it has so far, and when it ends.

use crate::constraint::{Constraint, SharedGrammar};
use crate::error::Result;
use crate::request::{EventKind, FinishReason, SamplingParams};
use crate::sampler::{Choice, Draw, History};
use crate::text::{TextStream, Tokenizer};
use std::sync::Arc;

/// An output that has not ended.
pub(crate) struct Output {
    params: Arc<SamplingParams>,
    seed: u64,
    history: History,
    /// Turns tokens into text, in an engine with a tokenizer.
    text: Option<(Arc<Tokenizer>, TextStream)>,
    grammar: Option<Box<dyn Constraint>>,
    /// The tokens that the grammar allows next, if it forbids any.
    allowed: Option<Vec<u32>>,
    /// Why the grammar cannot go on.
    fault: Option<String>,
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
        grammar: Option<&SharedGrammar>,
    ) -> Result<Output> {
        let history = History::new(&params, prompt);
        let text = match tokenizer {
            Some(tokenizer) => Some((tokenizer, TextStream::new(&params.stop)?)),
            None => None,
        };
        Ok(Output {
            params,
            seed,
            history,
            text,
            grammar: grammar.map(SharedGrammar::begin),
            allowed: None,
            fault: None,
            prompt_len: prompt.len(),
            num_tokens: 0,
        })
    }

    /// The choice of the token at `position` of the sequence, from a row of logits.
    pub fn draw(&self, row: usize, position: usize) -> Draw<'_> {
        Draw {
            row,
            params: &self.params,
            seed: self.seed,
            position,
            history: &self.history,
            constrained: self.grammar.is_some(),
            allowed: self.allowed.as_deref(),
        }
    }

    /// Asks the grammar, if there is one, which of `vocab` tokens may come next.
    pub fn ask_grammar(&mut self, vocab: usize) {
        let Some(grammar) = self.grammar.as_mut().filter(|_| self.fault.is_none()) else { return };
        let mut mask = self.allowed.take().unwrap_or_default();
        mask.clear();
        mask.resize(vocab.div_ceil(32), 0);
        match grammar.allowed(&mut mask) {
            Ok(forbids) => self.allowed = forbids.then_some(mask),
            Err(why) => self.fault = Some(why),
        }
    }

    /// Why the output cannot go on, if its grammar is the reason.
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Adds a token. Returns what to tell, and why the output ends, if it does. `ends` says whether it is one of the
    /// model's end tokens.
    pub fn push(&mut self, choice: Choice, ends: bool) -> (EventKind, Option<FinishReason>) {
        let token = choice.token;
        self.num_tokens += 1;
        self.history.push(&self.params, token);
        let mut stops = (ends && !self.params.ignore_eos) || self.params.stop_ids.contains(&token);
        let mut completes = false;
        if let Some(grammar) = &mut self.grammar
            && !stops
        {
            match grammar.accept(token) {
                Ok(complete) => completes = complete,
                Err(why) => self.fault = Some(why),
            }
        }
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
        let reason = match &self.fault {
            Some(why) => Some(FinishReason::Failed(why.clone())),
            None => (stops || completes).then_some(FinishReason::Stop),
        };
        (kind, reason)
    }

    /// The text that was held back and belongs to the output after all. After a stop text there is none.
    pub fn rest(mut self) -> String {
        self.text.as_mut().map(|(_, stream)| stream.finish()).unwrap_or_default()
    }
}
