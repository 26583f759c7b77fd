#!/usr/bin/env bash
# The application for Ray Serve, with two replicas on this machine. Ray comes from PyPI, into an environment of its own.
# usage: scripts/ray-test.sh PYTHON VENV
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 requirements=deploy/ray/requirements.txt
if ! cmp -s "$requirements" "$venv/.ready"; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 --timeout 60 -r "$requirements"
    # Last, so that what was interrupted is done again.
    cp "$requirements" "$venv/.ready"
fi
model=$(scripts/model.sh "$python")
"$venv/bin/python" deploy/ray/test_ray.py --program target/release/warpsmith --model "$model"
