#!/usr/bin/env bash
# Tests the Python package: builds the wheel, installs it into an environment with PyTorch and into an empty one, and runs
# the lints, the types and the tests.
# usage: scripts/python-test.sh [PYTHON] [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3} venv=${2:-.venv-python}
scripts/python-setup.sh "$python" "$venv"
scripts/wheel.sh "$venv"
bin="$PWD/$venv/bin"
"$bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/warpsmith-*.whl

"$bin/ruff" check crates/python
"$bin/ruff" format --check crates/python
"$bin/mypy"

# Without numpy and PyTorch.
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"$python" -m venv "$empty/venv"
"$empty/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index dist/warpsmith-*.whl
(cd "$empty" && venv/bin/python - <"$OLDPWD/crates/python/tests/without_anything.py")

# From another folder, so that the installed package is tested and not the one in the tree.
config="$PWD/pyproject.toml" tests="$PWD/crates/python/tests"
(cd "$empty" && "$bin/python" -m pytest -p no:cacheprovider -c "$config" --rootdir "$tests" "$tests")
