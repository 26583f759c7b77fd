"""`warpsmith.OperatorFuser`: what fusing a model comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from warpsmith._fuse.backend import compile_backend, listening
from warpsmith._fuse.program import Kernel, Program
from warpsmith._fuse.regions import elements, work
from warpsmith._fuse.writer import value_of


@dataclass(frozen=True)
class FusedKernel:
    """A fused part of a graph."""

    #: The ops of PyTorch that it stands for.
    ops: tuple[str, ...]
    #: Kernels that run for it, and the bytes that they read and write.
    launches: int
    bytes: int
    #: Bytes that the ops would read and write one by one.
    bytes_before: int
    #: The kernels as text.
    text: str


@dataclass(frozen=True)
class GraphPlan:
    """What becomes of one graph of PyTorch's."""

    #: "inference", "forward" or "backward".
    kind: str
    kernels: tuple[FusedKernel, ...]
    #: Ops that PyTorch runs, and how many of each.
    eager: Mapping[str, int]
    #: Why, where they could have been fused otherwise.
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        fused = sum(len(kernel.ops) for kernel in self.kernels)
        launches = sum(kernel.launches for kernel in self.kernels)
        before, after = (sum(getattr(k, name) for k in self.kernels) for name in ("bytes_before", "bytes"))
        lines = [
            f"{self.kind}: {fused} ops become {launches} kernels; {sum(self.eager.values())} ops stay with PyTorch",
            f"  fused ops read and write {after:,} bytes instead of {before:,}",
        ]
        for kernel in self.kernels:
            lines.append(f"  {' '.join(kernel.ops)}")
            lines.extend(f"    {line}" for line in kernel.text.splitlines())
        if self.eager:
            left = ", ".join(f"{count} {name}" for name, count in sorted(self.eager.items(), key=lambda one: -one[1]))
            lines.append(f"  with PyTorch: {left}")
        lines.extend(f"    {name} {reason}" for name, reason in self.reasons.items())
        return "\n".join(lines)


@dataclass
class FusionPlan:
    """The plans of all graphs of a model, in the order in which they were compiled."""

    graphs: list[GraphPlan] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs))


class OperatorFuser:
    """Shows what ``torch.compile(model, backend="warpsmith")`` makes of a model or function. ::

        print(warpsmith.OperatorFuser(model, {"input_ids": tokens}).plan())

    :param example: what the model is called with: a tensor, a tuple of arguments, or a dictionary of named ones.
    """

    def __init__(self, model: Callable[..., Any], example: Any) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(example, Mapping):
            self.kwargs = dict(example)
        else:
            self.args = tuple(example) if isinstance(example, (tuple, list)) else (example,)

    def plan(self, dynamic: bool | None = None) -> FusionPlan:
        """Compiles the model, calls it once, and derives its outputs where gradients are on."""
        found = FusionPlan()
        # Another backend to PyTorch than what the model may have been compiled with before.
        compiled = torch.compile(self.model, backend=lambda *given: compile_backend(*given), dynamic=dynamic)
        with listening(lambda kind, program: found.graphs.append(_plan(kind, program))):
            outputs = pytree.tree_leaves(compiled(*self.args, **self.kwargs))
            derived = [output.sum() for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
            if derived:
                _differentiate(sum(derived), self.model, pytree.tree_leaves((self.args, self.kwargs)))
        return found


def _differentiate(output: Any, model: Any, arguments: list[Any]) -> None:
    """Runs the backward pass without leaving gradients behind."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    leaves = [value for value in (*parameters, *arguments) if isinstance(value, torch.Tensor) and value.requires_grad]
    torch.autograd.grad(output, leaves, allow_unused=True)


def _plan(kind: str, program: Program) -> GraphPlan:
    reasons = {
        str(node.target): reason
        for node, reason in program.refused.items()
        if isinstance(node.target, torch._ops.OpOverload) and reason != "has no rule"
    }
    kernels = tuple(_kernel(kernel) for kernel in program.kernels)
    return GraphPlan(kind, kernels, program.eager(), reasons)


def _kernel(kernel: Kernel) -> FusedKernel:
    launches, size = kernel.native.traffic(kernel.shapes)
    computed = [node for node in kernel.nodes if work([node])]
    before = sum(_bytes(value_of(one)) for node in computed for one in (node, *node.all_input_nodes))
    ops = tuple(str(node.target).removeprefix("aten.").split(".")[0] for node in computed)
    return FusedKernel(ops, launches, size, before, kernel.native.plan())


def _bytes(value: Any) -> int:
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return sum(elements(leaf) * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
