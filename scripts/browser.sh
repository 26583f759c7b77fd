#!/usr/bin/env bash
# Makes sure that there is a Chromium for the tests of the server's page. Installs Debian's where apt-get is there and this may
# use it.
# usage: scripts/browser.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
found() {
    "$1" -B crates/server/tests/page/drive.py --find
}
found "$1" >/dev/null 2>&1 && exit 0
fail() {
    echo "browser: $1; the tests of the server's page need a Chromium" >&2
    exit 1
}
command -v apt-get >/dev/null || fail "there is no apt-get here"
as_root=()
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || fail "installing it needs root: sudo apt-get install chromium"
    as_root=(sudo -n)
fi
install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends chromium
}
echo "browser: installing chromium" >&2
install >/dev/null 2>&1 || { "${as_root[@]}" apt-get update --quiet && install; } >&2 || fail "apt-get could not install it"
found "$1"
