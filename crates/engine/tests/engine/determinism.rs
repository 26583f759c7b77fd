//! Needles: requests whose tokens must be the same, bit for bit, whatever else happens.

use crate::oracle::{VOCAB, tiny_llama};
use crate::{Done, Log, engine, prompt, run_all, some_params};
use warpsmith::DType;
use warpsmith::tensor::Random;
use warpsmith_engine::{EngineOptions, Request, SamplingParams};

/// Prompts with common beginnings, of many lengths.
fn needles(count: usize, max_tokens: usize) -> Vec<Request> {
    let mut random = Random::new(3);
    let system = prompt(&mut random, 37, VOCAB);
    (0..count)
        .map(|i| {
            let shared = [0, 16, 21, 37][i % 4];
            let len = 1 + random.below(40) as usize;
            let own = prompt(&mut random, len, VOCAB);
            // Log-probabilities show differences of single bits that tokens hide.
            let params = SamplingParams { logprobs: Some(0), ..some_params(&mut random, max_tokens) };
            Request { prompt: [&system[..shared], &own].concat(), params, ..Request::default() }
        })
        .collect()
}

fn same(expected: &[Done], got: &[Done], what: &str) {
    assert_eq!(expected.len(), got.len());
    for (i, (a, b)) in expected.iter().zip(got).enumerate() {
        assert_eq!((&a.tokens, &a.reason), (&b.tokens, &b.reason), "needle {i}, {what}");
        let bits = |done: &Done| done.logprobs.iter().map(|l| l.map(f32::to_bits)).collect::<Vec<_>>();
        assert_eq!(bits(a), bits(b), "log-probabilities of needle {i}, {what}");
    }
}

#[test]
fn tokens_do_not_depend_on_batch_chunks_cache_or_preemption() {
    compare(40, 24, None);
}

#[test]
fn nor_do_they_with_keys_and_values_of_8_bits() {
    compare(40, 24, Some(DType::F8E4M3));
}

/// `cargo test --release -p warpsmith-engine --test engine -- --ignored three_hundred`
#[test]
#[ignore = "takes minutes"]
fn three_hundred_needles_of_64_tokens_do_not_depend_on_anything_either() {
    compare(300, 64, None);
}

fn compare(count: usize, tokens: usize, kv_dtype: Option<DType>) {
    let needles = needles(count, tokens);
    let base = EngineOptions { num_pages: 400, page_size: 8, kv_dtype, ..EngineOptions::default() };

    let alone: Vec<Done> = needles
        .iter()
        .map(|needle| {
            let mut engine = engine(tiny_llama(), EngineOptions { prefix_cache: false, ..base.clone() });
            run_all(&mut engine, std::slice::from_ref(needle)).remove(0)
        })
        .collect();
    assert!(alone.iter().all(|done| done.tokens.len() == tokens));

    let mut together = engine(tiny_llama(), base.clone());
    same(&alone, &run_all(&mut together, &needles), "all together, cold");
    let warm = run_all(&mut together, &needles);
    assert!(warm.iter().filter(|done| done.usage.cached_tokens > 0).count() > 20, "the cache is used");
    same(&alone, &warm, "all together, warm");

    for max_chunk in [1, 3, 7, 16] {
        let options = EngineOptions { max_chunk, max_batch_tokens: 24, max_running: 10, ..base.clone() };
        same(
            &alone,
            &run_all(&mut engine(tiny_llama(), options), &needles),
            &format!("chunks of {max_chunk}"),
        );
    }

    for prefix_cache in [true, false] {
        let options = EngineOptions { num_pages: 34, prefix_cache, ..base.clone() };
        let mut tight = engine(tiny_llama(), options);
        let done = run_all(&mut tight, &needles);
        assert!(tight.stats().preemptions > 0, "pages run out");
        same(&alone, &done, "preempted");
    }

    // Arriving at odd times, and among requests that are cancelled.
    let mut mixed = engine(tiny_llama(), EngineOptions { num_pages: 60, ..base });
    let mut random = Random::new(9);
    let (mut log, mut ids, mut noise) = (Log::default(), Vec::new(), Vec::new());
    for needle in &needles {
        let len = 1 + random.below(60) as usize;
        let params = some_params(&mut random, 30);
        let other = Request { prompt: prompt(&mut random, len, VOCAB), params, ..Request::default() };
        noise.push(mixed.add_request(other).unwrap());
        ids.push(mixed.add_request(needle.clone()).unwrap());
        (0..random.below(4)).for_each(|_| log.step(&mut mixed));
        if random.below(2) == 0 {
            mixed.cancel(noise[random.below(noise.len() as u64) as usize]).unwrap();
        }
    }
    let log = log.finish(&mut mixed);
    let done: Vec<Done> = ids.iter().map(|&id| log.done[&(id, 0)].clone()).collect();
    same(&alone, &done, "among others");
    mixed.check().unwrap();
}

#[test]
fn each_of_n_outputs_is_the_one_that_its_seed_gives() {
    let params =
        SamplingParams { n: 5, seed: Some(11), temperature: 1.5, max_tokens: Some(20), ..Default::default() };
    let request = Request { prompt: (0..21).collect(), params, ..Request::default() };
    let base = EngineOptions { num_pages: 100, page_size: 8, ..EngineOptions::default() };
    let expected = run_all(&mut engine(tiny_llama(), base.clone()), std::slice::from_ref(&request));
    assert_eq!(expected.len(), 5);
    let mut different: Vec<&Vec<i32>> = expected.iter().map(|done| &done.tokens).collect();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), 5, "the outputs differ");
    for (what, options) in [
        ("few at a time", EngineOptions { max_running: 2, ..base.clone() }),
        ("without a cache", EngineOptions { prefix_cache: false, ..base.clone() }),
        ("few pages", EngineOptions { num_pages: 9, ..base.clone() }),
        ("few pages, no cache", EngineOptions { num_pages: 9, prefix_cache: false, ..base }),
    ] {
        let mut engine = engine(tiny_llama(), options);
        same(&expected, &run_all(&mut engine, std::slice::from_ref(&request)), what);
        engine.check().unwrap();
    }
}
