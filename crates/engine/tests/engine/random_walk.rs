//! Random requests, cancellations and steps, with every invariant checked after each.

use crate::oracle::{Oracle, VOCAB, tiny_llama};
use crate::{Log, engine, prompt, some_params};
use warpsmith::tensor::Random;
use warpsmith_engine::models::Model;
use warpsmith_engine::{Cascade, EngineOptions, FinishReason, Request, RequestId};

/// Walks for `steps` steps in an engine that is small enough to run out of everything. With `is_oracle` each output is
/// compared with the one it must be.
fn walk(model: impl Fn() -> Box<dyn Model>, is_oracle: bool, steps: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut left = steps;
    while left > 0 {
        let options = EngineOptions {
            page_size: 4,
            num_pages: 16 + random.below(60) as usize,
            max_batch_tokens: 8 + random.below(60) as usize,
            max_chunk: 1 + random.below(8) as usize,
            max_running: 1 + random.below(8) as usize,
            prefix_cache: random.below(4) > 0,
            fixed_decode: random.below(4) > 0,
            overlap: random.below(4) > 0,
            cuda_graphs: random.below(4) > 0,
            cascade: [Cascade::Off, Cascade::Always][random.below(2) as usize],
            ..EngineOptions::default()
        };
        let most = options.page_size * options.num_pages;
        let pages = options.num_pages;
        let mut engine = engine(model(), options);
        let mut log = Log::default();
        let mut live: Vec<(RequestId, Vec<i32>)> = Vec::new();
        let mut wanted = std::collections::BTreeMap::new();
        let stems: Vec<Vec<i32>> = (0..3).map(|_| prompt(&mut random, 24, VOCAB)).collect();
        for _ in 0..left.min(2000) {
            left -= 1;
            if random.below(3) == 0 {
                let stem = &stems[random.below(3) as usize][..random.below(25) as usize];
                let own = 1 + random.below(12) as usize;
                let prompt = [stem, &prompt(&mut random, own, VOCAB)[..]].concat();
                let count = 1 + random.below(30) as usize;
                let mut params = some_params(&mut random, count);
                if is_oracle {
                    params.temperature = 0.0;
                    params.repetition_penalty = 1.0;
                    params.frequency_penalty = 0.0;
                }
                params.n = [1, 1, 1, 1, 4][random.below(5) as usize];
                let priority = random.below(3) as i32;
                let fits = prompt.len() + count <= most + 1;
                // Tenants with and without a salt.
                let salt = [None, Some([1; 32]), Some([2; 32])][random.below(3) as usize];
                let request =
                    Request { prompt: prompt.clone(), params, priority, salt, ..Request::default() };
                match engine.add_request(request) {
                    Ok(id) => {
                        assert!(fits);
                        wanted.insert(id, Oracle::output(&prompt, count));
                        live.push((id, prompt));
                    }
                    Err(error) => assert!(!fits, "{error}"),
                }
            }
            if !live.is_empty() && random.below(12) == 0 {
                let (id, _) = live.swap_remove(random.below(live.len() as u64) as usize);
                engine.cancel(id).unwrap();
            }
            log.step(&mut engine);
            engine.check().unwrap();
        }
        let log = log.finish(&mut engine);
        engine.check().unwrap();
        assert_eq!(engine.stats().available_pages, pages);
        for ((id, _), done) in &log.done {
            match &done.reason {
                FinishReason::Length if is_oracle => assert_eq!(done.tokens, wanted[id]),
                FinishReason::Length => assert_eq!(done.tokens.len(), wanted[id].len()),
                FinishReason::Cancelled if is_oracle => {
                    assert_eq!(done.tokens, wanted[id][..done.tokens.len()])
                }
                FinishReason::Cancelled => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn random_steps_keep_every_rule() {
    walk(|| Box::new(Oracle::new(4)), true, 20_000, 1);
}

#[test]
fn random_steps_of_a_real_model_keep_every_rule() {
    walk(tiny_llama, false, 3_000, 2);
}

/// `cargo test --release -p warpsmith-engine --test engine -- --ignored a_million`
#[test]
#[ignore = "takes minutes"]
fn a_million_random_steps_keep_every_rule() {
    std::thread::scope(|scope| {
        for seed in 10..18 {
            scope.spawn(move || {
                walk(|| Box::new(Oracle::new(4)), true, 62_500, seed);
                walk(tiny_llama, false, 62_500, seed + 10);
            });
        }
    });
}
