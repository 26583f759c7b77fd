//! The page in a browser: `drive.py` opens it, sorts its tables and moves its timeline. Where there is no Chromium the
//! test is ignored, unless `WARPSMITH_REQUIRE_BROWSER` is 1.

mod sample;

pub use warpsmith_profile::*;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

const NAME: &str = "in_a_browser";

fn drive(words: &[&str]) -> bool {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report/drive.py");
    match Command::new("python3").arg("-B").arg(script).args(words).stdin(Stdio::null()).status() {
        Ok(status) => status.success(),
        Err(error) => {
            println!("python3 cannot be run: {error}");
            false
        }
    }
}

fn opens() -> bool {
    let folder = tempfile::tempdir().expect("a folder for the page");
    let [page, other] = ["report.html", "gpu.html"].map(|name| folder.path().join(name));
    report::save(&sample::sample(), &page).expect("the page");
    report::save(&sample::overlapping(), &other).expect("the other page");
    drive(&[&page.display().to_string(), &other.display().to_string()])
}

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    if !wanted.is_empty() && !wanted.iter().any(|word| NAME.contains(word.as_str())) {
        return ExitCode::SUCCESS;
    }
    if std::env::args().any(|word| word == "--list") {
        println!("{NAME}: test");
        return ExitCode::SUCCESS;
    }
    println!("\nrunning 1 test");
    let is_required = std::env::var("WARPSMITH_REQUIRE_BROWSER").is_ok_and(|value| value == "1");
    let (told, counts) = match (drive(&["--find"]), is_required) {
        (true, _) if opens() => ("ok", [1, 0, 0]),
        (false, false) => ("ignored, there is no browser", [0, 0, 1]),
        (found, _) => {
            if !found {
                println!("a browser is required: scripts/browser.sh installs one on Debian");
            }
            ("FAILED", [0, 1, 0])
        }
    };
    let [passed, failed, ignored] = counts;
    println!("test {NAME} ... {told}");
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out\n"
    );
    ExitCode::from(u8::from(failed > 0))
}
