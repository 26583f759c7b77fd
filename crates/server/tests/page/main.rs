//! The page in a browser: `drive.py` uses it as somebody would, with a server that only pretends and with a real one. Where there is
//! no Chromium the tests are ignored, unless `WARPSMITH_REQUIRE_BROWSER` is 1.

#[path = "../server/harness.rs"]
#[allow(dead_code, reason = "the other tests need all of it")]
mod harness;

use harness::{Running, Setup};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page/drive.py")
}

/// Runs the script. Whether it says that all is well.
fn drive(words: &[&str]) -> bool {
    match Command::new("python3").arg("-B").arg(script()).args(words).stdin(Stdio::null()).status() {
        Ok(status) => status.success(),
        Err(error) => {
            println!("python3 cannot be run: {error}");
            false
        }
    }
}

/// A conversation with a server that has a small random model, and a key.
async fn with_a_server() -> bool {
    let mut setup = Setup::default();
    setup.options.api_keys = vec!["a key".into()];
    let server = Running::start(setup).await;
    let url = format!("http://{}/", server.address);
    let passed = tokio::task::spawn_blocking(move || drive(&["--url", &url, "--key", "a key"])).await;
    server.stop().await;
    passed.unwrap_or(false)
}

fn main() -> ExitCode {
    // Names of tests that `cargo test NAME` wants.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str()));
    let names: Vec<&str> =
        ["in_a_browser", "with_a_server"].into_iter().filter(|name| is_wanted(name)).collect();
    if std::env::args().any(|word| word == "--list") {
        names.iter().for_each(|name| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", names.len());
    let begin = Instant::now();
    let browser = names.is_empty() || drive(&["--find"]);
    let is_required = std::env::var("WARPSMITH_REQUIRE_BROWSER").is_ok_and(|value| value == "1");
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for name in names {
        let result = match (browser, is_required, name) {
            (false, false, _) => None,
            (false, true, _) => {
                println!("a browser is required: scripts/browser.sh installs one on Debian");
                Some(false)
            }
            (true, _, "in_a_browser") => Some(drive(&[])),
            (true, ..) => match tokio::runtime::Runtime::new() {
                Ok(runtime) => Some(runtime.block_on(with_a_server())),
                Err(error) => {
                    println!("no runtime: {error}");
                    Some(false)
                }
            },
        };
        let (told, count) = match result {
            Some(true) => ("ok", &mut passed),
            Some(false) => ("FAILED", &mut failed),
            None => ("ignored, there is no browser", &mut ignored),
        };
        *count += 1;
        println!("test {name} ... {told}");
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    let time = begin.elapsed().as_secs_f64();
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out; finished in {time:.2}s\n"
    );
    ExitCode::from(u8::from(failed > 0))
}
