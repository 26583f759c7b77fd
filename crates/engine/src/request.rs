//! Requests to the engine, and its answers.

use crate::constraint::SharedGrammar;
use crate::error::{Error, Result};
use std::time::Instant;

/// The number of a request. Later requests have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A prompt and what to do with it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<i32>,
    /// How tokens are chosen, and when to stop.
    pub params: SamplingParams,
    /// Requests with a lower number are served first; equals in the order of their arrival.
    pub priority: i32,
    /// The request ends unfinished soon after this time.
    pub deadline: Option<Instant>,
    /// What its outputs must look like.
    pub grammar: Option<SharedGrammar>,
    /// Requests share cached prefixes only with those of the same salt.
    pub salt: Option<Salt>,
    /// The name of the adapter that it is computed with; `None` for the model as it is.
    pub adapter: Option<String>,
}

/// Separates the prefix caches of tenants: what one of them has asked is not found, and cannot be timed, by another.
pub type Salt = [u8; 32];

/// How tokens are chosen, and when to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// The most tokens to generate; as many as there is room for if `None`.
    pub max_tokens: Option<usize>,
    /// Logits are divided by it. Zero takes the most likely token.
    pub temperature: f32,
    /// Only this many of the most likely tokens are possible; zero for all.
    pub top_k: usize,
    /// Only the fewest most likely tokens whose probabilities add up to this, above 0, are possible; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this probable, relative to the most likely one, are possible; zero for all.
    pub min_p: f32,
    /// Logits of tokens that occur in the prompt or the output are divided by it if positive, else multiplied. 1 for none.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that occur in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens for each time that they occur in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(i32, f32)>,
    /// With a seed the same request always gives the same tokens. Without one, each request gets a new seed.
    pub seed: Option<u64>,
    /// Texts that end the output. They are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the output. They are not part of its text.
    pub stop_ids: Vec<i32>,
    /// Whether the model's own end tokens do not end the output.
    pub ignore_eos: bool,
    /// Log-probabilities of the chosen token and this many of the most likely ones are wanted with each token.
    pub logprobs: Option<usize>,
    /// The number of outputs for the prompt.
    pub n: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            max_tokens: None,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            n: 1,
        }
    }
}

impl SamplingParams {
    /// The most outputs of one request.
    pub const MAX_N: usize = 128;
    /// The most alternatives reported with each token.
    pub const MAX_LOGPROBS: usize = 20;

    /// Takes the most likely token each time.
    pub fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    /// Whether all options are in their ranges.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::request("top_p", "a number above 0 and at most 1", self.top_p));
        }
        let real = |what, value: f32, least: f32, most: f32| {
            if value.is_finite() && (least..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::request(what, format!("a number from {least} to {most}"), value))
        };
        let count = |what, value: usize, least: usize, most: usize| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(Error::request(what, format!("a number from {least} to {most}"), value))
        };
        let token = |what, id: i32| match usize::try_from(id).is_ok_and(|id| id < vocab_size) {
            true => Ok(()),
            false => Err(Error::request(what, format!("tokens from 0 to below {vocab_size}"), id)),
        };
        real("temperature", self.temperature, 0.0, 100.0)?;
        real("min_p", self.min_p, 0.0, 1.0)?;
        real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        real("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        real("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        for &(id, bias) in &self.logit_bias {
            token("logit_bias", id)?;
            real("logit_bias", bias, -1000.0, 1000.0)?;
        }
        count("n", self.n, 1, Self::MAX_N)?;
        count("logprobs", self.logprobs.unwrap_or(0), 0, Self::MAX_LOGPROBS)?;
        count("max_tokens", self.max_tokens.unwrap_or(1), 1, usize::MAX)?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::request("stop", "texts that are not empty", "an empty one"));
        }
        Ok(())
    }
}

/// Why an output ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it, or a stop did.
    Stop,
    /// It has as many tokens as it may have.
    Length,
    /// It was cancelled.
    Cancelled,
    /// Its deadline passed.
    Deadline,
    /// It could not be computed; other requests are not affected.
    Failed(String),
}

/// Counts of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache when the request was first admitted.
    pub cached_tokens: usize,
    /// Tokens that were generated, an end token among them.
    pub output_tokens: usize,
    /// How often the output lost its pages and had to start again.
    pub preemptions: usize,
}

/// A token with its log-probability, by the distribution that the model gave, before penalties, bias and cuts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: i32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// An event of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The request.
    pub request: RequestId,
    /// Which of its outputs.
    pub index: usize,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to an output.
#[derive(Debug, Clone, PartialEq)]
pub enum EventKind {
    /// A token was generated.
    Token {
        /// The token.
        token: i32,
        /// The text that is certain now and was not before. May be empty; always empty in an engine without a tokenizer.
        text: String,
        /// The log-probability of the token, if asked for.
        logprob: Option<f32>,
        /// The most likely tokens, if asked for.
        top_logprobs: Vec<TokenLogprob>,
    },
    /// The output ended.
    Finished {
        /// Why.
        reason: FinishReason,
        /// The text that was held back so far and belongs to the output.
        text: String,
        /// Counts.
        usage: Usage,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let wrong: [(&str, SamplingParams); 9] = [
            ("temperature", SamplingParams { temperature: f32::NAN, ..Default::default() }),
            ("top_p", SamplingParams { top_p: 0.0, ..Default::default() }),
            ("min_p", SamplingParams { min_p: 1.5, ..Default::default() }),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..Default::default() }),
            ("logit_bias", SamplingParams { logit_bias: vec![(10, 0.0)], ..Default::default() }),
            ("n", SamplingParams { n: 0, ..Default::default() }),
            ("logprobs", SamplingParams { logprobs: Some(21), ..Default::default() }),
            ("max_tokens", SamplingParams { max_tokens: Some(0), ..Default::default() }),
            ("stop", SamplingParams { stop: vec![String::new()], ..Default::default() }),
        ];
        for (name, params) in wrong {
            let told = params.validate(10).unwrap_err().to_string();
            assert!(told.contains(&format!("`{name}`")), "{told}");
            assert!(told.len() < 120, "{told}");
        }
        let told = SamplingParams { top_p: 0.0, ..Default::default() }.validate(10).unwrap_err().to_string();
        assert!(told.ends_with("expected a number above 0 and at most 1, got 0"), "{told}");
        SamplingParams::default().validate(10).unwrap();
    }
}
