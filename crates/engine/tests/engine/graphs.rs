//! Steps in fixed memory, which a GPU captures as graphs, give the bits that steps call by call give.

use crate::oracle::{Oracle, VOCAB, tiny_llama};
use crate::{Done, Log, engine, prompt, run_all, some_params, test_device};
use warpsmith::tensor::Random;
use warpsmith::{DType, Device};
use warpsmith_engine::{Cascade, Engine, EngineOptions, FinishReason, Request, SamplingParams, Stats};

/// Requests of many lengths; with every third, all numbers that graphs compute are compared, not tokens alone.
fn requests(count: usize) -> Vec<Request> {
    let mut random = Random::new(21);
    (0..count)
        .map(|i| {
            let (len, tokens) = (1 + random.below(70) as usize, 1 + random.below(90) as usize);
            let prompt = prompt(&mut random, len, VOCAB);
            let mut params = some_params(&mut random, tokens);
            params.logprobs = (i % 3 == 0).then_some(i % 2);
            params.n = if i % 7 == 3 { 3 } else { 1 };
            params.seed = Some(i as u64);
            Request { prompt, params, ..Request::default() }
        })
        .collect()
}

fn options(fixed: bool, max_running: usize) -> EngineOptions {
    EngineOptions {
        page_size: 16,
        num_pages: 400,
        max_running,
        cuda_graphs: fixed,
        fixed_decode: fixed,
        ..EngineOptions::default()
    }
}

pub(crate) fn same(expected: &[Done], got: &[Done], what: &str) {
    assert_eq!(expected.len(), got.len());
    for (i, (a, b)) in expected.iter().zip(got).enumerate() {
        assert_eq!((&a.tokens, &a.reason), (&b.tokens, &b.reason), "output {i}, {what}");
        let bits = |done: &Done| done.logprobs.iter().map(|x| x.map(f32::to_bits)).collect::<Vec<_>>();
        assert_eq!(bits(a), bits(b), "output {i}, {what}");
    }
}

/// On a GPU, whether steps were launches of graphs, as they should be or not.
fn check_graphs(engine: &Engine, captured: bool) {
    let stats = engine.stats();
    if test_device() == Device::Cpu {
        return assert_eq!((stats.graphs, stats.graph_launches), (0, 0));
    }
    assert_eq!(engine.graph_failure(), None);
    assert_eq!(stats.graphs > 0 && stats.graph_launches > stats.graphs as u64, captured, "{stats:?}");
}

#[test]
fn steps_in_fixed_memory_change_no_bits() {
    let requests = requests(48);
    let mut call_by_call = engine(tiny_llama(), options(false, 1));
    let expected = run_all(&mut call_by_call, &requests);
    check_graphs(&call_by_call, false);
    for max_running in [1, 3, 7, 40] {
        for (fixed, overlap) in [(true, true), (true, false), (false, true)] {
            let options = EngineOptions { overlap, ..options(fixed, max_running) };
            let mut engine = engine(tiny_llama(), options);
            let got = run_all(&mut engine, &requests);
            same(&expected, &got, &format!("{max_running} at a time, fixed: {fixed}, overlap: {overlap}"));
            check_graphs(&engine, fixed);
            assert!(overlap || engine.stats().steps_ahead == 0);
            engine.check().unwrap();
        }
    }
}

#[test]
fn steps_in_fixed_memory_change_no_bits_with_keys_and_values_of_8_bits() {
    let requests = requests(24);
    let options = |fixed, count| EngineOptions { kv_dtype: Some(DType::F8E4M3), ..options(fixed, count) };
    let expected = run_all(&mut engine(tiny_llama(), options(false, 1)), &requests);
    for max_running in [3, 40] {
        let mut engine = engine(tiny_llama(), options(true, max_running));
        same(&expected, &run_all(&mut engine, &requests), &format!("{max_running} at a time"));
        check_graphs(&engine, true);
    }
}

#[test]
fn prefixes_that_are_read_once_for_all_change_no_bits() {
    // Some prompts share 40 tokens, others 24 of them, and some nothing.
    let mut random = Random::new(31);
    let stem = prompt(&mut random, 40, VOCAB);
    let requests: Vec<Request> = requests(40)
        .into_iter()
        .enumerate()
        .map(|(i, request)| {
            let shared = &stem[..[40, 0, 24, 40][i % 4]];
            Request { prompt: [shared, &request.prompt].concat(), ..request }
        })
        .collect();
    for (kv_dtype, page_size) in [(None, 8), (None, 16), (Some(DType::F8E4M3), 8)] {
        let options = |cascade, max_running| EngineOptions {
            kv_dtype,
            page_size,
            num_pages: 800,
            cascade,
            ..options(true, max_running)
        };
        let mut apart = engine(tiny_llama(), options(Cascade::Off, 24));
        let expected = run_all(&mut apart, &requests);
        assert_eq!(apart.stats().cascade_steps, 0);
        for (max_running, overlap) in [(24, true), (24, false), (5, true)] {
            let options = EngineOptions { overlap, ..options(Cascade::Always, max_running) };
            let mut engine = engine(tiny_llama(), options);
            // The second time, all prompts are in the cache.
            for time in ["cold", "warm"] {
                same(
                    &expected,
                    &run_all(&mut engine, &requests),
                    &format!("{max_running} at a time, {time}"),
                );
            }
            assert!(engine.stats().cascade_steps > 20, "{:?}", engine.stats());
            engine.check().unwrap();
        }
    }
}

