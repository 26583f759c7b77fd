"""Ops on arrays of any library that speaks DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from warpsmith import _native
from warpsmith._checks import refusal, types_text
from warpsmith._spec import Op, Variant
from warpsmith.errors import ArgumentError

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
        if value is None:
            found.append(None)
            continue
        name = op.args[given.arg].name
        if not hasattr(value, "__dlpack__"):
            raise refusal(op, name, "a tensor or an array (something with `__dlpack__`)", type(value).__name__)
        try:
            found.append(lend(value))
        except ArgumentError as error:
            if error.argument == "DLPack dtype":
                raise refusal(op, name, types_text(op, given.arg), str(getattr(value, "dtype", error.got))) from None
            raise refusal(op, name, str(error.expected), str(error.got)) from None
        except (TypeError, ValueError) as error:
            raise refusal(op, name, "an array whose memory can be shared", str(error)) from None
    return found


def lend(value: Any) -> _native.Tensor:
    """An array as a tensor of warpsmith. One of our own is used as it is: a second handle to its memory would forbid
    writing."""
    return value if isinstance(value, _native.Tensor) else _native.from_dlpack(value)


def full_like(first: Any, size: Any, value: float, dtype: str) -> Any:
    """An array of one number, of the library and on the device of another array."""
    if is_numpy(first):
        import numpy

        return numpy.full(size, value, {"f32": "float32", "i64": "int64", "i32": "int32"}[dtype])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        from warpsmith._torch.dtypes import BY_NAME

        return torch.full((size,), value, dtype=BY_NAME[dtype], device=first.device)
    return value
