//! What a profile shows of the engine.

use crate::oracle::tiny_llama;
use crate::{Log, engine, prompt};
use warpsmith::profile::{Kind, Session, SpanRecord};
use warpsmith::tensor::Random;
use warpsmith_engine::{EngineOptions, Request, SamplingParams};

/// Other tests run on other threads meanwhile, and are recorded too: what counts is what this thread did.
#[test]
fn steps_hold_layers_and_calls_and_requests_wait_read_and_answer() {
    let mut engine = engine(tiny_llama(), EngineOptions { max_running: 1, ..EngineOptions::default() });
    let mut random = Random::new(5);
    let session = Session::start().unwrap();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let params = SamplingParams { max_tokens: Some(3), ..SamplingParams::greedy() };
        let prompt = prompt(&mut random, 7, crate::oracle::VOCAB);
        ids.push(engine.add_request(Request { prompt, params, ..Request::default() }).unwrap());
    }
    Log::default().finish(&mut engine);
    {
        let _mine = warpsmith::profile::span(Kind::User, || "this thread".into());
    }
    let records = session.stop();
    let mine = records.spans.iter().find(|span| span.name == "this thread").unwrap().thread;
    let of = |kind: Kind| records.spans.iter().filter(move |span| span.kind == kind && span.thread == mine);
    let names: Vec<&str> = of(Kind::Step).map(|span| span.name.as_str()).collect();
    let one = ["prompts of 7 tokens", "decode of 1", "decode of 1"];
    assert_eq!(names, [one, one].concat());
    let inside =
        |inner: &SpanRecord, outer: &SpanRecord| inner.start >= outer.start && inner.end <= outer.end;
    for step in of(Kind::Step) {
        let layers: Vec<&SpanRecord> = of(Kind::Layer).filter(|layer| inside(layer, step)).collect();
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        assert_eq!(names, ["embedding", "layer 0", "layer 1", "head"]);
        let calls = |layer: &SpanRecord| {
            let mine = records.calls.iter().filter(|call| call.thread == mine);
            mine.filter(|call| call.start >= layer.start && call.end <= layer.end).count()
        };
        assert!(layers.iter().all(|layer| calls(layer) > 0));
        assert!(of(Kind::Host).any(|span| span.name == "choose tokens" && inside(span, step)));
    }
    for id in ids {
        let life: Vec<&SpanRecord> = of(Kind::Request).filter(|span| span.track == Some(id.0)).collect();
        let part = |name: &str| *life.iter().find(|span| span.name == name).unwrap();
        let [whole, queue, prompt, answer] =
            [&format!("request {id}"), "queue", "prompt", "answer"].map(part);
        assert_eq!((whole.start, whole.end), (queue.start, answer.end));
        assert_eq!((queue.end, prompt.end), (prompt.start, answer.start));
    }
    // The second one waited until the first was done.
    let waits: Vec<u64> = of(Kind::Request).filter(|s| s.name == "queue").map(|s| s.end - s.start).collect();
    assert!(waits.len() == 2 && waits.iter().max() > waits.iter().min(), "{waits:?}");
}
