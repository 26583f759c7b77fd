//! Says what a build without optimisation is good for. With the feature `lab`: the library carries the sources of its CPU
//! kernels, by which evidence says what code it is about.

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Every vector of an inlined kernel then has its own place on the stack: frames of up to 3.6 MB.
    if std::env::var("OPT_LEVEL").as_deref() == Ok("0") {
        println!(
            "cargo::warning=without optimisation CPU kernels crawl, and overflow threads with less than 8 MiB of stack: \
             set `opt-level = 1` in [profile.dev.package.warpsmith]"
        );
    }
    if std::env::var_os("CARGO_FEATURE_LAB").is_none() {
        return;
    }
    let variable = |name: &str| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
    let source = variable("CARGO_MANIFEST_DIR").join("src");
    let mut table = String::from("static SOURCES: &[(&str, &str)] = &[\n");
    for room in ["cpu", "ops", "radix"] {
        println!("cargo::rerun-if-changed=src/{room}");
        for file in rust_files(&source.join(room)) {
            let name = file.strip_prefix(&source).expect("a file of the folder").to_string_lossy();
            writeln!(table, "    ({name:?}, include_str!({file:?})),").expect("strings grow");
        }
    }
    table.push_str("];\n");
    std::fs::write(variable("OUT_DIR").join("sources.rs"), table).expect("OUT_DIR is writable");
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}
