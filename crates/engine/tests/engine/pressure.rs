//! Too few pages, too little patience.

use crate::oracle::{Oracle, VOCAB};
use crate::{Log, engine, prompt};
use warpsmith::tensor::Random;
use warpsmith_engine::{EngineOptions, FinishReason, Request, SamplingParams};

fn options(num_pages: usize) -> EngineOptions {
    EngineOptions {
        page_size: 4,
        num_pages,
        max_batch_tokens: 128,
        max_chunk: 64,
        ..EngineOptions::default()
    }
}

#[test]
fn all_finish_with_a_third_of_the_pages_they_want() {
    let mut random = Random::new(1);
    // 64 requests at a time, of 22 pages each on average, would need 1400.
    const PAGES: usize = 470;
    let mut engine = engine(Box::new(Oracle::new(4)), options(PAGES));
    let (mut log, mut wanted) = (Log::default(), Vec::new());
    for _ in 0..5000 {
        let (len, count) = (1 + random.below(30) as usize, 1 + random.below(150) as usize);
        let prompt = prompt(&mut random, len, VOCAB);
        let params = SamplingParams { max_tokens: Some(count), ..SamplingParams::greedy() };
        wanted.push(Oracle::output(&prompt, count));
        engine.add_request(Request { prompt, params, ..Request::default() }).unwrap();
        if random.below(8) == 0 {
            log.step(&mut engine);
        }
    }
    let log = log.finish(&mut engine);
    assert!(engine.stats().preemptions > 100, "pages run out: {:?}", engine.stats());
    for (done, wanted) in log.done.values().zip(&wanted) {
        assert_eq!((&done.tokens, &done.reason), (wanted, &FinishReason::Length));
        assert!(done.usage.preemptions <= 8, "{:?}", done.usage);
    }
    engine.check().unwrap();
    assert_eq!(engine.stats().available_pages, PAGES);
}

#[test]
fn cancellations_at_any_phase_leave_nothing_behind() {
    let mut random = Random::new(2);
    let mut engine = engine(Box::new(Oracle::new(4)), options(120));
    let (mut log, mut live, mut cancelled) = (Log::default(), Vec::new(), 0);
    while cancelled < 2000 {
        let (len, count) = (1 + random.below(60) as usize, 1 + random.below(40) as usize);
        let n = if random.below(5) == 0 { 3 } else { 1 };
        let params = SamplingParams { max_tokens: Some(count), n, ..SamplingParams::greedy() };
        let request = Request { prompt: prompt(&mut random, len, VOCAB), params, ..Request::default() };
        live.push(engine.add_request(request).unwrap());
        (0..random.below(4)).for_each(|_| log.step(&mut engine));
        while live.len() > 8 || (!live.is_empty() && random.below(2) == 0) {
            let id = live.swap_remove(random.below(live.len() as u64) as usize);
            cancelled += engine.cancel(id).unwrap() as usize;
            engine.check().unwrap();
        }
    }
    let log = log.finish(&mut engine);
    let ended = log.done.values().filter(|done| done.reason == FinishReason::Cancelled).count();
    assert!(ended >= cancelled, "each output of a cancelled request says so");
    engine.check().unwrap();
    assert_eq!(engine.stats().available_pages, 120);
    engine.clear_prefix_cache();
    assert_eq!((engine.stats().available_pages, engine.stats().cached_pages), (120, 0));
}

#[test]
fn priorities_come_first_and_lose_their_pages_last() {
    let mut engine = engine(Box::new(Oracle::new(4)), EngineOptions { max_running: 2, ..options(12) });
    let request = |priority: i32| Request {
        prompt: vec![1, 2, 3, priority.rem_euclid(7)],
        params: SamplingParams { max_tokens: Some(30), ..SamplingParams::greedy() },
        priority,
        ..Request::default()
    };
    let late: Vec<_> = (0..3).map(|_| engine.add_request(request(5)).unwrap()).collect();
    let urgent = engine.add_request(request(-5)).unwrap();
    let mut log = Log::default();
    while !log.done.contains_key(&(urgent, 0)) {
        log.step(&mut engine);
        assert!(
            late.iter().skip(1).all(|&id| !log.done.contains_key(&(id, 0))),
            "the urgent one is not last"
        );
    }
    assert_eq!(log.done[&(urgent, 0)].usage.preemptions, 0);
    log.finish(&mut engine);
}

#[test]
fn a_request_past_its_deadline_ends_and_others_go_on() {
    let mut engine = engine(Box::new(Oracle::new(4)), options(50));
    let params = SamplingParams { max_tokens: Some(10), ..SamplingParams::greedy() };
    let request = Request { prompt: vec![1, 2, 3], params, ..Request::default() };
    let past = Some(std::time::Instant::now());
    let late = engine.add_request(Request { deadline: past, ..request.clone() }).unwrap();
    let other = engine.add_request(request).unwrap();
    let log = Log::default().finish(&mut engine);
    assert_eq!(log.done[&(late, 0)].reason, FinishReason::Deadline);
    assert_eq!(log.done[&(other, 0)].tokens, Oracle::output(&[1, 2, 3], 10));
}
