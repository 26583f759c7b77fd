#!/usr/bin/env bash
# Makes the Python environment that the package is built and tested in. PyTorch comes from PyPI, whose Linux wheels bring CUDA
# libraries along: some gigabytes, once.
# usage: scripts/python-setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."
if [ -f "$venv/.ready" ] && cmp -s "$venv/.ready" scripts/requirements-python.txt; then
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "setup: installing scripts/requirements-python.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 60 \
    -r scripts/requirements-python.txt
# Last, so that what was interrupted is done again.
cp scripts/requirements-python.txt "$venv/.ready"
