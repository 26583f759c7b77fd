//! Chooses tokens from logits, on the device, with the ops `penalize` and `sample`.
//!
//! A choice depends only on the row of logits, the request's options, its seed and the position of the token: noise is
//! drawn by seed, position and token id.

use crate::error::Result;
use crate::request::{SamplingParams, TokenLogprob};
use std::collections::BTreeMap;
use warpsmith::ops::{Copy, Embedding, MulAdd, Penalize, Sample};
use warpsmith::tensor::Element;
use warpsmith::{DType, Stream, Tensor, TensorView};

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

impl Choice {
    /// A token alone, without log-probabilities; `None` for the number that means no token.
    pub fn plain(token: i32) -> Option<Choice> {
        (token >= 0).then_some(Choice { token, logprob: None, top: Vec::new() })
    }
}

/// The history of a sequence for penalties.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// How often a token occurs in the output; zero for tokens that occur in the prompt only.
    counts: BTreeMap<i32, i32>,
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

/// One choice to be made, and what it depends on beside the logits.
#[derive(Clone, Copy)]
pub struct Draw<'a> {
    /// The row of the logits. Several draws may share one.
    pub row: usize,
    /// The request's options.
    pub params: &'a SamplingParams,
    /// The seed of the output.
    pub seed: u64,
    /// The position of the token in its sequence.
    pub position: usize,
    /// What the sequence has so far.
    pub history: &'a History,
    /// Whether the output follows a grammar.
    pub constrained: bool,
    /// The tokens that its grammar allows here, a bit for each; all if `None`.
    pub allowed: Option<&'a [u32]>,
}

impl Draw<'_> {
    /// Whether the token follows from the logits and `sample`'s own columns alone, and nothing else is wanted.
    pub fn is_plain(&self) -> bool {
        !History::is_needed(self.params)
            && self.params.logit_bias.is_empty()
            && self.params.logprobs.is_none()
            && !self.constrained
    }

    /// The tokens whose logits change: how often each occurred, -1 for never, and what is added to its logit.
    fn changes(&self) -> BTreeMap<i32, (i32, f32)> {
        let mut changes: BTreeMap<i32, (i32, f32)> =
            self.history.counts.iter().map(|(&token, &count)| (token, (count, 0.0))).collect();
        for &(token, bias) in &self.params.logit_bias {
            changes.entry(token).or_insert((-1, 0.0)).1 += bias;
        }
        changes
    }
}

