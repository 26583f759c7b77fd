//! `/v1/embeddings`: the forms of inputs and answers, what is refused, and who is served beside it.

use crate::harness::{CONTEXT, Running, Setup, VOCAB};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::time::Duration;
use warpsmith_engine::Pooling;

const PATH: &str = "/v1/embeddings";
/// The width of the tests' model.
const WIDTH: usize = 64;

/// The vectors of an answer, as bits.
fn vectors(answer: &Value) -> Vec<Vec<u32>> {
    let data = answer["data"].as_array().unwrap();
    let vector = |(i, one): (usize, &Value)| {
        assert_eq!((&one["object"], &one["index"]), (&json!("embedding"), &json!(i)));
        let numbers: Vec<f32> = match &one["embedding"] {
            Value::String(text) => {
                let bytes = STANDARD.decode(text).unwrap();
                bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
            }
            numbers => serde_json::from_value(numbers.clone()).unwrap(),
        };
        assert_eq!(numbers.len(), WIDTH);
        let length: f32 = numbers.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-4, "{length}");
        numbers.into_iter().map(f32::to_bits).collect()
    };
    data.iter().enumerate().map(vector).collect()
}

#[tokio::test]
async fn all_forms_of_inputs_and_answers_agree() {
    let server = Running::start(Setup::default()).await;
    let texts = ["abc", "another text", "abc"];
    let mut ids = Vec::new();
    for text in texts {
        ids.push(server.ask("/tokenize", json!({ "prompt": text })).await["tokens"].clone());
    }
    let whole = server.ask(PATH, json!({ "model": "alias", "input": texts, "user": "somebody" })).await;
    let expected = vectors(&whole);
    assert!(expected.len() == 3 && expected[0] == expected[2] && expected[0] != expected[1]);
    assert_eq!((&whole["object"], &whole["model"]), (&json!("list"), &json!("alias")));
    let tokens: usize = ids.iter().map(|ids| ids.as_array().unwrap().len()).sum();
    assert_eq!(whole["usage"], json!({ "prompt_tokens": tokens, "total_tokens": tokens }));
    for (body, which) in [
        (json!({ "input": texts, "encoding_format": "base64" }), 0..3),
        (json!({ "input": texts, "encoding_format": "float", "dimensions": WIDTH }), 0..3),
        (json!({ "input": ids, "pooling": "last" }), 0..3),
        (json!({ "input": ids[1], "encoding_format": "base64", "cache_salt": "x" }), 1..2),
        (json!({ "input": texts[1] }), 1..2),
    ] {
        assert_eq!(vectors(&server.ask(PATH, body.clone()).await), expected[which], "{body}");
    }
    let mean = vectors(&server.ask(PATH, json!({ "input": texts, "pooling": "mean" })).await);
    assert_ne!(mean[1], expected[1]);
    // As long as the context, which a prompt cannot be.
    server.ask(PATH, json!({ "input": vec![1; CONTEXT] })).await;
    let metrics = server.get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    assert!(!metrics.contains("vllm:prompt_tokens_total{model_name=\"tiny\",engine=\"0\"} 0"), "{metrics}");
    server.quiet().await;
    server.stop().await;

    let mut setup = Setup::default();
    setup.options.pooling = Pooling::Mean;
    let server = Running::start(setup).await;
    assert_eq!(vectors(&server.ask(PATH, json!({ "input": texts })).await), mean);
    server.stop().await;
}

