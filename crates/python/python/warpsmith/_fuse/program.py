"""PyTorch's graphs with their fusible parts replaced."""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from warpsmith._fuse import lowering
from warpsmith._fuse.regions import (
    Analysis,
    is_barrier,
    is_random,
    layout,
    outputs_of,
    pays,
    regions,
)
from warpsmith._fuse.writer import DTYPES, Refused, Seen, Writer, hint_of, tensor_of, value_of
from warpsmith._native import FusedCall, FusedGraph
from warpsmith.errors import WarpsmithError

#: Of an output: the graph's dimension of each of its own, and the order of those in memory.
Layout = tuple[tuple[int, ...], list[int]]


@dataclass
class Kernel:
    """A fused graph and its place in PyTorch's."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    native: FusedGraph
    call: Callable[..., Any]
    #: Of each input, how the graph sees its dimensions.
    seen: list[Seen]
    #: Of each output: the graph's dimension of each of its own, and the order of those in memory.
    layouts: list[Layout]
    #: Where all of its tensors are.
    device: str

    @property
    def shapes(self) -> list[list[int]]:
        """Shapes of the inputs, as the graph sees them, in the call that was compiled for."""
        sizes = [[hint_of(size) for size in value_of(node).shape] for node in self.inputs]
        return [[1 if dim is None else own[dim] for dim in seen] for own, seen in zip(sizes, self.seen, strict=True)]


@dataclass
class Program:
    """What became of a graph of PyTorch's."""

    graph: fx.Graph
    kernels: list[Kernel] = field(default_factory=list)
    #: Why nodes were left to PyTorch.
    refused: dict[fx.Node, str] = field(default_factory=dict)

    def eager(self) -> Counter[str]:
        """The ops that PyTorch runs, and how many of each."""
        fused = {node for kernel in self.kernels for node in kernel.nodes}
        left = (node for node in self.graph.nodes if node.op == "call_function" and node not in fused)
        return Counter(str(node.target) for node in left if isinstance(node.target, torch._ops.OpOverload))


def fuse_graph(graph: fx.Graph, worthwhile: Callable[[list[fx.Node]], bool] = pays, strict: bool = True) -> Program:
    """Finds the fusible parts of a graph of ATen ops and compiles them. Unless `strict`, outputs need not lie in
    memory as PyTorch says.
    """
    analysis = Analysis(graph)
    while True:
        kernels: list[Kernel] = []
        before = len(analysis.refused)
        for group in regions(analysis):
            if worthwhile(group) and not _keep_views_out(analysis, group):
                kernel = _kernel(analysis, group, f"fused_{len(kernels)}", strict)
                if kernel is not None:
                    kernels.append(kernel)
        # What was refused on the way changes the groups.
        if len(analysis.refused) == before:
            return Program(graph, kernels, analysis.refused)


def _keep_views_out(analysis: Analysis, group: list[fx.Node]) -> bool:
    """Refuses what the group would have to write although it is a view. Returns whether there was any."""
    views = [node for node in outputs_of(group) if str(node.target) in lowering.VIEWS]
    analysis.refused.update((node, "is a view that others need") for node in views)
    return bool(views)


def _kernel(analysis: Analysis, group: list[fx.Node], name: str, strict: bool) -> Kernel | None:
    """Compiles a group. Where that fails, the nodes at fault are refused."""
    try:
        return compile_nodes(group, outputs_of(group), name, strict)
    except (Refused, WarpsmithError) as failure:
        blamed = [(node, why) for node in group if (why := _fault(node, strict)) is not None]
        blamed = blamed or [(node, str(failure)) for node in group if str(node.target) in lowering.MOVES]
        analysis.refused.update(blamed or [(node, f"is in a group that {failure}") for node in group])
        return None


def _fault(node: fx.Node, strict: bool) -> str | None:
    """Why a node cannot be compiled, if it cannot by itself."""
    if not isinstance(value_of(node), torch.Tensor) or node.target is operator.getitem:
        return None
    try:
        if not lowering.restores(node, (value_of(node).ndim - 1,)) and str(node.target) not in lowering.MOVES:
            compile_nodes([node], [node], "alone", strict)
    except (Refused, WarpsmithError) as failure:
        return str(failure)
    return None


