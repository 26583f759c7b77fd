#!/usr/bin/env bash
# Makes the Python environment that the package is built and tested in, or, with requirements-wheel.txt, only built. PyTorch comes
# from PyPI, whose Linux wheels bring CUDA libraries along: some gigabytes, once.
# usage: scripts/python-setup.sh PYTHON VENV [REQUIREMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 requirements=scripts/${3:-requirements-python.txt}
# What was installed: some files include others.
wanted=$(echo "$requirements" && cat scripts/requirements-*.txt)
if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$wanted" ]; then
    exit 0
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "setup: installing $requirements"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 60 -r "$requirements"
# Last, so that what was interrupted is done again.
echo "$wanted" >"$venv/.ready"
