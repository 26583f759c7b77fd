"""Graphs of ATen ops, made shorter before anything is fused: fewer calls of views around products, and sums over rows
that see the tensor they sum rather than a view of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from warpsmith._fuse.writer import dims_of, value_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


def shorten(graph: fx.Graph) -> None:
    """Does both."""
    for node in list(graph.nodes):
        if node.target in VIEWS:
            _join_product(graph, node)
        elif node.target is aten.sum.dim_IntList:
            _sum_whole(graph, _without_kept(graph, node))
    for node in reversed(list(graph.nodes)):
        if node.target in SPARED and not node.users:
            graph.erase_node(node)


#: What may go if nobody needs it any more; all other nodes stay.
SPARED = (*VIEWS, aten.t.default, aten.mm.default, aten.addmm.default)


def _join_product(graph: fx.Graph, node: fx.Node) -> None:
    """``view(mm(view(x), w))`` of an `x` with more dimensions: PyTorch has one call for that, which does no more."""
    product = node.args[0]
    if not isinstance(product, fx.Node) or len(product.users) != 1:
        return
    bias: Any = None
    if product.target is aten.mm.default:
        flat, w = product.args
    elif product.target is aten.addmm.default and len(product.args) == 3 and not product.kwargs:
        bias, flat, w = product.args
    else:
        return
    if not isinstance(flat, fx.Node) or not isinstance(w, fx.Node) or flat.target not in VIEWS:
        return
    x = flat.args[0]
    if not isinstance(x, fx.Node) or not isinstance(value_of(x), torch.Tensor):
        return
    given, result = dims_of(value_of(x)), dims_of(value_of(node))
    inner, outer = dims_of(value_of(flat)), dims_of(value_of(product))
    if len(given) < 3 or given[-1] != inner[-1] or result[:-1] != given[:-1] or result[-1] != outer[-1]:
        return
    transposed = w.target is aten.t.default
    if bias is not None and not (transposed and value_of(bias).ndim == 1):
        return
    with graph.inserting_before(node):
        if transposed:
            new = graph.call_function(aten.linear.default, (x, w.args[0], bias))
        else:
            new = graph.call_function(aten.matmul.default, (x, w))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def _without_kept(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """``view(sum(x, 0, keepdim=True))`` without the dimensions ahead: a sum that does not keep them."""
    if len(node.args) < 3:
        return node
    x, dims = node.args[:2]
    value = value_of(node)
    ahead = isinstance(dims, (list, tuple)) and list(dims) == list(range(len(dims))) and 0 < len(dims) < value.ndim
    if not node.args[2] or not ahead or node.kwargs or not node.users:
        return node
    left = dims_of(value)[len(dims) :]  # type: ignore[arg-type]
    if not all(user.target is aten.view.default and dims_of(value_of(user)) == left for user in node.users):
        return node
    with graph.inserting_before(node):
        new = graph.call_function(aten.sum.dim_IntList, (x, dims))
    new.meta = dict(node.meta)
    new.meta["val"] = value_of(next(iter(node.users)))
    for user in list(node.users):
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)
    return new


def _sum_whole(graph: fx.Graph, node: fx.Node) -> None:
    """``sum(view(x), 0)`` of an `x` with more dimensions, as gradients of biases are: what computes `x` can sum it."""
    view, dims = (*node.args, None)[:2]
    keeps = len(node.args) > 2 and node.args[2]
    if not isinstance(view, fx.Node) or view.target not in VIEWS or dims != [0] or keeps or node.kwargs:
        return
    x = view.args[0]
    if not isinstance(x, fx.Node) or not isinstance(value_of(x), torch.Tensor):
        return
    given, flat = dims_of(value_of(x)), dims_of(value_of(view))
    if len(flat) != 2 or len(given) < 3 or given[-1] != flat[-1] or given[-1] == 1:
        return
    with graph.inserting_before(node):
        new = graph.call_function(aten.sum.dim_IntList, (x, list(range(len(given) - 1))))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
