"""Where the time of Python code goes: profiles of the ops that it calls."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from warpsmith import _native
from warpsmith._workbench import table as html_table


@dataclass(frozen=True)
class KernelTime:
    """All launches of a kernel. Times are in seconds."""

    kernel: str
    op: str
    time: float
    #: Of the time of all kernels, from 0 to 1.
    share: float
    launches: int
    #: The fewest bytes that they could move, and the arithmetic operations.
    bytes: float
    flops: float
    #: Part of the machine's measured limit that was reached; None if that is unknown.
    of_limit: float | None
    #: Registers of a thread and bytes of shared memory of a block, on a GPU.
    registers: int
    shared_bytes: int

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth, by the fewest bytes."""
        return self.bytes / self.time if self.time > 0 else 0.0


@dataclass(frozen=True)
class PeakMemory:
    """The most memory of the library's tensors that was allocated in the profile and lived at a time, on a device."""

    device: str
    bytes: int
    allocations: int
    #: Who held it: the place, the number of tensors, and their bytes; the largest first.
    holders: tuple[tuple[str, int, int], ...]


class KernelTable(list[KernelTime]):
    """Kernels, those that took longest first: a table when it is shown."""

    def __init__(self, kernels: list[KernelTime], text: str) -> None:
        super().__init__(kernels)
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        def row(kernel: KernelTime) -> tuple[str, ...]:
            limit = "" if kernel.of_limit is None else f"{kernel.of_limit:.0%}"
            return (kernel.kernel, f"{kernel.time * 1e6:.1f} us", f"{kernel.share:.1%}", str(kernel.launches), limit)

        head = ("kernel", "time", "share", "launches", "of limit")
        return html_table(head, [row(kernel) for kernel in self])


class profile:
    """Records every op that is called until the block ends, on all threads; one profile at a time.

    After the block, ``table()`` has the kernels, ``trace(path)`` writes a timeline for Perfetto and chrome://tracing,
    ``report(path)`` a page for any browser. ``span(name)`` names a part of the block.
    """

    def __init__(self, title: str = "Python") -> None:
        self.title = title
        self._recording: _native.Recording | None = None

    def __enter__(self) -> profile:
        self._recording = _native.Recording(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorded.stop()

    @property
    def _recorded(self) -> _native.Recording:
        if self._recording is None:
            raise RuntimeError("nothing was recorded: use it in a with statement")
        return self._recording

    def span(self, name: str) -> _native.NamedSpan:
        """Names what happens in a block: ``with p.span("attention"): ...``."""
        return _native.NamedSpan(name)

    @cached_property
    def data(self) -> dict[str, Any]:
        """All tables, with times in nanoseconds."""
        found: dict[str, Any] = json.loads(self._recorded.json())
        return found

    def table(self) -> KernelTable:
        """The kernels, with their times and how close they came to the machine's limits."""
        rows = self.data["summary"]["kernels"]
        return KernelTable([kernel_time(row) for row in rows], self._recorded.text())

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a timeline, compressed if the name ends in ``.gz``."""
        self._recorded.trace(os.fspath(path))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with a roofline, the timeline and tables."""
        self._recorded.report(os.fspath(path))

    @property
    def wall(self) -> float:
        """Seconds of the block."""
        return float(self.data["summary"]["wall_ns"]) * 1e-9

    @property
    def busy(self) -> float:
        """Seconds in which a kernel ran: those that overlap count once."""
        return float(self.data["summary"]["busy_ns"]) * 1e-9

    @property
    def idle(self) -> float:
        """The rest."""
        return float(self.data["summary"]["idle_ns"]) * 1e-9

    @property
    def backward(self) -> float:
        """Seconds of the kernels of gradients."""
        return float(self.data["summary"]["backward_ns"]) * 1e-9

    @property
    def forward(self) -> float:
        """Seconds of the other kernels."""
        return sum(kernel.time for kernel in self.table()) - self.backward

    @property
    def memory(self) -> tuple[PeakMemory, ...]:
        """The most memory on each device."""
        return tuple(peak_memory(peak) for peak in self.data["memory"])

    def __repr__(self) -> str:
        return f"profile({self.title!r})" if self._recording is None else self._recorded.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def kernel_time(row: dict[str, Any]) -> KernelTime:
    limit = row["limit_ns"]
    return KernelTime(
        kernel=row["kernel"],
        op=row["op"],
        time=row["time_ns"] * 1e-9,
        share=row["share"],
        launches=row["launches"],
        bytes=row["bytes"],
        flops=row["flops"],
        of_limit=None if limit is None else limit / max(row["time_ns"], 1.0),
        registers=row["registers"],
        shared_bytes=row["shared_bytes"],
    )


def peak_memory(peak: dict[str, Any]) -> PeakMemory:
    device = "cpu" if peak["device"] is None else f"cuda:{peak['device']}"
    holders = tuple((held["place"], held["count"], held["bytes"]) for held in peak["holders"])
    return PeakMemory(device, peak["bytes"], peak["allocations"], holders)


class GPUProfiler(profile):
    """A profile, with what it says of the device as ``metrics()``."""

    def metrics(self) -> dict[str, float]:
        """Seconds of the block: in all, busy, idle, forward and backward; and the bandwidth while busy, in bytes/s."""
        moved = sum(kernel.bytes for kernel in self.table())
        return {
            "wall": self.wall,
            "busy": self.busy,
            "idle": self.idle,
            "forward": self.forward,
            "backward": self.backward,
            "bytes_per_second": moved / self.busy if self.busy > 0 else 0.0,
        }


class MemoryProfiler(profile):
    """A profile, with what it says of memory as ``peaks()``. It counts tensors of this library, not PyTorch's own."""

    def peaks(self) -> tuple[PeakMemory, ...]:
        """The most memory on each device, and who held it."""
        return self.memory


class KernelProfiler(profile):
    """A profile, with its kernels by name as ``kernels()``."""

    def kernels(self) -> dict[str, KernelTime]:
        """Each kernel that ran, by its name."""
        return {kernel.kernel: kernel for kernel in self.table()}
