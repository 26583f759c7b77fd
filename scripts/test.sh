#!/usr/bin/env bash
# The gate: lints, every test of the workspace, those of the Python package, and some seconds of random
# calls. Ends with the result of each test binary.
# usage: scripts/test.sh PYTHON VENV PYTHON_VENV
set -euo pipefail
python=$1 venv=$2 python_venv=$3
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
# A fifth of the compiler's time goes into optimising across the library's parts, which makes kernels of the CPU faster but
# changes no result.
export CARGO_PROFILE_RELEASE_LTO=off
export WARPSMITH_TEST_NVRTC13 WARPSMITH_TEST_NVRTC12 WARPSMITH_REQUIRE_NVRTC=1 VIRTUAL_ENV

log=$(mktemp) setup_log=$(mktemp)
trap 'rm -f "$log" "$setup_log"' EXIT
# PyTorch is unpacked while the workspace is compiled.
scripts/python-setup.sh "$python" "$python_venv" >"$setup_log" 2>&1 &
setup=$!

scripts/lint.sh "$venv"
status=0
cargo test --release --workspace --no-fail-fast 2>&1 | tee "$log" || status=$?
# The tests of the command line have built it. To build it alone would choose other features of some crates, and compile the
# library again.
target/release/warpsmith check --random 60s --device cpu 2>&1 | tee -a "$log" || status=$?
if wait "$setup"; then
    scripts/python-test.sh --workspace-build "$python" "$python_venv" 2>&1 | tee -a "$log" || status=$?
else
    cat "$setup_log" >&2
    status=1
fi
echo
echo "Results:"
grep -E '^(     Running|   Doc-tests|test result:|error: |seed [0-9]| all  |[0-9]+ (passed|failed), )' "$log" || true
exit "$status"
