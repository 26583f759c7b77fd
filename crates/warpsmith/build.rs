//! Hashes the sources of the CPU kernels, so that evidence can say which code it is about.

use std::fmt::Write;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=src");
    let mut folders: Vec<PathBuf> = std::fs::read_dir("src/ops")
        .expect("src/ops exists")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    // Folders without a reference are shared by several ops.
    let (folders, common): (Vec<_>, Vec<_>) =
        folders.into_iter().partition(|f| f.join("reference.rs").exists());
    let mut shared = files(Path::new("src/cpu"));
    shared.extend(common.iter().flat_map(|folder| rust_files(folder)));
    let mut table = String::from("static CPU_HASHES: &[(&str, &str)] = &[\n");
    for folder in folders {
        let mut hasher = blake3::Hasher::new();
        // The search itself is part of the tree.
        let search = folder.ends_with("prefix_match").then(|| PathBuf::from("src/radix/flat.rs"));
        for file in shared.iter().cloned().chain(rust_files(&folder)).chain(search) {
            hasher.update(file.to_string_lossy().as_bytes());
            hasher.update(&std::fs::read(&file).expect("a readable source"));
        }
        let name = folder.file_name().expect("a folder has a name").to_string_lossy().into_owned();
        writeln!(table, "    (\"{name}\", \"{}\"),", hasher.finalize().to_hex()).expect("strings grow");
    }
    table.push_str("];\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("cpu_hashes.rs"), table).expect("OUT_DIR is writable");
}

/// Rust sources but for the CUDA half, which has a hash of its own.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let rust = files(folder).into_iter().filter(|f| f.extension().is_some_and(|e| e == "rs"));
    rust.filter(|f| f.file_name().is_some_and(|name| name != "cuda.rs")).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}
