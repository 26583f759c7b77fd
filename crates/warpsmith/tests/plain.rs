//! A program that only runs kernels has no lab in it: with the features it gets by default the library has no such
//! module, and none of the crates that only the lab needs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A program that runs a kernel.
const RUNS_A_KERNEL: &str = "use warpsmith::{DType, Device, Tensor, ops::RmsNorm};
fn main() {
    let x = Tensor::randn(&[2, 64], DType::F32, Device::Cpu, 0).unwrap();
    RmsNorm::new(&x).run().unwrap();
}";

fn cargo(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments).args(["-p", "warpsmith"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// The library as a program without special wishes gets it, type-checked but not translated.
fn library() -> PathBuf {
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    let messages = cargo(&["check", "--lib", "--profile", profile, "--message-format", "json"]);
    let artifact = messages
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .rfind(|message| message["reason"] == "compiler-artifact" && message["target"]["name"] == "warpsmith")
        .expect("the library is among what was checked");
    assert_eq!(artifact["features"], serde_json::json!(["cuda", "default"]));
    PathBuf::from(artifact["filenames"][0].as_str().unwrap())
}

/// Type-checks a program against the library.
fn compile(program: &str, library: &Path) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("main.rs");
    std::fs::write(&source, program).unwrap();
    let mut command = Command::new(Path::new(env!("CARGO")).with_file_name("rustc"));
    command.args(["--edition", "2024", "--emit", "metadata", "--out-dir"]).arg(folder.path());
    command.arg("--extern").arg(format!("warpsmith={}", library.display()));
    command.arg("-L").arg(format!("dependency={}", library.parent().unwrap().display()));
    command.arg(source).output().unwrap()
}

#[test]
fn a_program_that_only_runs_kernels_has_no_lab() {
    let library = library();
    let runs = compile(RUNS_A_KERNEL, &library);
    assert!(runs.status.success(), "{}", String::from_utf8_lossy(&runs.stderr));
    for item in ["lab", "ops::PROVABLE", "lab::proof::Prepared"] {
        let proves = compile(&format!("pub use warpsmith::{item};\n{RUNS_A_KERNEL}"), &library);
        let errors = String::from_utf8_lossy(&proves.stderr);
        // Not to be found: E0432 for the last name of a path, E0433 for one before it.
        let unknown = errors.contains("E0432") || errors.contains("E0433");
        assert!(!proves.status.success() && unknown, "{item}: {errors}");
    }
}

#[test]
fn crates_that_only_the_lab_needs_are_not_built() {
    let crates = cargo(&["tree", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]);
    let has = |name: &str| crates.lines().any(|line| line.split(' ').next() == Some(name));
    assert!(has("half") && !has("libm"), "{crates}");
    let with_lab =
        cargo(&["tree", "--features", "lab", "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    assert!(with_lab.lines().any(|line| line.starts_with("libm ")), "{with_lab}");
}
