//! What the commands refuse, and what they say then.

use super::models::{RANDOM, talking};
use super::{Stored, fails, floats, parse, run, store, succeeds, warpsmith};
use safetensors::tensor::Dtype;
use std::path::Path;

#[test]
fn explain_refuses_what_makes_no_sense() {
    let on_cpu = |more: &[&str]| fails(&[&["explain", "rms_norm", "--device", "cpu"], more].concat());
    assert!(on_cpu(&["--dtype", "i64"]).contains("dtype f32 or f16"));
    assert!(on_cpu(&["--shape", "rows=3"]).contains("num_tokens, hidden"));
    assert!(on_cpu(&["--set", "eps=-1"]).contains("eps"));
    assert!(on_cpu(&["--with", "x"]).contains("weight"));
    assert!(on_cpu(&["--kernel", "nothing"]).contains("no kernel is named"));
    assert!(on_cpu(&["--shape", "num_tokens=281474976710656"]).contains("size `num_tokens`"));
    assert!(
        on_cpu(&["--shape", "num_tokens=2147483648", "hidden=2147483648"])
            .contains("`x`: expected a tensor of")
    );
}

#[test]
fn a_mistyped_name_gets_those_most_like_it() {
    let said = fails(&["explain", "rmsnorm", "--device", "cpu"]);
    assert!(said.contains("perhaps rms_norm") && said.lines().all(|line| line.len() < 160), "{said}");
    assert!(fails(&["check", "xyzzy"]).contains("`warpsmith list` shows all"));
    assert!(fails(&["dump", "linear_sm9"]).contains("perhaps linear_sm90"));
    for name in ["half", "float16", "fp16"] {
        assert!(
            succeeds(&["explain", "rms_norm", "--device", "cpu", "--dtype", name]).contains("f16"),
            "{name}"
        );
    }
}

#[test]
fn the_largest_sizes_are_answered_at_once() {
    for op in parse(&succeeds(&["list", "--json"])).as_array().unwrap() {
        let name = op["name"].as_str().unwrap();
        for size in op["sizes"].as_array().unwrap() {
            let shape = format!("{}=2147483648", size["name"].as_str().unwrap());
            for place in [["--device", "cpu"], ["--arch", "90a"]] {
                let mut words = vec!["explain", name, "--dtype", "f32", "--shape", &shape];
                words.extend(place);
                let optional = op["args"].as_array().unwrap().iter().filter(|arg| arg["optional"] == true);
                for with in [false, true] {
                    if with {
                        words.extend(
                            optional.clone().flat_map(|arg| ["--with", arg["name"].as_str().unwrap()]),
                        );
                    }
                    let output = run(&words);
                    let message = String::from_utf8_lossy(&output.stderr);
                    assert!(matches!(output.status.code(), Some(0 | 1)), "{words:?}: {message}");
                }
            }
        }
    }
}

/// Where the reference of a call like that would have nothing to read.
#[test]
fn check_refuses_calls_the_op_does_not_define() {
    for (op, shape, more, blamed) in [
        ("cast", "num_tokens=17 hidden=2 num_scales=16", "--with scale", "`scale`"),
        ("rope", "num_tokens=3 num_heads=2 head_dim=17", "--set rotary_dim=20", "`rotary_dim`"),
        (
            "kv_store",
            "num_tokens=3 num_scales=0",
            "--with k_scale --with v_scale --set to=f8e4m3",
            "`k_scale`",
        ),
    ] {
        let words: Vec<&str> = ["check", op, "--device", "cpu", "--dtype", "f32", "--shape"]
            .into_iter()
            .chain(shape.split(' '))
            .chain(more.split(' '))
            .collect();
        let message = fails(&words);
        assert!(message.contains(&format!("{op}: argument ")) && message.contains(blamed), "{message}");
    }
}

#[test]
fn check_says_how_much_memory_a_reference_takes_and_how_much_there_is() {
    let message = fails(&["check", "rms_norm", "--device", "cpu", "--shape", "num_tokens=2147483648"]);
    let numbers: Vec<u64> = message.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [requested, free, total] = numbers[..] else { panic!("{message}") };
    // Both tensors, each element in several arithmetics.
    assert!((1 << 46..1 << 60).contains(&requested) && free < total, "{message}");
}

#[test]
fn some_cases_under_a_sanitizer_are_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let evidence = folder.path().to_str().unwrap();
    let some = ["check", "rms_norm", "--device", "cpu", "--sanitizer", "all", "--dtype", "f32"];
    let message = fails(&[&some[..], &["--record", "--evidence", evidence]].concat());
    assert!(message.contains("all cases of an op"), "{message}");
    assert!(fails(&some).contains("a CUDA device"), "without a record any part may be run");
}

