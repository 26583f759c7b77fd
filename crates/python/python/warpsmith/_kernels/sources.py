"""Where a kernel's code comes from: CUDA, Triton or Python."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch

from warpsmith import _native
from warpsmith.errors import ArgumentError

#: The architecture that CUDA source is compiled for where there is no GPU.
DEFAULT_ARCH = "90a"


@dataclass(frozen=True)
class Launch:
    """How a kernel is started.

    ``args`` are the kernel's own, in its order. For CUDA a tensor is its address, an int is ``int``, a float is
    ``float`` and a bool is ``bool``; other types are those of :mod:`ctypes`, such as ``ctypes.c_int64(n)``.
    """

    grid: Sequence[int]
    block: Sequence[int] = (1,)
    args: Sequence[Any] = ()
    #: Dynamic shared memory in bytes (CUDA).
    shared: int = 0
    #: Further options (Triton): constants, ``num_warps``.
    options: Mapping[str, Any] = field(default_factory=dict)


class Code(Protocol):
    """Code that fills outputs."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Kinds of devices it runs on."""

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
        """Computes the outputs from the inputs, in the order of the current stream."""


@dataclass(frozen=True)
class Callback:
    """A Python function that takes inputs, then outputs, which it writes."""

    body: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
        self.body(*inputs, *outputs)


class Cuda:
    """CUDA source with an ``extern "C" __global__`` function. Compiled when it is made, so that errors show at once."""

    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, name: str, source: str, launch: Callable[..., Launch]) -> None:
        self.name, self.launch = name, launch
        found = re.findall(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)', source)
        if name not in found and len(found) != 1:
            expected = f'one function `extern "C" __global__ void`, or one called {name}'
            refuse(name, "source", expected, ", ".join(found) or "none")
        self.native = _native.CudaKernel(name, source, name if name in found else found[0])
        self.native.compile(architecture())

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
        device = next(output.device for output in outputs if output is not None)
        started = self.launch(*inputs, *outputs)
        stream = torch.cuda.current_stream(device).cuda_stream
        args = [self.bits(at, value) for at, value in enumerate(started.args)]
        index = 0 if device.index is None else device.index
        grid, block = three(started.grid), three(started.block)
        self.native.launch(index, stream, grid, block, started.shared, args)

    def bits(self, at: int, value: Any) -> tuple[int, int]:
        """An argument as the driver gets it: its bits and its size in bytes."""
        if isinstance(value, torch.Tensor):
            return value.data_ptr(), 8
        if isinstance(value, bool):
            value = ctypes.c_bool(value)
        elif isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                refuse(self.name, f"launch.args[{at}]", "an int of 32 bits, or ctypes.c_int64", str(value))
            value = ctypes.c_int32(value)
        elif isinstance(value, float):
            value = ctypes.c_float(value)
        if not isinstance(value, ctypes._SimpleCData):
            refuse(self.name, f"launch.args[{at}]", "a tensor, a number, or one of ctypes", type(value).__name__)
        return int.from_bytes(bytes(value), "little"), ctypes.sizeof(value)


class Triton:
    """A function of Triton's. In its interpreter (TRITON_INTERPRET=1) it runs on the CPU, too."""

    def __init__(self, function: Any, launch: Callable[..., Launch]) -> None:
        self.function, self.launch = function, launch
        interpreted = type(function).__name__ == "InterpretedFunction"
        self.devices: tuple[str, ...] = ("cpu", "cuda") if interpreted else ("cuda",)

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
        started = self.launch(*inputs, *outputs)
        self.function[tuple(started.grid)](*started.args, **started.options)


def code_of(name: str, source: Any, launch: Callable[..., Launch] | None) -> Code:
    """The code that a user gave."""
    if isinstance(source, str):
        return Cuda(name, source, needed(name, launch))
    triton = sys.modules.get("triton")
    if triton is not None and isinstance(source, triton.runtime.KernelInterface):
        return Triton(source, needed(name, launch))
    if callable(source):
        return Callback(source)
    refuse(name, "source", "CUDA source, a function of Triton's or a callable", type(source).__name__)


def needed(name: str, launch: Callable[..., Launch] | None) -> Callable[..., Launch]:
    if launch is None:
        refuse(name, "launch", "a function of inputs and outputs that returns a warpsmith.Launch", "nothing")
    return launch


def architecture() -> str:
    """The architecture of the first GPU, or the default one."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"
    return DEFAULT_ARCH


def three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def refuse(op: str, argument: str, expected: str, got: str) -> NoReturn:
    message = f"{op}: argument `{argument}`: expected {expected}, got {got}"
    raise ArgumentError(message, op=op, argument=argument, expected=expected, got=got)
