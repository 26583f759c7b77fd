//! From the start of a server to its end.

use crate::harness::{Running, Setup, engine, user};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use warpsmith::{Stream, TensorViewMut};
use warpsmith_engine::models::{Config, Model};
use warpsmith_engine::{Batch, Engine, EngineOptions, Error, KvCache, Result};
use warpsmith_server::Ended;
use warpsmith_server::bridge::State;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_served_before_the_first_token_can_be_made() {
    let gate = Arc::new(AtomicBool::new(false));
    let open = gate.clone();
    let server = Running::open(Setup::default(), move |setup| {
        while !open.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        engine(setup)
    })
    .await;
    for (path, body) in
        [("/health", None), ("/v1/models", None), (CHAT, Some(json!({ "messages": user("a") })))]
    {
        let method = if body.is_some() { "POST" } else { "GET" };
        let answer = server.target.send(method, path, body.as_ref()).await.unwrap();
        assert_eq!(answer.status, 503, "{path}");
        assert_eq!(answer.json()["error"]["message"], "the model is being loaded");
    }
    assert_eq!(server.get("/server_info").await.json()["state"], "loading");
    gate.store(true, Ordering::Relaxed);
    server.bridge.watch().wait_for(|state| *state == State::Ready).await.unwrap();
    assert_eq!(server.get("/health").await.status, 200);
    server.ask(CHAT, json!({ "messages": user("a"), "max_tokens": 2 })).await;
    assert_eq!(server.stop().await, Ended::Told);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_told_to_end_finishes_what_it_has_begun() {
    let mut server = slow(Setup::default()).await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 200, "stream": true });
    let (target, other) = (server.target.clone(), server.target.clone());
    let mut events = 0;
    let long = tokio::spawn(async move {
        let mut finish = None;
        target
            .stream("/v1/completions", &body, |data| {
                events += 1;
                if let Ok(event) = serde_json::from_str::<serde_json::Value>(data) {
                    finish =
                        event["choices"][0]["finish_reason"].as_str().map(String::from).or(finish.take());
                }
                true
            })
            .await
            .unwrap();
        finish
    });
    while server.bridge.snapshot().stats.running == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    server.tell_to_stop();
    server.bridge.watch().wait_for(|state| *state != State::Ready).await.unwrap();
    if let Ok(answer) = other.send("GET", "/health", None).await {
        assert_eq!(answer.status, 503);
    }
    assert_eq!(long.await.unwrap().as_deref(), Some("length"));
    assert_eq!(server.ended.take().unwrap().await.unwrap(), Ended::Told);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_longer_than_the_end_may_take_is_broken_off() {
    let mut setup = Setup::default();
    setup.options.shutdown_timeout = Duration::from_millis(50);
    let server = slow(setup).await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 4000, "stream": true });
    let target = server.target.clone();
    let stream = tokio::spawn(async move {
        let mut last = String::new();
        let _ = target
            .stream("/v1/completions", &body, |data| {
                last = data.to_owned();
                true
            })
            .await;
        last
    });
    while server.bridge.snapshot().stats.running == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let begin = Instant::now();
    assert_eq!(server.stop().await, Ended::Told);
    assert!(begin.elapsed() < Duration::from_secs(3));
    assert!(stream.await.unwrap().contains("\"error\""));
}

/// A server whose steps take some milliseconds.
async fn slow(setup: Setup) -> Running {
    let never = Arc::new(AtomicUsize::new(usize::MAX));
    let server = Running::open(setup, move |_| failing(never, false, Duration::from_millis(3))).await;
    server.bridge.watch().wait_for(|state| *state == State::Ready).await.unwrap();
    server
}

/// A model that is slow, or fails when it is told to: as one on a GPU that was lost, or by a panic.
struct Failing {
    inner: Box<dyn Model>,
    /// Passes until then.
    left: Arc<AtomicUsize>,
    panics: bool,
    pause: Duration,
}

impl Model for Failing {
    fn config(&self) -> &Config {
        self.inner.config()
    }

    fn stream(&self) -> Option<&Stream> {
        self.inner.stream()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, logits: TensorViewMut<'_>) -> Result<()> {
        std::thread::sleep(self.pause);
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            assert!(!self.panics, "a bug");
            let (device, cause) = ("cuda:0".into(), "an illegal address".into());
            return Err(Error::Library(warpsmith::Error::Poisoned { device, cause }));
        }
        self.inner.forward(batch, kv, logits)
    }
}

/// A model of its own kind: the tests' Llama cannot be taken out of its engine.
fn failing(left: Arc<AtomicUsize>, panics: bool, pause: Duration) -> Result<Engine> {
    let json = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    });
    let config = Config::from_json(&json)?;
    let weights = warpsmith_engine::models::RandomWeights::new(&config, false, 1)?;
    let inner = warpsmith_engine::models::load(&config, &weights, Default::default())?;
    Engine::new(Box::new(Failing { inner, left, panics, pause }), EngineOptions::default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_engine_shows_at_once_and_ends_the_server() {
    for panics in [false, true] {
        let left = Arc::new(AtomicUsize::new(usize::MAX));
        let told = left.clone();
        let mut server =
            Running::open(Setup::default(), move |_| failing(told, panics, Duration::ZERO)).await;
        server.bridge.watch().wait_for(|state| *state == State::Ready).await.unwrap();
        let body = json!({ "prompt": [1, 2, 3], "max_tokens": 4000, "stream": true });
        // It fails while an answer is on its way.
        left.store(100, Ordering::Relaxed);
        let mut last = String::new();
        let stream = server.target.stream("/v1/completions", &body, |data| {
            last = data.to_owned();
            true
        });
        stream.await.unwrap();
        assert!(last.contains("\"error\""), "{last}");
        let begin = Instant::now();
        assert_eq!(server.get("/health").await.status, 503);
        let refused = server.post("/v1/completions", json!({ "prompt": [1] })).await;
        assert_eq!(refused.status, 503);
        let reason = if panics { "a bug" } else { "an illegal address" };
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains(reason), "{}", refused.json());
        let Ended::Failed(why) = server.ended.take().unwrap().await.unwrap() else { panic!("it went on") };
        assert!(why.contains(reason) && begin.elapsed() < Duration::from_secs(5), "{why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_cannot_be_opened_ends_the_server() {
    let open = |_: &Setup| Err(Error::Settings { what: "x", expected: "y".into(), got: "z".into() });
    let mut server = Running::open(Setup::default(), open).await;
    let Ended::Failed(why) = server.ended.take().unwrap().await.unwrap() else { panic!("it went on") };
    assert!(why.contains("expected y, got z"), "{why}");
}
