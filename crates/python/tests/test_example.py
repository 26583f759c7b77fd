"""The example that trains a model: its steps, its checkpoints, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from device import DEVICE

PROGRAM = Path(__file__).parents[3] / "examples" / "train" / "train.py"
STEPS = 8

# The example chooses its devices itself, and those of random numbers, which a default device would change.
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", PROGRAM)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    module.SIZES["tiny"] = module.Size(layers=2, width=64, heads=2, kv_heads=1, context=32, batch=4)
    found: ModuleType = module
    return found


def run(train: ModuleType, out: Path, *words: str) -> list[float]:
    """The losses of a run."""
    train.main([*words, "--out", str(out), "--device", DEVICE, "--dtype", "f32", "--rate", "1e-2"])
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


def test_it_trains_resumes_and_writes(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    half, stopped = tmp_path / "half", train.Run.save

    def keep(self: Any, path: Path) -> None:
        stopped(self, path)
        if len(self.losses) == STEPS // 2 and not half.exists():
            half.mkdir()
            shutil.copy(path, half)

    monkeypatch.setattr(train.Run, "save", keep)
    words = ("--steps", str(STEPS), "--save-every", str(STEPS // 2), "--bytes", "20", "--prompt", "# ")
    losses = run(train, tmp_path / "whole", *words)
    assert len(losses) == STEPS and losses[-1] < losses[0] < 7
    output = capfdbinary.readouterr().out
    assert b"tokens/s" in output and b"kernels of warpsmith" in output
    # The prompt, and as many bytes as were asked for.
    written = output.split(b"\n# ")[1]
    assert len(written) == 20 + 1, written
    svg = ElementTree.parse(tmp_path / "whole" / "loss.svg").getroot()
    lines = [line.get("points", "").split() for line in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [STEPS, STEPS]

    assert run(train, half, *words, "--resume") == losses, "as if it had not been stopped"
    again = capfdbinary.readouterr().out
    assert again.split(b"\n# ")[1] == written and b"resumed" in again

    plain = run(train, tmp_path / "plain", *words, "--plain")
    assert plain == pytest.approx(losses, rel=1e-3) and plain != losses
    assert b"kernels of PyTorch" in capfdbinary.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such.txt"], "no-such.txt: No such file"),
        (["--steps", "-1"], "argument --steps: expected 0 or more, got -1"),
        (["--batch", "0"], "argument --batch: expected at least 1, got 0"),
        (["--rate", "nan"], "argument --rate: expected more than 0"),
        (["--temperature", "-1"], "argument --temperature: expected 0 or more"),
        (["--device", "bread"], "argument --device: expected cpu or cuda, got 'bread'"),
        (["--resume"], "no such checkpoint"),
    ],
)
def test_wrong_arguments(
    train: ModuleType, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main([*words, "--out", str(tmp_path)])
    assert message in f"{stopped.value} {capsys.readouterr().err}"


def test_texts_and_checkpoints_that_are_none(train: ModuleType, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"too short")
    with pytest.raises(SystemExit, match="expected a text of at least 384 bytes, got 9"):
        train.main([str(short)])
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(SystemExit, match="expected a checkpoint"):
        train.main(["--resume", "--out", str(tmp_path)])
    torch.save({"size": "large"}, checkpoint)
    with pytest.raises(SystemExit, match="holds a model of --size large, not tiny"):
        train.main(["--resume", "--out", str(tmp_path)])
