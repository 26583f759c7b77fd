"""Names that other projects have for what is here, so that code written for them finds it.

Each is another spelling of something in this package and adds nothing to it. ``docs/names.md`` lists further names and
what stands for them here. The layers need PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from warpsmith import ops
from warpsmith._bench import bench
from warpsmith._profile import GPUProfiler, KernelProfiler, MemoryProfiler
from warpsmith._workbench import available

__all__ = [
    "KERNELS_AVAILABLE",
    "GPUProfiler",
    "KernelProfiler",
    "MemoryProfiler",
    "benchmark_kernel",
    "element_wise_mul_add",
]

#: Whether kernels can run on a GPU: ``warpsmith.available("cuda")``, asked when it is used.
KERNELS_AVAILABLE: bool

#: ``a * b + c``: :func:`warpsmith.mul_add`.
element_wise_mul_add = ops.mul_add


def benchmark_kernel(fn: Callable[..., Any], *args: Any, warmup: int = 20, iters: int = 100, **kwargs: Any) -> float:
    """Seconds that ``fn(*args, **kwargs)`` takes: the median of :func:`warpsmith.bench`."""
    return bench(fn, *args, warmup=warmup, iters=iters, **kwargs).median


if TYPE_CHECKING or ops._torch is not None:
    from warpsmith import nn

    #: A linear layer with GELU: :class:`warpsmith.nn.FusedLinear` with ``activation="gelu"``.
    FusedLinearGELU = partial(nn.FusedLinear, activation="gelu")
    #: A linear layer with SiLU: :class:`warpsmith.nn.FusedLinear` with ``activation="silu"``.
    FusedLinearSiLU = partial(nn.FusedLinear, activation="silu")
    #: A linear layer with ReLU: :class:`warpsmith.nn.FusedLinear` with ``activation="relu"``.
    FusedLinearReLU = partial(nn.FusedLinear, activation="relu")
    __all__ += ["FusedLinearGELU", "FusedLinearReLU", "FusedLinearSiLU"]


if not TYPE_CHECKING:  # To a type checker, this would give every misspelt name a type.

    def __getattr__(name: str) -> Any:
        # Not when the module is imported: to look for GPUs starts CUDA, which a process that forks must not do before.
        if name == "KERNELS_AVAILABLE":
            return available("cuda")
        raise AttributeError(f"module 'warpsmith.compat' has no attribute {name!r}")
