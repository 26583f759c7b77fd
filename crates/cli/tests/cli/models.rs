//! Commands that run models. Those that need text want a model in `WARPSMITH_TEST_MODEL`, and are skipped without.

// Not all of it is used here.
#[allow(dead_code)]
#[path = "../../../engine/tests/hub/server.rs"]
mod server;

use crate::{fails, has_nvrtc, parse, succeeds, warpsmith};
use server::{Content, Server};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use warpsmith::jit::pack::Pack;

/// A small random model without a tokenizer.
pub const RANDOM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures/models/llama");

/// A model that was trained to chat.
fn model() -> Option<String> {
    let model = std::env::var("WARPSMITH_TEST_MODEL").ok();
    if model.is_none() {
        eprintln!("skipped: WARPSMITH_TEST_MODEL names no model");
    }
    model
}

#[test]
fn a_model_is_measured_in_rows_of_prompts_and_tokens() {
    let sizes = ["-p", "16,32", "-n", "4", "-r", "2"];
    let json = succeeds(&[&["bench-model", "--model", RANDOM, "-o", "json"][..], &sizes].concat());
    let rows = parse(&json);
    let tests: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["test"].as_str().unwrap()).collect();
    assert_eq!(tests, ["pp16", "pp32", "tg4"]);
    for row in rows.as_array().unwrap() {
        assert!(row["mean"].as_f64().unwrap() > 0.0 && row["samples"].as_array().unwrap().len() == 2);
    }
    // As `serve` would run them.
    let words = ["-p", "0", "-n", "0", "-r", "1", "-o", "json", "--workload", "serve", "--requests", "6"];
    let lengths = ["--random-input-len", "20", "--random-output-len", "5", "--max-running-requests", "4"];
    let rows = parse(&succeeds(&[&["bench-model", "--model", RANDOM][..], &words, &lengths].concat()));
    let row = &rows.as_array().unwrap()[0];
    let seconds = row["milliseconds"].as_f64().unwrap() / 1e3;
    assert_eq!(row["test"], "serve");
    assert!(
        (row["mean"].as_f64().unwrap() * seconds / 30.0 - 1.0).abs() < 1e-6,
        "all tokens of all answers: {row}"
    );
    let table = succeeds(&[&["bench-model", "--model", RANDOM][..], &sizes].concat());
    assert!(table.starts_with("| model |") && table.contains("| pp32 |"), "{table}");
}

#[test]
fn what_is_missing_is_named() {
    for command in [&["generate", "hello"][..], &["chat"], &["bench-model"]] {
        let told = fails(command);
        assert!(told.contains("--model") && told.contains("WARPSMITH_MODEL"), "{told}");
        let told = fails(&[command, &["--model", "/no/such/model.gguf"]].concat());
        assert!(told.contains("/no/such/model.gguf"), "{told}");
    }
    assert!(fails(&["generate", "hello", "--model", RANDOM]).contains("tokenizer"));
    assert!(fails(&["chat", "--model", RANDOM]).contains("chat template"));
}

#[test]
fn a_question_is_answered_the_same_each_time() {
    let Some(model) = model() else { return };
    let question = ["generate", "What is gravity?", "--max-tokens", "12", "--model", &model];
    let text = succeeds(&question);
    assert!(text.contains("ravity"), "{text}");
    let json = parse(&succeeds(&[&question[..], &["--json"]].concat()));
    assert_eq!(json["text"].as_str().unwrap(), text.trim_end_matches('\n'));
    assert_eq!((json["finish_reason"].as_str(), json["output_tokens"].as_u64()), (Some("length"), Some(12)));
    let stopped = succeeds(&[&question[..], &["--stop", "ravity"]].concat());
    assert_eq!(stopped, format!("{}\n", text.split("ravity").next().unwrap()));
}