#[test]
fn run_names_tensors_that_do_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| folder.path().join(format!("{name}.safetensors")));
    let message = |tensors: &[Stored<'_>]| {
        store(&input, tensors);
        let [from, to] = [&input, &output].map(|path| path.to_str().unwrap());
        let message = fails(&["run", "rms_norm", "--input", from, "--output", to, "--device", "cpu"]);
        assert!(!output.exists(), "nothing is written after an error");
        message
    };
    let x = || ("x", Dtype::F32, &[1, 2][..], floats(&[1.0, 2.0]));
    assert!(message(&[]).contains("`x`: expected a tensor"));
    assert!(message(&[x(), ("y", Dtype::F32, &[1], floats(&[1.0]))]).contains("x, weight, residual"));
    assert!(message(&[x(), ("weight", Dtype::F32, &[1], floats(&[1.0]))]).contains("[hidden=2], got [1]"));
    assert!(message(&[("x", Dtype::I32, &[1, 2], floats(&[1.0, 2.0]))]).contains("got i32"));
    assert!(message(&[("x", Dtype::F64, &[1], vec![0; 8])]).contains("F64"));
    assert!(message(&[("x", Dtype::F32, &[], floats(&[1.0]))]).contains("[..., hidden]"));
}

#[test]
fn bench_says_why_nothing_was_timed_and_records_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let record = ["--record", "--evidence", folder.path().to_str().unwrap()];
    for (asked, why) in [
        (&["rms_norm", "--dtype", "i32"][..], "none is of i32, only of f32, bf16"),
        (&["--kernel", "rms_norm_row"], "no kernel that was asked for runs on cpu"),
        // Found only on trying it.
        (&["rms_norm", "--shape", "num_tokens=2147483648", "--dtype", "f32"], "nothing was timed"),
    ] {
        let output = run(&[&["bench", "--device", "cpu"], asked, &record].concat());
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(why), "{message}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "no table without rows");
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "{asked:?}");
    }
    assert!(fails(&["tune", "rms_norm", "--device", "cpu", "--dtype", "i32"]).contains("none is of i32"));
}

#[test]
fn evidence_updates_the_readme_and_the_page_of_every_device() {
    let folder = tempfile::tempdir().unwrap();
    let evidence = folder.path().join("evidence");
    std::fs::create_dir(&evidence).unwrap();
    let update = ["evidence", "--update-readme", "--evidence", evidence.to_str().unwrap()];
    assert!(fails(&update).contains("README.md: reading"));
    let readme = folder.path().join("README.md");
    std::fs::write(&readme, "no markers").unwrap();
    succeeds(&update);
    assert_eq!(std::fs::read_to_string(&readme).unwrap(), "no markers");
    std::fs::write(&readme, "head\n<!-- evidence:begin -->\n<!-- evidence:end -->\ntail\n").unwrap();
    let record = r#"{"format": 1, "device": "GPU 9", "driver": null, "nvrtc": null, "clocks": null, "cpu": null,
        "ceilings": null, "kernels": {}, "timings": []}"#;
    std::fs::write(evidence.join("gpu-9.json"), record).unwrap();
    succeeds(&update);
    let text = std::fs::read_to_string(&readme).unwrap();
    assert!(
        text.starts_with("head\n")
            && text.ends_with("tail\n")
            && text.contains("| `rms_norm`, `layer_norm`, `softmax` |"),
        "{text}"
    );
    assert!(std::fs::read_to_string(evidence.join("gpu-9.md")).unwrap().starts_with("# GPU 9\n"));
    // What is up to date is not written again.
    assert_eq!(String::from_utf8(run(&update).stderr).unwrap(), "");
}

