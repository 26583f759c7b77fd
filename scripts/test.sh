#!/usr/bin/env bash
# The gate: lints, then every test of the workspace. Ends with the result of each test binary.
# usage: scripts/test.sh VENV
set -euo pipefail
venv=$1
cd "$(dirname "$0")/.."

library() {
    local found=("$venv"/lib*/python3*/site-packages/nvidia/$1)
    [ -e "${found[0]}" ] || {
        echo "test: nvidia/$1 is not in $venv; remove $venv and run \`make setup\`" >&2
        exit 1
    }
    (cd "$(dirname "${found[0]}")" && echo "$PWD/$(basename "${found[0]}")")
}
# With the compilers named and required, their tests fail rather than skip.
WARPSMITH_TEST_NVRTC13=$(library cu13/lib/libnvrtc.so.13)
WARPSMITH_TEST_NVRTC12=$(library cuda_nvrtc/lib/libnvrtc.so.12)
VIRTUAL_ENV=$(cd "$venv" && pwd)
export WARPSMITH_TEST_NVRTC13 WARPSMITH_TEST_NVRTC12 WARPSMITH_REQUIRE_NVRTC=1 VIRTUAL_ENV

scripts/lint.sh "$venv"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
cargo test --release --workspace --no-fail-fast 2>&1 | tee "$log" || status=$?
echo
echo "Results:"
grep -E '^(     Running|   Doc-tests|test result:|error: )' "$log" || true
exit "$status"
