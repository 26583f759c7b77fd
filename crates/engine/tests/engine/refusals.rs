//! What can never be served is refused at once, by name; what just fits is served.

use crate::oracle::{Oracle, VOCAB, tiny_llama};
use crate::{Log, engine, on_test_device, run_all};
use warpsmith::{DType, Tensor, TensorViewMut};
use warpsmith_engine::models::{Config, Model};
use warpsmith_engine::{
    Batch, Engine, EngineOptions, FinishReason, KvCache, OpenOptions, Request, Result, SamplingParams,
};

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt).map(|i| (i % VOCAB) as i32).collect(),
        params: SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::greedy() },
        ..Request::default()
    }
}

#[test]
fn a_request_of_exactly_the_pool_is_served_and_one_token_more_refused() {
    let options = EngineOptions { page_size: 4, num_pages: 5, ..EngineOptions::default() };
    let mut engine = engine(Box::new(Oracle::new(4)), options);
    // The last token needs no place: 12 + 9 - 1 = 20.
    let fitting = request(12, 9);
    let done = run_all(&mut engine, std::slice::from_ref(&fitting));
    assert_eq!(done[0].tokens, Oracle::output(&fitting.prompt, 9));
    let told = engine.add_request(request(12, 10)).unwrap_err().to_string();
    assert!(told.contains("`max_tokens`") && told.contains("at most 9"), "{told}");
    assert!(engine.add_request(request(21, 1)).is_err());
    // Two of them, which cannot be there at the same time, one after the other.
    let done = run_all(&mut engine, &[fitting.clone(), request(11, 10)]);
    assert_eq!(done[0].tokens, Oracle::output(&fitting.prompt, 9));
    assert_eq!(done[1].tokens, Oracle::output(&request(11, 10).prompt, 10));
    // Without a number of tokens, as many as there is room for.
    let open = Request { params: SamplingParams::greedy(), ..request(12, 1) };
    let done = run_all(&mut engine, &[open]);
    assert_eq!((done[0].tokens.len(), &done[0].reason), (9, &FinishReason::Length));
}

#[test]
fn a_prompt_of_whole_pages_that_is_fully_cached_is_answered_alike() {
    let options = EngineOptions { page_size: 4, num_pages: 50, ..EngineOptions::default() };
    let mut engine = engine(Box::new(Oracle::new(4)), options);
    let whole = request(16, 6);
    let cold = run_all(&mut engine, std::slice::from_ref(&whole));
    let warm = run_all(&mut engine, std::slice::from_ref(&whole));
    assert_eq!((cold[0].usage.cached_tokens, warm[0].usage.cached_tokens), (0, 12));
    assert_eq!(cold[0].tokens, warm[0].tokens);
    assert_eq!(cold[0].tokens, Oracle::output(&whole.prompt, 6));
}

#[test]
fn bad_requests_and_settings_are_refused_by_name() {
    let mut engine = engine(tiny_llama(), EngineOptions::default());
    let named = |result: Result<warpsmith_engine::RequestId>, name: &str| {
        let told = result.unwrap_err().to_string();
        assert!(told.contains(&format!("`{name}`")), "{told}");
    };
    named(engine.add_request(request(0, 1)), "prompt");
    named(engine.add_request(request(512, 1)), "prompt");
    named(engine.add_request(request(10, 503)), "max_tokens");
    named(engine.add_request(Request { prompt: vec![VOCAB as i32], ..request(1, 1) }), "prompt");
    named(engine.add_request(Request { prompt: vec![-1], ..request(1, 1) }), "prompt");
    named(engine.add_request(request(1, 0)), "max_tokens");
    assert!(!engine.has_work());
    for (name, options) in [
        ("page_size", EngineOptions { page_size: 0, ..Default::default() }),
        ("num_pages", EngineOptions { num_pages: 0, ..Default::default() }),
        ("max_running", EngineOptions { max_running: 2000, ..Default::default() }),
        ("max_chunk", EngineOptions { max_chunk: 0, ..Default::default() }),
        ("kv_dtype", EngineOptions { kv_dtype: Some(DType::F16), ..Default::default() }),
        ("vocab_size", EngineOptions { vocab_size: Some(VOCAB + 1), ..Default::default() }),
    ] {
        let told = Engine::new(tiny_llama(), on_test_device(options)).err().expect(name).to_string();
        assert!(told.contains(&format!("`{name}`")), "{told}");
    }
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama");
    for page_size in [0, 257, 1 << 32] {
        let options = OpenOptions { page_size: Some(page_size), ..OpenOptions::default() };
        let told = Engine::open(model, options).err().expect("an error").to_string();
        assert!(told.contains("`page_size`") && told.contains(&page_size.to_string()), "{told}");
    }
    for fraction in [0.0, 5.0, f64::NAN] {
        let options = OpenOptions { mem_fraction_static: Some(fraction), ..OpenOptions::default() };
        let told = Engine::open(model, options).err().expect("on the CPU too").to_string();
        assert!(told.contains("`mem_fraction_static`: expected a number above 0 and at most 1"), "{told}");
    }
    for context in [0, 129] {
        let options = OpenOptions { max_positions: Some(context), ..OpenOptions::default() };
        let told = Engine::open(model, options).err().expect("an error").to_string();
        assert!(told.contains("`max_positions`") && told.ends_with(&format!("got {context}")), "{told}");
    }
}

