//! Models by name, from a hub in this process.
#![cfg(feature = "hub")]

mod server;

use server::{Content, Server, TOKEN, tag};
use std::path::{Path, PathBuf};
use warpsmith_engine::hub::{Hub, HubError, ModelName};
use warpsmith_engine::{Engine, Error, EventKind, OpenOptions, Request, SamplingParams};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The small Llama with a tokenizer, whole and in two files, and as GGUF.
fn content() -> Content {
    let (model, tokenizer) = (fixture("models/llama"), fixture("tokenizer"));
    let small = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];
    let index = br#"{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}"#.to_vec();
    Content::default()
        .add("tiny/llama", &model, &["config.json", "model.safetensors"])
        .add("tiny/llama", &tokenizer, &small)
        .add_file("tiny/llama", "README.md", b"not needed".to_vec())
        .add_file("tiny/llama", "pytorch_model.bin", b"not needed".to_vec())
        .add("private/llama", &model, &["config.json", "model.safetensors"])
        .add("gated/llama", &model, &["config.json", "model.safetensors"])
        .add("tiny/llama-GGUF", &model, &["model.gguf"])
        .add("tiny/sharded", &model, &["config.json"])
        .add_file("tiny/sharded", "model.safetensors.index.json", index)
        .add_file("tiny/sharded", "part-1.safetensors", b"one".to_vec())
        .add_file("tiny/sharded", "part-2.safetensors", b"two".to_vec())
        .add_file("other/mamba", "config.json", br#"{"model_type": "mamba"}"#.to_vec())
        .add("other/mamba", &model, &["model.safetensors"])
        .add("tiny/torn", &model, &["config.json"])
        .add_file("tiny/torn", "model.safetensors.index.json", br#"{"weight_map": {"a": "../a"}}"#.to_vec())
}

struct Bench {
    server: Server,
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        Bench { server: Server::start(content()), folder: tempfile::tempdir().unwrap() }
    }

    fn hub(&self) -> Hub {
        let cache = self.folder.path().join("hub");
        Hub { endpoint: self.server.endpoint.clone(), cache, token: None, offline: false }
    }

    fn fetch(&self, hub: &Hub, name: &str) -> Result<PathBuf, Error> {
        hub.fetch(&ModelName::parse(name).unwrap(), &mut |_| ())
    }

    /// What an interrupted download of the small Llama's weights has left.
    fn leave_part(&self, bytes: &[u8]) -> PathBuf {
        let blobs = self.folder.path().join("hub/models--tiny--llama/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        let weights = std::fs::read(fixture("models/llama/model.safetensors")).unwrap();
        std::fs::write(blobs.join(tag(&weights)).with_extension("part"), bytes).unwrap();
        blobs
    }

    fn refusal(&self, hub: &Hub, name: &str) -> HubError {
        match self.fetch(hub, name) {
            Err(Error::Hub { model, why }) => {
                assert_eq!(model, name);
                why
            }
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn weights_of_a_model_that_cannot_be_run_are_not_downloaded() {
    let (bench, name, mut files) = (Bench::new(), ModelName::parse("other/mamba").unwrap(), Vec::new());
    let told = bench.hub().fetch(&name, &mut |now| files.push(now.file.to_string())).unwrap_err().to_string();
    assert!(told.contains("`model_type`") && told.contains("gpt2, got \"mamba\""), "{told}");
    assert!(files.iter().any(|file| file == "config.json"), "{files:?}");
    assert!(!files.iter().any(|file| file == "model.safetensors"), "{files:?}");
}

#[test]
fn a_model_is_downloaded_once_and_runs() {
    let bench = Bench::new();
    let (name, mut told) = (ModelName::parse("tiny/llama").unwrap(), Vec::new());
    let folder = bench
        .hub()
        .fetch(&name, &mut |now| {
            assert!(now.bytes <= now.total);
            told.push((now.file.to_string(), now.bytes == now.total));
        })
        .unwrap();
    let size = std::fs::metadata(folder.join("model.safetensors")).unwrap().len();
    assert_eq!(size, std::fs::metadata(fixture("models/llama/model.safetensors")).unwrap().len());
    assert!(folder.starts_with(bench.folder.path().join("hub/models--tiny--llama/snapshots")));
    assert_eq!(told.last(), Some(&("model.safetensors".to_string(), true)), "weights come last");
    assert!(!bench.server.asked().iter().any(|path| path.contains("README") || path.contains("pytorch")));
    // As from the fixture itself.
    let run = |path: &Path| {
        let mut engine = Engine::open(path, OpenOptions::default()).unwrap();
        let params = SamplingParams { max_tokens: Some(8), ignore_eos: true, ..SamplingParams::greedy() };
        engine.add_request(Request { prompt: vec![3, 1, 4], params, ..Request::default() }).unwrap();
        let mut tokens = Vec::new();
        while engine.has_work() {
            tokens.extend(engine.step().unwrap().into_iter().filter_map(|event| match event.kind {
                EventKind::Token { token, .. } => Some(token),
                EventKind::Finished { .. } => None,
            }));
        }
        assert_eq!(tokens.len(), 8);
        tokens
    };
    assert!(Engine::open(&folder, OpenOptions::default()).unwrap().tokenizer().is_some());
    assert_eq!(run(&folder), run(&fixture("models/llama")));
    // Again, without a question to the hub.
    assert_eq!(bench.fetch(&bench.hub(), "tiny/llama").unwrap(), folder);
    let offline = Hub { offline: true, endpoint: "http://127.0.0.1:9".into(), ..bench.hub() };
    assert_eq!(bench.fetch(&offline, "tiny/llama").unwrap(), folder);
    assert!(bench.server.asked().is_empty());
}

#[test]
fn an_index_says_which_files_are_needed() {
    let bench = Bench::new();
    let folder = bench.fetch(&bench.hub(), "tiny/sharded").unwrap();
    for (file, text) in [("part-1.safetensors", "one"), ("part-2.safetensors", "two")] {
        assert_eq!(std::fs::read_to_string(folder.join(file)).unwrap(), text);
    }
    std::fs::remove_file(folder.join("part-2.safetensors")).unwrap();
    assert!(bench.fetch(&Hub { offline: true, ..bench.hub() }, "tiny/sharded").is_err());
    assert_eq!(bench.fetch(&bench.hub(), "tiny/sharded").unwrap(), folder);
    assert!(folder.join("part-2.safetensors").exists());
    // An index that reaches for files elsewhere is refused.
    let told = bench.fetch(&bench.hub(), "tiny/torn").unwrap_err().to_string();
    assert!(told.contains("without folders"), "{told}");
}

#[test]
fn only_what_is_missing_after_an_interruption_is_asked_for() {
    let bench = Bench::new();
    bench.server.faults.lock().unwrap().busy = Some(("part-2.safetensors".into(), 3));
    let why = bench.refusal(&bench.hub(), "tiny/sharded");
    assert!(matches!(&why, HubError::Broken { why } if why.contains("503")), "{why}");
    bench.server.asked();
    let folder = bench.fetch(&bench.hub(), "tiny/sharded").unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("part-2.safetensors")).unwrap(), "two");
    let asked = bench.server.asked();
    let files: Vec<&String> = asked.iter().filter(|path| path.contains("/resolve/")).collect();
    assert!(!files.is_empty() && files.iter().all(|path| path.ends_with("part-2.safetensors")), "{asked:?}");
}

#[test]
fn a_part_is_continued_also_if_the_hub_is_busy_once() {
    let bench = Bench::new();
    let weights = std::fs::read(fixture("models/llama/model.safetensors")).unwrap();
    bench.leave_part(&weights[..1000]);
    bench.server.faults.lock().unwrap().busy = Some(("model.safetensors".into(), 1));
    let folder = bench.fetch(&bench.hub(), "tiny/llama").unwrap();
    assert!(std::fs::read(folder.join("model.safetensors")).unwrap() == weights);
}

#[test]
fn a_file_of_another_size_is_not_kept() {
    let bench = Bench::new();
    let weights = std::fs::read(fixture("models/llama/model.safetensors")).unwrap();
    let blobs = bench.leave_part(&weights[..1000]);
    bench.server.faults.lock().unwrap().ignores_range = true;
    let why = bench.refusal(&bench.hub(), "tiny/llama");
    let (file, expected) = ("model.safetensors".to_string(), weights.len() as u64);
    assert_eq!(why, HubError::WrongSize { file, expected, got: expected + 1000 });
    assert!(why.to_string().contains(&format!("should have {expected} bytes")), "{why}");
    assert!(!blobs.join(tag(&weights)).exists());
    assert!(bench.fetch(&Hub { offline: true, ..bench.hub() }, "tiny/llama").is_err());
    // Nothing is left that a hub of this kind cannot continue.
    let folder = bench.fetch(&bench.hub(), "tiny/llama").unwrap();
    assert!(std::fs::read(folder.join("model.safetensors")).unwrap() == weights);
    // Nobody can continue this.
    let bench = Bench::new();
    let folder = bench.leave_part(&[&weights[..], b"more"].concat());
    let why = bench.refusal(&bench.hub(), "tiny/llama");
    assert_eq!(why, HubError::WrongPart { folder: folder.clone() });
    assert!(why.to_string().contains(&format!("delete {}/*.part", folder.display())), "{why}");
}

#[test]
fn a_tokenizer_that_others_left_out_is_fetched() {
    let bench = Bench::new();
    let folder = bench.fetch(&bench.hub(), "tiny/llama").unwrap();
    let tokenizer = folder.join("tokenizer.json");
    std::fs::remove_file(&tokenizer).unwrap();
    bench.server.asked();
    // It runs without, on token ids.
    for hub in
        [Hub { offline: true, ..bench.hub() }, Hub { endpoint: "http://127.0.0.1:9".into(), ..bench.hub() }]
    {
        assert_eq!(bench.fetch(&hub, "tiny/llama").unwrap(), folder);
    }
    assert!(bench.server.asked().is_empty() && !tokenizer.exists());
    assert_eq!(bench.fetch(&bench.hub(), "tiny/llama").unwrap(), folder);
    assert!(tokenizer.exists());
    let asked = bench.server.asked();
    let is_known = |path: &String| path.ends_with("/revision/main") || path.ends_with("/tokenizer.json");
    assert!(asked.iter().all(is_known), "{asked:?}");
    // A repository may have none.
    let right = Hub { token: Some(TOKEN.into()), ..bench.hub() };
    let folder = bench.fetch(&right, "private/llama").unwrap();
    assert_eq!(bench.fetch(&right, "private/llama").unwrap(), folder);
    // And what was had with a token runs without.
    assert_eq!(bench.fetch(&bench.hub(), "private/llama").unwrap(), folder);
}

#[test]
fn one_file_of_a_gguf_repository_is_enough() {
    let bench = Bench::new();
    let file = bench.fetch(&bench.hub(), "tiny/llama-GGUF:model.gguf").unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(fixture("models/llama/model.gguf")).unwrap());
    assert!(Engine::open(&file, OpenOptions::default()).is_ok());
    let why = bench.refusal(&bench.hub(), "tiny/llama-GGUF:other.gguf");
    assert!(matches!(&why, HubError::NoFile { file, .. } if file == "other.gguf"));
    assert!(why.to_string().contains("it has model.gguf"), "{why}");
    // Without a file, it says which there are.
    let told = bench.refusal(&bench.hub(), "tiny/llama-GGUF").to_string();
    assert!(told.contains("config.json") && told.contains("tiny/llama-GGUF:FILE"), "{told}");
}

#[test]
fn what_cannot_be_had_is_said() {
    let bench = Bench::new();
    let hub = bench.hub();
    assert_eq!(bench.refusal(&hub, "tiny/nothing"), HubError::NoRepository);
    assert_eq!(bench.refusal(&hub, "private/llama"), HubError::Unauthorised { with_token: false });
    let told = bench.refusal(&hub, "private/llama").to_string();
    assert!(told.contains("HF_TOKEN") && told.contains("if it is a path"), "{told}");
    let wrong = Hub { token: Some("hf_wrong".into()), ..hub.clone() };
    assert_eq!(bench.refusal(&wrong, "private/llama"), HubError::Unauthorised { with_token: true });
    assert_eq!(bench.refusal(&hub, "gated/llama"), HubError::Forbidden);
    let right = Hub { token: Some(TOKEN.into()), ..hub.clone() };
    assert!(bench.fetch(&right, "private/llama").is_ok());
    let offline = Hub { offline: true, ..hub.clone() };
    let why = bench.refusal(&offline, "tiny/llama");
    assert!(matches!(why, HubError::Offline { .. }) && why.to_string().contains("HF_HUB_OFFLINE"), "{why}");
    let gone = Hub { endpoint: "http://127.0.0.1:9".into(), ..hub };
    let why = bench.refusal(&gone, "tiny/llama");
    assert!(matches!(&why, HubError::Unreachable { endpoint, .. } if endpoint.ends_with(":9")), "{why}");
}
