#!/usr/bin/env bash
# Format and lints of Rust and Python.
# usage: scripts/lint.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
"$1/bin/ruff" check bench scripts crates/profile/tests crates/server/tests crates/cli/tests deploy
"$1/bin/ruff" format --check bench scripts crates/profile/tests crates/server/tests crates/cli/tests deploy
# The workspace has the lab and CUDA. Programs that only run kernels build the library without the lab, which the test `plain`
# does, and machines without CUDA may build it without that.
cargo clippy --release --workspace --lib --bins --tests --examples -- -D warnings
cargo clippy --release -p warpsmith --no-default-features --features lab -- -D warnings
