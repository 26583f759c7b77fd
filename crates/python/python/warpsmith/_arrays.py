"""Ops on arrays of any library that speaks DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from warpsmith import _native
from warpsmith._spec import Op, Variant

#: Types that numpy has.
NUMPY_TYPES = frozenset({"f32", "f16", "i64", "i32", "u8", "bool"})


def is_numpy(value: object) -> bool:
    """Whether a value is an array of numpy, which need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def array_call(op: Op, variant: Variant) -> Callable[..., Any]:
    """Calls the op on arrays: tensors, options and switches. Arrays of numpy give arrays of numpy, where it has the
    type; others give tensors of warpsmith."""

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> tuple[Any, ...]:
        borrowed = borrow(op, variant, tensors)
        made = _native.call(op.name, variant.in_place, borrowed, list(options), list(switches))
        if all(value is None or is_numpy(value) for value in tensors):
            return tuple(
                tensor.numpy() if tensor is not None and tensor.dtype in NUMPY_TYPES else tensor for tensor in made
            )
        return tuple(made)

    return run


def borrow(op: Op, variant: Variant, tensors: tuple[Any, ...]) -> list[_native.Tensor | None]:
    """The arrays as tensors of warpsmith, in the same memory."""
    found: list[_native.Tensor | None] = []
    for given, value in zip(variant.tensors, tensors, strict=True):
        try:
            found.append(None if value is None else lend(value))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{op.name}: argument `{op.args[given.arg].name}`: {error}") from None
    return found


def lend(value: Any) -> _native.Tensor:
    """An array as a tensor of warpsmith. One of our own is used as it is: a second handle to its memory would forbid
    writing."""
    return value if isinstance(value, _native.Tensor) else _native.from_dlpack(value)
