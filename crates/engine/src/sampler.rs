//! Chooses tokens from logits, on the host.
//!
//! A choice depends on the row of logits, the request's options, its seed and the place of the token, and on nothing else.
//! Noise is keyed by seed, place and token id, so that the order of computation does not matter: the token with the
//! largest sum of logit and Gumbel noise is a sample of the softmax.

use crate::request::{SamplingParams, TokenLogprob};
use std::collections::HashMap;

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: i32,
    /// Its log-probability in the model's own distribution, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens of that distribution, if asked for, the likeliest first.
    pub top: Vec<TokenLogprob>,
}

/// What is remembered of a sequence for penalties.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// How often a token occurs in the output; zero for tokens that occur in the prompt only.
    counts: HashMap<i32, u32>,
}

impl History {
    /// Whether options need a history at all.
    fn is_needed(params: &SamplingParams) -> bool {
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
    }

    /// The history of a prompt.
    pub fn new(params: &SamplingParams, prompt: &[i32]) -> History {
        let mut history = History::default();
        if History::is_needed(params) {
            history.counts.extend(prompt.iter().map(|&token| (token, 0)));
        }
        history
    }

    /// A token was added to the output.
    pub fn push(&mut self, params: &SamplingParams, token: i32) {
        if History::is_needed(params) {
            *self.counts.entry(token).or_insert(0) += 1;
        }
    }
}

/// Chooses the token at `position` of a sequence from its `logits`, which are changed. Only the first `vocab` can be
/// chosen: models may have more columns than tokens. `None` if a logit among them is NaN, or none is finite.
pub fn choose(
    logits: &mut [f32],
    vocab: usize,
    params: &SamplingParams,
    seed: u64,
    position: usize,
    history: &History,
) -> Option<Choice> {
    let vocab = vocab.min(logits.len());
    let logits = &mut logits[..vocab];
    let largest =
        logits.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b.is_nan() { b } else { a.max(b) });
    if !largest.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    let log_sum = params.logprobs.map(|_| log_sum_exp(logits));
    let top = match (params.logprobs, log_sum) {
        (Some(count), Some(log_sum)) => most_likely(logits, count, log_sum),
        _ => Vec::new(),
    };
    let raw = log_sum.map(|log_sum| (log_sum, logits.to_vec()));
    penalise(logits, params, history);
    let token =
        if params.temperature == 0.0 { argmax(logits) } else { sample(logits, params, seed, position) };
    let logprob = raw.map(|(log_sum, raw)| (f64::from(raw[token]) - log_sum) as f32);
    Some(Choice { token: token as i32, logprob, top })
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits[argmax(logits)]);
    largest + logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum::<f64>().ln()
}

fn most_likely(logits: &[f32], count: usize, log_sum: f64) -> Vec<TokenLogprob> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_rank = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
    let count = count.min(order.len());
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_rank);
    }
    order.truncate(count);
    order.sort_unstable_by(by_rank);
    let logprob = |token: usize| (f64::from(logits[token]) - log_sum) as f32;
    order.into_iter().map(|token| TokenLogprob { token: token as i32, logprob: logprob(token) }).collect()
}

