//! The model against the evidence: what is built in is what the records say, and it does not get worse.

use std::path::{Path, PathBuf};
use warpsmith::lab::evidence::{self, Record};
use warpsmith_whatif::change::{Target, compare};
use warpsmith_whatif::model::MeasuredStep;
use warpsmith_whatif::{Change, Errors, FAMILIES, Layers, Model, Step, Work, standard_changes};

fn evidence_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence")
}

fn record() -> Record {
    let records = evidence::load(&evidence_folder()).unwrap();
    records.into_iter().find(|record| record.machine.device == "NVIDIA H200").expect("the H200 is on record")
}

fn layers(name: &str) -> Layers {
    let (layers, hidden, inner, heads) = match name {
        "qwen3-0.6b" => (28, 1024, 3072, 16),
        "qwen3-8b" => (36, 4096, 12288, 32),
        _ => panic!("{name} has no sizes here"),
    };
    let (kv_heads, head_dim, vocab) = (8, 128, 151_936);
    Layers { name: name.into(), layers, hidden, inner, heads, kv_heads, head_dim, vocab, head_norms: true }
}

fn measured_steps() -> Vec<MeasuredStep> {
    let text = std::fs::read_to_string(evidence_folder().join("models/nvidia-h200.json")).unwrap();
    warpsmith_whatif::step::measured(&text, |name| Ok(Some(layers(name)))).unwrap()
}

fn fitted() -> Model {
    Model::fit(&record()).unwrap().with_steps(&measured_steps()).unwrap()
}

/// The bars for families with ten rows or more whose tensors do not stay in the cache.
const ENOUGH_ROWS: usize = 10;
const MEDIAN: f64 = 0.10;
const NINTH: f64 = 0.25;
const STEP: f64 = 0.10;

#[test]
fn errors_on_rows_that_were_held_back_meet_the_bars_and_do_not_get_worse() {
    let (model, built_in) = (fitted(), Model::built_in());
    assert!(model.families.len() > 12, "{} families", model.families.len());
    for now in model.families.iter().chain(&model.steps) {
        let hint = "fit again with `warpsmith whatif --fit --record` if the evidence has changed";
        let before = built_in.families.iter().chain(&built_in.steps).find(|family| family.name == now.name);
        let before = before.unwrap_or_else(|| panic!("{} is not in fitted.json: {hint}", now.name));
        let (new, old): (Errors, Errors) = (now.held_out, before.held_out);
        let worse = |new: f64, old: f64| new > 1.25 * old + 0.01;
        assert!(
            !worse(new.median, old.median),
            "{}: median {} was {}; {hint}",
            now.name,
            new.median,
            old.median
        );
        assert!(!worse(new.ninth, old.ninth), "{}: ninth {} was {}; {hint}", now.name, new.ninth, old.ninth);
        let family = FAMILIES.iter().find(|family| family.name == now.name);
        if family.is_some_and(|family| !family.in_cache) && now.rows >= ENOUGH_ROWS {
            assert!(new.median <= MEDIAN && new.ninth <= NINTH, "{}: {new:?}", now.name);
        }
    }
    let steps = model.steps.unwrap();
    assert!(steps.rows >= 4 && steps.held_out.worst <= STEP, "{steps:?}");
}

#[test]
fn the_model_beats_the_plain_roofline_on_held_back_rows_of_every_large_family() {
    for family in Model::built_in().families.iter().filter(|family| family.rows >= ENOUGH_ROWS) {
        assert!(family.held_out.ninth < family.roofline.ninth, "{family:?}");
    }
}

#[test]
fn no_op_of_the_records_is_forgotten() {
    let built_in = Model::built_in();
    let rows: usize = built_in.families.iter().map(|family| family.rows).sum();
    let without: usize = built_in.without_family.values().sum();
    assert!(without * 10 < rows, "{rows} with a family, {without} without");
    assert_eq!(built_in.machine.name, "NVIDIA H200");
}

#[test]
fn faster_memory_helps_a_decode_step_and_tensor_cores_do_not() {
    let model = Model::built_in();
    let step = Step::new(layers("qwen3-8b"), 1, 1024).unwrap();
    let compared = compare(&model, &Target::Step(step), &standard_changes()).unwrap();
    let outcome = |text: &str| {
        let found = compared.outcomes.iter().find(|outcome| outcome.change.contains(text));
        found.unwrap_or_else(|| panic!("nothing about {text}")).faster
    };
    assert!(outcome("memory bandwidth 2x").is_some_and(|faster| (1.4..2.0).contains(&faster)));
    assert_eq!((outcome("tensor cores 2x"), outcome("L2 2x")), (None, None));
    assert!(outcome("H100").is_some_and(|faster| faster < 1.0));
    assert!(outcome("B200").is_some_and(|faster| faster > 1.2));
}

#[test]
fn tensor_cores_help_long_products_and_keys_on_chip_help_long_contexts() {
    let model = Model::built_in();
    let work = Work::new("linear", "linear_sm90", "m=8192 n=8192 k=8192", "bf16").costing(4e8, 1.1e12);
    let tensor = compare(&model, &Target::Op(work), &[Change::Tensor(2.0)]).unwrap();
    assert!(tensor.outcomes[0].faster.is_some_and(|faster| (1.5..2.0).contains(&faster)), "{tensor:?}");
    // Most of the time of 64 requests with 32 thousand keys is reading keys and values; keeping half of them halves that.
    let step = Step::new(layers("qwen3-0.6b"), 64, 32_768).unwrap();
    let half = 0.5 * step.layers.kv_bytes() * 64.0 * 32_768.0;
    let kept = compare(&model, &Target::Step(step), &[Change::KeptKv(half)]).unwrap();
    assert!(kept.outcomes[0].faster.is_some_and(|faster| (1.7..2.0).contains(&faster)), "{kept:?}");
}

#[test]
fn an_op_without_a_family_is_refused_by_name() {
    let work = Work::new("penalize", "penalize_cuda", "rows=1", "f32").costing(1.0, 1.0);
    let error = compare(&Model::built_in(), &Target::Op(work), &[]).unwrap_err().to_string();
    assert!(error.contains("penalize") && error.contains("rows, in cache"), "{error}");
}
