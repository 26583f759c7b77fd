"""Writes the type stubs of the ops, from their descriptions. With --check, says whether they are up to date.

usage: python crates/python/stubs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from warpsmith._codegen import documentation, parameters
from warpsmith._spec import Op, Variant, all_ops

PATH = Path(__file__).parent / "python" / "warpsmith" / "ops.pyi"

HEAD = '''\
# Made by crates/python/stubs.py from the ops' descriptions.
"""The ops as functions."""

from typing import Any

from warpsmith._torch import Torch

#: A tensor of PyTorch, an array of numpy, or anything else with ``__dlpack__``.
Array = Any

_torch: Torch | None
__all__: list[str]
'''


def result(op: Op, variant: Variant) -> str:
    """The type a function returns: tensors of PyTorch for such, arrays of numpy for those, else tensors of
    warpsmith."""
    if not variant.returned:
        return "None"
    if any(op.args[output].optional for output in variant.returned):
        return "Any"
    arrays = ["Array"] * len(variant.returned)
    return arrays[0] if len(arrays) == 1 else f"tuple[{', '.join(arrays)}]"


def function(op: Op, variant: Variant) -> str:
    text = documentation(op, variant).replace("\\", "\\\\")
    body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    head = parameters(op, variant, types={"array": "Array"})
    return f'\ndef {variant.name}({head}) -> {result(op, variant)}:\n    """{body.strip()}\n    """\n'


def stubs() -> str:
    return HEAD + "".join(function(op, variant) for op in all_ops().values() for variant in op.variants)


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
