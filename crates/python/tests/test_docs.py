"""The documents: what they show is run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCUMENTS = Path(__file__).parents[3] / "docs"


def blocks(text: str) -> list[tuple[int, str]]:
    """Blocks of Python, with the lines they start in."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def test_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # It writes files.
    path = DOCUMENTS / "python.md"
    # Dynamo looks up the globals of a function in its module.
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    names = module.__dict__
    found = blocks(path.read_text())
    assert len(found) >= 8
    for line, code in found:
        # Blank lines before, so that a traceback names the document's line.
        exec(compile("\n" * line + code, str(path), "exec"), names)


def test_the_page_of_fusion_runs() -> None:
    path = DOCUMENTS / "fusion.md"
    names: dict[str, object] = {"__name__": "fusion"}
    found = blocks(path.read_text())
    assert len(found) >= 3
    for line, code in found:
        exec(compile("\n" * line + code, str(path), "exec"), names)


def test_names_of_the_guide_exist() -> None:
    import warpsmith

    named = set(re.findall(r"`(?:warpsmith|nn)\.(\w+)", (DOCUMENTS / "python.md").read_text()))
    missing = {name for name in named if not hasattr(warpsmith, name) and not hasattr(warpsmith.nn, name)}
    assert not missing


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("WARPSMITH_NOTEBOOK_QUICK", "1")
    path = DOCUMENTS / "attention.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    results = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in results if output["output_type"] == "error"]
    plots = [output["data"]["image/png"] for output in results if "image/png" in output.get("data", {})]
    assert plots, "readers who do not run it see the plots that are stored"
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path}, code cell {number}", "exec"), names)
