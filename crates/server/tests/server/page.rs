//! The page's files, and what `/debug/state` tells whom.

use crate::harness::{Running, Setup, user};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use warpsmith_server::client::{Answer, Target};

const CHAT: &str = "/v1/chat/completions";
const STATE: &str = "/debug/state";

async fn state(target: &Target) -> Value {
    let answer = target.send("GET", STATE, None).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.json());
    let state = answer.json();
    if !state["engine"].is_null() {
        let pages = &state["engine"]["pages"];
        let sum = ["free", "cached", "in_use"].map(|name| pages[name].as_u64().unwrap()).iter().sum::<u64>();
        assert_eq!(sum, pages["total"], "{pages}");
        let branches = state["engine"]["tree"]["branches"].as_array().unwrap();
        for branch in branches {
            let parent = &branch["parent"];
            assert!(parent == 0 || branches.iter().any(|other| other["id"] == *parent), "{branches:?}");
        }
    }
    state
}

/// Waits until what somebody sees is as it should be.
async fn seen(target: &Target, holds: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let state = state(target).await;
        if holds(&state["engine"]) {
            return state;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{state:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Asks without end: the model is so fast that one request may have ended before anybody looks.
async fn again_and_again(target: Target, body: Value) {
    while target.stream(CHAT, &body, |_| true).await.is_ok() {}
}

fn len(value: &Value) -> usize {
    value.as_array().map_or(0, Vec::len)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_needs_no_key_and_says_what_it_may_do() {
    let mut setup = Setup::default();
    setup.options.api_keys = vec!["secret".into()];
    let server = Running::start(setup).await;
    let nobody = server.with_key(None);
    let get = async |path: &str| -> Answer { nobody.send("GET", path, None).await.unwrap() };
    for (path, kind, begin) in [
        ("/", "text/html; charset=utf-8", "<!doctype html>"),
        ("/page/app.js", "text/javascript; charset=utf-8", "//"),
        ("/page/style.css", "text/css; charset=utf-8", "/*"),
    ] {
        let answer = get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(answer.body.starts_with(begin.as_bytes()), "{path}");
        let header = |name: &str| answer.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header("content-type").unwrap(), kind);
        assert!(header("content-security-policy").unwrap().starts_with("default-src 'self'; "));
        assert!(header("etag").unwrap().len() > 20 && header("cache-control").unwrap() == "no-cache");
    }
    assert_eq!(get("/page/nothing.js").await.status, 401);
    assert_eq!(get(STATE).await.status, 401);
    assert_eq!(server.get("/page/nothing.js").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_state_tells_what_runs_and_what_has_ended() {
    let server = Running::start(Setup::default()).await;
    let system = "One beginning for all of them. ".repeat(8);
    let ask = |question: &str, more: Value| {
        let messages =
            json!([{ "role": "system", "content": system }, { "role": "user", "content": question }]);
        let mut body = json!({ "messages": messages, "max_tokens": 4, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let empty = state(&server.target).await;
    assert_eq!((&empty["state"], &empty["model"]["name"]), (&json!("ready"), &json!("tiny")));
    assert_eq!((len(&empty["engine"]["requests"]), len(&empty["engine"]["tree"]["branches"])), (0, 0));

    server.ask(CHAT, ask("The zebra question?", json!({}))).await;
    server.ask(CHAT, ask("Another zebra question?", json!({}))).await;
    let after = seen(&server.target, |engine| len(&engine["finished"]) == 2).await;
    let [last, first] = [0, 1].map(|i| &after["engine"]["finished"][i]);
    assert!(first["cached_tokens"] == 0 && last["cached_tokens"].as_u64().unwrap() > 64, "{after:#}");
    for past in [last, first] {
        let times = ["arrived_ms", "started_ms", "first_token_ms", "ended_ms"]
            .map(|name| past[name].as_u64().unwrap());
        assert!(times.is_sorted() && past["output_tokens"] == 4 && past["reason"] == "length", "{past}");
    }
    let tree = &after["engine"]["tree"];
    let branches = tree["branches"].as_array().unwrap();
    assert!(branches.len() >= 3 && branches.iter().all(|branch| branch["users"] == 0), "{tree}");
    assert_eq!(branches.iter().filter(|branch| branch["parent"] == 0).count(), 1, "{tree}");
    assert!(!after.to_string().contains("zebra"), "the state has text of requests");

    // Two that run share the beginning.
    let endless = json!({ "max_tokens": 700, "stream": true });
    let streams = [0, 1].map(|i| {
        let (target, body) = (server.with_key(None), ask(&format!("Question {i}?"), endless.clone()));
        tokio::spawn(again_and_again(target, body))
    });
    let during = seen(&server.target, |engine| {
        engine["requests"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|request| !request["first_token_ms"].is_null())
            .count()
            == 2
    })
    .await;
    let most = during["engine"]["tree"]["branches"]
        .as_array()
        .unwrap()
        .iter()
        .map(|b| b["users"].as_u64().unwrap())
        .max();
    assert_eq!(most, Some(2), "{during:#}");
    for request in during["engine"]["requests"].as_array().unwrap() {
        assert!(request["state"] == "running" && request["pages"].as_u64() > Some(0), "{request}");
        assert!(request["computed_tokens"].as_u64() >= request["prompt_tokens"].as_u64(), "{request}");
    }
    streams.iter().for_each(tokio::task::JoinHandle::abort);
    seen(&server.target, |engine| len(&engine["requests"]) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_sees_its_own_and_only_sizes_of_others() {
    let mut setup = Setup::default();
    setup.options.api_keys = vec!["first".into(), "second".into()];
    let server = Running::start(setup).await;
    let [first, second] = ["first", "second"].map(|key| server.with_key(Some(key)));
    let ask = async |target: &Target, text: &str, salt: Option<&str>| {
        let body = json!({ "messages": user(&text.repeat(30)), "max_tokens": 3, "cache_salt": salt });
        assert_eq!(target.send("POST", CHAT, Some(&body)).await.unwrap().status, 200);
    };
    ask(&first, "one two ", None).await;
    ask(&first, "one two ", Some("salt")).await;
    ask(&second, "three ", None).await;
    let own = seen(&first, |engine| len(&engine["finished"]) == 2).await;
    let others = seen(&second, |engine| len(&engine["finished"]) == 1).await;
    let tokens = |state: &Value, name: &str| state["engine"]["tree"][name].as_u64().unwrap();
    assert_eq!(tokens(&own, "tokens"), tokens(&others, "other_tokens"));
    assert_eq!(tokens(&others, "tokens"), tokens(&own, "other_tokens"));
    assert!(tokens(&own, "tokens") > 0 && tokens(&others, "tokens") > 0);
    assert_eq!((len(&own["engine"]["tree"]["branches"]), len(&others["engine"]["tree"]["branches"])), (2, 1));

    let body = json!({ "messages": user("a"), "max_tokens": 900, "ignore_eos": true, "stream": true });
    let target = server.with_key(Some("first"));
    let stream = tokio::spawn(again_and_again(target, body));
    let others = seen(&second, |engine| engine["others"]["running"] == 1).await;
    assert_eq!(len(&others["engine"]["requests"]), 0, "{others:#}");
    seen(&first, |engine| len(&engine["requests"]) == 1 && engine["others"]["running"] == 0).await;
    stream.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_who_look_do_not_hold_up_the_engine() {
    let server = Running::start(Setup::default()).await;
    let watchers: Vec<_> = (0..32)
        .map(|_| {
            let target = server.with_key(None);
            tokio::spawn(async move {
                for _ in 0..10 {
                    let begin = Instant::now();
                    state(&target).await;
                    assert!(begin.elapsed() < Duration::from_secs(5), "a look took {:?}", begin.elapsed());
                }
            })
        })
        .collect();
    let body = json!({ "messages": user("a"), "max_tokens": 200, "ignore_eos": true });
    let answer = server.ask(CHAT, body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 200);
    for watcher in watchers {
        watcher.await.unwrap();
    }
}
