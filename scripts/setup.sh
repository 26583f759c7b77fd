#!/usr/bin/env bash
# Makes the Python environment: CUDA's run-time compilers (libraries, no GPU needed), a linter, and NumPy.
# usage: scripts/setup.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."

fail() {
    echo "setup: $1" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "\`$python\` is not installed; name another with PYTHON=..."
if ! [ -x "$venv/bin/python" ]; then
    echo "setup: making $venv"
    "$python" -m venv "$venv" || fail "\`$python -m venv\` failed (on Debian: apt install python3-venv)"
fi
echo "setup: installing scripts/requirements.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 20 \
    -r scripts/requirements.txt || fail "pip could not install scripts/requirements.txt (no network?)"
# Last, so that what was interrupted is done again.
touch "$venv/.ready"
