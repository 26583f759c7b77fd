#!/usr/bin/env bash
# Tests the Python package: lints, types, tests with PyTorch, and one without anything.
#
# Builds the wheel and tests that, all of it. With --workspace-build it tests the workspace's own build instead, which needs no
# second build of the library, and leaves out what is slow: some minutes.
# usage: scripts/python-test.sh [--workspace-build] [PYTHON] [VENV]
set -euo pipefail
cd "$(dirname "$0")/.."
workspace=
if [ "${1:-}" = --workspace-build ]; then
    workspace=1
    shift
fi
python=${1:-python3} venv=${2:-.venv-python}
scripts/python-setup.sh "$python" "$venv"
bin="$PWD/$venv/bin" config="$PWD/pyproject.toml" tests="$PWD/crates/python/tests"
# Tests run from another folder, so that the installed package is tested and not what happens to be near.
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT

if [ "$workspace" ]; then
    scripts/python-dev.sh "$venv"
    "$python" -m venv --without-pip "$elsewhere/venv"
    echo "$PWD/crates/python/python" >"$("$elsewhere/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/warpsmith.pth"
    chosen=(-m "not slow")
else
    scripts/wheel.sh "$venv"
    rm -f "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/warpsmith-dev.pth"
    "$bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/warpsmith-*.whl
    "$python" -m venv "$elsewhere/venv"
    "$elsewhere/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index dist/warpsmith-*.whl
    chosen=()
fi

"$bin/ruff" check crates/python
"$bin/ruff" format --check crates/python
"$bin/mypy"

# Without numpy and PyTorch.
(cd "$elsewhere" && venv/bin/python - <"$tests/without_anything.py")
# A process for each core, with a thread each: most of the time goes to Python.
(cd "$elsewhere" && "$bin/python" -m pytest -n auto --maxprocesses 8 --dist worksteal -p no:cacheprovider -c "$config" --rootdir "$tests" "${chosen[@]}" "$tests")
