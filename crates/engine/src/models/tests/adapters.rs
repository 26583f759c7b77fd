//! Adapters that PEFT saved, against the logits that it computes. `scripts/adapter_fixtures.py` makes both.

use super::{fixture, largest_difference, logits_with, model};
use crate::adapters::Adapter;
use crate::error::Result;
use crate::models::{Config, LoadOptions, Model, load_adapted};
use crate::weights::Checkpoint;
use std::path::{Path, PathBuf};
use warpsmith::DType;

/// How far logits in f32 may be from those of PEFT, in parts of the largest. The numbers of these adapters are as large as those of
/// the weights, so both round twice: differences of up to 7e-6 were seen. The adapters themselves make one of more than 1e-3.
const LIMIT: f32 = 2e-5;

/// How far logits in bf16 may be from those in f32, in parts of their norm. PEFT's own in bf16 are off by 0.022 to 0.073: these
/// small models have large adapters.
const LIMIT_BF16: f32 = 0.05;

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt()
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters").join(name)
}

fn adapted(base: &Path, dtype: DType, adapters: &[&Path]) -> Result<Box<dyn Model>> {
    let checkpoint = Checkpoint::open(base).unwrap();
    let config = Config::from_checkpoint(&checkpoint).unwrap();
    let adapters: Vec<Adapter> =
        adapters.iter().map(|path| Adapter::open("a", path)).collect::<Result<_>>()?;
    load_adapted(&config, &checkpoint, LoadOptions { dtype, ..LoadOptions::default() }, &adapters)
}

const ADAPTERS: [(&str, &str); 4] =
    [("llama", "llama_all"), ("llama", "llama_some"), ("phi3", "phi3_all"), ("gpt2", "gpt2_all")];

#[test]
fn logits_are_those_of_peft() {
    for (base, name) in ADAPTERS {
        let expected = Checkpoint::open(folder(name).join("expected.safetensors")).unwrap();
        let ids: Vec<i32> = expected.tensor("ids").unwrap().to_tensor(DType::I32).unwrap().to_vec().unwrap();
        let expected: Vec<f32> =
            expected.tensor("logits").unwrap().to_tensor(DType::F32).unwrap().to_vec().unwrap();
        let scale = expected.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        let mut bases = vec![fixture(base)];
        // Rows of queries and keys have another order there; adapters are for that of transformers.
        bases.extend(Some(fixture(base).join("model.gguf")).filter(|path| path.is_file()));
        for path in bases {
            let mut with = adapted(&path, DType::F32, &[&folder(name)]).unwrap();
            let all = [ids.len()];
            let got = logits_with(&mut *with, &ids, &all, DType::F32, Some(0));
            let difference = largest_difference(&got, &expected) / scale;
            assert!(difference < LIMIT, "{name}: {difference:e} of the largest logit, {scale}");
            let parts = logits_with(&mut *with, &ids, &[5, 1, 9], DType::F32, Some(0));
            assert!(parts == got, "{name}: chunks change bits");
            // Without the adapter it is the model that it was, but for the rounding between gate and activation.
            let plain = logits_with(&mut *with, &ids, &all, DType::F32, None);
            let without = logits_with(&mut *model(path, DType::F32), &ids, &all, DType::F32, None);
            assert!(largest_difference(&plain, &without) / scale < LIMIT, "{name}");
            assert!(largest_difference(&plain, &got) / scale > 1e-3, "{name} has no effect");
        }
        let mut narrow = adapted(&fixture(base), DType::BF16, &[&folder(name)]).unwrap();
        let got = logits_with(&mut *narrow, &ids, &[ids.len()], DType::BF16, Some(0));
        let difference = distance(&got, &expected) / distance(&vec![0.0; expected.len()], &expected);
        assert!(difference < LIMIT_BF16, "{name} in bf16: {difference:e} of the norm of the logits");
    }
}

#[test]
fn adapters_of_other_models_are_refused_by_tensor() {
    let told = |base: &str, name: &str| {
        adapted(&fixture(base), DType::F32, &[&folder(name)]).err().expect("it is refused").to_string()
    };
    let unknown = told("llama", "gpt2_all");
    assert!(unknown.contains("transformer.h.0.attn.c_attn.lora_A.weight"), "{unknown}");
    assert!(unknown.contains("a module that cannot be adapted"), "{unknown}");
    assert!(told("gpt2", "llama_all").contains("model.layers.0.mlp.down_proj.lora_A.weight"));
    for base in ["qwen3", "phi3"] {
        let wrong = told(base, "llama_all");
        assert!(wrong.contains("adapter_model.safetensors") && wrong.contains("shape ["), "{wrong}");
    }
}
