//! `warpsmith check --random`.

use super::{run, succeeds};
use serde_json::Value;

const RANDOM: [&str; 6] = ["check", "copy", "--device", "cpu", "--seed", "3"];

fn counts(words: &[&str]) -> Value {
    let text = succeeds(&[&RANDOM[..], words, &["--json"]].concat());
    serde_json::from_str(text.trim()).unwrap()
}

#[test]
fn a_seed_gives_the_same_calls_again() {
    let first = counts(&["--random", "40"]);
    assert_eq!((first["op"].as_str(), first["failures"].as_u64()), (Some("copy"), Some(0)));
    assert!(first["calls"].as_u64().unwrap() >= 40, "{first}");
    assert_eq!(first, counts(&["--random", "40"]));
}

#[test]
fn processes_share_the_calls() {
    let all = counts(&["--random", "40", "--jobs", "2"]);
    assert!(all["calls"].as_u64().unwrap() >= 40 && all["failures"].as_u64() == Some(0), "{all}");
}

#[test]
fn a_run_is_added_to_the_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let folder_name = folder.path().to_str().unwrap();
    for times in 1..3 {
        succeeds(&[&RANDOM[..], &["--random", "10", "--record", "--evidence", folder_name]].concat());
        let ledger = std::fs::read_to_string(folder.path().join("random.md")).unwrap();
        assert_eq!(
            ledger.lines().filter(|line| line.contains("| copy | judged | 3 |")).count(),
            times,
            "{ledger}"
        );
    }
}

#[test]
fn what_no_random_call_can_be_is_refused() {
    for bad in [
        &["--random", "0"][..],
        &["--random", "1d"],
        &["--random", "9", "--shape", "rows=3"],
        &["--values", "large"],
    ] {
        let output = run(&[&RANDOM[..], bad].concat());
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
}