#[tokio::test]
async fn wrong_requests_are_refused_by_name() {
    let server = Running::start(Setup::limits(|limits| limits.max_inputs = 3)).await;
    let before = server.bridge.submitted();
    for (change, names) in [
        (json!({ "input": null }), "input"),
        (json!({ "input": "" }), "input"),
        (json!({ "input": [] }), "input"),
        (json!({ "input": [""] }), "input[0]"),
        (json!({ "input": ["a", ""] }), "input[1]"),
        (json!({ "input": [[]] }), "input[0]"),
        (json!({ "input": 3 }), "input"),
        (json!({ "input": true }), "input"),
        (json!({ "input": { "text": "a" } }), "input"),
        (json!({ "input": ["a", 3] }), "input[1]"),
        (json!({ "input": [1, "a"] }), "input[1]"),
        (json!({ "input": [1.5] }), "input[0]"),
        (json!({ "input": [-1] }), "input[0]"),
        (json!({ "input": [[1], [VOCAB]] }), "input[1][0]"),
        (json!({ "input": [[[1]]] }), "input[0][0]"),
        (json!({ "input": vec![1; CONTEXT + 1] }), "input"),
        (json!({ "input": "long ".repeat(3 * CONTEXT) }), "input"),
        (json!({ "input": vec!["a"; 4] }), "input"),
        (json!({ "encoding_format": "int8" }), "encoding_format"),
        (json!({ "encoding_format": 3 }), "encoding_format"),
        (json!({ "dimensions": 0 }), "dimensions"),
        (json!({ "dimensions": 32 }), "dimensions"),
        (json!({ "dimensions": "64" }), "dimensions"),
        (json!({ "pooling": "cls" }), "pooling"),
        (json!({ "pooling": 1 }), "pooling"),
        (json!({ "normalize": false }), "normalize"),
        (json!({ "add_special_tokens": 1 }), "add_special_tokens"),
        (json!({ "truncate_prompt_tokens": 5 }), "truncate_prompt_tokens"),
        (json!({ "messages": [{ "role": "user", "content": "a" }] }), "messages"),
        (json!({ "user": 3 }), "user"),
        (json!({ "cache_salt": "" }), "cache_salt"),
        (json!({ "priority": 1001 }), "priority"),
        (json!({ "model": 3 }), "model"),
    ] {
        let mut body = json!({ "input": "a" });
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let answer = server.post(PATH, body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (400, &json!(names)), "{change}: {error}");
        assert!(error["message"].as_str().unwrap().contains(names), "{error}");
    }
    assert_eq!(server.post(PATH, json!({ "input": "a", "model": "nobody" })).await.status, 404);
    assert_eq!(server.get(PATH).await.status, 405);
    assert_eq!(server.bridge.submitted(), before);
    server.ask(PATH, json!({ "input": ["a", "b", "c"] })).await;
    server.stop().await;

    let mut setup = Setup::default();
    setup.options.api_keys = vec!["right".into()];
    let server = Running::start(setup).await;
    server.ask(PATH, json!({ "input": "a" })).await;
    for key in [None, Some("wrong")] {
        let answer = server.with_key(key).send("POST", PATH, Some(&json!({ "input": "a" }))).await.unwrap();
        assert_eq!(answer.status, 401);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn embeddings_come_while_a_request_runs_and_time_limits_hold() {
    let server = Running::start(Setup::default()).await;
    let input = json!({ "input": ["one text", "and another"] });
    let alone = vectors(&server.ask(PATH, input.clone()).await);
    let chat = json!({ "prompt": "abc", "max_tokens": 400, "ignore_eos": true, "temperature": 0 });
    let expected = server.ask("/v1/completions", chat.clone()).await;
    let embed = async {
        while server.bridge.snapshot().stats.running == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let during = vectors(&server.ask(PATH, input).await);
        (during, server.bridge.open_outputs())
    };
    let (answer, (during, open)) = tokio::join!(server.ask("/v1/completions", chat), embed);
    assert_eq!(during, alone);
    assert_eq!(open, 1, "the other request is still running");
    assert_eq!(answer["choices"], expected["choices"]);
    server.quiet().await;
    server.stop().await;

    let server = Running::start(Setup::limits(|limits| {
        limits.request_timeout = Some(Duration::from_nanos(1));
    }))
    .await;
    let answer = server.post(PATH, json!({ "input": "a" })).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (408, &json!("timeout")));
    server.quiet().await;
    server.stop().await;
}