/// Chooses a token for each draw from `logits`, `[rows, columns]` in f32, in the order of `stream`. Only the first `vocab`
/// columns can be chosen: models may have more columns than tokens. `None` for a row that has nothing but NaN.
///
/// # Errors
/// If an op refuses its arguments.
pub fn choose(
    logits: TensorView<'_>,
    draws: &[Draw<'_>],
    vocab: usize,
    stream: &Stream,
) -> Result<Vec<Option<Choice>>> {
    if draws.is_empty() {
        return Ok(Vec::new());
    }
    let shared = draws.iter().enumerate().any(|(i, draw)| draw.row != i) || draws.len() != logits.shape()[0];
    let own = match shared {
        false => None,
        true => {
            let mut rows = Tensor::empty_on(&[draws.len(), logits.shape()[1]], DType::F32, stream)?;
            let names = column(draws, stream, |draw| draw.row as i32)?;
            Embedding::new(logits, &names).run_into(&mut rows, stream)?;
            Some(rows)
        }
    };
    let raw = own.as_ref().map_or(logits, Tensor::view);
    let changed = match penalized(raw, draws, stream)? {
        Some(changed) => Some(masked(changed.view(), draws, stream)?.unwrap_or(changed)),
        None => masked(raw, draws, stream)?,
    };
    let [seed, position] = [
        column(draws, stream, |draw| draw.seed as i64)?,
        column(draws, stream, |draw| draw.position as i64)?,
    ];
    let temperature = column(draws, stream, |draw| draw.params.temperature)?;
    let (top_k, top_p, min_p) = (
        column(draws, stream, |draw| top_k(draw.params))?,
        column(draws, stream, |draw| draw.params.top_p)?,
        column(draws, stream, |draw| draw.params.min_p)?,
    );
    let mut tokens = Tensor::empty_on(&[draws.len()], DType::I32, stream)?;
    Sample::new(changed.as_ref().map_or(raw, Tensor::view), &seed, &position)
        .temperature(&temperature)
        .top_k(&top_k)
        .top_p(&top_p)
        .min_p(&min_p)
        .raw(raw)
        .vocab(vocab)
        .run_into(&mut tokens, None, stream)?;
    let tokens: Vec<i32> = tokens.to_vec()?;
    let mut choices = Vec::with_capacity(draws.len());
    for (i, (draw, &token)) in draws.iter().zip(&tokens).enumerate() {
        if token < 0 {
            choices.push(None);
            continue;
        }
        let Some(count) = draw.params.logprobs else {
            choices.push(Some(Choice { token, logprob: None, top: Vec::new() }));
            continue;
        };
        // One computation for all tokens of a position: a token has the same number wherever it is reported.
        let row = raw.narrow(0, i, 1).expect("a row for each draw").to_vec::<f32>()?;
        let row = Logprobs::new(&row[..vocab.min(row.len())]);
        let logprob = row.of(token as usize);
        choices.push(Some(Choice { token, logprob: Some(logprob), top: row.most_likely(count) }));
    }
    Ok(choices)
}

/// The option as `sample` takes it.
pub fn top_k(params: &SamplingParams) -> i32 {
    params.top_k.min(i32::MAX as usize) as i32
}

/// A number of each draw, as a tensor.
fn column<T: Element>(
    draws: &[Draw<'_>],
    stream: &Stream,
    number: impl Fn(&Draw<'_>) -> T,
) -> Result<Tensor> {
    upload(&draws.iter().map(number).collect::<Vec<T>>(), &[draws.len()], stream)
}

/// Numbers as a tensor, copied in the order of `stream`.
fn upload<T: Element>(numbers: &[T], shape: &[usize], stream: &Stream) -> Result<Tensor> {
    let mut tensor = Tensor::empty_on(shape, T::DTYPE, stream)?;
    tensor.write(0, numbers, stream)?;
    Ok(tensor)
}

/// The logits after penalties and biases; `None` if no draw has any.
fn penalized(logits: TensorView<'_>, draws: &[Draw<'_>], stream: &Stream) -> Result<Option<Tensor>> {
    let changes: Vec<BTreeMap<i32, (i32, f32)>> = draws.iter().map(Draw::changes).collect();
    let width = changes.iter().map(BTreeMap::len).max().unwrap_or(0);
    if width == 0 {
        return Ok(None);
    }
    let (mut ids, mut counts, mut bias) = (Vec::new(), Vec::new(), Vec::new());
    for row in &changes {
        for (&id, &(count, added)) in row {
            ids.push(id);
            counts.push(count);
            bias.push(added);
        }
        let filled = ids.len() + width - row.len();
        ids.resize(filled, -1);
        counts.resize(filled, -1);
        bias.resize(filled, 0.0);
    }
    let shape = [draws.len(), width];
    let (ids, counts) = (upload(&ids, &shape, stream)?, upload(&counts, &shape, stream)?);
    let bias = upload(&bias, &shape, stream)?;
    let mut changed = Tensor::empty_on(logits.shape(), logits.dtype(), stream)?;
    Copy::new(logits).run_into(&mut changed, stream)?;
    Penalize::new(&ids, &counts)
        .bias(&bias)
        .repetition(&column(draws, stream, |draw| draw.params.repetition_penalty)?)
        .presence(&column(draws, stream, |draw| draw.params.presence_penalty)?)
        .frequency(&column(draws, stream, |draw| draw.params.frequency_penalty)?)
        .run_into(&mut changed, stream)?;
    Ok(Some(changed))
}

/// The logits without the tokens that grammars forbid; `None` if no draw has a grammar that forbids any.
fn masked(logits: TensorView<'_>, draws: &[Draw<'_>], stream: &Stream) -> Result<Option<Tensor>> {
    if draws.iter().all(|draw| draw.allowed.is_none()) {
        return Ok(None);
    }
    let columns = logits.shape()[1];
    // Each logit times 1 plus 0, or times 0 minus infinity. Infinity times 0 is NaN, which counts as minus infinity too.
    let mut factors = vec![1.0f32; draws.len() * columns];
    let mut added = vec![0.0f32; draws.len() * columns];
    for (i, words) in draws.iter().enumerate().filter_map(|(i, draw)| Some((i, draw.allowed?))) {
        let row = i * columns..(i + 1) * columns;
        for (j, (factor, added)) in factors[row.clone()].iter_mut().zip(&mut added[row]).enumerate() {
            if words.get(j / 32).is_none_or(|word| word >> (j % 32) & 1 == 0) {
                (*factor, *added) = (0.0, f32::NEG_INFINITY);
            }
        }
    }
    let shape = logits.shape();
    let (factors, added) = (upload(&factors, shape, stream)?, upload(&added, shape, stream)?);
    let mut masked = Tensor::empty_on(shape, DType::F32, stream)?;
    MulAdd::new(logits, &factors, &added).run_into(&mut masked, stream)?;
    Ok(Some(masked))
}

/// The log-probabilities of a row of logits.
struct Logprobs<'a> {
    logits: &'a [f32],
    largest: f64,
    log_sum: f64,
}

