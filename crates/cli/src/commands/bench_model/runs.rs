//! What is measured.

use std::time::Instant;
use warpsmith::tensor::Random;
use warpsmith_engine::{Engine, Error, EventKind, FinishReason, Request, Result, SamplingParams};

/// Tokens after a common prefix.
const OWN_TOKENS: usize = 16;

/// Requests that are served together: tokens of each prompt and answer.
pub struct Requests {
    lengths: Vec<[usize; 2]>,
    temperature: f32,
}

/// The least that answers read from memory: all weights in each step, and the keys and values that their tokens see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    pub steps: usize,
    pub keys: usize,
}

impl Requests {
    /// Requests of equal lengths, decoded greedily.
    pub fn alike(count: usize, prompt: usize, tokens: usize) -> Requests {
        Requests { lengths: vec![[prompt, tokens]; count], temperature: 0.0 }
    }

    /// Those of nano-vllm's benchmark. Its lengths are drawn by another generator, from the same distribution.
    pub fn nano_vllm(count: usize) -> Requests {
        let mut random = Random::new(0);
        let mut length = || 100 + random.below(1024 - 100 + 1) as usize;
        Requests { lengths: (0..count).map(|_| [length(), length()]).collect(), temperature: 0.6 }
    }

    pub fn output_tokens(&self) -> usize {
        self.lengths.iter().map(|[_, tokens]| tokens).sum()
    }

    /// What must be read from memory in any case.
    pub fn reads(&self) -> Reads {
        // The token that a prompt gives sees it all; each further one sees one more.
        let keys = |[prompt, tokens]: [usize; 2]| tokens * prompt + tokens * tokens.saturating_sub(1) / 2;
        Reads {
            steps: self.lengths.iter().map(|&[_, tokens]| tokens).max().unwrap_or(0),
            keys: self.lengths.iter().map(|&lengths| keys(lengths)).sum(),
        }
    }
}

/// Seconds that random prompts and their answers take.
pub fn time(engine: &mut Engine, requests: &Requests, seed: u64) -> Result<f64> {
    engine.clear_prefix_cache();
    let mut random = Random::new(seed);
    for (i, &[prompt, tokens]) in requests.lengths.iter().enumerate() {
        let prompt = tokens_of(engine, &mut random, prompt);
        engine.add_request(request(prompt, tokens, requests.temperature, i as u64))?;
    }
    let start = Instant::now();
    while engine.has_work() {
        step(engine)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Seconds until the first token of a prompt, and of another that begins with the same `tokens` tokens.
pub fn prefix(engine: &mut Engine, tokens: usize, seed: u64) -> Result<[f64; 2]> {
    engine.clear_prefix_cache();
    let mut random = Random::new(seed);
    let common = tokens_of(engine, &mut random, tokens);
    let mut seconds = [0.0; 2];
    for taken in &mut seconds {
        let own = tokens_of(engine, &mut random, OWN_TOKENS);
        engine.add_request(request([&common[..], &own].concat(), 1, 0.0, 0))?;
        let start = Instant::now();
        while engine.has_work() {
            step(engine)?;
        }
        *taken = start.elapsed().as_secs_f64();
    }
    Ok(seconds)
}

fn tokens_of(engine: &Engine, random: &mut Random, count: usize) -> Vec<i32> {
    let vocab = engine.tokenizer().map_or(usize::MAX, |tokenizer| tokenizer.len());
    let vocab = vocab.min(engine.model().config().vocab_size) as u64;
    (0..count).map(|_| random.below(vocab) as i32).collect()
}

fn request(prompt: Vec<i32>, tokens: usize, temperature: f32, seed: u64) -> Request {
    let params = SamplingParams {
        max_tokens: Some(tokens),
        temperature,
        seed: Some(seed),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    Request { prompt, params, ..Request::default() }
}

/// A step. A failed request is an error, because its time would mean nothing.
fn step(engine: &mut Engine) -> Result<()> {
    for event in engine.step()? {
        if let EventKind::Finished { reason: FinishReason::Failed(why), .. } = event.kind {
            return Err(Error::Broken(why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lengths_of_nano_vllm_are_the_same_each_time() {
        let requests = Requests::nano_vllm(256);
        assert_eq!(requests.lengths, Requests::nano_vllm(256).lengths);
        assert!(requests.lengths.as_flattened().iter().all(|length| (100..=1024).contains(length)));
        let mean = requests.output_tokens() as f64 / 256.0;
        assert!((520.0..610.0).contains(&mean), "{mean}");
    }

    #[test]
    fn the_longest_answer_sets_the_steps_and_every_token_reads_the_keys_before_it() {
        let requests = Requests { lengths: vec![[3, 2], [5, 1]], temperature: 0.0 };
        // 3 and 4 keys for the first, 5 for the second.
        assert_eq!(requests.reads(), Reads { steps: 2, keys: 12 });
    }
}
