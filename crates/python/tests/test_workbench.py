"""Timing, listing, explaining, examining."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import warpsmith
from device import DEVICE


def test_bench() -> None:
    x = torch.randn(64, 512)
    found = warpsmith.bench(warpsmith.rms_norm, x, warmup=2, iters=10, bytes=2 * x.nbytes, flops=1e6)
    assert len(found.times) == 10 and found.name == "rms_norm" and found.device == DEVICE
    low, high = found.spread
    assert 0 < found.best <= low <= found.median <= high
    assert found.bytes_per_second == pytest.approx(2 * x.nbytes / found.median)
    assert "GB/s" in repr(found) and "<table>" in found._repr_html_() and "GFLOP/s" in repr(found)
    with pytest.raises(ValueError, match="iters"):
        warpsmith.bench(lambda: None, iters=0)
    assert warpsmith.bench(lambda a, *, b: a + b, 1, b=2, iters=3).flops_per_second is None


def test_list_ops() -> None:
    ops = warpsmith.list_ops()
    assert {op.name for op in ops} >= {"rms_norm", "linear", "attention", "kv_store"}
    norm = next(op for op in ops if op.name == "rms_norm")
    assert norm.has_gradient and norm.works_in_place and norm.kernels
    assert norm.schema.startswith("warpsmith::rms_norm(Tensor x, Tensor? weight=None")
    assert "rms_norm" in repr(ops) and "<td>" in ops._repr_html_()


def test_explain() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    found = warpsmith.explain("rms_norm", x, eps=1e-5)
    assert found.kernel in next(op.kernels for op in warpsmith.list_ops() if op.name == "rms_norm")
    assert found.reason and found.kernel in repr(found) and found.others and "<td>" in found._repr_html_()
    assert warpsmith.explain("rms_norm", np.zeros((4, 64), np.float32), kernel="rms_norm_portable").kernel.endswith(
        "portable"
    )
    with pytest.raises(warpsmith.ArgumentError, match="no kernel is named"):
        warpsmith.explain("rms_norm", x, kernel="nothing")
    with pytest.raises(ValueError, match="no op is called"):
        warpsmith.explain("nothing", x)


def test_doctor_and_available() -> None:
    report = warpsmith.doctor()
    states = {finding.what: finding.state for finding in report}
    assert states["cpu"] == "ok" and states["torch"] == "ok" and report.ok
    assert "directly" in repr(report) and "<table>" in report._repr_html_()
    assert warpsmith.available("cpu") and not warpsmith.available("tpu")
    assert warpsmith.available() == any(name.startswith("cuda") for name in warpsmith._workbench.devices())


def test_memory_of_a_device_is_told_and_given_back() -> None:
    cpu = warpsmith.memory_stats("cpu")
    assert 0 < cpu.free <= cpu.total
    assert (cpu.pool_reserved, cpu.pool_used, cpu.pool_peak, cpu.pool_unused) == (0, 0, 0, 0)
    warpsmith.empty_cache("cpu")
    warpsmith.reset_peak_memory_stats("cpu")
    with pytest.raises(warpsmith.WarpsmithError, match="device"):
        warpsmith.memory_stats("tpu")
    if warpsmith.available("cuda"):
        warpsmith.reset_peak_memory_stats("cuda")
        gpu = warpsmith.memory_stats()
        assert gpu.pool_used <= gpu.pool_peak <= gpu.pool_reserved <= gpu.total
        warpsmith.empty_cache()
        assert warpsmith.memory_stats().pool_unused <= gpu.pool_unused


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", warpsmith.__version__)


def test_stubs_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[1] / "stubs.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0


def test_every_op_has_help() -> None:
    for name in warpsmith.ops.__all__:
        assert getattr(warpsmith, name).__doc__, name
