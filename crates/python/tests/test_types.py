"""What type checkers are told: right programs pass, and each mistake in wrong ones is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warpsmith

HEAD = """
import numpy as np
import torch
import warpsmith

x, w = torch.randn(4, 64), torch.randn(64)
array = np.zeros((4, 64), np.float32)
"""
RIGHT = """
print(warpsmith.rms_norm(x, w, eps=1e-5).shape, warpsmith.linear(x, x, act="silu").dtype)
out, total = warpsmith.rms_norm(x, residual=x)
out, total = warpsmith.layer_norm(x, w, w, x)
print(total.requires_grad, warpsmith.softmax(array).strides)
tokens, logprob = warpsmith.sample(x, 1, torch.arange(4), temperature=0.7, return_logprob=True)
print(tokens.tolist(), logprob.dtype)
print(warpsmith.attention(x, x, x, scale=None).shape, warpsmith.from_dlpack(array).ndim)
layer = warpsmith.nn.FusedLinear(64, 64, activation="gelu")
print(layer(x).shape, warpsmith.sdpa(x, x, x, scale=0.5).shape)
"""
#: Each line has one mistake.
WRONG = """
warpsmith.linear(x, x, act="swish")
warpsmith.rms_norm(x).shap
warpsmith.softmax(array).shap
warpsmith.rms_norm(x, residual=x)[1].shap
warpsmith.rms_norm(x, eps="a")
warpsmith.rms_norm(x, epsilon=1.0)
warpsmith.rms_norm(3)
warpsmith.attention(x, x, x, window=(3, 0))
warpsmith.sample(x, 1, 2, temperature="hot")
warpsmith.rms_nrm(x)
warpsmith.nn.FusedLinear(64, 64, activation="swish")
warpsmith.list_ops()[0].sumary
"""


def test_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(HEAD + RIGHT + WRONG)
    package = Path(warpsmith.__file__).parents[1]
    # What mypy knows of PyTorch is kept for the next time, also for the gate's own call of it.
    cache = Path(__file__).parents[3] / ".mypy_cache"
    command = [sys.executable, "-m", "mypy", "--strict", "--untyped-calls-exclude=torch", "--cache-dir", str(cache)]
    done = subprocess.run(
        [*command, "--config-file=", str(program)],
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    first = (HEAD + RIGHT).count("\n") + 1
    expected = {first + at for at, line in enumerate(WRONG.splitlines()) if line}
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    assert found == expected, done.stdout + done.stderr
