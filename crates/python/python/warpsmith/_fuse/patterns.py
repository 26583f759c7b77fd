"""What is recognised in the graphs of torch.compile before their gradients are made: attention, and rotary positions.

These graphs are made of PyTorch's functions and methods, and may write tensors. Nodes are only replaced by others that
give the same values, and only removed if they are known to do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from warpsmith._fuse.rotary import rotate_half

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
#: Most elements of a mask that is looked at.
MAX_MASK = 1 << 28


def simplify(module: fx.GraphModule, differentiates: bool) -> None:
    """Replaces what is recognised. With gradients, attention stays with PyTorch, in a form that it is fast at."""
    changed = False
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.cat:
            changed |= _replace_rotation(node)
        elif node.target is F.scaled_dot_product_attention:
            changed |= _replace_attention(node, differentiates)
    if changed:
        module.graph.lint()
        module.recompile()


def _value(node: Any) -> Any:
    """What Dynamo knows of a node's value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _sizes(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, if they are all known."""
    value = _value(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def _is(node: Any, *names: str) -> bool:
    """Whether a node is one of these functions or methods."""
    return isinstance(node, fx.Node) and _name(node) in names


def _name(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


# Rotary positions.


def _replace_rotation(node: fx.Node) -> bool:
    """``cat((-x[..., n:], x[..., :n]), -1)``."""
    tensors, dim = _argument(node, 0, "tensors"), _argument(node, 1, "dim", 0)
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or not _is(tensors[0], "neg"):
        return False
    x = _halved(tensors[1], tensors[0].args[0])
    own, value = _value(node), _value(x)
    if x is None or not isinstance(own, torch.Tensor) or dim not in (-1, own.ndim - 1) or _is_written(x):
        return False
    if value.shape != own.shape or value.dtype != own.dtype or not own.dtype.is_floating_point:
        return False
    with node.graph.inserting_before(node):
        turned = node.graph.call_function(rotate_half, (x,))
    turned.meta = dict(node.meta)
    node.replace_all_uses_with(turned)
    _remove(node)
    return True


def _halved(first: Any, second: Any) -> fx.Node | None:
    """The tensor that these are the first and the second half of, by columns."""
    if not _is(first, "getitem") or not _is(second, "getitem") or first.args[0] is not second.args[0]:
        return None
    x: Any = first.args[0]
    if _is(x, "chunk"):
        into, dim = _argument(x, 1, "chunks"), _argument(x, 2, "dim", 0)
        in_order = (first.args[1], second.args[1]) == (0, 1)
        x = x.args[0]
        last = isinstance(_value(x), torch.Tensor) and dim in (-1, _value(x).ndim - 1)
        even = last and isinstance(_value(x).shape[-1], int) and _value(x).shape[-1] % 2 == 0
        return x if into == 2 and in_order and even else None
    value = _value(x)
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not isinstance(value.shape[-1], int):
        return None
    half = value.shape[-1] // 2
    parts = (_columns(first, 2 * half), _columns(second, 2 * half))
    return x if value.shape[-1] == 2 * half and parts == ((0, half), (half, 2 * half)) else None


def _is_written(node: fx.Node) -> bool:
    """Whether a tensor is written in place, under this name."""

    def writes(name: str) -> bool:
        return name == "setitem" or (name.endswith("_") and not name.endswith("__"))

    return any(writes(_name(user)) for user in node.users)


def _columns(node: fx.Node, count: int) -> tuple[int, int] | None:
    """The columns, of so many, that ``x[..., a:b]`` has."""
    if not isinstance(node.args[1], tuple):
        return None
    *before, last = node.args[1]
    whole = all(one is Ellipsis or one == slice(None) for one in before)
    full = Ellipsis in before or len(before) == _value(node.args[0]).ndim - 1
    if not whole or not full or not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(one is None or isinstance(one, int) for one in (last.start, last.stop)):
        return None
    start, stop, _ = last.indices(count)
    return start, stop


# Attention.


def _argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)


def _replace_attention(node: fx.Node, differentiates: bool) -> bool:
    """Finds what a mask comes to, and heads that are repeated."""
    q, k, v = (_argument(node, at, name) for at, name in enumerate(("query", "key", "value")))
    mask, dropout = _argument(node, 3, "attn_mask"), _argument(node, 4, "dropout_p", 0.0)
    causal, scale = _argument(node, 5, "is_causal", False), _argument(node, 6, "scale")
    grouped = _argument(node, 7, "enable_gqa", False)
    sizes = [_sizes(one) for one in (q, k, v)]
    if any(size is None or len(size) != 4 for size in sizes) or not isinstance(causal, bool):
        return False
    q_size, k_size = sizes[0] or (), sizes[1] or ()
    if mask is not None:
        seen = _seen(mask, q_size[2], k_size[2]) if isinstance(mask, fx.Node) and not causal else None
        if seen is None:
            return False
        causal = seen == "causal"
    own_k, own_v = _unrepeated(k), _unrepeated(v)
    value = _value(q)
    narrow = value.is_cuda and value.dtype in (torch.float16, torch.bfloat16)
    if own_k is not None and own_v is not None and _sizes(own_k) == _sizes(own_v) and (narrow or not differentiates):
        k, v, grouped = own_k, own_v, True
    target: Callable[..., Any] = F.scaled_dot_product_attention
    if not differentiates and dropout == 0:
        from warpsmith._sdpa import sdpa

        target = sdpa
    elif mask is None and (k, v) == (_argument(node, 1, "key"), _argument(node, 2, "value")):
        return False
    words = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, (q, k, v), words)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    _remove(node)
    return True


