//! The page of `warpsmith evidence --report` in a browser, by `drive.py`. Where there is no Chromium the test is ignored,
//! unless `WARPSMITH_REQUIRE_BROWSER` is 1.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

const NAME: &str = "the_report_in_a_browser";

fn drive(word: &Path) -> bool {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/report/drive.py");
    let status = Command::new("python3").arg("-B").arg(script).arg(word).stdin(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Writes the report of the repository's evidence and opens it.
fn passes() -> bool {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report.html");
    let mut command = Command::new(env!("CARGO_BIN_EXE_warpsmith"));
    let written = command.current_dir(root).args(["evidence", "--report"]).arg(&page).status();
    written.is_ok_and(|status| status.success()) && drive(&page)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let is_wanted = words.is_empty() || words.iter().any(|word| NAME.contains(word.as_str()));
    if std::env::args().any(|word| word == "--list") {
        println!("{NAME}: test");
        return ExitCode::SUCCESS;
    }
    let is_required = std::env::var("WARPSMITH_REQUIRE_BROWSER").is_ok_and(|value| value == "1");
    let result = match (is_wanted, drive(Path::new("--find")), is_required) {
        (false, ..) => return ExitCode::SUCCESS,
        (true, false, false) => None,
        (true, false, true) => {
            println!("a browser is required: scripts/browser.sh installs one on Debian");
            Some(false)
        }
        (true, true, _) => Some(passes()),
    };
    let told = match result {
        Some(true) => "ok",
        Some(false) => "FAILED",
        None => "ignored, there is no browser",
    };
    println!("\nrunning 1 test\ntest {NAME} ... {told}");
    let counts = [Some(true), Some(false), None].map(|kind| u8::from(result == kind));
    let [passed, failed, ignored] = counts;
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored\n");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
