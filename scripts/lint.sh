#!/usr/bin/env bash
# Format and lints of Rust and Python.
# usage: scripts/lint.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
"$1/bin/ruff" check bench scripts
"$1/bin/ruff" format --check bench scripts
cargo clippy --release --workspace --all-targets -- -D warnings
# The library must also build without CUDA support.
cargo clippy --release -p warpsmith --no-default-features -- -D warnings