def _unrepeated(node: Any) -> fx.Node | None:
    """`x` of ``x[:, :, None].expand(...).reshape(...)``, which repeats each head."""
    if not _is(node, "reshape") or not _is(node.args[0], "expand"):
        return None
    inner = node.args[0].args[0]
    index = (slice(None), slice(None), None, slice(None), slice(None))
    if not _is(inner, "getitem") or inner.args[1] != index:
        return None
    x = inner.args[0]
    own, repeated, spread = _sizes(x), _sizes(node), _sizes(node.args[0])
    if own is None or repeated is None or spread is None or len(own) != 4 or len(repeated) != 4:
        return None
    batch, heads, length, width = own
    fits = len(spread) == 5 and spread[:2] == (batch, heads) and spread[3:] == (length, width)
    return x if fits and repeated == (batch, heads * spread[2], length, width) else None


def _seen(mask: fx.Node, queries: int, keys: int) -> str | None:
    """What a mask that no input changes lets each query see: "all" keys, or "causal", those up to its own."""
    sizes = _sizes(mask)
    if sizes is None or len(sizes) < 2 or sizes[-2:] != (queries, keys) or torch.Size(sizes).numel() > MAX_MASK:
        return None
    known = _constant(mask)
    if known is None or known.dtype is not torch.bool:
        return None
    if bool(known.all()):
        return "all"
    if queries != keys:
        return None
    lower = torch.ones(queries, keys, dtype=torch.bool, device=known.device).tril()
    return "causal" if bool((known == lower).all()) else None


def _constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input."""
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    open_: list[tuple[fx.Node, bool]] = [(node, False)]
    while open_:
        one, complete = open_.pop()
        if complete:
            order.append(one)
        elif one not in done:
            done.add(one)
            if one.op not in ("call_function", "call_method") or _name(one) not in PURE:
                return None
            open_.append((one, True))
            open_.extend((source, False) for source in one.all_input_nodes)
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for one in order:
            args, kwargs = fx.node.map_arg((one.args, dict(one.kwargs)), values.__getitem__)
            if one.op == "call_method":
                values[one] = getattr(args[0], str(one.target))(*args[1:], **kwargs)
            else:
                assert callable(one.target)
                values[one] = one.target(*args, **kwargs)
    result = values[node]
    return result if isinstance(result, torch.Tensor) else None


def _remove(node: fx.Node) -> None:
    """Removes a node that was replaced, and what was there for it alone."""
    open_, gone = [node], set()
    while open_:
        one = open_.pop()
        if one in gone or one.users or (one is not node and _name(one) not in PURE):
            continue
        gone.add(one)
        open_.extend(one.all_input_nodes)
        one.graph.erase_node(one)
