"""Writes down which keys transformers' configurations of the engine's families have, and what holds without each.

    venv/bin/python scripts/config_keys.py crates/engine/tests/fixtures/config_keys.json

in the environment of `model_fixtures.py`. A test of the engine asks that each key is used, refused or known to do
nothing, and that what holds without it is this; a test of the Python package, that the file is that of the transformers
installed.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import transformers

CLASSES = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "smollm3": transformers.SmolLM3Config,
    "olmo2": transformers.Olmo2Config,
    "gpt2": transformers.GPT2Config,
}


def keys(kind: Any) -> dict[str, Any]:
    """The keys of a class with their defaults: its fields, those of all classes, and what it writes beside them."""
    written = kind().to_dict()
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    defaults = {name: default for name, default in fields.items() if default is not dataclasses.MISSING}
    # A default that is made anew each time is what it writes.
    found = {name: defaults.get(name, written.get(name)) for name in {*fields, *written} if name != "model_type"}
    # Bases of rotations are not fields, and stand beside `rope_parameters` in older files.
    theta = kind.default_theta
    bases = {"rope_theta": theta["global"], "rope_local_base_freq": theta["local"]} if isinstance(theta, dict) else {}
    if "rope_parameters" in found:
        found |= bases or {"rope_theta": theta}
    return {name: found[name] for name in sorted(found) if name not in ("id2label", "label2id", "transformers_version")}


def text() -> str:
    """What the file holds."""
    return json.dumps({family: keys(kind) for family, kind in CLASSES.items()}, indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
