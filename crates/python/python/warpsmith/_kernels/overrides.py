"""Which calls of the library's ops users' kernels compute.

Such an op gets another kernel of PyTorch's, in Python: it looks a call up, and leaves it to the library if nobody wants
it. Ops that no kernel was adopted for stay as they are.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.library import Library

from warpsmith import _codegen
from warpsmith._spec import Op, all_ops
from warpsmith._torch.autograd import raw_options
from warpsmith._torch.builtin import builtin
from warpsmith._torch.registration import PUBLIC, RAW

#: What makes two calls the same problem: the tensors' types, shapes, strides, devices and alignment, options, switches.
Problem = tuple[Any, ...]
#: Only the lowest bits of addresses matter.
ALIGNMENT = 16


class Adopted(Protocol):
    """A kernel that computes some calls."""

    name: str

    def compute(self, problem: Problem, tensors: Sequence[Any], options: Sequence[Any]) -> list[torch.Tensor | None]:
        """The op's outputs, in the order it returns them."""


def problem_of(tensors: Sequence[Any], options: Sequence[Any], switches: Sequence[bool]) -> Problem:
    """The problem of a call."""
    forms = [None if t is None else (t.dtype, t.shape, t.stride(), t.device, t.data_ptr() % ALIGNMENT) for t in tensors]
    return (*forms, *options, *switches)


class Override:
    """The calls of one op on one kind of device."""

    def __init__(self, op: Op, key: str) -> None:
        self.op, self.key = op, key
        self.table: dict[Problem, Adopted] = {}
        self.libraries: list[Library] = []

    def open(self) -> None:
        """Puts the op's kernel in Python in front of the library's."""
        if self.libraries:
            return
        variant = self.op.variants[0]
        for namespace, raw in ((PUBLIC, False), (RAW, True)):
            library = Library(namespace, "IMPL")
            kernel = _codegen.bound(self.op, variant, self.run, raw=raw)
            with warnings.catch_warnings():
                # PyTorch warns when a kernel replaces another, which is intended here.
                warnings.simplefilter("ignore")
                library.impl(variant.name, kernel, self.key, allow_override=True)
            self.libraries.append(library)

    def close(self) -> None:
        """Takes it away again."""
        for library in self.libraries:
            library._destroy()
        self.libraries.clear()

    def run(self, tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        problem = problem_of(tensors, options, switches)
        adopted = self.table.get(problem)
        if adopted is None:
            return builtin(self.op.name)(*tensors, *raw_options(self.op, options), *switches)
        with torch._C._AutoDispatchBelowAutograd():
            made = adopted.compute(problem, tensors, options)
        return made[0] if len(made) == 1 else tuple(made)


_lock = threading.RLock()
_overrides: dict[tuple[str, str], Override] = {}
KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def find(op: str, problem: Problem) -> Adopted | None:
    """The kernel that computes a call, if it is a user's."""
    for override in _overrides.values():
        if override.op.name == op and problem in override.table:
            return override.table[problem]
    return None


def adopt(op: str, device: str, problem: Problem, kernel: Adopted) -> None:
    """Makes a kernel compute a problem's calls from now on."""
    with _lock:
        override = _overrides.setdefault((op, device), Override(all_ops()[op], KEYS[device]))
        override.table[problem] = kernel
        override.open()


def put(op: str, device: str, problem: Problem, kernel: Adopted | None) -> None:
    """As :func:`adopt`; without a kernel, the library computes the problem's calls."""
    if kernel is not None:
        adopt(op, device, problem, kernel)
        return
    with _lock:
        override = _overrides.get((op, device))
        if override is not None and override.table.pop(problem, None) is not None and not override.table:
            override.close()


def drop(unwanted: Callable[[Problem, Adopted], bool]) -> None:
    """Gives calls back to the library."""
    with _lock:
        for override in _overrides.values():
            override.table = {p: kernel for p, kernel in override.table.items() if not unwanted(p, kernel)}
            if not override.table:
                override.close()
