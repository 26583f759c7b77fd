//! The commands end to end, as a user runs them.

mod chat;
mod evidence;
mod models;
mod profile;
mod random;
mod refusals;
mod serve;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program with its own cache and none of the caller's settings.
fn warpsmith(cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warpsmith"));
    for name in ["KERNEL_PACK", "DISABLE_JIT", "NUM_THREADS", "CPU_TIER", "CPU_MATRIX"] {
        command.env_remove(format!("WARPSMITH_{name}"));
    }
    command.env_remove("WARPSMITH_MODEL");
    command.env("WARPSMITH_CACHE_DIR", cache);
    command
}

fn run(args: &[&str]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    warpsmith(cache.path()).args(args).output().unwrap()
}

/// What a command that succeeds prints.
fn succeeds(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What a command that fails with status 1 says.
fn fails(args: &[&str]) -> String {
    let output = run(args);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {message}");
    assert!(message.starts_with("error: "), "{args:?}: {message}");
    message
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in:\n{text}"))
}

/// Whether kernels can be compiled here.
fn has_nvrtc() -> bool {
    let found = warpsmith::jit::nvrtc::find().is_ok();
    if !found {
        eprintln!("skipped: no NVRTC");
    }
    found
}

type Stored<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

fn store(path: &Path, tensors: &[Stored<'_>]) {
    let view = |(name, dtype, shape, data): &'_ Stored<'_>| -> (String, (Dtype, Vec<usize>, Vec<u8>)) {
        (name.to_string(), (*dtype, shape.to_vec(), data.clone()))
    };
    let owned: Vec<_> = tensors.iter().map(view).collect();
    let views = owned.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn list_shows_ops_in_text_and_json() {
    let overview = succeeds(&["list"]);
    let all = parse(&succeeds(&["list", "--json"]));
    let all = all.as_array().unwrap();
    // What is too long for a line goes on below its column.
    assert_eq!(overview.lines().filter(|line| !line.starts_with(' ')).count(), all.len());
    assert!(overview.lines().all(|line| line.chars().count() <= 80), "{overview}");
    for op in all {
        assert!(overview.contains(op["name"].as_str().unwrap()));
        assert!(!op["kernels"].as_array().unwrap().is_empty());
    }
    let one = succeeds(&["list", "rms_norm"]);
    for text in ["weight", "optional", "eps", "default 0.000001", "hidden", "rms_norm_row", "CPU, avx2"] {
        assert!(one.contains(text), "{text} in:\n{one}");
    }
    assert_eq!(parse(&succeeds(&["list", "rms_norm", "--json"]))["name"], "rms_norm");
    assert!(fails(&["list", "nothing"]).contains("warpsmith list"));
    assert!(fails(&["list", "cascade"]).contains("op: expected the op paged_attention"));
}

#[test]
fn inspect_shows_files_of_weights_and_refuses_damaged_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let name = path.to_str().unwrap();
    store(&path, &[("a.weight", Dtype::F32, &[2, 3], floats(&[0.5; 6])), ("b", Dtype::U8, &[4], vec![7; 4])]);
    let shown = succeeds(&["inspect", name]);
    for text in ["safetensors, 2 tensors, 10 parameters, 28 B", "a.weight", "[2, 3]", "f32", "u8"] {
        assert!(shown.contains(text), "{text} in:\n{shown}");
    }
    let all = parse(&succeeds(&["inspect", name, "--json"]));
    assert_eq!(all["format"], "safetensors");
    let weight =
        all["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == "a.weight").unwrap();
    assert_eq!((&weight["type"], &weight["bytes"]), (&"f32".into(), &24.into()));
    assert_eq!(weight["shape"], serde_json::json!([2, 3]));

    let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures/formats.gguf");
    let shown = succeeds(&["inspect", gguf]);
    for text in [
        "gguf, 16 tensors",
        "general.architecture",
        "\"fixture\"",
        "4 x string: [\"a\", ",
        "blocks.q6_k",
        "q6_k",
    ] {
        assert!(shown.contains(text), "{text} in:\n{shown}");
    }
    let all = parse(&succeeds(&["inspect", gguf, "--json"]));
    assert_eq!(all["metadata"]["fixture.f32"], 0.00001);
    assert_eq!(all["metadata"]["fixture.strings"], serde_json::json!(["a", "", "ñ", "Ġthe"]));
    assert_eq!(all["metadata"]["fixture.u64"], 9_223_372_036_854_775_808u64);

    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let message = fails(&["inspect", name]);
    assert!(message.contains("m.safetensors: tensor `") && message.contains("expected"), "{message}");
    assert!(fails(&["inspect", folder.path().to_str().unwrap()]).contains("config.json"));
}

#[test]
fn usage_errors_are_status_2_and_help_teaches() {
    let wrong = [
        &["unknown"][..],
        &["explain"],
        &["explain", "rms_norm", "--dtype", "f99"],
        &["explain", "rms_norm", "--arch", "99"],
        &["explain", "rms_norm", "--arch", "90a", "--units", "0"],
        &["explain", "rms_norm", "--arch", "90a", "--units", "9223372036854775808"],
        &["dump", "k", "--ptx", "--sass"],
        &["bench", "--tolerance", "nan"],
        &["bench", "--quick", "--record"],
    ];
    for args in wrong {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
    assert!(succeeds(&["--version"]).starts_with("warpsmith "));
    assert!(succeeds(&["help", "run"]).contains("safetensors.torch.save_file"));
    let packs = succeeds(&["help", "build-kernels"]);
    assert!(packs.contains("covering set") && packs.contains("the call fails"), "{packs}");
}

#[test]
fn a_reader_that_stops_ends_the_program_quietly() {
    let cache = tempfile::tempdir().unwrap();
    let mut child = warpsmith(cache.path())
        .args(["list", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn explain_chooses_for_machines_that_are_not_here() {
    let text = succeeds(&["explain", "rms_norm", "--arch", "90a", "--with", "weight"]);
    for part in
        ["runs rms_norm_row", "not rms_norm_long", "not rms_norm_avx2: runs on the CPU only", "134.2 MB"]
    {
        assert!(text.contains(part), "{part} in:\n{text}");
    }
    let text =
        succeeds(&["explain", "rms_norm", "--arch", "80", "--shape", "num_tokens=2", "hidden=1000000"]);
    assert!(text.contains("runs rms_norm_long"), "{text}");
    let text =
        succeeds(&["explain", "layer_norm_backward", "--arch", "90a", "--units", "3", "--with", "dweight"]);
    assert!(text.contains("3 multiprocessors") && text.contains("groups of rows"), "{text}");
    let text = succeeds(&["explain", "rms_norm", "--device", "cpu", "--kernel", "rms_norm_portable"]);
    assert!(text.contains("named by the caller"), "{text}");
    // Every function a kernel launches must be for the device, not only its first.
    let text = succeeds(&["explain", "linear_backward", "--with", "dx", "--dtype", "bf16", "--arch", "75"]);
    assert!(text.contains("runs linear_backward_generic"), "{text}");
    assert!(text.contains("not linear_backward_sm80: needs sm_80"), "{text}");
    let text = succeeds(&["explain", "paged_attention", "--arch", "60"]);
    assert!(text.contains("runs paged_attention_generic"), "{text}");
}

#[test]
fn run_computes_what_the_formula_says() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in", "out"].map(|name| folder.path().join(format!("{name}.safetensors")));
    store(
        &input,
        &[
            ("x", Dtype::F32, &[2, 2], floats(&[3.0, 4.0, 1.0, 1.0])),
            ("residual", Dtype::F32, &[2, 2], floats(&[0.0, 0.0, 1.0, -3.0])),
            ("weight", Dtype::F32, &[2], floats(&[1.0, 2.0])),
        ],
    );
    let [input, output] = [&input, &output].map(|path| path.to_str().unwrap());
    let base = ["run", "rms_norm", "--input", input, "--output", output, "--device", "cpu"];
    let call = |more: &[&'static str]| [&base[..], more].concat();
    let text = succeeds(&call(&["--want", "sum", "--set", "eps=0", "--kernel", "rms_norm_portable"]));
    assert!(text.contains("rms_norm_portable"), "{text}");

    let bytes = std::fs::read(output).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |name: &str| -> Vec<f32> {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[2, 2][..]));
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    assert_eq!(values("sum"), [3.0, 4.0, 2.0, -2.0]);
    let rms = 12.5f32.sqrt();
    for (got, expected) in values("out").iter().zip([3.0 / rms, 8.0 / rms, 1.0, -2.0]) {
        assert!((got - expected).abs() < 1e-6, "{got} {expected}");
    }
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1;
    assert_eq!(metadata.metadata().as_ref().unwrap()["kernel"], "rms_norm_portable");

    // A residual implies the sum.
    succeeds(&call(&["--set", "eps=0", "--kernel", "rms_norm_portable"]));
    let again = std::fs::read(output).unwrap();
    let again = SafeTensors::deserialize(&again).unwrap();
    for name in ["out", "sum"] {
        assert_eq!(again.tensor(name).unwrap().data(), file.tensor(name).unwrap().data(), "{name}");
    }

    // Each mistake is named.
    assert!(fails(&call(&["--want", "out"])).contains("one of sum"));
    assert!(fails(&call(&["--set", "alpha=1"])).contains("eps"));
    assert!(
        fails(&call(&["--kernel", "rms_norm_row", "--want", "sum"])).contains("runs on CUDA devices only")
    );
}

#[test]
fn dump_shows_sources_everywhere_and_code_where_it_can_be_made() {
    let source = succeeds(&["dump", "rms_norm_row", "--source", "--set", "ELEM=f16"]);
    for text in ["#define ELEM f16", "struct NormParams", "norm_row("] {
        assert!(source.contains(text), "{text} in:\n{source}");
    }
    assert!(succeeds(&["dump", "rms_norm_avx2"]).contains("src/ops/rms_norm"));
    assert!(fails(&["dump", "rms_norm_rows"]).contains("rms_norm_row"));
    assert!(fails(&["dump", "rms_norm_row", "--set", "ELEM=f64"]).contains("ELEM=bf16"));
    assert!(fails(&["dump", "rms_norm_row", "--variant", "100000"]).contains("a number below"));
    for (kernel, arch, needed) in [
        ("attention_sm90", "80", "sm_90a"),
        ("attention_split", "75", "sm_80"),
        ("linear_sm90", "100a", "sm_90a"),
    ] {
        for what in ["--resources", "--ptx", "--sass"] {
            let message = fails(&["dump", kernel, "--arch", arch, what]);
            assert!(message.contains(&format!("it needs {needed}")), "{message}");
        }
    }
    assert!(succeeds(&["dump", "attention_sm90", "--arch", "80", "--source"]).contains("#define"));
    for (kernel, why) in [("rms_norm_avx2", "runs on the CPU"), ("linear_cublaslt", "cuBLASLt's")] {
        for what in ["--resources", "--ptx", "--sass"] {
            assert!(fails(&["dump", kernel, what]).contains(why), "{kernel} {what}");
        }
    }
    if !has_nvrtc() {
        return;
    }
    let table = succeeds(&["dump", "rms_norm_row", "--variant", "1", "--arch", "80"]);
    let row: Vec<&str> = table.lines().nth(2).unwrap().split_whitespace().collect();
    assert_eq!((row[0], row[2], row[4], row[5]), ("1", "0", "0", "norm_row"), "{table}");
    assert!(row[1].parse::<u32>().unwrap() > 8, "{table}");
    let ptx = succeeds(&["dump", "rms_norm_row", "--variant", "1", "--ptx", "--lineinfo", "--arch", "90a"]);
    assert!(ptx.contains(".target sm_90a") && ptx.contains(".loc"), "no line information");
}

#[test]
fn packs_are_built_and_used_without_a_compiler() {
    assert!(fails(&["build-kernels", "--arch", "80", "--op", "rms_nrm", "--out", "x"]).contains("rms_norm"));
    if !has_nvrtc() {
        return;
    }
    // The op that takes the least time to compile.
    let list = parse(&succeeds(&["list", "--json"]));
    let variants = |op: &&Value| -> u64 {
        op["kernels"].as_array().unwrap().iter().map(|kernel| kernel["variants"].as_u64().unwrap()).sum()
    };
    let op = list.as_array().unwrap().iter().filter(|op| variants(op) > 0).min_by_key(variants).unwrap();
    if variants(&op) > 64 {
        eprintln!("skipped: even the smallest op has {} variants to compile", variants(&op));
        return;
    }
    let name = op["name"].as_str().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let out = cache.path().join("pack");
    let build = || {
        let mut command = warpsmith(cache.path());
        command.args(["build-kernels", "--arch", "80", "--jobs", "2", "--op", name, "--out"]).arg(&out);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(build().contains(" 0 from the cache"));
    assert!(build().contains(", 0 compiled"));
    let output = warpsmith(cache.path()).args(["cache", "ls", "--json"]).output().unwrap();
    let entries = parse(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(entries.as_array().unwrap().len() as u64, variants(&op));
    let output = warpsmith(cache.path()).args(["cache", "clear", "--yes"]).output().unwrap();
    let cleared = String::from_utf8(output.stdout).unwrap();
    assert!(cleared.starts_with(&format!("removed {} files", variants(&op))), "{cleared}");

    // From the pack alone: an empty cache and no compiler.
    let kernel = op["kernels"].as_array().unwrap().iter().find(|kernel| kernel["device"] == "cuda").unwrap();
    let dump = |arch: &str| {
        let mut command = warpsmith(cache.path());
        command.env("WARPSMITH_KERNEL_PACK", &out).env("WARPSMITH_DISABLE_JIT", "1");
        command.args(["dump", kernel["name"].as_str().unwrap(), "--variant", "0", "--arch", arch]);
        command.output().unwrap()
    };
    assert!(dump("86").status.success(), "{}", String::from_utf8_lossy(&dump("86").stderr));
    assert!(String::from_utf8_lossy(&dump("90a").stderr).contains("compiling at run time is off"));
}

#[test]
fn tune_remembers_what_later_calls_choose() {
    let cache = tempfile::tempdir().unwrap();
    let case = ["rms_norm", "--device", "cpu", "--dtype", "f32", "--shape", "num_tokens=3", "hidden=65"];
    let on_case = |command: &str, more: &[&str]| {
        let output = warpsmith(cache.path()).arg(command).args(case).args(more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(!on_case("explain", &[]).contains("tuned on this device"));
    let tuning = parse(&on_case("tune", &["--quick", "--json"]));
    let names = |tuning: &Value| -> Vec<String> {
        let measured = tuning["measured"].as_array().unwrap().iter();
        measured.map(|m| m["kernel"].as_str().unwrap().to_string()).collect()
    };
    assert!(names(&tuning).contains(&"rms_norm_portable".to_string()), "{tuning:#}");
    assert_eq!(tuning["chosen"].as_str(), Some(names(&tuning)[0].as_str()));
    let tuned = on_case("explain", &[]);
    assert!(tuned.contains("tuned on this device") && !tuned.contains("ranked lower"), "{tuned}");
    // A named kernel is remembered, however fast the others are.
    let table = on_case("tune", &["--quick", "--kernel", "rms_norm_portable"]);
    assert!(table.contains("until now") && table.contains("rms_norm_portable"), "{table}");
    let text = on_case("explain", &[]);
    assert!(
        text.contains("rms_norm_portable (tuned on this device)") || text.contains("runs rms_norm_portable"),
        "{text}"
    );
    let other = warpsmith(cache.path()).args(["explain", "rms_norm", "--device", "cpu"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&other.stdout).contains("tuned on this device"));
}

#[test]
fn cache_is_cleared_only_when_told() {
    assert!(succeeds(&["cache", "ls"]).starts_with("0 kernels"));
    assert_eq!(parse(&succeeds(&["cache", "ls", "--json"])), Value::Array(Vec::new()));
    let cache = tempfile::tempdir().unwrap();
    let refused = warpsmith(cache.path()).args(["cache", "clear"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--yes"));
    assert!(succeeds(&["cache", "clear", "--yes"]).starts_with("removed 0 files"));
}

#[test]
fn doctor_tells_broken_from_missing() {
    let cache = tempfile::tempdir().unwrap();
    let examine = |name: &str, value: &str| {
        let output = warpsmith(cache.path()).args(["doctor", "--json"]).env(name, value).output().unwrap();
        (output.status.code(), parse(&String::from_utf8(output.stdout).unwrap()))
    };
    let about = |findings: &Value, what: &str| -> Value {
        let mut findings = findings.as_array().unwrap().iter();
        findings.find(|finding| finding["what"] == what).unwrap().clone()
    };
    let (code, healthy) = examine("UNRELATED", "x");
    assert_eq!(code, Some(0), "{healthy:#}");
    for what in ["CPU", "CPU tiers", "CPU matrix products", "CPU threads", "kernel cache"] {
        assert_eq!(about(&healthy, what)["state"], "ok", "{what}");
    }
    let wrong = [
        ("WARPSMITH_CPU_TIER", "sse9", "CPU tiers"),
        ("WARPSMITH_CPU_MATRIX", "sse9", "CPU matrix products"),
        ("WARPSMITH_NUM_THREADS", "many", "CPU threads"),
        ("WARPSMITH_CACHE_DIR", "/proc/nowhere", "kernel cache"),
        ("WARPSMITH_KERNEL_PACK", "/nowhere", "kernel pack"),
    ];
    for (name, value, what) in wrong {
        let (code, findings) = examine(name, value);
        let finding = about(&findings, what);
        assert_eq!((code, &finding["state"]), (Some(1), &"broken".into()), "{name}");
        assert_ne!(finding["fix"], "", "{name}");
    }
    let text = String::from_utf8(warpsmith(cache.path()).arg("doctor").output().unwrap().stdout).unwrap();
    assert!(text.starts_with("ok       CPU"), "{text}");
}

#[test]
fn doctor_names_the_packages_of_a_missing_disassembler() {
    let nowhere = tempfile::tempdir().unwrap();
    let mut command = warpsmith(nowhere.path());
    for name in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH"] {
        command.env_remove(name);
    }
    let output =
        command.args(["doctor", "--json"]).env("HOME", nowhere.path()).current_dir(nowhere.path()).output();
    let findings = parse(&String::from_utf8(output.unwrap().stdout).unwrap());
    let mut findings = findings.as_array().unwrap().iter();
    let finding = findings.find(|finding| finding["what"] == "disassembler").unwrap();
    if finding["state"] == "ok" {
        eprintln!("skipped: {}", finding["found"]);
        return;
    }
    let fix = finding["fix"].as_str().unwrap();
    assert!(fix.contains("nvidia-cuda-nvdisasm") && fix.contains("nvidia-cuda-cuobjdump"), "{fix}");
}

#[test]
fn new_op_writes_an_op_and_refuses_to_write_it_twice() {
    let folder = tempfile::tempdir().unwrap();
    let ops = folder.path().join("crates/warpsmith/src/ops");
    std::fs::create_dir_all(&ops).unwrap();
    let real = Path::new(env!("CARGO_MANIFEST_DIR")).join("../warpsmith/src/ops/mod.rs");
    std::fs::copy(real, ops.join("mod.rs")).unwrap();
    // Found from a folder inside the repository.
    let scaffold = |name: &str| {
        let mut command = warpsmith(folder.path());
        command.args(["new-op", name]).current_dir(ops.parent().unwrap()).output().unwrap()
    };
    assert!(scaffold("zz_scale").status.success());
    for file in ["mod.rs", "cases.rs", "reference.rs", "cpu.rs", "cuda.rs", "kernel.cu"] {
        let text = std::fs::read_to_string(ops.join("zz_scale").join(file)).unwrap();
        assert!(text.contains("zz_scale") || text.contains("ZzScale"), "{file}");
    }
    assert_eq!(scaffold("zz_scale").status.code(), Some(1));
    assert_eq!(scaffold("Bad-Name").status.code(), Some(1));
    assert!(!ops.join("Bad-Name").exists());
}

#[test]
fn the_demo_is_a_tour_in_60_lines_of_80_columns() {
    let flags =
        ["--batch-size", "1", "--seq-len", "128", "--d-model", "64", "--num-experts", "4", "--top-k", "1"];
    let demo = ["demo", "--quick", "--device", "cpu", "--profile-memory"];
    let text = succeeds(&[&demo[..], &flags[..]].concat());
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(text.lines().count() <= 60, "{text}");
    let list = parse(&succeeds(&["list", "--json"]));
    for op in list.as_array().unwrap() {
        // A quick demo checks all gradients without naming them.
        let name = op["name"].as_str().unwrap().trim_end_matches("_backward");
        assert!(text.split([' ', ',', '\n']).any(|word| word == name), "{name:?} is missing in:\n{text}");
    }
    for part in
        ["attention: ", "experts: 1 of 4", "fusion: linear", "hardware: a decode step", "SDPA: torch (flash)"]
    {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    assert!(text.contains("agree with the f64 reference"), "{text}");
}

#[test]
fn flags_of_the_demo_that_do_not_fit_are_refused_before_anything_runs() {
    let message = fails(&["demo", "--top-k", "9"]);
    assert!(message.contains("--top-k") && message.contains("at most the 4"), "{message}");
    let message = fails(&["demo", "--d-model", "100"]);
    assert!(message.contains("--d-model") && message.contains("a multiple of 8"), "{message}");
}

#[test]
fn whatif_answers_in_80_columns_and_as_json_and_refuses_by_name() {
    let op = ["whatif", "linear", "--shape", "m=64", "n=14336", "k=4096", "--hbm", "2x", "--sms", "1.5x"];
    let text = succeeds(&op);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for part in ["memory bandwidth 2x", "both together", "no difference", "held back"] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("plot.svg");
    let model =
        ["whatif", "--model", "llama-3.1-8b", "--batch", "8", "--json", "--svg", svg.to_str().unwrap()];
    let json = parse(&succeeds(&model));
    assert!(
        json["outcomes"].as_array().unwrap().len() >= 8 && json["now_us"].as_f64().unwrap() > 3000.0,
        "{json}"
    );
    assert!(std::fs::read_to_string(&svg).unwrap().ends_with("</svg>\n"));
    let message = fails(&["whatif", "penalize", "--dtype", "f32"]);
    assert!(message.contains("penalize") && message.contains("These are modelled"), "{message}");
    assert_eq!(run(&["whatif", "rms_norm", "--hbm", "fast"]).status.code(), Some(2));
    assert_eq!(run(&["whatif"]).status.code(), Some(2));
}

#[test]
fn fast_math_is_only_for_cuda_code_and_changes_it() {
    for command in ["check", "bench"] {
        let message = fails(&[command, "rms_norm", "--device", "cpu", "--fast-math"]);
        assert!(message.contains("--fast-math") && message.contains("a GPU"), "{message}");
        assert_eq!(run(&[command, "rms_norm", "--fast-math", "--record"]).status.code(), Some(2));
    }
    if has_nvrtc() {
        let dump = ["dump", "activation_cuda", "--arch", "90a", "--variant", "0", "--ptx"];
        let [precise, fast] = [&dump[..], &[&dump[..], &["--fast-math"]].concat()].map(succeeds);
        assert!(fast.matches(".ftz").count() > precise.matches(".ftz").count());
    }
}

#[test]
fn whatif_fits_in_a_repository_alone() {
    let folder = tempfile::tempdir().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let output =
        warpsmith(cache.path()).args(["whatif", "--fit"]).current_dir(folder.path()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("evidence"), "{message}");
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeeds(&["completions", shell]).contains("build-kernels"), "{shell}");
    }
}
