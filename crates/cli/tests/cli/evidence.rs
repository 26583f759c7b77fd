//! What `bench` and `evidence` record, keep and show.

use super::{parse, warpsmith};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;

#[test]
fn bench_goes_step_by_step() {
    let cache = tempfile::tempdir().unwrap();
    let peers = cache.path().join("peers.jsonl");
    let mut command = warpsmith(cache.path());
    command.args([
        "bench",
        "rms_norm",
        "--device",
        "cpu",
        "--dtype",
        "f32",
        "--shape",
        "num_tokens=3",
        "hidden=65",
    ]);
    command.args(["--quick", "--json", "--step", "--peers", peers.to_str().unwrap()]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"\n").unwrap();
    assert_eq!(parse(&lines.next().unwrap().unwrap())["case"], "num_tokens=3 hidden=65");
    input.write_all(b"again\n").unwrap();
    assert_eq!(parse(&lines.next().unwrap().unwrap())["case"], "num_tokens=3 hidden=65");
    // Written only now: the peers are read last.
    std::fs::write(&peers, "").unwrap();
    input.write_all(b"\n").unwrap();
    assert!(lines.next().is_none());
    assert!(child.wait().unwrap().success());
}

#[test]
fn bench_records_what_was_compared_when_the_other_side_ends() {
    let cache = tempfile::tempdir().unwrap();
    let (peers, evidence) = (cache.path().join("peers.jsonl"), cache.path().join("evidence"));
    std::fs::create_dir(&evidence).unwrap();
    std::fs::write(&peers, "").unwrap();
    let mut command = warpsmith(cache.path());
    command.args(["bench", "rms_norm", "--device", "cpu", "--dtype", "f32", "--json", "--step"]);
    command.args(["--record", "--evidence", evidence.to_str().unwrap(), "--peers", peers.to_str().unwrap()]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"\n").unwrap();
    let first = parse(&lines.next().unwrap().unwrap());
    input.write_all(b"\n").unwrap();
    lines.next().unwrap().unwrap();
    // The second case was timed here, but its peers were not.
    drop((input, lines));
    assert!(child.wait().unwrap().success());
    let file = std::fs::read_dir(&evidence).unwrap().next().unwrap().unwrap().path();
    let record = parse(&std::fs::read_to_string(file).unwrap());
    let timings = record["timings"].as_array().unwrap();
    assert_eq!(timings.len(), 1);
    assert_eq!(timings[0]["case"], first["case"]);
    assert!(timings[0]["date"].as_str().unwrap().starts_with("20"), "{}", timings[0]);
    // It is not stale then: the next one is timed.
    let mut command = warpsmith(cache.path());
    command.args(["bench", "rms_norm", "--device", "cpu", "--dtype", "f32", "--json", "--step", "--stale"]);
    command.args(["--record", "--evidence", evidence.to_str().unwrap(), "--peers", peers.to_str().unwrap()]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_ne!(parse(&lines.next().unwrap().unwrap())["case"], first["case"]);
    // Nobody answered, so nothing was timed.
    assert!(!child.wait().unwrap().success());
}

#[test]
fn bench_keeps_peers_and_stops_when_its_time_is_over() {
    let cache = tempfile::tempdir().unwrap();
    let (peers, evidence) = (cache.path().join("peers.jsonl"), cache.path().join("evidence"));
    std::fs::create_dir(&evidence).unwrap();
    let case = "num_tokens=3 hidden=65";
    let bench = |more: &[&str]| {
        let mut command = warpsmith(cache.path());
        command.args(["bench", "rms_norm", "--device", "cpu", "--dtype", "f32", "--record"]).args(more);
        command.args(["--evidence", evidence.to_str().unwrap(), "--peers", peers.to_str().unwrap()]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stderr).unwrap()
    };
    let record = || {
        let file = std::fs::read_dir(&evidence).unwrap().next().unwrap().unwrap().path();
        parse(&std::fs::read_to_string(file).unwrap())
    };
    let peer = |ms: f64, calibration: bool| {
        let line = serde_json::json!({"op": "rms_norm", "case": case, "dtype": "f32", "device": "cpu", "peer": "torch",
            "ms": ms, "version": "torch 9", "calibration": calibration});
        std::fs::write(&peers, format!("{line}\n")).unwrap();
    };
    let one = ["--shape", "num_tokens=3", "hidden=65"];
    peer(2.0, false);
    bench(&one);
    let kept = record()["peers"].clone();
    assert_eq!((kept[0]["ms"].as_f64(), kept[0]["version"].as_str()), (Some(2.0), Some("torch 9")));
    assert!(record()["timings"][0]["calibration"].is_null(), "the peer is of the same run");
    peer(2.1, true);
    bench(&one);
    assert_eq!((&record()["peers"], record()["timings"][0]["calibration"].as_f64()), (&kept, Some(1.05)));
    let before = record();
    let left = bench(&["--stale", "--budget", "0s"]);
    assert!(left.contains("left to time: ") && left.contains("(rms_norm "), "{left}");
    assert_eq!(record(), before, "no time for a case");
}

#[test]
fn evidence_is_shown_anywhere_and_says_how_old_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let show = |words: &[&str]| {
        let mut command = warpsmith(folder.path());
        command.arg("evidence").args(words).current_dir(folder.path()).output().unwrap()
    };
    let text = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let pages = show(&[]);
    assert!(pages.status.success() && text(&pages).contains("## Timings"), "{}", text(&pages));
    assert_eq!(show(&["--json"]).status.code(), Some(1), "that needs the records");
    let records = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence");
    let ages = text(&show(&["--check", "--evidence", records.to_str().unwrap()]));
    for word in ["the oldest date of each op", "open: ", "unwatched: ", "rms_norm"] {
        assert!(ages.contains(word), "{word}: {ages}");
    }
}