def compile_nodes(nodes: list[fx.Node], outputs: list[fx.Node], name: str, strict: bool) -> Kernel:
    """Compiles nodes, given in order, to one call."""
    writer = Writer()
    for node in nodes:
        try:
            lowering.lower(writer, node)
        except Refused as reason:
            raise Refused(f"`{node.name}` ({node.target}) {reason}") from None
    if unbound := writer.unbound():
        raise Refused(f"needs the size {', '.join(sorted(unbound))}, which none of its tensors has")
    known = [writer.known(node) for node in outputs]
    layouts = [(one.dims, _order(node, strict)) for one, node in zip(known, outputs, strict=True)]
    native = FusedGraph(writer.json([one.name for one in known]))
    device = str(writer.device)
    inputs, seen = [node for node, _ in writer.inputs], [seen for _, seen in writer.inputs]
    call = FusedCall(native, name, seen, layouts, device)
    kernel = Kernel(nodes, inputs, outputs, native, call, seen, layouts, device)
    _check_forms(kernel)
    return kernel


def _order(node: fx.Node, strict: bool) -> list[int]:
    try:
        return layout(tensor_of(node))
    except Refused:
        if strict:
            raise
        return list(range(value_of(node).ndim))


def _check_forms(kernel: Kernel) -> None:
    """Whether the outputs are what PyTorch says they are."""
    forms = kernel.native.forms(kernel.shapes)
    for node, (dtype, shape), (dims, _) in zip(kernel.outputs, forms, kernel.layouts, strict=True):
        tensor = tensor_of(node)
        own = [shape[dim] for dim in dims]
        expected = [hint_of(size) for size in tensor.shape]
        if dtype != DTYPES[tensor.dtype] or own != expected:
            raise Refused(f"gives {node.name} the form {dtype} {own} instead of {tensor.dtype} {expected}")


def rewrite(program: Program, owner: torch.nn.Module, boxed: bool = True) -> fx.GraphModule:
    """The module with the graph's fused parts as calls; `boxed` if it takes its arguments in a list that it empties."""
    new = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for unit in _schedule(program):
        if isinstance(unit, fx.Node):
            places[unit] = new.node_copy(unit, places.__getitem__)
            continue
        arguments = tuple(places[node] for node in unit.inputs)
        called = new.call_function(unit.call, arguments)
        for at, node in enumerate(unit.outputs):
            single = len(unit.outputs) == 1
            places[node] = called if single else new.call_function(operator.getitem, (called, at))
            places[node].meta = dict(node.meta)
    if boxed and (generator := getattr(torch.fx.graph, "_BoxedCodeGen", None)):
        new.set_codegen(generator())
    return fx.GraphModule(owner, new)


def _schedule(program: Program) -> list[fx.Node | Kernel]:
    """Nodes and calls in an order in which they can run, as near to the graph's as possible."""
    nodes = list(program.graph.nodes)
    unit_of: dict[fx.Node, Any] = {node: kernel for kernel in program.kernels for node in kernel.nodes}
    units: list[Any] = []
    for node in nodes:
        unit = unit_of.setdefault(node, node)
        if isinstance(unit, fx.Node) or node is unit.nodes[-1]:
            units.append(unit)
    number = {id(unit): at for at, unit in enumerate(units)}
    after: list[set[int]] = [set() for _ in units]
    barrier: int | None = None
    random: int | None = None
    earlier: set[int] = set()
    for node in nodes:
        at = number[id(unit_of[node])]
        needed = {number[id(unit_of[source])] for source in node.all_input_nodes}
        if is_barrier(node) or node.op == "output":
            needed |= earlier
        if is_random(node):
            needed |= {random} if random is not None else set()
            random = at
        if barrier is not None:
            needed.add(barrier)
        if is_barrier(node):
            barrier = at
        after[at] |= needed - {at}
        earlier.add(at)
    users: list[list[int]] = [[] for _ in units]
    for at, needed in enumerate(after):
        for source in needed:
            users[source].append(at)
    waiting = [len(needed) for needed in after]
    ready = [at for at, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(units[at])
        for user in users[at]:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, user)
    if len(order) != len(units):
        raise AssertionError("fused graphs wait for each other")
    return order
