//! What is left of a server's goodput when ten times as many requests come as it can serve.

use crate::harness::{Running, Setup, VOCAB};
use serde_json::json;
use warpsmith_engine::EngineOptions;
use warpsmith_server::bench::{Load, overload};

/// Of the goodput at capacity.
const LEAST_KEPT: f64 = 0.9;

/// Its result depends on times, so it runs on demand, on a machine that does nothing else:
/// `cargo test --release -p warpsmith-server --test server goodput -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures times"]
async fn ten_times_the_load_leaves_the_goodput() {
    let mut setup = Setup::limits(|limits| limits.max_waiting = 32);
    setup.engine = EngineOptions { max_running: 16, ..EngineOptions::default() };
    setup.pool_tokens = 16_384;
    let server = Running::start(setup).await;
    let load = Load {
        endpoint: "/v1/completions".into(),
        model: "tiny".into(),
        count: 480,
        rate: f64::INFINITY,
        concurrency: Some(16),
        input: 32,
        output: 200,
        prefix: 0,
        vocab: VOCAB,
        seed: 1,
        ends: false,
        // Three times as many requests as run may be in the server. If all could wait in it, the last would take ten times as
        // long as the whole first part, and most would miss this.
        goodput: [None, None, Some(3000.0)],
    };
    let report = overload(&server.target, &load, 10.0).await.unwrap();
    let told = report.json(&[99.0]);
    for name in ["capacity", "overload"] {
        let part = &told[name];
        println!(
            "{name}: {:.1} good requests/s of {} in {:.1} s, p99 of the whole {:.0} ms",
            part["request_goodput"].as_f64().unwrap(),
            part["num_prompts"],
            part["duration"].as_f64().unwrap(),
            part["p99_e2el_ms"].as_f64().unwrap()
        );
    }
    println!("goodput kept at ten times the load: {:.3}; {} refused", report.kept(), report.over.refused());
    assert_eq!(report.full.failures(), (0, None));
    assert_eq!(report.over.broken(), (0, None), "all others are told to come again, and when");
    assert!(report.over.refused() > 1000, "{}", report.over.refused());
    assert!(report.kept() >= LEAST_KEPT, "{}", report.kept());
    // Afterwards all is as before.
    server.quiet().await;
    server.ask("/v1/completions", json!({ "prompt": [1, 2], "max_tokens": 2 })).await;
}