impl Logprobs<'_> {
    fn new(logits: &[f32]) -> Logprobs<'_> {
        let row = Logprobs { logits, largest: 0.0, log_sum: 0.0 };
        let all = || (0..logits.len()).map(|token| f64::from(row.logit(token)));
        let largest = all().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all().map(|logit| (logit - largest).exp()).sum();
        Logprobs { largest, log_sum: sum.ln(), ..row }
    }

    /// NaN counts as minus infinity, plus infinity as the largest number, as they do for `sample`.
    fn logit(&self, token: usize) -> f32 {
        let logit = self.logits[token];
        if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
    }

    fn of(&self, token: usize) -> f32 {
        (f64::from(self.logit(token)) - self.largest - self.log_sum) as f32
    }

    /// The most likely tokens, the likeliest first, the lowest of equal ones.
    fn most_likely(&self, count: usize) -> Vec<TokenLogprob> {
        let mut order: Vec<usize> = (0..self.logits.len()).collect();
        let by_rank = |&a: &usize, &b: &usize| self.logit(b).total_cmp(&self.logit(a)).then(a.cmp(&b));
        if count < order.len() {
            order.select_nth_unstable_by(count, by_rank);
            order.truncate(count);
        }
        order.sort_unstable_by(by_rank);
        order.into_iter().map(|token| TokenLogprob { token: token as i32, logprob: self.of(token) }).collect()
    }
}