#[test]
fn a_chat_sends_the_whole_conversation_and_computes_what_is_new() {
    let Some(model) = model() else { return };
    let cache = tempfile::tempdir().unwrap();
    let mut chat = warpsmith(cache.path())
        .args(["chat", "--max-tokens", "24", "--stats", "--model", &model])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = "My name is Ada.\nWhat is my name?\n/clear\n\n/exit\nnever read\n";
    chat.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = chat.wait_with_output().unwrap();
    let (text, stats) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stats}");
    assert!(!text.trim().is_empty());
    // "35 prompt tokens, 0 cached, ...": one line for each answer.
    let count = |line: &str, after: usize| line.split(' ').nth(after).unwrap().parse::<usize>().unwrap();
    let counts: Vec<[usize; 2]> = stats.lines().map(|line| [count(line, 0), count(line, 3)]).collect();
    let [[first, 0], [second, cached]] = counts[..] else { panic!("{stats}") };
    assert!(second > first + 24 && cached > 0, "the second prompt has the first and its answer: {stats}");
}

/// The small random model with a tokenizer, and a template that refuses the message `no`.
pub fn talking(folder: &Path, change: impl FnOnce(&mut [u8])) {
    let fixtures = Path::new(RANDOM).join("../..");
    for (from, file) in [("models/llama", "config.json"), ("tokenizer", "tokenizer.json")] {
        std::fs::copy(fixtures.join(from).join(file), folder.join(file)).unwrap();
    }
    let template = "{% for message in messages %}{% if message.content == 'no' %}{{ raise_exception('not that') }}\
        {% endif %}{{ message.content }}{% endfor %}";
    let config = serde_json::json!({ "eos_token": "<|im_end|>", "chat_template": template });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let mut weights = std::fs::read(Path::new(RANDOM).join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    change(&mut weights[header..]);
    std::fs::write(folder.join("model.safetensors"), weights).unwrap();
}

#[test]
fn a_chat_goes_on_after_a_message_that_cannot_be_answered() {
    let chat = |change: fn(&mut [u8])| {
        let folder = tempfile::tempdir().unwrap();
        talking(folder.path(), change);
        let mut chat = warpsmith(folder.path())
            .args(["chat", "--max-tokens", "4", "--ignore-eos", "--stats", "--model"])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        chat.stdin.take().unwrap().write_all(b"no\nabc\nno\nabc\n").unwrap();
        let output = chat.wait_with_output().unwrap();
        assert!(output.status.success());
        let told = String::from_utf8(output.stderr).unwrap();
        told.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let told = chat(|_| ());
    assert_eq!(told.len(), 4, "{told:?}");
    for (line, part) in told.iter().zip(["not that", "prompt tokens", "not that", "prompt tokens"]) {
        assert!(line.contains(part) && line.starts_with("error: ") == (part == "not that"), "{told:?}");
    }
    // All weights are NaN.
    let told = chat(|weights| weights.fill(0xff));
    for (line, part) in told.iter().zip(["not that", "not numbers", "not that", "not numbers"]) {
        assert!(line.starts_with("error: ") && line.contains(part), "{told:?}");
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    for more in [&[][..], &["--json"]] {
        let output = warpsmith(folder.path())
            .args(["generate", "abc", "--max-tokens", "4", "--ignore-eos", "--model"])
            .arg(folder.path())
            .args(more)
            .stdout(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.starts_with("error: ") && told.contains("standard output"), "{told}");
    }
}

#[test]
fn options_of_a_model_want_a_model() {
    for option in [
        &["--dtype", "bf16"][..],
        &["--kv-dtype", "auto"],
        &["--context", "100"],
        &["--expand"],
        &["--max-running", "64"],
        &["--max-batch-tokens", "1024"],
    ] {
        let told = fails(&[&["build-kernels", "--arch", "90a", "--out", "x"], option].concat());
        assert!(told.contains(option[0]) && told.contains("--model or --random"), "{told}");
    }
}

#[test]
fn a_model_is_had_by_name_from_a_hub() {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures");
    let files = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"];
    let content = Content::default()
        .add("tiny/llama", &engine.join("models/llama"), &["config.json", "model.safetensors"])
        .add("tiny/llama", &engine.join("tokenizer"), &files);
    let (server, cache) = (Server::start(content), tempfile::tempdir().unwrap());
    let ask = |words: &[&str], offline: &str| {
        let mut command = warpsmith(cache.path());
        command.args(words).env_remove("HF_HUB_CACHE");
        command.env("HF_HOME", cache.path()).env("HF_ENDPOINT", &server.endpoint);
        command.env("HF_HUB_OFFLINE", offline).env_remove("HF_TOKEN");
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let run = |model: &str, offline: &str| {
        ask(&["generate", "xyz", "--raw", "--max-tokens", "4", "--json", "--model", model], offline)
    };
    let (ok, told, error) = run("tiny/llama", "1");
    assert!(
        !ok && told.is_empty() && error.contains("tiny/llama") && error.contains("HF_HUB_OFFLINE"),
        "{error}"
    );
    let (ok, first, error) = run("tiny/llama", "0");
    assert!(ok, "{error}");
    assert!(error.is_empty(), "no progress where there is no terminal: {error}");
    assert_eq!(parse(&first)["tokens"].as_array().unwrap().len(), 4);
    let (ok, again, _) = run("tiny/llama", "1");
    assert!(ok && parse(&again)["tokens"] == parse(&first)["tokens"]);
    let (ok, shown, error) = ask(&["inspect", "tiny/llama"], "1");
    assert!(ok && shown.contains("tensors, "), "{error}");
    let (ok, _, error) = run("tiny/nothing", "0");
    assert!(!ok && error.contains("`tiny/nothing`") && error.contains("no such repository"), "{error}");
}

#[test]
fn keys_and_values_have_8_bits_where_that_is_asked_for() {
    let command = |dtype, kv_dtype| {
        let sizes = ["-p", "16", "-n", "4", "-r", "1", "-o", "json"];
        let types = ["--dtype", dtype, "--kv-dtype", kv_dtype];
        [&["bench-model", "--model", RANDOM][..], &sizes, &types].concat()
    };
    for (dtype, kv_dtype) in [("f32", "fp8_e4m3"), ("bf16", "fp8_e4m3"), ("bf16", "bf16"), ("f32", "auto")] {
        succeeds(&command(dtype, kv_dtype));
    }
    let told = fails(&command("f32", "bf16"));
    assert!(told.contains("`kv_dtype`") && told.contains("f8e4m3"), "{told}");
}

#[test]
fn a_pack_is_built_of_the_kernels_of_one_model() {
    let command = ["build-kernels", "--arch", "90a", "--out", "x"];
    let told = fails(&[&command[..], &["--random", "gpt-5"]].concat());
    assert!(told.contains("qwen3-0.6b") && told.contains("gpt-5"), "{told}");
    if !has_nvrtc() {
        return;
    }
    // Of a model with one layer, for one sequence and short prompts.
    let cache = tempfile::tempdir().unwrap();
    let config = cache.path().join("config.json");
    let sizes =
        "\"hidden_size\": 256, \"intermediate_size\": 512, \"num_hidden_layers\": 1, \"head_dim\": 64";
    let rest =
        "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-6, \"rope_theta\": 1e4";
    let json = format!(
        "{{\"model_type\": \"qwen3\", \"vocab_size\": 512, \"max_position_embeddings\": 64, {sizes}, {rest}}}"
    );
    std::fs::write(&config, json).unwrap();
    let out = cache.path().join("pack");
    let mut build = warpsmith(cache.path());
    build.args([
        "build-kernels",
        "--arch",
        "90a",
        "--max-running",
        "1",
        "--max-batch-tokens",
        "4",
        "--random",
    ]);
    let output = build.arg(&config).arg("--out").arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let pack = Pack::open(&out).unwrap();
    let names: BTreeSet<&str> = pack.entries().iter().map(|entry| entry.kernel.as_str()).collect();
    for kernel in ["qkv_store", "embedding", "sample"] {
        assert!(names.iter().any(|name| name.contains(kernel)), "{kernel} in {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("backward")), "{names:?}");
}
