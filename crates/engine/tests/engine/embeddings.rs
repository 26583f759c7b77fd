//! Embeddings: the hidden states that the head reads, pooled, whatever else runs.

use crate::{engine, families, prompt, run_all};
use std::path::Path;
use warpsmith::DType;
use warpsmith::tensor::Random;
use warpsmith_engine::weights::Checkpoint;
use warpsmith_engine::{Engine, EngineOptions, Error, Pooling, Request, SamplingParams};

fn options(max_chunk: usize) -> EngineOptions {
    EngineOptions { page_size: 4, num_pages: 32, max_chunk, fixed_decode: true, ..EngineOptions::default() }
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|x| x.to_bits()).collect()
}

fn embed(engine: &mut Engine, tokens: &[i32], pooling: Pooling) -> Vec<f32> {
    let before = engine.stats();
    let vector = engine.embed(tokens, pooling, None).unwrap().expect("there are enough pages");
    engine.check().unwrap();
    assert_eq!(engine.stats().available_pages, before.available_pages);
    assert_eq!(engine.stats().cached_pages, before.cached_pages, "nothing is kept");
    vector
}

/// The head is linear: of an embedding it makes the pooled logits times a factor. The logits are those that transformers
/// recorded.
#[test]
fn the_head_makes_the_recorded_logits_of_an_embedding() {
    for family in families::FAMILIES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let expected = Checkpoint::open(folder.join("expected.safetensors")).unwrap();
        let model = Checkpoint::open(&folder).unwrap();
        let read = |checkpoint: &Checkpoint, name: &str| {
            let tensor = checkpoint.tensor(name).unwrap();
            (tensor.shape().to_vec(), tensor.to_tensor(DType::F32).unwrap().to_f64().unwrap())
        };
        let ids = expected.tensor("ids").unwrap().bytes().chunks_exact(4);
        let ids: Vec<i32> = ids.map(|id| i32::from_le_bytes(id.try_into().unwrap())).collect();
        let (shape, logits) = read(&expected, "logits");
        let vocab = shape[shape.len() - 1];
        let heads = ["lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight", "wte.weight"];
        let head = heads.into_iter().find(|name| model.get(name).is_some()).unwrap();
        let (shape, head) = read(&model, head);
        for (pooling, chunk) in [(Pooling::Last, 64), (Pooling::Mean, 64), (Pooling::Mean, 5)] {
            let mut engine = engine(families::model(family), options(chunk));
            let vector = embed(&mut engine, &ids, pooling);
            let length: f64 = vector.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-5, "{family}: {length}");
            let product = |row: &[f64]| row.iter().zip(&vector).map(|(w, &x)| w * f64::from(x)).sum::<f64>();
            let got: Vec<f64> = head.chunks_exact(shape[1]).take(vocab).map(product).collect();
            let mut wanted = vec![0.0; vocab];
            let first = if pooling == Pooling::Last { ids.len() - 1 } else { 0 };
            for row in logits.chunks_exact(vocab).take(ids.len()).skip(first) {
                wanted.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let cosine = dot(&got, &wanted) / (dot(&got, &got) * dot(&wanted, &wanted)).sqrt();
            // Activations of 16 bits are a matter of the device.
            let enough = if crate::test_dtype() == DType::F32 { 1.0 - 1e-6 } else { 0.999 };
            assert!(cosine > enough, "{family}, {pooling:?}, chunks of {chunk}: {cosine}");
        }
    }
}

#[test]
fn embeddings_and_running_requests_do_not_change_each_other() {
    for family in ["llama", "gpt2"] {
        let mut random = Random::new(7);
        let vocab = families::model(family).config().vocab_size;
        let inputs: Vec<Vec<i32>> = [1, 4, 13].map(|len| prompt(&mut random, len, vocab)).into();
        let requests: Vec<Request> = [9, 3]
            .map(|len| Request {
                prompt: prompt(&mut random, len, vocab),
                params: SamplingParams { max_tokens: Some(10), ignore_eos: true, ..SamplingParams::greedy() },
                ..Request::default()
            })
            .into();
        let mut quiet = engine(families::model(family), options(5));
        let expected = run_all(&mut quiet, &requests);
        let poolings = [Pooling::Last, Pooling::Mean];
        let alone =
            inputs.iter().map(|input| poolings.map(|pooling| bits(&embed(&mut quiet, input, pooling))));
        let alone: Vec<_> = alone.collect();
        assert_ne!(alone[1][0], alone[1][1]);

        let mut busy = engine(families::model(family), options(5));
        for request in &requests {
            busy.add_request(request.clone()).unwrap();
        }
        let mut log = crate::Log::default();
        let mut rounds = 0;
        while busy.has_work() {
            log.step(&mut busy);
            let input = rounds % inputs.len();
            for (pooling, alone) in poolings.into_iter().zip(&alone[input]) {
                assert_eq!(bits(&embed(&mut busy, &inputs[input], pooling)), *alone, "{family}, {pooling:?}");
            }
            rounds += 1;
        }
        assert!(rounds >= 10 && busy.stats().steps_ahead > 0, "{:?}", busy.stats());
        let done: Vec<_> = log.finish(&mut busy).done.into_values().map(|done| done.tokens).collect();
        assert_eq!(done, expected.into_iter().map(|done| done.tokens).collect::<Vec<_>>());
    }
}

#[test]
fn inputs_wait_for_pages_and_those_that_never_fit_are_refused() {
    let mut engine = engine(families::model("llama"), EngineOptions { num_pages: 8, ..options(5) });
    let most = engine.longest_input();
    assert_eq!(most, 32, "eight pages of four tokens");
    let vocab = engine.vocab_size();
    let refused = |engine: &mut Engine, tokens: &[i32], told: &str| {
        let error = engine.embed(tokens, Pooling::Last, None).unwrap_err();
        assert!(matches!(error, Error::Request { what: "input", .. }), "{error}");
        assert!(error.to_string().contains(told), "{error}");
    };
    refused(&mut engine, &[], "expected 1 to 32 tokens, got 0");
    refused(&mut engine, &[1; 33], "got 33");
    refused(&mut engine, &[1, vocab as i32], "tokens from 0 to below");
    refused(&mut engine, &[-1], "got -1");

    let params = SamplingParams { max_tokens: Some(4), ignore_eos: true, ..SamplingParams::greedy() };
    let request = Request { prompt: vec![1; 9], params, ..Request::default() };
    let expected = run_all(&mut engine, std::slice::from_ref(&request));
    let id = engine.add_request(request).unwrap();
    let mut log = crate::Log::default();
    log.step(&mut engine);
    assert!(engine.embed(&[2; 32], Pooling::Mean, None).unwrap().is_none(), "the request has pages");
    engine.check().unwrap();
    let log = log.finish(&mut engine);
    assert_eq!(log.done[&(id, 0)].tokens, expected[0].tokens);
    // Now all pages are unused, those of the cache among them.
    assert!(engine.stats().cached_pages > 0);
    assert!(engine.embed(&[2; 32], Pooling::Mean, None).unwrap().is_some());
    engine.check().unwrap();
    assert_eq!(engine.stats().available_pages, 8);
}
