"""Nodes of the graphs of torch.compile before their gradients are made. They are of PyTorch's functions and methods,
and may write tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

#: Functions and methods by which masks are made; none of them writes anything or draws numbers.
PURE = {
    "__and__",
    "__eq__",
    "__ge__",
    "__gt__",
    "__invert__",
    "__le__",
    "__lt__",
    "__ne__",
    "__or__",
    "add",
    "and_",
    "arange",
    "bool",
    "contiguous",
    "cumsum",
    "diff",
    "eq",
    "expand",
    "float",
    "full",
    "ge",
    "getitem",
    "gt",
    "int",
    "invert",
    "le",
    "logical_and",
    "logical_not",
    "logical_or",
    "long",
    "lt",
    "mul",
    "ne",
    "neg",
    "new_ones",
    "new_zeros",
    "ones",
    "or_",
    "reshape",
    "sub",
    "to",
    "tril",
    "triu",
    "unsqueeze",
    "view",
    "where",
    "zeros",
}


def value_in(node: Any) -> Any:
    """What Dynamo knows of a node's value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def sizes_in(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, if they are all known."""
    value = value_in(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def is_one_of(node: Any, *names: str) -> bool:
    """Whether a node is one of these functions or methods."""
    return isinstance(node, fx.Node) and name_of(node) in names


def name_of(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)


def is_written(node: fx.Node) -> bool:
    """Whether a tensor is written in place, under this name."""

    def writes(name: str) -> bool:
        return name == "setitem" or (name.endswith("_") and not name.endswith("__"))

    return any(writes(name_of(user)) for user in node.users)


def remove(node: fx.Node) -> None:
    """Removes a node that was replaced, and what was there for it alone."""
    open_, gone = [node], set()
    while open_:
        one = open_.pop()
        if one in gone or one.users or (one is not node and name_of(one) not in PURE):
            continue
        gone.add(one)
        open_.extend(one.all_input_nodes)
        one.graph.erase_node(one)
