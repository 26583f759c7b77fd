#!/usr/bin/env bash
# Builds the wheel into dist/. The tag says how old a system may be: that of this machine, or with
# `--zig --compatibility manylinux_2_28` (pip install ziglang) an older one.
# usage: scripts/wheel.sh VENV [words for maturin]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "$1")
shift
rm -f dist/warpsmith-*.whl
PATH="$venv/bin:$PATH" maturin build --release --out dist "$@"
size=$(stat -c %s dist/warpsmith-*.whl)
[ "$size" -lt 20000000 ] || { echo "wheel: $size bytes, more than 20 MB" >&2; exit 1; }
