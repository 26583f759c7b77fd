//! Clients that are slow, leave, or have no key.

use crate::harness::{Running, Setup, user};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn raw(path: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_leave_nothing_behind() {
    let server = Running::start(Setup::limits(|limits| limits.max_waiting = 4000)).await;
    let before = server.bridge.snapshot().stats;
    let prompt = json!("abcdefgh".repeat(8));
    let streamed = raw(
        COMPLETIONS,
        &json!({ "prompt": prompt, "max_tokens": 300, "n": 2, "ignore_eos": true, "stream": true }),
    );
    let whole = raw(CHAT, &json!({ "messages": user("abc"), "max_tokens": 300, "ignore_eos": true }));
    // In every phase: in the headers, in the body, before the answer, in the answer.
    let leave = async |number: usize| {
        let request = if number.is_multiple_of(2) { &streamed } else { &whole };
        let mut stream = TcpStream::connect(&server.address).await.unwrap();
        match number % 5 {
            0 => stream.write_all(&request[..40]).await.unwrap(),
            1 => stream.write_all(&request[..request.len() - 5]).await.unwrap(),
            2 => stream.write_all(request).await.unwrap(),
            3 => {
                stream.write_all(request).await.unwrap();
                tokio::time::sleep(Duration::from_millis(number as u64 % 7)).await;
            }
            _ => {
                stream.write_all(&streamed).await.unwrap();
                let _ = stream.read(&mut [0; 600]).await;
            }
        }
    };
    let baseline = descriptors();
    for round in 0..20 {
        futures_of((0..100).map(|i| leave(round * 100 + i)).collect()).await;
    }
    server.quiet().await;
    for _ in 0..400 {
        if descriptors() <= baseline + 8 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(descriptors() <= baseline + 8, "{} descriptors, {baseline} before", descriptors());
    let after = server.bridge.snapshot().stats;
    assert_eq!(after.available_pages, before.available_pages);
    let flushed = server.ask("/flush_cache", json!({})).await;
    assert_eq!(flushed["cached_pages"], 0);
    server.ask(CHAT, json!({ "messages": user("a"), "max_tokens": 2 })).await;
}

/// Runs futures at the same time.
async fn futures_of<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut all: Vec<_> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    std::future::poll_fn(|context| {
        let mut is_done = true;
        for slot in &mut all {
            if let Some(future) = slot {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(()) => *slot = None,
                    std::task::Poll::Pending => is_done = false,
                }
            }
        }
        if is_done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Allows this process as many open files as it may have: both ends of each connection are here.
fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls take a pointer to one `rlimit`, which lives as long as they run.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    assert!(limit.rlim_max >= 4096, "the system allows {} open files: `ulimit -Hn 4096`", limit.rlim_max);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_slow_senders_are_cut_off_and_harm_nobody() {
    raise_file_limit();
    let senders = 1000;
    let server = Running::start(Setup::limits(|limits| {
        limits.header_timeout = Duration::from_millis(300);
        limits.body_timeout = Duration::from_millis(300);
    }))
    .await;
    let mut slow = Vec::new();
    for i in 0..senders {
        let mut stream = TcpStream::connect(&server.address).await.unwrap();
        let request = raw(CHAT, &json!({ "messages": user("a") }));
        let part = if i % 2 == 0 { &request[..30] } else { &request[..request.len() - 1] };
        stream.write_all(part).await.unwrap();
        slow.push(stream);
    }
    let begin = Instant::now();
    server.ask(CHAT, json!({ "messages": user("a"), "max_tokens": 2 })).await;
    assert!(begin.elapsed() < Duration::from_secs(2));
    for (i, mut stream) in slow.into_iter().enumerate() {
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(5), stream.read_to_string(&mut answer)).await;
        assert!(read.is_ok(), "number {i} is still connected");
        if i % 2 == 1 {
            assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("did not arrive"), "{answer}");
        }
    }
    assert_eq!(server.bridge.submitted(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_loses_its_request() {
    let mut setup = Setup::limits(|limits| limits.stall_timeout = Duration::from_secs(1));
    setup.pool_tokens = 40_000;
    let server = Running::start(setup).await;
    // Far more than the system's buffers hold.
    let mut body = json!({
        "prompt": vec!["a"; 4], "n": 8, "max_tokens": 50, "ignore_eos": true, "stream": true, "logprobs": 5,
    });
    let read = server.events(COMPLETIONS, body.clone()).await;
    let ends = read.iter().filter(|event| !event["choices"][0]["finish_reason"].is_null());
    assert_eq!(ends.count(), 32, "who reads gets all of it");
    body["max_tokens"] = json!(900);
    let mut stream = TcpStream::connect(&server.address).await.unwrap();
    stream.write_all(&raw(COMPLETIONS, &body)).await.unwrap();
    while server.bridge.submitted() < 8 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let begin = Instant::now();
    server.quiet().await;
    println!("the request was ended after {:?}", begin.elapsed());
    let metrics = String::from_utf8(server.get("/metrics").await.body.to_vec()).unwrap();
    assert!(metrics.contains("finished_reason=\"abort\""), "{metrics}");
    drop(stream);
    server.ask(CHAT, json!({ "messages": user("a"), "max_tokens": 2 })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_but_health_needs_the_key() {
    let mut setup = Setup::default();
    setup.options.api_keys = vec!["first".into(), "second".into()];
    let server = Running::start(setup).await;
    let document = server.get("/openapi.json").await.json();
    let mut routes: Vec<(String, String)> = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        routes
            .extend(methods.as_object().unwrap().keys().map(|method| (method.to_uppercase(), path.clone())));
    }
    assert!(routes.len() > 10);
    routes.push(("GET".into(), "/nothing".into()));
    for (method, path) in routes {
        let path = path.replace("{model}", "tiny");
        for key in [None, Some("third"), Some("firs"), Some("")] {
            let answer = server.with_key(key).send(&method, &path, Some(&json!({}))).await.unwrap();
            match path.as_str() {
                "/health" => assert_eq!(answer.status, 200),
                _ => {
                    assert_eq!(answer.status, 401, "{method} {path}");
                    assert_eq!(answer.json()["error"]["code"], "invalid_api_key");
                }
            }
        }
        for key in ["first", "second"] {
            let answer = server.with_key(Some(key)).send(&method, &path, Some(&json!({}))).await.unwrap();
            assert_ne!(answer.status, 401, "{method} {path}");
        }
    }
    assert_eq!(server.bridge.submitted(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_probes_find_nothing_of_others() {
    let mut setup = Setup::default();
    setup.options.api_keys = vec!["first".into(), "second".into()];
    let server = Running::start(setup).await;
    let cached = async |key: &str, salt: Option<String>| {
        let body = json!({ "prompt": "abcdefgh".repeat(20), "max_tokens": 1, "cache_salt": salt });
        let answer = server.with_key(Some(key)).send("POST", COMPLETIONS, Some(&body)).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.json());
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("first", None).await, 0);
    let warm = cached("first", None).await;
    assert!(warm > 64, "{warm}");
    // Those of a batch share steps, but nothing else.
    for batch in 0..10_000 / 25 {
        let probe = async |i| {
            assert_eq!(cached("second", Some(format!("probe {}", batch * 25 + i))).await, 0);
        };
        futures_of((0..25).map(probe).collect()).await;
    }
    assert_eq!(cached("second", None).await, 0);
    assert_eq!(cached("second", None).await, warm);
    assert_eq!(cached("first", Some("own".into())).await, 0);
    assert_eq!(cached("first", Some("own".into())).await, warm);
}
