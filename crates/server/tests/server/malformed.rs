//! Requests that are wrong: each is refused at once, names the field, and does not reach the engine.

use crate::harness::{CONTEXT, Running, Setup, VOCAB, user};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";

/// A wrong request: where it goes, and what its refusal names.
struct Wrong {
    path: &'static str,
    body: Value,
    names: String,
}

/// Values of every type but those named.
fn other_types(right: &[&str]) -> Vec<Value> {
    let all = [
        ("bool", json!(true)),
        ("int", json!(3)),
        ("real", json!(0.5)),
        ("text", json!("x")),
        ("list", json!([{}])),
        ("object", json!({ "x": [1] })),
    ];
    all.into_iter().filter(|(kind, _)| !right.contains(kind)).map(|(_, value)| value).collect()
}

/// Every field that has a type, the types it may have, and further values that are wrong.
fn table() -> Vec<(&'static str, Vec<&'static str>, Vec<Value>)> {
    let numbers = vec!["int", "real"];
    let far = |values: &[f64]| values.iter().map(|&value| json!(value)).collect::<Vec<Value>>();
    let long = |length: usize| json!("x".repeat(length));
    vec![
        ("temperature", numbers.clone(), far(&[-0.1, 2.1, 1e300, -1e300])),
        ("top_p", numbers.clone(), far(&[-0.1, 1.1, 7.0])),
        ("min_p", numbers.clone(), far(&[-0.1, 1.5])),
        ("presence_penalty", numbers.clone(), far(&[-2.1, 2.1])),
        ("frequency_penalty", numbers.clone(), far(&[-2.1, 2.1])),
        ("repetition_penalty", numbers, far(&[0.0, -1.0, 101.0])),
        ("top_k", vec!["int"], vec![json!(-2), json!(VOCAB + 1), json!(1e40)]),
        ("n", vec!["int"], vec![json!(0), json!(-1), json!(9), json!(16384), json!(i64::MAX)]),
        ("seed", vec!["int"], vec![json!(1e30), json!(1.5), json!(u64::MAX)]),
        ("ignore_eos", vec!["bool"], vec![]),
        ("stream", vec!["bool"], vec![json!("true"), json!(1)]),
        (
            "stop",
            vec!["text"],
            vec![json!(""), json!([""]), json!(["a", 1]), json!(vec!["a"; 5]), long(257), json!([["a"]])],
        ),
        (
            "stop_token_ids",
            vec![],
            vec![json!([-1]), json!([VOCAB]), json!([1.5]), json!(["1"]), json!([[1]]), json!(vec![1; 65])],
        ),
        (
            "logit_bias",
            vec![],
            vec![
                json!({ "-1": 1 }),
                json!({ "a": 1 }),
                json!({ VOCAB.to_string(): 1 }),
                json!({ "1": 101 }),
                json!({ "1": "x" }),
                json!({ "1.5": 1 }),
                json!({ "99999999999999999999": 1 }),
                (0..1025).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into(),
            ],
        ),
        ("user", vec!["text"], vec![long(1025)]),
        ("metadata", vec!["object"], vec![]),
        ("store", vec!["bool"], vec![]),
        ("service_tier", vec!["text"], vec![]),
        ("cache_salt", vec!["text"], vec![json!(""), long(257)]),
        ("priority", vec!["int"], vec![json!(1001), json!(-1001)]),
        ("min_tokens", vec![], vec![json!(1), json!(-1)]),
        ("prompt_logprobs", vec![], vec![json!(1), json!(-1), json!(1_000_000)]),
        ("best_of", vec![], vec![json!(2), json!(0), json!(-3)]),
        ("use_beam_search", vec!["list"], vec![json!(true)]),
        ("include_stop_str_in_output", vec![], vec![json!(true)]),
        ("skip_special_tokens", vec!["bool"], vec![json!(false)]),
        ("guided_regex", vec!["text"], vec![json!("("), json!("a{5,2}"), long(70_000)]),
        ("guided_grammar", vec![], vec![json!("start: x"), json!("x"), json!("(".repeat(200)), long(70_000)]),
        ("guided_choice", vec![], vec![json!([]), json!([1]), json!(vec!["a"; 1025])]),
        ("guided_json", vec!["bool", "object"], vec![json!("{"), json!("3"), deep(40)]),
        ("guided_json_object", vec!["bool"], vec![]),
        ("regex", vec!["text"], vec![json!("[")]),
        ("ebnf", vec![], vec![json!("root ::= \"x\"")]),
        ("structured_outputs", vec!["object"], vec![json!({ "regex": 3 }), json!({ "choice": [] })]),
        (
            "response_format",
            vec![],
            vec![
                json!({}),
                json!({ "type": "xml" }),
                json!({ "type": 3 }),
                json!({ "type": "json_schema" }),
                json!({ "type": "json_schema", "json_schema": 3 }),
                json!({ "type": "json_schema", "json_schema": {} }),
                json!({ "type": "json_schema", "json_schema": { "schema": 3 } }),
                json!({ "type": "json_schema", "json_schema": { "schema": {}, "strict": "yes" } }),
                json!({ "type": "json_schema", "json_schema": { "schema": deep(40) } }),
                json!({ "type": "json_schema", "json_schema": { "schema": { "type": "nothing" } } }),
                json!({ "type": "json_schema", "json_schema": { "schema": { "$ref": "http://x/y" } } }),
                json!({ "type": "regex", "regex": 3 }),
                json!({ "type": "grammar", "grammar": "(" }),
            ],
        ),
    ]
}