/// A model that cannot be run has tensors that cannot be read, and none is looked at.
#[test]
fn family_and_head_size_are_judged_before_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let key = |name: &str, kind: u32, value: &[u8]| [&text(name)[..], &kind.to_le_bytes(), value].concat();
    let file = |keys: &[Vec<u8>]| {
        let path = folder.path().join("model.gguf");
        // One tensor of a type that does not exist.
        let tensor =
            [&text("x")[..], &1u32.to_le_bytes(), &4u64.to_le_bytes(), &99u32.to_le_bytes(), &[0; 8]]
                .concat();
        let head =
            [&b"GGUF"[..], &3u32.to_le_bytes(), &1u64.to_le_bytes(), &(keys.len() as u64).to_le_bytes()];
        std::fs::write(&path, [&head.concat()[..], &keys.concat(), &tensor].concat()).unwrap();
        Engine::open(path, OpenOptions::default()).err().expect("an error").to_string()
    };
    let family = |name: &str| key("general.architecture", 8, &text(name));
    let told = file(&[family("mamba")]);
    assert!(told.contains("model.gguf: ") && told.contains("smollm3, olmo2, gpt2, got \"mamba\""), "{told}");
    let told = file(&[family("llama"), key("llama.attention.key_length", 4, &48u32.to_le_bytes())]);
    assert!(told.contains("`llama.attention.key_length`") && told.contains("32, 64, 80"), "{told}");
    let told = file(&[family("llama"), key("llama.attention.key_length", 4, &64u32.to_le_bytes())]);
    assert!(told.contains("tensor `x`: its type number 99 is not supported"), "{told}");
}

/// Gives NaN to sequences whose last token is 13.
struct Unlucky(Oracle);

impl Model for Unlucky {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, out: TensorViewMut<'_>) -> Result<()> {
        let mut logits = Tensor::empty(out.shape(), DType::F32, batch.ids.device())?;
        self.0.forward(batch, kv, logits.view_mut())?;
        let mut logits: Vec<f32> = logits.to_vec()?;
        let ids: Vec<i32> = batch.ids.to_vec()?;
        let all = || Ok((0..ids.len() as i32).collect());
        let rows: Vec<i32> = batch.logit_rows.as_ref().map_or_else(all, Tensor::to_vec)?;
        for (row, at) in logits.chunks_exact_mut(VOCAB).zip(rows) {
            if ids[at as usize] == 13 {
                row.fill(f32::NAN);
            }
        }
        let logits = Tensor::from_slice(&logits, &[logits.len() / VOCAB, VOCAB], batch.ids.device())?;
        Ok(warpsmith::ops::Copy::new(&logits).run_into(out, batch.stream())?)
    }
}

#[test]
fn a_row_of_nan_fails_alone_and_is_not_shared() {
    let options = EngineOptions { page_size: 4, num_pages: 50, ..EngineOptions::default() };
    let mut engine = engine(Box::new(Unlucky(Oracle::new(4))), options);
    let bad = Request { prompt: vec![1, 2, 3, 4, 5, 6, 7, 8, 13], ..request(1, 4) };
    let forked = Request { params: SamplingParams { n: 3, ..bad.params.clone() }, ..bad.clone() };
    let good = Request { prompt: vec![9, 8, 7], ..request(1, 1) };
    let done = run_all(&mut engine, &[bad.clone(), good, forked]);
    assert!(matches!(done[0].reason, FinishReason::Failed(_)));
    assert_eq!(done[1].reason, FinishReason::Length);
    assert!(done[2..].iter().all(|done| matches!(done.reason, FinishReason::Failed(_))) && done.len() == 5);
    engine.check().unwrap();
    let again = run_all(&mut engine, &[bad]);
    assert_eq!(again[0].usage.cached_tokens, 0, "pages that were never verified are not in the cache");
}

/// Fails the second forward pass.
struct Broken(Oracle, usize);

impl Model for Broken {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvCache, out: TensorViewMut<'_>) -> Result<()> {
        self.1 += 1;
        match self.1 {
            2 => Err(warpsmith::Error::argument("test", "x", "luck", "none").into()),
            _ => self.0.forward(batch, kv, out),
        }
    }
}

#[test]
fn a_step_that_fails_ends_its_requests_and_the_engine_goes_on() {
    let options = EngineOptions { page_size: 4, num_pages: 50, max_running: 1, ..EngineOptions::default() };
    let mut engine = engine(Box::new(Broken(Oracle::new(4), 0)), options);
    let first = engine.add_request(request(5, 5)).unwrap();
    let second = engine.add_request(request(6, 5)).unwrap();
    let log = Log::default().finish(&mut engine);
    assert!(matches!(&log.done[&(first, 0)].reason, FinishReason::Failed(why) if why.contains("luck")));
    assert_eq!(log.done[&(second, 0)].tokens, Oracle::output(&request(6, 5).prompt, 5));
    engine.check().unwrap();
    assert_eq!(engine.stats().available_pages, 50);
}
