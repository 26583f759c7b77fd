"""Profiles of Python code, on the CPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
import warpsmith
from warpsmith import compat

pytestmark = pytest.mark.cpu


def work() -> torch.Tensor:
    x = torch.randn(64, 256)
    return warpsmith.softmax(warpsmith.rms_norm(x, torch.ones(256)))


def test_a_profile_has_the_kernels_and_their_numbers() -> None:
    work()
    with warpsmith.profile("norms") as p:
        for _ in range(3):
            with p.span("a step"):
                work()
    work()
    table = p.table()
    by_op = {kernel.op: kernel for kernel in table}
    assert set(by_op) == {"rms_norm", "softmax"}
    norm = by_op["rms_norm"]
    assert norm.launches == 3 and norm.kernel.startswith("rms_norm_")
    assert norm.bytes == 3 * (2 * 64 * 256 + 256) * 4
    assert 0 < norm.time < p.wall and norm.of_limit is not None and norm.of_limit > 0
    assert abs(sum(kernel.share for kernel in table) - 1) < 1e-6
    assert abs(p.busy + p.idle - p.wall) < 1e-9 and p.busy > 0
    spans = p.data["summary"]["spans"]
    assert [(span["name"], span["count"]) for span in spans] == [("a step", 3)]
    text = repr(table)
    assert "norms" in text and norm.kernel in text and max(map(len, text.splitlines())) <= 80
    assert norm.kernel in table._repr_html_()


def test_a_timeline_and_a_page_are_written(tmp_path: Path) -> None:
    with warpsmith.profile("a </script> title") as p:
        work()
    p.trace(tmp_path / "trace.json")
    p.trace(tmp_path / "trace.json.gz")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == trace
    ops = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "op"]
    assert ops == ["rms_norm", "softmax"]
    p.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "a &lt;/script&gt; title" in page
    with pytest.raises(OSError, match="nowhere"):
        p.trace(tmp_path / "nowhere" / "trace.json")


def test_forward_and_backward_are_apart() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    with compat.GPUProfiler() as p:
        warpsmith.softmax(x).sum().backward()
    metrics = p.metrics()
    assert metrics["forward"] > 0 and metrics["backward"] > 0
    assert metrics["busy"] + metrics["idle"] == pytest.approx(metrics["wall"])


def test_views_by_their_names() -> None:
    with compat.KernelProfiler() as p:
        work()
    assert all(name == kernel.kernel and kernel.launches == 1 for name, kernel in p.kernels().items())
    assert len(p.kernels()) == 2
    native = warpsmith.from_dlpack(torch.ones(1024, 1024))
    with compat.MemoryProfiler() as m:
        kept = warpsmith.softmax(native)
    peak = next(peak for peak in m.peaks() if peak.device == "cpu")
    assert peak.bytes >= 4 << 20 and peak.allocations >= 1
    assert any("softmax" in place for place, _, _ in peak.holders), peak
    del kept


def test_there_is_one_at_a_time_and_it_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), warpsmith.profile():
        with pytest.raises(warpsmith.ArgumentError, match="not ended"), warpsmith.profile():
            pass
        raise ZeroDivisionError
    with warpsmith.profile() as p:
        pass
    assert p.table() == [] and p.busy == 0
    with pytest.raises(RuntimeError, match="with statement"):
        warpsmith.profile().table()
