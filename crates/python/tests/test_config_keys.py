"""The keys of transformers' configurations that the engine's tests know."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[3]


@pytest.mark.cpu
def test_the_keys_are_those_of_the_transformers_installed() -> None:
    written = (ROOT / "crates/engine/tests/fixtures/config_keys.json").read_text()
    made = runpy.run_path(str(ROOT / "scripts/config_keys.py"))
    assert made["text"]() == written, "run scripts/config_keys.py, and judge what is new in models/config/tests.rs"
