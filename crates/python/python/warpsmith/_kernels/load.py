"""Kernels from files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from warpsmith._kernels.decorator import UserKernel, kernel
from warpsmith._kernels.sources import Launch, refuse


def load_kernel(
    path: str | os.PathLike[str],
    *,
    launch: Callable[..., Launch],
    reference: Callable[..., Any],
    cases: Sequence[Sequence[Any] | Callable[[], Sequence[Any]]],
    precision: float | None = None,
    streams: int = 1,
) -> Callable[[Callable[..., Any]], UserKernel]:
    """Makes an op of the CUDA kernel in a file, as :func:`warpsmith.kernel` does of source in a string.

    path: a file of CUDA source with an ``extern "C" __global__`` function.

    The other arguments are those of :func:`warpsmith.kernel`, which checks the kernel.
    """
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        refuse("load_kernel", "path", "a file of CUDA source", f"{os.fspath(path)} ({error})")
    return kernel(source=source, launch=launch, reference=reference, cases=cases, precision=precision, streams=streams)
