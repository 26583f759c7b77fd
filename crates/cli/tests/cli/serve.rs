//! `serve` and `bench-serve`, end to end.

use crate::models::RANDOM;
use crate::{fails, parse, run, succeeds, warpsmith};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

/// A server with random weights.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(folder: &std::path::Path, words: &[&str]) -> Served {
        let mut child = warpsmith(folder)
            .args(["serve", "--random", RANDOM, "--port", "0", "--device", "cpu"])
            .args(words)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // "serving NAME (...) at http://127.0.0.1:PORT/v1: ..."
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.find(|line| line.starts_with("serving ")).expect("it becomes ready");
        let (_, rest) = line.split_once("http://").unwrap();
        let address = rest.split('/').next().unwrap().to_owned();
        std::thread::spawn(move || lines.for_each(drop));
        Served { child, address }
    }

    fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn end(mut self) -> std::process::ExitStatus {
        let id = self.child.id().to_string();
        std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Served {
    /// A test that fails leaves no server behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_server_serves_is_measured_and_ends_when_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("server.toml");
    std::fs::write(&config, "api-key = [\"k\"]\nserved-model-name = [\"m\"]\nmax-num-seqs = 4\n").unwrap();
    let server = Served::start(folder.path(), &["--config", config.to_str().unwrap()]);
    let answer = server
        .ask("GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nconnection: close\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"id\":\"m\""), "{answer}");
    let url = format!("http://{}", server.address);
    let words = [
        "--num-prompts",
        "6",
        "--max-concurrency",
        "2",
        "--random-input-len",
        "20",
        "--random-output-len",
        "5",
    ];
    let json =
        succeeds(&[&["bench-serve", "--base-url", &url, "--api-key", "k", "--json"][..], &words].concat());
    let report = parse(&json);
    assert_eq!((&report["completed"], &report["failed"]), (&6.into(), &0.into()));
    assert_eq!((&report["total_input_tokens"], &report["total_output_tokens"]), (&120.into(), &30.into()));
    // Tokens that come quickly come together: there may be no time between any two.
    assert!(
        report["median_ttft_ms"].as_f64().unwrap() > 0.0 && report["p99_e2el_ms"].as_f64().unwrap() > 0.0
    );
    // With its four places taken, and under three times as much.
    let over =
        ["bench-serve", "--base-url", &url, "--api-key", "k", "--overload", "3", "--random-output-len", "5"];
    let json = succeeds(&[&over[..], &["--random-input-len", "20", "--num-prompts", "8", "--json"]].concat());
    let report = parse(&json);
    assert_eq!(
        (&report["capacity"]["completed"], &report["capacity"]["max_concurrency"]),
        (&8.into(), &4.into())
    );
    assert_eq!((&report["overload"]["num_prompts"], &report["refused"]), (&24.into(), &0.into()));
    assert!(report["goodput_kept"].as_f64().unwrap() > 0.0, "{report}");
    let told = fails(&[&over[..], &["--random-input-len", "20", "--num-prompts", "3"]].concat());
    assert!(told.contains("--num-prompts: expected at least 4"), "{told}");
    let refused = fails(&[&["bench-serve", "--base-url", &url][..], &words].concat());
    assert!(refused.contains("401"), "{refused}");
    assert!(server.end().success());
}

#[test]
fn what_cannot_be_served_is_said_at_once() {
    for (words, told) in [
        (vec!["serve", "no/such/file.gguf"], "no/such/file.gguf"),
        (vec!["serve", "--random", RANDOM, "--tool-call-parser", "xml"], "tool-call-parser"),
        (vec!["serve", "--random", RANDOM, "--reasoning-parser", "xml"], "reasoning-parser"),
        (vec!["serve", "--random", RANDOM, "--host", "256.0.0.1"], "256.0.0.1"),
        (vec!["serve", "--random", RANDOM, "--api-key", " "], "--api-key"),
        (vec!["serve", "--config", "/no/such.toml"], "/no/such.toml"),
        (vec!["bench-serve", "--base-url", "nothing"], "http://"),
        (vec!["bench-serve", "--base-url", "http://127.0.0.1:1"], "no answer"),
        (vec!["bench-serve", "--goodput", "speed:3"], "--goodput"),
    ] {
        let said = fails(&words);
        assert!(said.contains(told), "{words:?}: {said}");
    }
    // What only the engine can judge, the server says after it has begun to load.
    let words = [
        "serve",
        "--random",
        RANDOM,
        "--port",
        "0",
        "--max-running-requests",
        "50",
        "--max-prefill-tokens",
        "10",
    ];
    let output = run(&words);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && said.contains("error: engine settings: `max_running`"),
        "{said}"
    );
}