/// The seed of one of several outputs of a request.
pub fn seed_of_output(seed: u64, index: usize) -> u64 {
    // SplitMix64's finaliser: neighbouring indices give seeds that have nothing to do with each other.
    let mix = |value: u64| {
        let mut bits = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    };
    if index == 0 { seed } else { mix(seed ^ mix(index as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpsmith::Device;

    fn draw<'a>(params: &'a SamplingParams, seed: u64, history: &'a History) -> Draw<'a> {
        Draw { row: 0, params, seed, position: 3, history, constrained: false, allowed: None }
    }

    fn row(logits: &[f32]) -> Tensor {
        Tensor::from_slice(logits, &[1, logits.len()], Device::Cpu).unwrap()
    }

    fn pick(logits: &[f32], params: &SamplingParams, vocab: usize) -> Option<Choice> {
        choose(row(logits).view(), &[draw(params, 0, &History::default())], vocab, &Stream::Host)
            .unwrap()
            .remove(0)
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest_that_exist() {
        assert_eq!(pick(&[1.0, 4.0, 4.0, 2.0], &SamplingParams::greedy(), 4).unwrap().token, 1);
        assert_eq!(pick(&[1.0, 2.0, 9.0, f32::NAN], &SamplingParams::greedy(), 2).unwrap().token, 1);
        assert_eq!(pick(&[f32::NAN; 4], &SamplingParams::default(), 4), None);
    }

    #[test]
    fn draws_of_one_row_follow_its_distribution_and_their_cuts() {
        let probabilities = [0.5f32, 0.3, 0.15, 0.05];
        let logits = row(&probabilities.map(f32::ln));
        let none = History::default();
        let counts = |params: &SamplingParams| {
            let draws: Vec<Draw<'_>> = (0..8000).map(|seed| draw(params, seed, &none)).collect();
            let mut counts = [0usize; 4];
            let choices = choose(logits.view(), &draws, 4, &Stream::Host).unwrap();
            choices.iter().for_each(|choice| counts[choice.as_ref().unwrap().token as usize] += 1);
            counts
        };
        let base = SamplingParams::default();
        for (count, probability) in counts(&base).iter().zip(probabilities) {
            assert!((*count as f32 / 8000.0 - probability).abs() < 0.02, "{:?}", counts(&base));
        }
        let seen = |params: SamplingParams| counts(&params).map(|count| count > 0);
        assert_eq!(seen(SamplingParams { top_k: 2, ..base.clone() }), [true, true, false, false]);
        assert_eq!(seen(SamplingParams { top_p: 0.6, ..base.clone() }), [true, true, false, false]);
        assert_eq!(seen(SamplingParams { min_p: 0.25, ..base.clone() }), [true, true, true, false]);
        let biased = SamplingParams { logit_bias: vec![(0, -1000.0)], ..base };
        assert_eq!(seen(biased), [false, true, true, true]);
    }

    #[test]
    fn penalties_change_the_rows_of_those_who_asked() {
        let plain = SamplingParams::greedy();
        let repeats = SamplingParams { repetition_penalty: 2.0, ..plain.clone() };
        let counts = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..plain.clone() };
        let logits: Vec<f32> = [2.0, 1.5, -1.0].repeat(3);
        let logits = Tensor::from_slice(&logits, &[3, 3], Device::Cpu).unwrap();
        let mut histories = [History::default(), History::new(&repeats, &[0]), History::new(&counts, &[0])];
        histories[1].push(&repeats, 2);
        (0..2).for_each(|_| histories[2].push(&counts, 1));
        let draws: Vec<Draw<'_>> = [&plain, &repeats, &counts]
            .into_iter()
            .zip(&histories)
            .enumerate()
            .map(|(row, (params, history))| Draw { row, ..draw(params, 0, history) })
            .collect();
        let changed: Vec<f32> =
            penalized(logits.view(), &draws, &Stream::Host).unwrap().unwrap().to_vec().unwrap();
        assert_eq!(changed, [2.0, 1.5, -1.0, 1.0, 1.5, -2.0, 2.0, 0.5, -1.0]);
    }

    #[test]
    fn a_grammar_takes_tokens_from_the_rows_that_follow_it_alone() {
        let (params, history) = (SamplingParams::greedy(), History::default());
        let logits: Vec<f32> = [3.0, f32::INFINITY, 2.0, f32::NAN].repeat(3);
        let logits = Tensor::from_slice(&logits, &[3, 4], Device::Cpu).unwrap();
        let tokens = |allowed: [Option<&[u32]>; 3]| {
            let draws: Vec<Draw<'_>> = (0..3)
                .map(|row| Draw {
                    row,
                    constrained: true,
                    allowed: allowed[row],
                    ..draw(&params, 0, &history)
                })
                .collect();
            let choices = choose(logits.view(), &draws, 4, &Stream::Host).unwrap();
            choices.into_iter().map(|choice| choice.map(|choice| choice.token)).collect::<Vec<_>>()
        };
        assert_eq!(tokens([Some(&[0b0101]), None, Some(&[0b0100])]), [Some(0), Some(1), Some(2)]);
        // Nothing that is a number is left, and words that are missing allow nothing.
        assert_eq!(tokens([Some(&[0b1000]), Some(&[]), Some(&[0b1101])]), [None, None, Some(0)]);
    }

    #[test]
    fn log_probabilities_are_those_of_the_model() {
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let params =
            SamplingParams { logprobs: Some(2), logit_bias: vec![(2, 50.0)], ..SamplingParams::greedy() };
        let choice = pick(&logits, &params, 3).unwrap();
        assert_eq!(choice.token, 2);
        assert!((choice.logprob.unwrap() - 0.2f32.ln()).abs() < 1e-5);
        let top: Vec<i32> = choice.top.iter().map(|top| top.token).collect();
        assert_eq!(top, [0, 1]);
        assert!((choice.top[0].logprob - 0.5f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_token_has_the_same_log_probability_wherever_it_is_told() {
        let width = 1000;
        let mut random = warpsmith::tensor::Random::new(3);
        for scale in [0.1, 3.0, 40.0] {
            let logits: Vec<f32> = (0..width).map(|_| (scale * random.normal()) as f32).collect();
            let asked = |count| SamplingParams { logprobs: Some(count), ..SamplingParams::greedy() };
            let [alone, with_top] = [0, 5].map(|count| pick(&logits, &asked(count), width).unwrap());
            assert_eq!((alone.top.len(), with_top.top.len()), (0, 5));
            assert_eq!(with_top.top[0].token, with_top.token);
            let bits = |logprob: f32| logprob.to_bits();
            assert_eq!(bits(with_top.top[0].logprob), bits(with_top.logprob.unwrap()));
            assert_eq!(bits(alone.logprob.unwrap()), bits(with_top.logprob.unwrap()));
            let exact: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
            let exact = f64::from(logits[alone.token as usize]) - exact;
            assert!(
                (f64::from(alone.logprob.unwrap()) - exact).abs() <= 1e-6 * exact.abs().max(1e-6),
                "{exact}"
            );
        }
        // Infinity is the largest number, and more tokens are asked for than there are.
        let params = SamplingParams { logprobs: Some(5), ..SamplingParams::greedy() };
        let choice = pick(&[1.0, f32::INFINITY, f32::NAN], &params, 3).unwrap();
        assert_eq!((choice.token, choice.logprob, choice.top.len()), (1, Some(0.0), 3));
        assert_eq!(choice.top[2], TokenLogprob { token: 2, logprob: f32::NEG_INFINITY });
    }
}
