"""Writes the type stubs of the ops, from their descriptions. With --check, says whether they are up to date.

usage: python crates/python/stubs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from warpsmith._codegen import Parameter, documentation, joined, option_parameters, tensor_parameters
from warpsmith._spec import Op, Variant, all_ops

PATH = Path(__file__).parent / "python" / "warpsmith" / "ops.pyi"

HEAD = '''\
# Made by crates/python/stubs.py from the ops' descriptions.
"""The ops as functions."""

from typing import Any, Literal, Protocol, TypeVar, overload

import numpy.typing
import torch

from warpsmith._native import Tensor
from warpsmith._torch import Torch

class Array(Protocol):
    """An array of any library that speaks DLPack."""

    def __dlpack__(self) -> Any: ...

#: Tensors of PyTorch give tensors of PyTorch, arrays of numpy arrays of numpy.
Same = TypeVar("Same", torch.Tensor, numpy.typing.NDArray[Any], Tensor)

_torch: Torch | None
'''


def result(count: int, array: str) -> str:
    """The type of that many results."""
    return array if count == 1 else f"tuple[{', '.join([array] * count)}]"


def signatures(op: Op, variant: Variant) -> list[tuple[str, str]]:
    """Parameters and result of each form of a call. Results are of the arguments' type. One that may be missing comes
    with an input or a switch; where there are several such, stubs do not say what is returned."""
    options = option_parameters(op, variant)
    tensors = tensor_parameters(op, variant, "Same")
    others = joined(tensor_parameters(op, variant, "Array"), options, typed=True)
    plain = joined(tensors, options, typed=True)
    count = len(variant.returned)
    optional = [output for output in variant.returned if op.args[output].optional]
    if count == 0:
        return [(others, "None")]
    if len(optional) > 1:
        return [(others, "Any")]
    if not optional:
        return [(plain, result(count, "Same")), (others, "Any")]
    with_input = op.args[optional[0]].given_with
    if with_input is None:
        switch = variant.wanted[optional[0]]
        without = joined(tensors, chosen(options, switch, Parameter(switch, "Literal[False]", "False")), typed=True)
        given = joined(tensors, chosen(options, switch, Parameter(switch, "Literal[True]")), typed=True)
        return [(without, result(count - 1, "Same")), (given, result(count, "Same")), (others, "Any")]
    name = op.args[with_input].name
    at = next(at for at, tensor in enumerate(tensors) if tensor.name == name)
    without = joined(chosen(tensors, name, Parameter(name, "None", "None")), options, typed=True)
    by_name = joined([*tensors[:at], *tensors[at + 1 :]], [Parameter(name, "Same"), *options], typed=True)
    needed = [replace(tensor, default=None) for tensor in tensors[:at]]
    by_place = joined([*needed, Parameter(name, "Same"), *tensors[at + 1 :]], options, typed=True)
    both = result(count, "Same")
    return [(without, result(count - 1, "Same")), (by_name, both), (by_place, both), (others, "Any")]


def chosen(parameters: Sequence[Parameter], name: str, instead: Parameter) -> list[Parameter]:
    """The parameters with another in place of the one of that name."""
    return [instead if parameter.name == name else parameter for parameter in parameters]


def function(op: Op, variant: Variant) -> str:
    text = documentation(op, variant).replace("\\", "\\\\")
    doc = "\n".join(f"    {line}".rstrip() for line in text.splitlines()).strip()
    (head, returned), *more = signatures(op, variant)
    mark = "@overload\n" if more else ""
    found = f'\n{mark}def {variant.name}({head}) -> {returned}:\n    """{doc}\n    """\n'
    return found + "".join(f"{mark}def {variant.name}({head}) -> {returned}: ...\n" for head, returned in more)


def stubs() -> str:
    calls = [(op, variant) for op in all_ops().values() for variant in op.variants]
    names = "".join(f'    "{variant.name}",\n' for _, variant in calls)
    return f"{HEAD}__all__ = [\n{names}]\n" + "".join(function(op, variant) for op, variant in calls)


def main() -> int:
    text = stubs()
    if "--check" not in sys.argv:
        PATH.write_text(text)
        return 0
    if PATH.exists() and PATH.read_text() == text:
        return 0
    print(f"{PATH} is out of date: run `python crates/python/stubs.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
