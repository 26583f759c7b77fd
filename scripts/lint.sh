#!/usr/bin/env bash
# Format and lints of Rust and Python.
# usage: scripts/lint.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
"$1/bin/ruff" check bench scripts
"$1/bin/ruff" format --check bench scripts
# The workspace has the lab; programs that only run kernels build the library without it, and may do so without CUDA.
# (With CUDA and without the lab it is built by the test `plain`.)
cargo clippy --release --workspace --all-targets -- -D warnings
cargo clippy --release -p warpsmith --no-default-features -- -D warnings
cargo clippy --release -p warpsmith --no-default-features --features lab -- -D warnings
