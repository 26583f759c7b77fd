#!/usr/bin/env bash
# The lines that the tests of the workspace run: a table of the library's rooms, and a page for each file in target/llvm-cov.
# cargo-llvm-cov is installed into .tools, and rustup adds LLVM's tools. Not part of the gate: the first time everything is
# compiled anew, which takes as long as the first build; later only what has changed. Tests that fail are told at the end.
# The lines of Python are not counted, and the tests of the Python package are not among those that are run.
# usage: scripts/coverage.sh [PACKAGE...] [-- WORDS]     the library alone unless packages are named
# WORDS choose tests, as those of cargo test do: `scripts/coverage.sh warpsmith-server -- --test server safety` or
# `scripts/coverage.sh warpsmith -- --test units jit::`.
set -euo pipefail
cd "$(dirname "$0")/.."
# As recorded in the tool's own lock file.
version=0.8.4
tools=$PWD/.tools
fail() {
    echo "coverage: $1" >&2
    exit 1
}
if ! "$tools/bin/cargo-llvm-cov" llvm-cov --version 2>/dev/null | grep -qF " $version"; then
    echo "coverage: installing cargo-llvm-cov $version into .tools" >&2
    cargo install --quiet --locked --root "$tools" --version "$version" cargo-llvm-cov || fail "cargo-llvm-cov could not be installed"
fi
tool=$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin/llvm-cov
if ! [ -x "$tool" ]; then
    command -v rustup >/dev/null || fail "$tool is missing: install the component llvm-tools of this Rust"
    rustup component add llvm-tools || fail "rustup could not add llvm-tools"
fi
packages=() words=()
while [ $# -gt 0 ]; do
    if [ "$1" = -- ]; then
        shift
        words=("$@")
        break
    fi
    packages+=("$1")
    shift
done
[ ${#packages[@]} -gt 0 ] || packages=(warpsmith)
selected=()
for package in "${packages[@]}"; do
    selected+=(--package "$package")
done
# References and cases are data of the tests. Optimised code: the conformance tests would take hours without.
export PATH="$tools/bin:$PATH" CARGO_PROFILE_RELEASE_LTO=off
ignored='(/tests/|_tests\.rs$|/tests\.rs$|/reference\.rs$|/cases\.rs$|\.cargo/|rustc/)'
# What earlier tests have run does not count; what was compiled for them stays.
cargo llvm-cov clean --profraw-only
failed=
cargo llvm-cov test --release --no-fail-fast --no-clean --no-report "${selected[@]}" "${words[@]}" || failed=1
cargo llvm-cov report --release --html "${selected[@]}" --ignore-filename-regex "$ignored"
# As a file: there may be more of it than fits on a command line.
summary=$(mktemp)
trap 'rm -f "$summary"' EXIT
cargo llvm-cov report --release --json --summary-only "${selected[@]}" --ignore-filename-regex "$ignored" >"$summary"
python3 - "$PWD" "$summary" <<'PYTHON'
"""Sums up the lines of each room."""

import json
import pathlib
import sys
from collections import defaultdict

root, report = sys.argv[1], json.loads(pathlib.Path(sys.argv[2]).read_text())
rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
for file in report["data"][0]["files"]:
    place = file["filename"].removeprefix(root + "/").split("/")
    lines = file["summary"]["lines"]
    for room in ("/".join(place[:4]) if len(place) > 4 else "/".join(place[:3]), "all"):
        rooms[room][0] += lines["covered"]
        rooms[room][1] += lines["count"]
for room, (covered, count) in sorted(rooms.items(), key=lambda each: (each[0] == "all", each[0])):
    print(f"{room:<50} {covered:>7} of {count:>7} lines {100 * covered / max(count, 1):6.1f} %")
print("each file: target/llvm-cov/html/index.html")
PYTHON
[ -z "$failed" ] || fail "some tests failed; the lines that they ran are counted"
