#!/usr/bin/env bash
# Runs every CUDA kernel over every case under compute-sanitizer's four tools and records what they found.
# First each tool must find a bug planted for it: a tool that sees nothing proves nothing.
# Needs a GPU, nvcc and compute-sanitizer (both from a CUDA toolkit; CUDA_HOME or PATH).
# usage: bench/sanitize.sh [words for `warpsmith check`, such as an op's name, --jobs 8, or --stale]
set -euo pipefail
cd "$(dirname "$0")/.."

find_tool() {
    local candidate
    for candidate in "${CUDA_HOME:-/usr/local/cuda}/bin/$1" "$(command -v "$1" || true)"; do
        if [ -x "$candidate" ]; then
            echo "$candidate"
            return
        fi
    done
    echo "sanitize: $1 is neither in CUDA_HOME nor on PATH" >&2
    exit 1
}
nvcc=$(find_tool nvcc)
sanitizer=$(find_tool compute-sanitizer)
PATH=$(dirname "$sanitizer"):$PATH
export PATH

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$nvcc" -lineinfo -arch=native -o "$folder/planted" bench/planted_bugs.cu

for tool in memcheck racecheck initcheck synccheck; do
    "$folder/planted" none || {
        echo "sanitize: the planted program does not run here" >&2
        exit 1
    }
    if ! "$sanitizer" --tool "$tool" --error-exitcode 99 "$folder/planted" none >"$folder/log" 2>&1; then
        cat "$folder/log"
        echo "sanitize: $tool complains about a program without a bug" >&2
        exit 1
    fi
    status=0
    "$sanitizer" --tool "$tool" --error-exitcode 99 "$folder/planted" "$tool" >"$folder/log" 2>&1 || status=$?
    if [ "$status" != 99 ]; then
        cat "$folder/log"
        echo "sanitize: $tool did not find the bug planted for it (status $status); nothing is recorded" >&2
        exit 1
    fi
    echo "sanitize: $tool finds its planted bug"
done

if command -v cargo >/dev/null; then
    cargo build --release -p warpsmith-cli
fi
target/release/warpsmith check "$@" --device cuda --sanitizer all --record
