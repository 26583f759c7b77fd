//! Grammars of requests: what they forbid never comes, wherever the step runs, and others do not notice.

use crate::oracle::{Oracle, VOCAB};
use crate::{Done, engine, run_all};
use std::sync::Arc;
use warpsmith_engine::{
    Constraint, EngineOptions, FinishReason, Grammar, Request, SamplingParams, SharedGrammar,
};

/// Every token is three larger than the one before, round and round, and the output ends after so many. One that begins with
/// `fails` cannot go on.
struct Stairs {
    length: usize,
    fails: bool,
}

struct Climbing {
    last: Option<i32>,
    left: usize,
    fails: bool,
}

impl Grammar for Stairs {
    fn begin(&self) -> Box<dyn Constraint> {
        Box::new(Climbing { last: None, left: self.length, fails: self.fails })
    }
}

impl Constraint for Climbing {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<bool, String> {
        // The first token is free.
        let Some(last) = self.last else { return Ok(false) };
        if self.fails {
            return Err("there is no next step".into());
        }
        assert!(mask.iter().all(|word| *word == 0));
        let next = (last as usize + 3) % VOCAB;
        mask[next / 32] |= 1 << (next % 32);
        Ok(true)
    }

    fn accept(&mut self, token: i32) -> Result<bool, String> {
        if self.last.is_some_and(|last| token as usize != (last as usize + 3) % VOCAB) {
            return Err(format!("{token} after {:?}", self.last));
        }
        self.last = Some(token);
        self.left -= 1;
        Ok(self.left == 0)
    }
}

fn stairs(length: usize, fails: bool) -> Option<SharedGrammar> {
    Some(SharedGrammar::new(Arc::new(Stairs { length, fails })))
}

fn request(prompt: Vec<i32>, n: usize, grammar: Option<SharedGrammar>) -> Request {
    let params = SamplingParams { max_tokens: Some(20), n, ..SamplingParams::greedy() };
    Request { prompt, params, grammar, ..Request::default() }
}

#[test]
fn what_a_grammar_forbids_never_comes_and_others_do_not_notice() {
    for (fixed_decode, overlap, pages) in [(false, false, 200), (true, true, 200), (true, true, 14)] {
        let options = EngineOptions {
            page_size: 4,
            num_pages: pages,
            fixed_decode,
            overlap,
            ..EngineOptions::default()
        };
        let prompts: Vec<Vec<i32>> = (0..6).map(|i| vec![i, i + 1, 7]).collect();
        let requests: Vec<Request> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| match i {
                1 => request(prompt.clone(), 1, stairs(9, false)),
                3 => request(prompt.clone(), 3, stairs(50, false)),
                5 => request(prompt.clone(), 1, stairs(9, true)),
                _ => request(prompt.clone(), 1, None),
            })
            .collect();
        let mut engine = engine(Box::new(Oracle::new(4)), options);
        let done = run_all(&mut engine, &requests);
        engine.check().unwrap();
        let climbs = |done: &Done, first: i32| {
            let expected = (0..done.tokens.len() as i32).map(|i| (first + 3 * i) % VOCAB as i32);
            done.tokens.iter().copied().eq(expected)
        };
        let first = |i: usize| Oracle::output(&prompts[i], 1)[0];
        for (i, at) in [(0, 0), (2, 2), (4, 6)] {
            assert_eq!(done[at].tokens, Oracle::output(&prompts[i], 20), "request {i}");
        }
        // It is complete after nine tokens.
        assert!(done[1].tokens.len() == 9 && climbs(&done[1], first(1)), "{:?}", done[1]);
        assert_eq!(done[1].reason, FinishReason::Stop);
        for output in &done[3..6] {
            assert!(output.tokens.len() == 20 && climbs(output, first(3)), "{output:?}");
            assert_eq!(output.reason, FinishReason::Length);
        }
        let FinishReason::Failed(why) = &done[7].reason else { panic!("{:?}", done[7]) };
        assert!(done[7].tokens.len() == 1 && why.contains("no next step"), "{why}");
    }
}
