#!/usr/bin/env bash
# Installs the Python package from the workspace's own build, without building the library again: the environment reads the
# package from the tree, where the native half is put. It is built with all of the workspace: for parts of it Cargo would choose
# other features of what the library is made of, and compile the library again.
# usage: scripts/python-dev.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
bin="$PWD/$1/bin"
# As in the gate, whose build would otherwise be thrown away and made again.
export CARGO_PROFILE_RELEASE_LTO=off
PYO3_BUILD_EXTENSION_MODULE=1 cargo build --release --workspace --lib --bins --tests --examples

package="$PWD/crates/python/python"
target=${CARGO_TARGET_DIR:-target}
# By way of another name: a process may have the old one loaded.
cp "$target/release/lib_native.so" "$package/warpsmith/_native.new.so"
mv "$package/warpsmith/_native.new.so" "$package/warpsmith/_native.abi3.so"

# An installed wheel would come first.
"$bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes warpsmith 2>/dev/null
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$package" >"$site/warpsmith-dev.pth"
