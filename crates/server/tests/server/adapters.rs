//! Adapters under names of their own.

use crate::harness::{Running, Setup};
use serde_json::{Value, json};
use std::path::Path;
use warpsmith_engine::{AdapterPath, Engine, OpenOptions};
use warpsmith_server::bridge::State;

async fn server() -> Running {
    let mut setup = Setup::default();
    setup.options.adapters = vec!["all".into(), "some".into()];
    Running::open(setup, |setup| {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures");
        let adapter = |name: &String| AdapterPath {
            name: name.clone(),
            path: fixtures.join("adapters").join(format!("llama_{name}")),
        };
        let adapters = setup.options.adapters.iter().map(adapter).collect();
        let options = OpenOptions { adapters, engine: setup.engine.clone(), ..OpenOptions::default() };
        Engine::open(fixtures.join("models/llama"), options)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_choose_an_adapter_by_its_name() {
    let server = server().await;
    server.bridge.watch().wait_for(|state| *state == State::Ready).await.unwrap();
    let models = server.get("/v1/models").await.json();
    let ids: Vec<&Value> = models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["tiny", "alias", "all", "some"]);
    assert_eq!(models["data"][2]["parent"], "tiny");
    assert_eq!(models["data"][0].get("parent"), None);
    let logprob = async |model: &str| {
        let body = json!({ "model": model, "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0, "logprobs": 1 });
        let answer = server.post("/v1/completions", body).await;
        assert_eq!(answer.status, 200, "{}", answer.json());
        assert_eq!(answer.json()["model"], model);
        answer.json()["choices"][0]["logprobs"]["token_logprobs"][0].as_f64().unwrap()
    };
    let (plain, all, some) = (logprob("alias").await, logprob("all").await, logprob("some").await);
    assert!(plain != all && all != some && plain != some, "{plain} {all} {some}");
    assert_eq!(logprob("all").await, all);
    let vector = async |model: &str| {
        let answer = server.post("/v1/embeddings", json!({ "model": model, "input": [5, 6, 7] })).await;
        assert_eq!(answer.status, 200);
        answer.json()["data"][0]["embedding"].clone()
    };
    assert_ne!(vector("tiny").await, vector("some").await);
    let unknown = server.post("/v1/completions", json!({ "model": "al", "prompt": [1] })).await;
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
}
