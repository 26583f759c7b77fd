"""Errors of wrong calls, which name the op, the argument, what was expected and what was given.

Nothing here runs in a call that is right.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from warpsmith import _native
from warpsmith._shapes import all_types
from warpsmith._spec import Attr, Op, Variant
from warpsmith.errors import ArgumentError, WarpsmithError


def refusal(op: Op, argument: str, expected: str, got: str) -> ArgumentError:
    """The error of an argument."""
    message = f"{op.name}: argument `{argument}`: expected {expected}, got {got}"
    return ArgumentError(message, op=op.name, argument=argument, expected=expected, got=got)


def types_text(op: Op, index: int) -> str:
    """The types an argument may have, for errors."""
    return f"dtype {' or '.join(all_types(op, index))}"


def native_error(error: Exception) -> Exception:
    """The exception of the native half with its details; PyTorch only passes on its text."""
    if isinstance(error, WarpsmithError):
        return error
    found = _native.take_last_error()
    if isinstance(found, RuntimeError) and str(found) in str(error):
        return found
    return error


def failed_call(
    error: Exception,
    op: Op,
    variant: Variant,
    tensors: Sequence[Any],
    options: Sequence[Any],
    switches: Sequence[Any],
) -> Exception:
    """What to raise where a call with tensors of PyTorch failed."""
    import torch

    found = native_error(error)
    if isinstance(found, WarpsmithError):
        return found
    for given, tensor in zip(variant.tensors, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor) and not (given.optional and tensor is None):
            got = "nothing" if tensor is None else type(tensor).__name__
            return refusal(op, op.args[given.arg].name, "a tensor of PyTorch, like the first argument", got)
    return wrong_option(op, variant, options, switches) or error


def wrong_option(op: Op, variant: Variant, options: Sequence[Any], switches: Sequence[Any]) -> ArgumentError | None:
    """The error of the first option of the wrong kind."""
    for attr, value in zip(op.attrs, options, strict=True):
        expected = expected_kind(attr)
        if not is_kind(attr, value):
            return refusal(op, attr.name, expected, repr(value))
    for name, value in zip(variant.wanted.values(), switches, strict=True):
        if not is_flag(value):
            return refusal(op, name, "True or False", repr(value))
    return None


def is_kind(attr: Attr, value: Any) -> bool:
    """Whether an option can have this value."""
    if value is None:
        return attr.default is None
    if attr.kind == "choice":
        return isinstance(value, str) and value in attr.choices
    if attr.kind == "bool":
        return is_flag(value)
    if attr.kind == "float":
        return isinstance(value, numbers.Real) and _is_float(value)
    return isinstance(value, numbers.Integral) and -(2**63) <= int(value) < 2**63


def _is_float(value: numbers.Real) -> bool:
    """Whether a number has the range of floats."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_flag(value: Any) -> bool:
    """Whether a value is true or false: one of Python's, of numpy's, or the number 1 or 0."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_", "SymBool"):
        return True
    return isinstance(value, int) and value in (0, 1)


def flag(op: Op, name: str, value: Any) -> bool:
    """A switch that is not a plain bool."""
    if not is_flag(value):
        raise refusal(op, name, "True or False", repr(value))
    return bool(value)


def expected_kind(attr: Attr) -> str:
    """The valid values of an option, in words."""
    if attr.kind == "choice":
        return f"one of {', '.join(attr.choices)}"
    text = {"float": "a number", "int": "a whole number of 64 bits", "bool": "True or False"}[attr.kind]
    return f"{text} or None" if attr.default is None else text
