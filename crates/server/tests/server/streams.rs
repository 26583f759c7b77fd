//! Many requests at the same time.

use crate::harness::{Running, Setup, user};
use serde_json::{Value, json};
use std::time::Duration;
use warpsmith_engine::EngineOptions;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_streams_at_once_are_all_served() {
    let server = Running::start(Setup::default()).await;
    let alone = server
        .ask(COMPLETIONS, json!({ "prompt": "abc 7", "max_tokens": 8, "temperature": 0, "ignore_eos": true }))
        .await["choices"][0]["text"]
        .clone();
    let mut tasks = Vec::new();
    for i in 0..256 {
        let target = server.target.clone();
        tasks.push(tokio::spawn(async move {
            let body = json!({
                "prompt": format!("abc {}", i % 16), "max_tokens": 8, "temperature": 0, "ignore_eos": true,
                "stream": true,
            });
            let (mut text, mut done) = (String::new(), false);
            let answer = target.stream(COMPLETIONS, &body, |data| {
                done |= data == "[DONE]";
                let event: Value = serde_json::from_str(data).unwrap_or_default();
                text += event["choices"][0]["text"].as_str().unwrap_or_default();
                true
            });
            (answer.await.unwrap().status, done, text)
        }));
    }
    let mut texts = Vec::new();
    for task in tasks {
        let (status, done, text) = task.await.unwrap();
        assert_eq!((status, done), (200, true));
        texts.push(text);
    }
    assert!(texts.iter().skip(7).step_by(16).all(|text| *text == alone), "others change nothing");
    server.quiet().await;
    let metrics = String::from_utf8(server.get("/metrics").await.body.to_vec()).unwrap();
    for line in [
        "vllm:num_requests_running{model_name=\"tiny\",engine=\"0\"} 0",
        "vllm:generation_tokens_total{model_name=\"tiny\",engine=\"0\"} 2056",
        "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=\"length\"} 257",
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\",engine=\"0\"} 257",
        "vllm:inter_token_latency_seconds_count{model_name=\"tiny\",engine=\"0\"} 1799",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert!(metrics.contains("vllm:prefix_cache_hits_total") && metrics.ends_with("# EOF\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_requests_are_told_to_come_again() {
    let mut setup = Setup::limits(|limits| limits.max_waiting = 4);
    setup.engine = EngineOptions { max_running: 4, ..EngineOptions::default() };
    let server = Running::start(setup).await;
    let mut tasks = Vec::new();
    for _ in 0..80 {
        let target = server.target.clone();
        tasks.push(tokio::spawn(async move {
            let body = json!({ "messages": user("a"), "max_tokens": 200, "ignore_eos": true });
            target.send("POST", CHAT, Some(&body)).await.unwrap()
        }));
    }
    let (mut served, mut refused) = (0, 0);
    for task in tasks {
        let answer = task.await.unwrap();
        match answer.status {
            200 => served += 1,
            429 => {
                assert_eq!(answer.headers["retry-after"], "1");
                assert_eq!(answer.json()["error"]["code"], "rate_limit_exceeded");
                refused += 1;
            }
            other => panic!("{other}: {}", answer.json()),
        }
    }
    assert!(served >= 8 && refused >= 8, "{served} served, {refused} refused");
    // Afterwards all is as before.
    server.quiet().await;
    server.ask(CHAT, json!({ "messages": user("a"), "max_tokens": 2 })).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_takes_too_long_ends() {
    let setup = Setup::limits(|limits| limits.request_timeout = Some(Duration::from_millis(30)));
    let server = Running::start(setup).await;
    let body = json!({ "prompt": ["a", "b", "c", "d"], "max_tokens": 1000, "n": 8, "ignore_eos": true });
    let answer = server.post(COMPLETIONS, body).await;
    assert_eq!(answer.status, 408, "{}", answer.json());
    // The client must not do it all again.
    assert_eq!(answer.headers["x-should-retry"], "false");
    server.quiet().await;
}
