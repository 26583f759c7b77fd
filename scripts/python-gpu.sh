#!/usr/bin/env bash
# Tests the Python package with tensors of a GPU, on a machine that has PyTorch but need not have Rust or a network. What was
# built elsewhere must lie in the tree: the native half (scripts/python-dev.sh), and where the machine has no pytest,
# `pip install --target dist/pytest pytest` (with pytest-xdist, `-n 8` runs eight at once).
# usage: scripts/python-gpu.sh PYTHON [words for pytest, as --record evidence/python/nvidia-h200.json]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
package="$PWD/crates/python/python" tests="$PWD/crates/python/tests"
[ -e "$package/warpsmith/_native.abi3.so" ] || {
    echo "python-gpu: the native half is not in $package/warpsmith; build it with scripts/python-dev.sh" >&2
    exit 1
}
# JAX would take most of the memory at once.
export PYTHONPATH="$package:$PWD/dist/pytest" WARPSMITH_TEST_DEVICE=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false
"$python" -c 'import warpsmith; print(warpsmith.doctor()); assert warpsmith.available("cuda")'
"$python" -m pytest -p no:cacheprovider -c pyproject.toml --rootdir "$tests" -m "not slow" "$@" "$tests"
