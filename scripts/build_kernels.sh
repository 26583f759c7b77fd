#!/usr/bin/env bash
# The same as `make build-kernels`, under a name that other projects have. Its words go to make.
# usage: scripts/build_kernels.sh [ARCH=80,90a] [OUT=packs]
set -euo pipefail
exec make -C "$(dirname "$0")/.." build-kernels "$@"