#[test]
fn options_out_of_range_are_refused_with_the_range() {
    // By the command line itself, whatever the model is.
    for (option, value, told) in [
        ("--context", "0", "is not in 1.."),
        ("-r", "0", "is not in 1.."),
        ("--batch", "1,0", "is not in 1.."),
        ("--prefix", "0", "is not in 1.."),
        ("--mem-fraction-static", "5", "a number above 0 and at most 1"),
        ("--mem-fraction-static", "0", "a number above 0 and at most 1"),
        ("--mem-fraction-static", "NaN", "a number above 0 and at most 1"),
        ("--dtype", "i32", "possible values: f32, bf16, f16"),
        ("--dtype", "f8e4m3", "possible values: f32, bf16, f16"),
    ] {
        let output = run(&["bench-model", "--model", RANDOM, option, value]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{option} {value}: {message}");
        assert!(message.contains(told), "{option} {value}: {message}");
    }
    let help = succeeds(&["generate", "--help"]);
    assert!(help.contains("[possible values: f32, bf16, f16]"), "{help}");
    let told = fails(&["bench-model", "--model", RANDOM, "-p", "0", "-n", "0,0"]);
    assert!(told.contains("something to measure"), "{told}");
    // By the model.
    let told = fails(&["bench-model", "--model", RANDOM, "--context", "129"]);
    assert!(told.contains("a context of 1 to 128 tokens") && told.contains("got 129"), "{told}");
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let told = fails(&["generate", "abc", "--top-p", "0", "--model", folder.path().to_str().unwrap()]);
    assert!(told.contains("`top_p`: expected a number above 0 and at most 1, got 0"), "{told}");
}

#[test]
fn settings_of_the_environment_that_cannot_be_read_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| folder.path().join(format!("{name}.safetensors")));
    store(&input, &[("x", Dtype::F32, &[1, 2], floats(&[1.0, 2.0]))]);
    for (name, value, told) in [
        ("WARPSMITH_NUM_THREADS", "abc", "a number from 1 to 4096"),
        ("WARPSMITH_NUM_THREADS", "0", "a number from 1 to 4096"),
        ("WARPSMITH_NUM_THREADS", "5000", "a number from 1 to 4096"),
        ("WARPSMITH_CPU_TIER", "avx1024", "portable"),
        ("WARPSMITH_CPU_MATRIX", "tpu", "portable"),
    ] {
        let on_op = warpsmith(folder.path())
            .args(["run", "rms_norm", "--device", "cpu", "--input"])
            .arg(&input)
            .arg("--output")
            .arg(&output)
            .env(name, value)
            .output()
            .unwrap();
        let model = ["bench-model", "--model", RANDOM, "-p", "4", "-n", "0", "-r", "1"];
        let on_model = warpsmith(folder.path()).args(model).env(name, value).output().unwrap();
        for run in [on_op, on_model] {
            let message = String::from_utf8(run.stderr).unwrap();
            assert_eq!(run.status.code(), Some(1), "{name}={value}: {message}");
            assert!(message.contains(told) && message.contains(value), "{name}={value}: {message}");
        }
    }
}

#[test]
fn no_speed_is_told_of_an_answer_that_failed() {
    let folder = tempfile::tempdir().unwrap();
    // All weights are NaN.
    talking(folder.path(), |weights| weights.fill(0xff));
    let model = folder.path().to_str().unwrap();
    let question = ["generate", "abc", "--max-tokens", "4", "--model", model];
    let told = fails(&question);
    assert!(told.contains("not numbers") && !told.contains("tok/s"), "{told}");
    let output = run(&[&question[..], &["--json"]].concat());
    let json = parse(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(json["finish_reason"], "failed");
    assert!(json["first_token_ms"].is_null() && json["rest_ms"].is_null(), "{json}");
}

#[test]
fn models_that_cannot_be_run_are_refused_by_family_head_size_and_file() {
    // There are no weights: the configuration is judged before they are looked for.
    let told = |config: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        std::fs::write(&file, config).unwrap();
        let told = fails(&["generate", "abc", "--model", folder.path().to_str().unwrap()]);
        assert!(told.contains(file.to_str().unwrap()), "the file is named: {told}");
        told
    };
    let family = told(r#"{"model_type": "mamba"}"#);
    assert!(
        family.contains("`model_type`")
            && family.contains("llama, qwen2, qwen3, ")
            && family.contains("gpt2, got \"mamba\""),
        "{family}"
    );
    let head = told(r#"{"model_type": "llama", "hidden_size": 96, "num_attention_heads": 2}"#);
    assert!(head.contains("32, 64, 80, 96, 128, 160, 192, 256, got 48"), "{head}");
    // Errors of weights name their file.
    let folder = tempfile::tempdir().unwrap();
    talking(folder.path(), |_| ());
    let config = std::fs::read_to_string(Path::new(RANDOM).join("config.json")).unwrap();
    let changed = config.replace("\"intermediate_size\": 80", "\"intermediate_size\": 81");
    assert_ne!(config, changed);
    std::fs::write(folder.path().join("config.json"), changed).unwrap();
    let told = fails(&["generate", "abc", "--model", folder.path().to_str().unwrap()]);
    assert!(
        told.contains("model.safetensors: weights: tensor `model.layers.0.mlp.gate_proj.weight`"),
        "{told}"
    );
}