#[test]
fn steps_ahead_of_their_tokens_change_no_bits_whatever_ends_meanwhile() {
    // Plain requests alone are computed ahead. Some end by a token that only the step itself brings, some are cancelled,
    // some come late; pages are few and small, so that steps ahead take new ones, and sometimes get none.
    let mut random = Random::new(4);
    let requests: Vec<Request> = (0..60)
        .map(|i| {
            let (len, tokens) = (1 + random.below(30) as usize, 1 + random.below(60) as usize);
            let params = SamplingParams {
                max_tokens: Some(tokens),
                temperature: [0.0, 1.0][i % 2],
                seed: Some(i as u64),
                stop_ids: vec![7, 8],
                ..SamplingParams::default()
            };
            Request { prompt: prompt(&mut random, len, VOCAB), params, ..Request::default() }
        })
        .collect();
    let base = EngineOptions { page_size: 4, num_pages: 70, max_running: 9, ..options(false, 9) };
    let expected = run_all(&mut engine(tiny_llama(), base.clone()), &requests);
    for (num_pages, max_running) in [(70, 9), (400, 9), (400, 64), (24, 5)] {
        let options =
            EngineOptions { num_pages, max_running, fixed_decode: true, cuda_graphs: true, ..base.clone() };
        let mut engine = engine(tiny_llama(), options);
        let (mut log, mut ids) = (Log::default(), Vec::new());
        for (i, request) in requests.iter().enumerate() {
            ids.push(engine.add_request(request.clone()).unwrap());
            (0..random.below(6)).for_each(|_| log.step(&mut engine));
            if i % 5 == 4 {
                engine.cancel(ids[i]).unwrap();
            }
            engine.check().unwrap();
        }
        let log = log.finish(&mut engine);
        for (i, (id, expected)) in ids.iter().zip(&expected).enumerate() {
            let done = &log.done[&(*id, 0)];
            match done.reason {
                FinishReason::Cancelled => {
                    assert_eq!(done.tokens, expected.tokens[..done.tokens.len()], "{i}")
                }
                _ => assert_eq!((&done.tokens, &done.reason), (&expected.tokens, &expected.reason), "{i}"),
            }
        }
        engine.check().unwrap();
        let stats = engine.stats();
        assert!(stats.steps_ahead > 0, "{stats:?}");
        assert_eq!(stats.available_pages, num_pages);
    }
}

#[test]
fn sequences_that_outgrow_a_width_of_the_page_table_go_on() {
    // Pages of one token: the narrowest table has 1024 pages, of which the pool has fewer; so widths end with the pool's.
    let base = EngineOptions { page_size: 1, num_pages: 480, max_running: 4, ..options(true, 4) };
    let params = SamplingParams { max_tokens: Some(200), ..SamplingParams::greedy() };
    let request = Request { prompt: vec![3, 1, 4], params, ..Request::default() };
    let many = vec![request; 3];
    let fixed = run_all(&mut engine(tiny_llama(), base.clone()), &many);
    let plain = EngineOptions { cuda_graphs: false, fixed_decode: false, ..base };
    same(&run_all(&mut engine(tiny_llama(), plain), &many), &fixed, "long");
}

#[test]
fn a_warm_up_captures_all_graphs_and_leaves_nothing_behind() {
    let requests = requests(20);
    let base = options(true, 9);
    let expected = run_all(&mut engine(tiny_llama(), base.clone()), &requests);
    let mut engine = engine(tiny_llama(), base);
    let before = engine.stats();
    let mut ticks = Vec::new();
    engine.warm_up(&mut |done, all| ticks.push((done, all))).unwrap();
    engine.check().unwrap();
    let warm = engine.stats();
    assert_eq!(Stats { graphs: 0, ..warm }, Stats { graphs: 0, ..before }, "figures");
    if test_device() != Device::Cpu {
        let &(done, all) = ticks.last().unwrap();
        assert!(done == all && warm.graphs == all && ticks.len() == all + 1, "{ticks:?}, {warm:?}");
    }
    let got = run_all(&mut engine, &requests);
    same(&expected, &got, "after a warm-up");
    if test_device() != Device::Cpu {
        assert_eq!(engine.stats().graphs, warm.graphs, "none was left to capture");
    }
    // It would wait for requests that are there.
    engine.add_request(requests[0].clone()).unwrap();
    let told = engine.warm_up(&mut |_, _| ()).unwrap_err().to_string();
    assert!(told.contains("`warm_up`") && told.contains("without requests"), "{told}");
}

#[test]
fn a_model_that_cannot_be_captured_runs_call_by_call() {
    let mut engine = engine(Box::new(Oracle::new(16)), options(true, 4));
    let params = SamplingParams { max_tokens: Some(30), ..SamplingParams::greedy() };
    let request = |first| Request { prompt: vec![first, 2, 3], params: params.clone(), ..Request::default() };
    let done = run_all(&mut engine, &[request(1), request(5), request(9)]);
    for (done, first) in done.iter().zip([1, 5, 9]) {
        assert_eq!(done.tokens, Oracle::output(&[first, 2, 3], 30));
    }
    assert_eq!(engine.stats().graphs, 0);
    assert_eq!(engine.graph_failure().is_some(), test_device() != Device::Cpu);
}
