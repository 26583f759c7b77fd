#!/usr/bin/env bash
# The gate: lints, every test of the workspace, those of the Python package, and some seconds of random
# calls. Ends with the result of each test binary, and how long each part took.
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
# Optimising across the library's parts takes half of the compiler's time, and changes no result.
export CARGO_PROFILE_RELEASE_LTO=off
# The native half of the Python package is built with the tests, as scripts/python-dev.sh builds it.
export PYO3_BUILD_EXTENSION_MODULE=1
export WARPSMITH_TEST_NVRTC13 WARPSMITH_TEST_NVRTC12 WARPSMITH_REQUIRE_NVRTC=1 WARPSMITH_REQUIRE_BROWSER=1 VIRTUAL_ENV

log=$(mktemp) setup_log=$(mktemp) browser_log=$(mktemp)
trap 'rm -f "$log" "$setup_log" "$browser_log"' EXIT
# PyTorch is unpacked while the workspace is compiled.
scripts/python-setup.sh "$python" "$python_venv" >"$setup_log" 2>&1 &
setup=$!
# So is the browser.
scripts/browser.sh "$python" >"$browser_log" 2>&1 &
browser=$!

times=()
last=0
# Notes how long the part that ends here took.
took() {
    times+=("$(printf '%5d s  %s' $((SECONDS - last)) "$1")")
    last=$SECONDS
}

scripts/lint.sh "$venv"
took lints
status=0
cargo build --release --workspace --lib --bins --tests --examples
took "compiling the tests"
# The page's tests say so, if there is none.
wait "$browser" || cat "$browser_log" >&2
cargo test --release --workspace --no-fail-fast 2>&1 | tee "$log" || status=$?
took tests
# The tests of the command line have built it. To build it alone would choose other features of some crates, and compile the
# library again.
target/release/warpsmith check --device cpu --random 60s 2>&1 | tee -a "$log" || status=$?
took "random calls"
if wait "$setup"; then
    scripts/python-test.sh --workspace-build "$python" "$python_venv" 2>&1 | tee -a "$log" || status=$?
    took "the Python package"
    "$python_venv/bin/python" crates/server/tests/openai_client.py target/release/warpsmith --required 2>&1 | tee -a "$log" || status=$?
    took "the OpenAI client"
    "$python_venv/bin/python" deploy/kubernetes/test_manifests.py target/release/warpsmith 2>&1 | tee -a "$log" || status=$?
    took "the manifests"
else
    cat "$setup_log" >&2
    status=1
    took "the Python package"
fi
echo
echo "Results:"
grep -E '^(     Running|   Doc-tests|test result:|error: |seed [0-9]|all  |[0-9]+ (passed|failed), |openai [0-9]|kubernetes: )' "$log" || true
echo
echo "Time:"
printf '%s\n' "${times[@]}"
exit "$status"