/// Fields of chats alone.
fn chat_table() -> Vec<(&'static str, Vec<&'static str>, Vec<Value>)> {
    let tool = |function: Value| json!([{ "type": "function", "function": function }]);
    let message = |message: Value| json!([message]);
    vec![
        ("max_tokens", vec!["int"], vec![json!(0), json!(-1), json!(CONTEXT), json!(1e12)]),
        ("max_completion_tokens", vec!["int"], vec![json!(0), json!(-5), json!(100_000)]),
        ("logprobs", vec!["bool"], vec![]),
        ("top_logprobs", vec![], vec![json!(3), json!(21), json!(-1)]),
        ("reasoning_effort", vec![], vec![json!("huge"), json!("")]),
        ("verbosity", vec![], vec![json!("huge")]),
        ("modalities", vec![], vec![json!(["audio"]), json!(["text", 3])]),
        ("audio", vec![], vec![json!({ "voice": "x" })]),
        ("prediction", vec![], vec![json!({})]),
        ("web_search_options", vec![], vec![json!({})]),
        ("functions", vec![], vec![json!([{}])]),
        ("function_call", vec![], vec![json!("auto")]),
        ("chat_template", vec![], vec![json!("{{ 1 }}")]),
        ("add_generation_prompt", vec!["bool"], vec![]),
        (
            "chat_template_kwargs",
            vec!["object"],
            vec![json!({ "messages": 1 }), json!({ "tools": 1 }), json!({ "bos_token": "<s>" })],
        ),
        ("documents", vec!["list"], vec![json!([3])]),
        ("parallel_tool_calls", vec!["bool"], vec![]),
        (
            "tools",
            vec![],
            vec![
                json!([3]),
                json!([{}]),
                json!([{ "type": "browser" }]),
                json!([{ "type": "function" }]),
                tool(json!(3)),
                tool(json!({})),
                tool(json!({ "name": 3 })),
                tool(json!({ "name": "" })),
                tool(json!({ "name": "a b" })),
                tool(json!({ "name": "x".repeat(65) })),
                tool(json!({ "name": "f", "description": 3 })),
                tool(json!({ "name": "f", "parameters": 3 })),
                tool(json!({ "name": "f", "parameters": deep(40) })),
                json!([{ "type": "function", "function": { "name": "f" } }, { "type": "function", "function": { "name": "f" } }]),
                json!(vec![json!({}); 129]),
            ],
        ),
        (
            "tool_choice",
            vec![],
            vec![
                json!("maybe"),
                json!("required"),
                json!({}),
                json!({ "type": "function" }),
                json!({ "type": "function", "function": { "name": "f" } }),
                json!({ "type": "x" }),
            ],
        ),
        (
            "messages",
            vec![],
            vec![
                json!(null),
                json!([]),
                message(json!(3)),
                message(json!({})),
                message(json!({ "role": "user" })),
                message(json!({ "role": "root", "content": "x" })),
                message(json!({ "role": 3, "content": "x" })),
                message(json!({ "role": "user", "content": 3 })),
                message(json!({ "role": "user", "content": {} })),
                message(json!({ "role": "user", "content": [3] })),
                message(json!({ "role": "user", "content": [{ "text": "x" }] })),
                message(
                    json!({ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }),
                ),
                message(json!({ "role": "user", "content": [{ "type": "text" }] })),
                message(json!({ "role": "user", "content": [{ "type": "text", "text": 3 }] })),
                message(json!({ "role": "user", "content": "x", "name": 3 })),
                message(json!({ "role": "tool", "content": "x" })),
                message(json!({ "role": "user", "content": "x", "tool_calls": [{}] })),
                message(json!({ "role": "assistant", "tool_calls": [3] })),
                message(json!({ "role": "assistant", "tool_calls": [{}] })),
                message(json!({ "role": "assistant", "tool_calls": [{ "function": {} }] })),
                message(
                    json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "x" } }] }),
                ),
                message(
                    json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": 3 } }] }),
                ),
                message(json!({ "role": "assistant", "content": "x", "function_call": {} })),
                message(json!({ "role": "user", "content": "refuse" })),
                json!(vec![json!({ "role": "user", "content": "x" }); 4097]),
                user(&"long ".repeat(3 * CONTEXT)),
            ],
        ),
    ]
}

