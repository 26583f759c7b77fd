"""Which nodes of PyTorch's graph become fused graphs together.

Every node gets a level. Values go from level to level only upwards, and strictly upwards through nodes that are not
fused, so that the connected fusible nodes of a level never wait for something that waits for them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from warpsmith._fuse import lowering
from warpsmith._fuse.writer import Operand, Refused, Writer, dims_of, hint_of, value_of

#: Fewest ops of a fused graph, and fewest elements of its largest tensor: calls of less are faster op by op. With
#: twice as many ops, any size will do.
MIN_OPS = 2
MIN_ELEMENTS = 4096
MANY_OPS = 6


@dataclass
class Analysis:
    """What is known of the nodes of a graph."""

    graph: fx.Graph
    #: Why nodes cannot be fused.
    refused: dict[fx.Node, str] = field(default_factory=dict)
    #: Results that lack a dimension of size 1 that they have inside of fused graphs.
    dropping: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for at, node in enumerate(self.graph.nodes):
            self.order[node] = at
            if node.op == "call_function":
                self._try(node)

    def _try(self, node: fx.Node) -> None:
        """Lowers a node by itself."""
        if node.target is operator.getitem:
            source = node.args[0]
            if not isinstance(source, fx.Node) or source in self.refused or source.op != "call_function":
                self.refused[node] = "takes a part of what is not fused"
            return
        if any(lowering.restores(node, self.dropping.get(source, ())) for source in node.all_input_nodes):
            return
        if str(node.target) in lowering.MOVES and not self._joins_source(node):
            self.refused[node] = "gives dimensions another order"
            return
        writer = Writer()
        try:
            lowering.lower(writer, node)
        except Refused as reason:
            self.refused[node] = str(reason)
            return
        known = writer.known(node)
        if isinstance(known, Operand) and known.dropped:
            self.dropping[node] = known.dropped

    def _joins_source(self, node: fx.Node) -> bool:
        """Whether what is transposed is fused itself. Views of other tensors cost PyTorch next to nothing."""
        source = node.args[0]
        computed = isinstance(source, fx.Node) and self.fusible(source) and source not in self.dropping
        return computed and source.target is not operator.getitem  # type: ignore[union-attr]

    def fusible(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.refused

    def joins(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a value can go from one to the other inside of a fused graph."""
        if not (self.fusible(node) and self.fusible(user)) or device_of(node) != device_of(user):
            return False
        return node not in self.dropping or lowering.restores(user, self.dropping[node])


def device_of(node: fx.Node) -> torch.device | None:
    """Where a node's results are."""
    value = value_of(node)
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)


def is_barrier(node: fx.Node) -> bool:
    """Whether a node changes what others read."""
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _levels(analysis: Analysis) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """The level of each node, and how many barriers come before it."""
    level: dict[fx.Node, int] = {}
    epoch: dict[fx.Node, int] = {}
    base = highest = barriers = random = 0
    for node in analysis.graph.nodes:
        own = base
        for source in node.all_input_nodes:
            if source.op in ("placeholder", "get_attr"):
                continue
            apart = analysis.fusible(source) and not analysis.joins(source, node)
            own = max(own, level[source] + apart)
        if is_random(node):
            own = random = max(own, random)
        if is_barrier(node):
            own = base = highest + 1
            barriers += 1
        level[node], epoch[node] = own, barriers
        highest = max(highest, own)
    return level, epoch


def _bytes(node: fx.Node) -> int:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return 0
    return elements(value) * value.element_size()


def elements(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= hint_of(size)
    return count


def _sink(analysis: Analysis, level: dict[fx.Node, int], epoch: dict[fx.Node, int]) -> None:
    """Moves nodes to the level of those that use them, where nothing larger is kept for that."""
    for node in reversed(list(analysis.graph.nodes)):
        users = list(node.users)
        if not users or not analysis.fusible(node) or not isinstance(value_of(node), torch.Tensor):
            continue
        if node.target is operator.getitem or not all(analysis.joins(node, user) for user in users):
            continue
        lowest = min(level[user] for user in users)
        if lowest <= level[node] or any(epoch[user] != epoch[node] for user in users):
            continue
        given = [source for source in node.all_input_nodes if source.op not in ("placeholder", "get_attr")]
        if sum(map(_bytes, given)) <= _bytes(node):
            level[node] = lowest


def regions(analysis: Analysis) -> list[list[fx.Node]]:
    """The groups of nodes that can be fused graphs, each in the graph's order."""
    level, epoch = _levels(analysis)
    _sink(analysis, level, epoch)
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in analysis.graph.nodes:
        if not analysis.fusible(node):
            continue
        root(node)
        for source in node.all_input_nodes:
            if analysis.joins(source, node) and level[source] == level[node] and epoch[source] == epoch[node]:
                parent[root(node)] = root(source)
    # What goes over the same tensor reads it once. Nodes of a level never wait for each other.
    readers: dict[tuple[Any, ...], fx.Node] = {}
    for node in [*parent]:
        if str(node.target) in lowering.FREE:
            continue
        for source in node.all_input_nodes:
            if _goes_over(node, source):
                key = (source, level[node], epoch[node], device_of(node))
                parent[root(node)] = root(readers.setdefault(key, node))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in parent:
        found.setdefault(root(node), []).append(node)
    groups = [sorted(group, key=analysis.order.__getitem__) for group in found.values()]
    return sorted(groups, key=lambda group: analysis.order[group[0]])


def _goes_over(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node goes through a tensor element by element, or row by row, and the tensor is large."""
    value, given = value_of(node), value_of(source)
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    # Not the shapes themselves: to compare symbols would compile for these sizes alone.
    return value.ndim > 0 and dims_of(value) == dims_of(given) and elements(given) >= MIN_ELEMENTS


def work(group: list[fx.Node]) -> int:
    """How many ops of PyTorch a group stands for."""
    return sum(str(node.target) not in lowering.FREE and node.target is not operator.getitem for node in group)


def pays(group: list[fx.Node]) -> bool:
    """Whether one call of a fused graph is faster than the ops of the group."""
    ops = work(group)
    if ops < MIN_OPS:
        return False
    tensors = [value_of(node) for node in group] + [value_of(n) for node in group for n in node.all_input_nodes]
    largest = max((elements(value) for value in tensors if isinstance(value, torch.Tensor)), default=0)
    return ops >= MANY_OPS or largest >= MIN_ELEMENTS


def outputs_of(group: list[fx.Node]) -> list[fx.Node]:
    """The nodes of a group that something outside needs."""
    inside = set(group)
    tensors = (node for node in group if isinstance(value_of(node), torch.Tensor))
    return [node for node in tensors if any(user not in inside for user in node.users)]


def layout(value: torch.Tensor) -> list[int]:
    """The order of an output's dimensions in memory, from the largest stride to the smallest."""
    sizes = [hint_of(size) for size in value.shape]
    strides = [hint_of(stride) for stride in value.stride()]
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1 and strides[dim] != step and 0 not in sizes:
            raise Refused("has gaps in memory, or elements that share it")
        step *= sizes[dim]
    return order
