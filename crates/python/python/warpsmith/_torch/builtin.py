"""The library's own kernels of an op, each as an op of PyTorch's: they stay, whatever kernels the op itself gets."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from warpsmith import _native
from warpsmith._spec import all_ops
from warpsmith._torch.registration import through_python

NAMESPACE = "_warpsmith_kernels"

#: Kept: without it the ops would be gone.
_library: list[Library] = []


_made: dict[tuple[str, str | None], Any] = {}
#: An op can be defined only once, whoever asks for it at the same time.
_lock = threading.Lock()


def builtin(name: str, kernel: str | None = None) -> Any:
    """What computes an op with the library's kernel of a name, or with the one that the library chooses. It is called
    as the raw op is."""
    found = _made.get((name, kernel))
    if found is None:
        with _lock:
            found = _made.get((name, kernel))
            if found is None:
                found = _made[name, kernel] = _define(name, kernel)
    return found


def _define(name: str, kernel: str | None) -> Any:
    from warpsmith import ops

    if not _library:
        _library.append(Library(NAMESPACE, "DEF"))
    op = all_ops()[name]
    variant = op.variants[0]
    label = name if kernel is None else f"{name}__{kernel}"
    library = _library[0]
    library.define(label + variant.raw_schema[len(variant.name) :])
    if ops._torch is not None and ops._torch.native:
        _native.register_kernel(NAMESPACE, label, name, kernel)
    else:
        for key in ("CPU", "CUDA"):
            library.impl(label, through_python(op, variant, kernel), key)
    library.impl(label, fallthrough_kernel, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), label).default