fn penalise(logits: &mut [f32], params: &SamplingParams, history: &History) {
    for &(token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
    for (&token, &count) in &history.counts {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        let penalty = params.repetition_penalty;
        *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
        if count > 0 {
            *logit -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
    }
}

/// The largest; of equals the first.
fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best
}

/// Cuts by `min_p`, `top_k` and `top_p`, in this order, each by the logits divided by the temperature; then samples.
fn sample(logits: &[f32], params: &SamplingParams, seed: u64, position: usize) -> usize {
    let scale = 1.0 / f64::from(params.temperature);
    let largest = f64::from(logits[argmax(logits)]);
    let weight = |token: usize| ((f64::from(logits[token]) - largest) * scale).exp();
    let mut candidates: Vec<usize> = (0..logits.len()).collect();
    if params.min_p > 0.0 {
        candidates.retain(|&token| weight(token) >= f64::from(params.min_p));
    }
    let by_rank = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
    if (1..candidates.len()).contains(&params.top_k) {
        candidates.select_nth_unstable_by(params.top_k - 1, by_rank);
        candidates.truncate(params.top_k);
    }
    if params.top_p < 1.0 {
        candidates.sort_unstable_by(by_rank);
        let total: f64 = candidates.iter().map(|&token| weight(token)).sum();
        let mut reached = 0.0;
        let enough = candidates.iter().position(|&token| {
            reached += weight(token);
            reached >= total * f64::from(params.top_p)
        });
        candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
    }
    let score = |token: usize| f64::from(logits[token]) * scale + gumbel(seed, position as u64, token as u64);
    let mut best = (f64::NEG_INFINITY, usize::MAX);
    for token in candidates {
        let score = score(token);
        // Candidates may be in any order: of equals the lower id.
        if score > best.0 || (score == best.0 && token < best.1) {
            best = (score, token);
        }
    }
    best.1
}

/// Standard Gumbel noise.
fn gumbel(seed: u64, position: u64, token: u64) -> f64 {
    let bits = mix(mix(mix(seed) ^ position) ^ token);
    // Uniform in the open interval from 0 to 1.
    let uniform = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -(-uniform.ln()).ln()
}

/// SplitMix64's finaliser: every bit of the input changes half of the output's.
fn mix(value: u64) -> u64 {
    let mut bits = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// The seed of one of several outputs of a request.
pub fn seed_of_output(seed: u64, index: usize) -> u64 {
    if index == 0 { seed } else { mix(seed ^ mix(index as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(logits: &[f32], params: &SamplingParams, seed: u64) -> i32 {
        choose(&mut logits.to_vec(), logits.len(), params, seed, 3, &History::default()).unwrap().token
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(pick(&[1.0, 4.0, 4.0, 2.0], &SamplingParams::greedy(), 0), 1);
    }

    #[test]
    fn columns_past_the_vocabulary_are_never_chosen() {
        let mut logits = [1.0, 2.0, 9.0, f32::NAN];
        let chosen = choose(&mut logits, 2, &SamplingParams::greedy(), 0, 0, &History::default());
        assert_eq!(chosen.unwrap().token, 1);
    }

    #[test]
    fn a_row_that_is_not_made_of_numbers_chooses_nothing() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in 0..3 {
                let mut logits = [1.0, 2.0, 3.0];
                logits[at] = bad;
                let chosen = choose(&mut logits, 3, &SamplingParams::default(), 0, 0, &History::default());
                assert_eq!(chosen, None);
            }
        }
    }

    #[test]
    fn samples_follow_the_distribution() {
        let probabilities = [0.5f32, 0.3, 0.15, 0.05];
        let logits = probabilities.map(f32::ln);
        let params = SamplingParams::default();
        let mut counts = [0f64; 4];
        let rounds = 20_000;
        (0..rounds).for_each(|seed| counts[pick(&logits, &params, seed) as usize] += 1.0);
        for (count, probability) in counts.iter().zip(probabilities) {
            assert!((count / rounds as f64 - f64::from(probability)).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn cuts_leave_what_they_say() {
        let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
        let seen = |params: SamplingParams| {
            let mut seen: Vec<i32> = (0..500).map(|seed| pick(&logits, &params, seed)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        let base = SamplingParams::default();
        assert_eq!(seen(base.clone()), [0, 1, 2, 3]);
        assert_eq!(seen(SamplingParams { top_k: 2, ..base.clone() }), [0, 1]);
        assert_eq!(seen(SamplingParams { top_p: 0.6, ..base.clone() }), [0, 1]);
        assert_eq!(seen(SamplingParams { min_p: 0.25, ..base.clone() }), [0, 1, 2]);
        assert_eq!(seen(SamplingParams { logit_bias: vec![(0, -1000.0)], ..base }), [1, 2, 3]);
    }

    #[test]
    fn penalties_count_prompt_and_output_as_they_say() {
        let mut params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::greedy() };
        let mut history = History::new(&params, &[0]);
        let mut logits = [2.0, 1.5, -1.0];
        history.push(&params, 2);
        penalise(&mut logits, &params, &history);
        assert_eq!(logits, [1.0, 1.5, -2.0]);
        params =
            SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..SamplingParams::greedy() };
        history = History::new(&params, &[0]);
        (0..2).for_each(|_| history.push(&params, 1));
        logits = [2.0, 1.5, -1.0];
        penalise(&mut logits, &params, &history);
        assert_eq!(logits, [2.0, 0.5, -1.0]);
    }

    #[test]
    fn log_probabilities_are_those_of_the_model() {
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let params =
            SamplingParams { logprobs: Some(2), logit_bias: vec![(2, 50.0)], ..SamplingParams::greedy() };
        let choice = choose(&mut logits.to_vec(), 3, &params, 0, 0, &History::default()).unwrap();
        assert_eq!(choice.token, 2);
        assert!((choice.logprob.unwrap() - 0.2f32.ln()).abs() < 1e-6);
        assert_eq!(choice.top.iter().map(|top| top.token).collect::<Vec<_>>(), [0, 1]);
    }
}
