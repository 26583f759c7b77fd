//! `warpsmith profile`.

use super::models::RANDOM;
use super::{fails, parse, run, succeeds};
use serde_json::Value;
use warpsmith_profile::trace;

/// Busy and idle time add up to the traced time, and shares to one.
fn adds_up(phase: &Value) {
    let of = |name: &str| phase["summary"][name].as_f64().unwrap();
    assert!((of("busy_ns") + of("idle_ns") - of("wall_ns")).abs() < 1.0, "{phase:#}");
    let step = &phase["step"];
    let traced = step["traced_ns"].as_f64().unwrap() * step["count"].as_f64().unwrap();
    assert!((traced - of("wall_ns")).abs() < 1.0 && step["untraced_ns"].as_f64().unwrap() > 0.0, "{step}");
    let kernels = phase["summary"]["kernels"].as_array().unwrap();
    let shares: f64 = kernels.iter().map(|kernel| kernel["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-6 && !kernels.is_empty(), "{kernels:?}");
}

#[test]
fn the_calls_of_an_op_are_shown_as_text_json_timeline_and_page() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [timeline, packed, page] = ["trace.json", "trace.json.gz", "report.html"].map(path);
    let op = ["profile", "rms_norm", "--shape", "num_tokens=512", "hidden=512", "--with", "weight"];
    let more = ["--device", "cpu", "--threads", "2", "--calls", "7", "-r", "2"];
    let words = [&op[..], &more].concat();
    let found =
        parse(&succeeds(&[&words[..], &["--json", "--trace", &timeline, "--report", &page]].concat()));
    let phase = &found["phases"][0];
    adds_up(phase);
    let kernel = &phase["summary"]["kernels"][0];
    assert_eq!((kernel["op"].as_str(), kernel["launches"].as_u64()), (Some("rms_norm"), Some(7)));
    assert_eq!(kernel["bytes"].as_f64(), Some(7.0 * (2.0 * 512.0 * 512.0 + 512.0) * 4.0));
    assert!(kernel["limit_ns"].as_f64().unwrap() > 0.0);
    assert_eq!(phase["summary"]["threads"]["count"], 2);

    let seen = trace::check(&std::fs::read_to_string(&timeline).unwrap()).unwrap();
    assert_eq!(seen.slices_of("op"), 7);
    assert!(seen.slices_of("work") >= 7, "{seen:?}");
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("<svg id=\"roofline\"") && html.contains("profile rms_norm --shape"));

    let text = succeeds(&[&words[..], &["--trace", &packed]].concat());
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for part in
        ["rms_norm num_tokens=512 hidden=512 +weight", "7 steps of", "busy +", "limits: copy", "rms_norm_"]
    {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert_eq!(std::fs::read(&packed).unwrap()[..2], [0x1f, 0x8b]);
}

#[test]
fn prompts_and_steps_of_a_model_are_shown_apart() {
    let folder = tempfile::tempdir().unwrap();
    let timeline = folder.path().join("trace.json").display().to_string();
    let model = ["profile", "--model", RANDOM, "--device", "cpu", "-p", "9", "-n", "3", "-r", "2"];
    let found = parse(&succeeds(&[&model[..], &["--json", "--trace", &timeline]].concat()));
    let phases = found["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["prompt of 9 tokens", "decode of 1"]);
    phases.iter().for_each(adds_up);
    assert_eq!(
        (phases[0]["step"]["count"].as_u64(), phases[1]["step"]["count"].as_u64()),
        (Some(1), Some(3))
    );
    assert!(phases[1]["summary"]["layers"].as_array().unwrap().len() >= 3);
    let seen = trace::check(&std::fs::read_to_string(&timeline).unwrap()).unwrap();
    assert_eq!(seen.slices_of("step"), 4);
    assert!(seen.slices_of("layer") >= 12 && seen.slices_of("op") > 12, "{seen:?}");
}

#[test]
fn what_cannot_be_profiled_is_refused() {
    let on_cpu = |more: &[&str]| fails(&[&["profile", "rms_norm", "--device", "cpu"], more].concat());
    assert!(on_cpu(&["--shape", "width=3"]).contains("num_tokens, hidden"));
    assert!(on_cpu(&["--kernel", "nothing"]).contains("no kernel is named"));
    assert!(fails(&["profile", "rmsnorm", "--device", "cpu"]).contains("perhaps rms_norm"));
    let nowhere = "/nowhere/trace.json";
    let few = ["--shape", "num_tokens=4", "hidden=64", "--calls", "1", "-r", "1", "--trace", nowhere];
    assert!(on_cpu(&few).contains(nowhere));
    for wrong in [
        &["profile", "rms_norm", "--model", "m"][..],
        &["profile", "--shape", "hidden=3"],
        &["profile", "rms_norm", "--calls", "0"],
        &["profile", "rms_norm", "-n", "3"],
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong:?}");
    }
    assert!(fails(&["profile", "--device", "cpu"]).contains("--model"));
}
