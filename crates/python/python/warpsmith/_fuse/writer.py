"""Graphs of the fuser, written node by node as the JSON that its native half reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

#: A size: a number, or an expression of symbols as text.
Dim = int | str

DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "bool",
}
#: Kinds of devices that have fused kernels.
DEVICES = ("cpu", "cuda")
#: Most dimensions of a tensor.
MAX_RANK = 8


class Refused(Exception):
    """Why a node cannot be part of a fused graph."""


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph."""

    name: str
    #: As the graph sees it.
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    #: The graph's dimension of each that PyTorch's tensor has.
    dims: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Dimensions of size 1 that PyTorch's tensor lacks."""
        return tuple(dim for dim in range(self.rank) if dim not in self.dims)

    @property
    def is_moved(self) -> bool:
        """Whether PyTorch's dimensions have another order."""
        return list(self.dims) != sorted(self.dims)


def plain(rank: int) -> tuple[int, ...]:
    """Dimensions that are the same for PyTorch and the graph."""
    return tuple(range(rank))


#: For each of a graph's dimensions PyTorch's, or none for one of size 1 that PyTorch's tensor lacks.
Seen = tuple[int | None, ...]


def dim_of(size: int | torch.SymInt) -> Dim:
    """A size for the graph. Asking a symbolic one for its value would compile for that value alone."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else str(expression)


def dims_of(tensor: torch.Tensor) -> tuple[Dim, ...]:
    return tuple(dim_of(size) for size in tensor.shape)


def hint_of(size: int | torch.SymInt) -> int:
    """The size that a symbol has in the call that is compiled for; 0 if it depends on data."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else 0


def value_of(node: fx.Node) -> Any:
    """What tracing knows of a node's value."""
    return node.meta.get("val")


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The node's tensor, which must be one that fused graphs take."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise Refused("is no tensor")
    if value.layout is not torch.strided or value.is_quantized:
        raise Refused(f"has layout {value.layout}")
    if value.dtype not in DTYPES:
        raise Refused(f"has type {value.dtype}")
    if value.device.type not in DEVICES:
        raise Refused(f"is on {value.device.type}")
    if value.ndim > MAX_RANK:
        raise Refused(f"has {value.ndim} dimensions")
    return value


class Writer:
    """Collects inputs and nodes."""

    def __init__(self) -> None:
        #: By PyTorch's node and how the graph sees its dimensions.
        self.inputs: dict[tuple[fx.Node, Seen], Operand] = {}
        self.nodes: list[dict[str, Any]] = []
        #: Where the tensors are, which must be one place.
        self.device: torch.device | None = None
        #: Names of sizes that a node uses by itself; an input must have them.
        self.sizes: set[str] = set()
        self._known: dict[fx.Node, Any] = {}

    def operand(self, node: fx.Node) -> Operand:
        """The tensor of a node of PyTorch's graph: one that was set, else an input."""
        if node in self._known:
            known = self._known[node]
            if not isinstance(known, Operand):
                raise Refused("is several tensors")
            if known.dropped:
                raise Refused("is used without the dimension that was reduced")
            return known
        return self.input(node, plain(tensor_of(node).ndim))

    def input(self, node: fx.Node, seen: Seen) -> Operand:
        """A tensor of PyTorch's as an input, with its dimensions as the graph sees them."""
        key = (node, seen)
        if key not in self.inputs:
            tensor = tensor_of(node)
            self.settle(tensor.device)
            sizes = dims_of(tensor)
            shape = tuple(1 if dim is None else sizes[dim] for dim in seen)
            self.inputs[key] = Operand(f"in{len(self.inputs)}", shape, tensor.dtype, plain(len(shape)))
        return self.inputs[key]

    def is_input(self, operand: Operand) -> bool:
        return operand.name.startswith("in")

    def settle(self, device: torch.device) -> None:
        """Notes where a tensor is."""
        if self.device not in (None, device):
            raise Refused(f"takes tensors on {self.device} and {device}")
        self.device = device

    def known(self, node: fx.Node) -> Any:
        return self._known.get(node)

    def put(self, node: fx.Node, value: Any) -> None:
        self._known[node] = value

    def op(self, op: str, *args: Any, **attrs: Any) -> str:
        """Adds a node and returns its name."""
        name = f"t{len(self.nodes)}"
        node: dict[str, Any] = {"name": name, "op": op, "args": [_argument(arg) for arg in args]}
        if attrs:
            node["attrs"] = {key: self._attribute(key, value) for key, value in attrs.items()}
        self.nodes.append(node)
        return name

    def _attribute(self, key: str, value: Any) -> Any:
        if key == "shape":
            self.sizes.update(size for size in value if isinstance(size, str))
            return list(value)
        return DTYPES[value] if key == "dtype" else _argument(value)

    def unbound(self) -> set[str]:
        """Names of sizes that no input has."""
        return self.sizes - {
            size for operand in self.inputs.values() for size in operand.shape if isinstance(size, str)
        }

    def json(self, outputs: list[str]) -> str:
        inputs = [
            {"name": operand.name, "dtype": DTYPES[operand.dtype], "shape": list(operand.shape)}
            for operand in self.inputs.values()
        ]
        return json.dumps({"inputs": inputs, "nodes": self.nodes, "outputs": outputs})


def _argument(arg: Any) -> Any:
    if isinstance(arg, Operand):
        return arg.name
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"number": "nan" if math.isnan(arg) else "inf" if arg > 0 else "-inf"}
    if isinstance(arg, (str, bool, int, float)):
        return arg
    raise Refused(f"has an argument of type {type(arg).__name__}")
