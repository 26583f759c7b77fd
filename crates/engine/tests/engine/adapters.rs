//! Adapters in the whole engine: what has one runs beside what has another or none, and none of them sees it.

use crate::graphs::same;
use crate::{prompt, run_all, test_device, test_dtype};
use std::path::{Path, PathBuf};
use warpsmith::tensor::Random;
use warpsmith_engine::{
    AdapterPath, Engine, EngineOptions, Error, OpenOptions, Pooling, Request, SamplingParams,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn adapter(name: &str, folder: &str) -> AdapterPath {
    AdapterPath { name: name.into(), path: fixtures().join("adapters").join(folder) }
}

fn engine(max_running: usize) -> Engine {
    let engine = EngineOptions { max_running, max_chunk: 7, ..EngineOptions::default() };
    let options = OpenOptions {
        device: Some(test_device()),
        dtype: Some(test_dtype()),
        page_size: Some(8),
        pool_tokens: Some(2000),
        adapters: vec![adapter("all", "llama_all"), adapter("some", "llama_some")],
        engine,
        ..OpenOptions::default()
    };
    Engine::open(fixtures().join("models/llama"), options).unwrap()
}

fn request(prompt: &[i32], adapter: Option<&str>) -> Request {
    let params = SamplingParams { max_tokens: Some(9), logprobs: Some(0), n: 2, ..SamplingParams::greedy() };
    Request { prompt: prompt.to_vec(), params, adapter: adapter.map(str::to_owned), ..Request::default() }
}

#[test]
fn requests_with_different_adapters_run_together_without_a_trace() {
    let mut random = Random::new(3);
    let common = prompt(&mut random, 25, 96);
    let adapters = [None, Some("all"), Some("some"), Some("all"), None, Some("some"), Some("all")];
    let requests: Vec<Request> = adapters
        .iter()
        .enumerate()
        .map(|(i, adapter)| request(&[&common[..], &prompt(&mut random, i % 3, 96)].concat(), *adapter))
        .collect();
    let expected = run_all(&mut engine(1), &requests);
    let mut together = engine(16);
    for time in ["cold", "warm"] {
        same(&expected, &run_all(&mut together, &requests), time);
    }
    together.check().unwrap();
    // They are not all the same: each adapter changes the answer.
    let of = |adapter| run_all(&mut engine(1), &[request(&common, adapter)]);
    assert_ne!(format!("{:?}", of(None)), format!("{:?}", of(Some("all"))));
    assert_ne!(format!("{:?}", of(Some("some"))), format!("{:?}", of(Some("all"))));
}

#[test]
fn prefixes_are_found_with_the_same_adapter_alone() {
    let mut engine = engine(4);
    let prompt = prompt(&mut Random::new(4), 33, 96);
    let mut cached = |adapter, salt| {
        let request = Request { salt, ..request(&prompt, adapter) };
        engine.add_request(request).unwrap();
        crate::Log::default().finish(&mut engine).done.values().next().unwrap().usage.cached_tokens
    };
    let tenant = Some([7; 32]);
    for (adapter, salt) in [(None, None), (Some("all"), None), (Some("some"), None), (Some("all"), tenant)] {
        assert_eq!(cached(adapter, salt), 0, "{adapter:?}");
        assert_eq!(cached(adapter, salt), 32, "{adapter:?}");
    }
    assert_eq!(cached(None, tenant), 0);
}

#[test]
fn embeddings_have_adapters_too() {
    let mut engine = engine(1);
    let mut embed = |adapter| engine.embed(&[5, 6, 7], Pooling::Last, adapter).map(Option::unwrap);
    let (plain, adapted) = (embed(None).unwrap(), embed(Some("all")).unwrap());
    assert_ne!(plain, adapted);
    assert!(matches!(embed(Some("none")), Err(Error::Request { what: "adapter", .. })));
}

#[test]
fn unknown_adapters_and_names_are_refused() {
    let told = engine(1).add_request(request(&[1], Some("al"))).unwrap_err().to_string();
    assert_eq!(told, "request: `adapter`: expected all, some, got `al`");
    assert_eq!(engine(1).adapters().collect::<Vec<_>>(), ["all", "some"]);
    let adapters = vec![adapter("a", "llama_all"), adapter("a", "llama_some")];
    let options = OpenOptions { adapters, ..OpenOptions::default() };
    let told = Engine::open(fixtures().join("models/llama"), options).err().unwrap().to_string();
    assert_eq!(told, "engine settings: `adapters`: expected a name of its own for each, got `a`");
}