/// Fields of completions alone.
fn completion_table() -> Vec<(&'static str, Vec<&'static str>, Vec<Value>)> {
    vec![
        ("max_tokens", vec!["int"], vec![json!(0), json!(-1), json!(CONTEXT), json!(1e12)]),
        ("logprobs", vec!["int"], vec![json!(21), json!(-1), json!(1_000_000)]),
        ("echo", vec!["bool"], vec![]),
        ("suffix", vec![], vec![json!("x")]),
        ("add_special_tokens", vec!["bool"], vec![]),
        (
            "prompt",
            vec!["text"],
            vec![
                json!(null),
                json!(""),
                json!([]),
                json!([-1]),
                json!([VOCAB]),
                json!([1, 2.5]),
                json!([1, "x"]),
                json!([[]]),
                json!([[1], [-1]]),
                json!(["x", 3]),
                json!(["x", ""]),
                json!([[1, VOCAB]]),
                json!(vec!["x"; 65]),
                json!(vec![1; CONTEXT]),
                json!("long ".repeat(3 * CONTEXT)),
            ],
        ),
    ]
}

/// A schema with so many levels.
fn deep(levels: usize) -> Value {
    (0..levels).fold(json!({ "type": "object" }), |inner, _| json!({ "items": inner }))
}

fn wrong_requests() -> Vec<Wrong> {
    let mut all = Vec::new();
    let paths = [
        (CHAT, json!({ "model": "tiny", "messages": user("a"), "max_tokens": 4 }), chat_table()),
        (COMPLETIONS, json!({ "model": "tiny", "prompt": "a", "max_tokens": 4 }), completion_table()),
    ];
    for (path, base, own) in paths {
        for (field, right, wrong) in table().into_iter().chain(own) {
            let values = other_types(&right).into_iter().chain(wrong);
            for value in values {
                // In every kind of request: alone, streamed, and with several outputs.
                for extra in [json!({}), json!({ "stream": true }), json!({ "n": 2, "temperature": 0.5 })] {
                    let mut body = base.clone();
                    for (name, value) in extra.as_object().unwrap() {
                        body[name] = value.clone();
                    }
                    body[field] = value.clone();
                    if field == "best_of" && body["best_of"] == body["n"] {
                        continue;
                    }
                    all.push(Wrong { path, body, names: field.into() });
                }
            }
        }
        for (model, names) in
            [(json!("nobody"), "model"), (json!(3), "model"), (json!("x".repeat(300)), "model")]
        {
            let mut body = base.clone();
            body["model"] = model;
            all.push(Wrong { path, body, names: names.into() });
        }
        for options in
            [json!(3), json!([]), json!({ "include_usage": 3 }), json!({ "continuous_usage_stats": "x" })]
        {
            let mut body = base.clone();
            body["stream"] = json!(true);
            body["stream_options"] = options;
            all.push(Wrong { path, body, names: "stream_options".into() });
        }
        let mut both = base.clone();
        both["regex"] = json!("a");
        both["guided_json_object"] = json!(true);
        all.push(Wrong { path, body: both, names: "regex".into() });
    }
    for (input, names) in [
        (json!(3), "input"),
        (json!([]), "input"),
        (json!([3]), "input"),
        (json!([{ "role": "x", "content": "y" }]), "input"),
        (json!([{ "type": "picture" }]), "input"),
        (json!([{ "type": "function_call" }]), "input"),
    ] {
        all.push(Wrong { path: RESPONSES, body: json!({ "input": input }), names: names.into() });
    }
    for (field, value) in [
        ("previous_response_id", json!("resp_1")),
        ("instructions", json!(3)),
        ("max_output_tokens", json!(0)),
        ("text", json!({ "format": { "type": "xml" } })),
        ("tools", json!([{ "type": "web_search" }])),
        ("background", json!(true)),
        ("truncation", json!("auto")),
        ("temperature", json!(9)),
        ("top_logprobs", json!(3)),
        ("max_tool_calls", json!(0)),
        ("stream_options", json!(3)),
        ("text", json!({ "verbosity": "huge" })),
        ("guided_regex", json!("(")),
    ] {
        let mut body = json!({ "input": "a" });
        body[field] = value;
        all.push(Wrong { path: RESPONSES, body, names: field.into() });
    }
    // What cannot be done together is not done in part.
    let tools = |parameters: Value| json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
    let required = |names: &str, value: Value| {
        let mut body = json!({
            "input": "a", "messages": user("a"), "tools": tools(json!({ "type": "object" })), "tool_choice": "required",
        });
        body[names] = value;
        body
    };
    let object = json!({ "type": "json_object" });
    let long = |i: usize| {
        let schema = json!({ "type": "object", "description": "x".repeat(60_000) });
        json!({ "type": "function", "function": { "name": format!("f{i}"), "parameters": schema } })
    };
    let long: Value = (0..5).map(long).collect();
    for (path, body, names) in [
        (CHAT, required("response_format", object.clone()), "response_format"),
        (CHAT, required("tools", long.clone()), "tools"),
        (RESPONSES, required("text", json!({ "format": object })), "text"),
        (RESPONSES, required("guided_regex", json!("a")), "guided_regex"),
        (RESPONSES, required("tools", long), "tools"),
        (
            RESPONSES,
            json!({ "input": "a", "guided_regex": "a", "text": { "format": object } }),
            "guided_regex",
        ),
    ] {
        all.push(Wrong { path, body, names: names.into() });
    }
    for (path, body, names) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({ "prompt": 3 }), "prompt"),
        ("/tokenize", json!({ "messages": [3] }), "messages[0]"),
        ("/tokenize", json!({ "prompt": "x", "messages": user("x") }), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({ "tokens": "x" }), "tokens"),
        ("/detokenize", json!({ "tokens": [VOCAB] }), "tokens[0]"),
    ] {
        all.push(Wrong { path, body, names: names.into() });
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_wrong_requests_are_refused_by_name_beside_a_stream() {
    let server = Running::start(Setup::default()).await;
    let wrong = wrong_requests();
    assert!(wrong.len() >= 1000, "{}", wrong.len());
    // A neighbour, whose stream goes on meanwhile.
    let neighbour = server.target.clone();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let stream = tokio::spawn(async move {
        let (mut tokens, mut requests) = (0, 0u64);
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let body = json!({ "prompt": "abc", "max_tokens": 500, "ignore_eos": true, "stream": true, "temperature": 0 });
            let answer = neighbour.stream(COMPLETIONS, &body, |_| {
                tokens += 1;
                true
            });
            assert_eq!(answer.await.unwrap().status, 200);
            requests += 1;
        }
        (tokens, requests)
    });
    let (mut slowest, mut taken) = (Vec::new(), Vec::new());
    for Wrong { path, body, names } in &wrong {
        let begin = Instant::now();
        let answer = server.post(path, body.clone()).await;
        slowest.push(begin.elapsed());
        let error = answer.json()["error"].clone();
        let is_named = error["param"].as_str().is_some_and(|param| param.starts_with(names.as_str()));
        let is_short = error["message"].as_str().is_some_and(|message| message.len() < 2000);
        if !((400..500).contains(&answer.status) && is_named && is_short) {
            let shown: String = body.to_string().chars().take(300).collect();
            let told: String = error.to_string().chars().take(300).collect();
            taken.push(format!("{path} {}, not {names}: {told} to {shown}", answer.status));
        }
    }
    assert!(taken.is_empty(), "{}", taken.join("\n"));
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let (tokens, requests) = stream.await.unwrap();
    assert!(tokens > 100, "the neighbour got {tokens} tokens");
    assert_eq!(server.bridge.submitted(), requests, "a wrong request reached the engine");
    slowest.sort();
    let late = slowest.iter().filter(|time| **time > Duration::from_millis(100)).count();
    println!(
        "{} wrong requests, median {:?}, 99 % {:?}, slowest {:?}; {tokens} tokens beside",
        wrong.len(),
        slowest[slowest.len() / 2],
        slowest[slowest.len() * 99 / 100],
        slowest[slowest.len() - 1]
    );
    // Those with a prompt too long to fit are encoded before that is known; machines of tests are busy.
    assert!(late * 50 < wrong.len(), "{late} took more than 100 ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_no_requests_are_refused() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Running::start(Setup::limits(|limits| limits.max_body = 10_000)).await;
    let send = async |head: &str, body: &[u8]| {
        let mut stream = tokio::net::TcpStream::connect(&server.address).await.unwrap();
        let head =
            format!("{head}\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        let _ = stream.write_all(body).await;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    };
    let json = "content-type: application/json";
    let nested = "[".repeat(5000);
    for (head, body, status, told) in [
        (
            "POST /v1/chat/completions HTTP/1.1\r\ncontent-type: text/plain",
            &b"{}"[..],
            415,
            "application/json",
        ),
        (&format!("POST /v1/chat/completions HTTP/1.1\r\n{json}"), b"{", 400, "not JSON"),
        (&format!("POST /v1/chat/completions HTTP/1.1\r\n{json}"), b"[]", 400, "JSON object"),
        (&format!("POST /v1/chat/completions HTTP/1.1\r\n{json}"), b"\xff", 400, "UTF-8"),
        (&format!("POST /v1/chat/completions HTTP/1.1\r\n{json}"), nested.as_bytes(), 400, "deep"),
        (&format!("POST /v1/completions HTTP/1.1\r\n{json}; charset=utf-8"), b"{}", 400, "`prompt`"),
        (&format!("POST /v1/completions HTTP/1.1\r\n{json}"), &[b' '; 10_001], 413, "10000 bytes"),
        ("GET /v1/completions HTTP/1.1", b"", 405, "GET"),
        ("GET /nothing HTTP/1.1", b"", 404, "/nothing"),
        ("GET /v1/models/nobody HTTP/1.1", b"", 404, "nobody"),
    ] {
        let answer = send(head, body).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{head}: {answer}");
        assert!(answer.contains(told) && answer.contains("\"error\""), "{head}: {answer}");
    }
    assert_eq!(server.bridge.submitted(), 0);
    // Without a length, byte by byte.
    let chunked = async |body: &[u8]| {
        let mut stream = tokio::net::TcpStream::connect(&server.address).await.unwrap();
        let mut all = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\n{json}\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        .into_bytes();
        for byte in body {
            all.extend([b"1\r\n", &[*byte][..], b"\r\n"].concat());
        }
        all.extend(b"0\r\n\r\n");
        // A server that has refused it reads no more.
        let _ = stream.write_all(&all).await;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    };
    let answer = chunked(b"{\"prompt\": \"a\", \"max_tokens\": 1}").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("text_completion"), "{answer}");
    let answer = chunked(&[b' '; 10_001]).await;
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("10000 bytes"), "{answer}");
    assert_eq!(server.bridge.submitted(), 1);
}
