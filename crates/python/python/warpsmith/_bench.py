"""Timing of any callable."""

from __future__ import annotations

import html
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """How long a call takes, in seconds."""

    name: str
    #: Each timed call, in order.
    times: tuple[float, ...]
    #: What it was timed on: "cpu" or "cuda".
    device: str
    #: Bytes moved and operations done by one call, if the caller said.
    bytes: float | None = None
    flops: float | None = None

    @property
    def median(self) -> float:
        """The middle of the times."""
        return statistics.median(self.times)

    @property
    def best(self) -> float:
        """The least of the times."""
        return min(self.times)

    @property
    def spread(self) -> tuple[float, float]:
        """A tenth of the times is below the first, a tenth above the second."""
        ordered = sorted(self.times)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of memory traffic at the median."""
        return None if self.bytes is None else self.bytes / self.median

    @property
    def flops_per_second(self) -> float | None:
        """The rate of arithmetic at the median."""
        return None if self.flops is None else self.flops / self.median

    def rows(self) -> list[tuple[str, str]]:
        """The results, as names and values."""
        low, high = self.spread
        rows = [
            ("median", duration(self.median)),
            ("spread", f"{duration(low)} to {duration(high)} (10 % to 90 %)"),
            ("best", duration(self.best)),
            ("calls", f"{len(self.times)} on {self.device}"),
        ]
        if self.bytes_per_second is not None:
            rows.append(("memory", f"{self.bytes_per_second / 1e9:.3g} GB/s"))
        if self.flops_per_second is not None:
            rows.append(("arithmetic", f"{self.flops_per_second / 1e9:.3g} GFLOP/s"))
        return rows

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value}" for name, value in self.rows())
        return f"{self.name}: {told}"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self.rows())
        return f"<table><caption>{html.escape(self.name)}</caption>{rows}</table>"


def bench(
    fn: Callable[..., Any],
    *args: Any,
    warmup: int = 20,
    iters: int = 100,
    name: str | None = None,
    bytes: float | None = None,
    flops: float | None = None,
    **kwargs: Any,
) -> Measurement:
    """Times ``fn(*args, **kwargs)``.

    Each call is timed by itself, after ``warmup`` calls that are not. If an argument is on a GPU, the GPU's own clock
    is read before and after each call. With ``bytes`` or ``flops`` of one call, rates are reported too.
    """
    if iters < 1 or warmup < 0:
        raise ValueError(f"bench: expected iters of at least 1 and warmup of at least 0, got {iters} and {warmup}")
    for _ in range(warmup):
        fn(*args, **kwargs)
    on_gpu = any(getattr(value, "is_cuda", False) for value in (*args, *kwargs.values()))
    time_calls = time_on_gpu if on_gpu else time_on_host
    times = time_calls(lambda: fn(*args, **kwargs), iters)
    label = name or getattr(fn, "__name__", None) or repr(fn)
    return Measurement(label, times, "cuda" if on_gpu else "cpu", bytes, flops)


def time_on_host(call: Callable[[], Any], iters: int) -> tuple[float, ...]:
    times = []
    for _ in range(iters):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return tuple(times)


def time_on_gpu(call: Callable[[], Any], iters: int) -> tuple[float, ...]:
    torch = sys.modules["torch"]
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iters)]
    torch.cuda.synchronize()
    for before, after in marks:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return tuple(before.elapsed_time(after) / 1e3 for before, after in marks)


def duration(seconds: float) -> str:
    """A time in a readable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"
