"""What is recognised in the graphs of torch.compile before their gradients are made: attention, rotary positions, and
what the library has ops for.

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

from warpsmith._fuse.library import replace_embedding, replace_linear, replace_loss
from warpsmith._fuse.nodes import PURE, argument, is_one_of, is_written, name_of, remove, sizes_in, value_in
from warpsmith._fuse.rotary import rotate_half

#: Activations that kernels of products apply.
ACTIVATIONS = (F.gelu, F.silu, F.relu)
#: Most elements of a mask that is looked at.
MAX_MASK = 1 << 28


def simplify(module: fx.GraphModule, differentiates: bool) -> None:
    """Replaces what is recognised, each where it is faster than what it replaces."""
    changed = False
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.cat:
            changed |= _replace_rotation(node)
        elif node.target is F.scaled_dot_product_attention:
            changed |= _replace_attention(node, differentiates)
        elif node.target is F.cross_entropy:
            changed |= replace_loss(node)
        elif node.target is F.embedding:
            changed |= differentiates and replace_embedding(node)
        elif node.target in ACTIVATIONS:
            changed |= not differentiates and replace_linear(node)
    if changed:
        module.graph.lint()
        module.recompile()


# Rotary positions.


def _replace_rotation(node: fx.Node) -> bool:
    """``cat((-x[..., n:], x[..., :n]), -1)``."""
    tensors, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
    if not isinstance(tensors, (tuple, list)) or len(tensors) != 2 or not is_one_of(tensors[0], "neg"):
        return False
    x = _halved(tensors[1], tensors[0].args[0])
    own, value = value_in(node), value_in(x)
    if x is None or not isinstance(own, torch.Tensor) or dim not in (-1, own.ndim - 1):
        return False
    if any(is_written(one) for one in (x, *tensors, tensors[0].args[0])):
        return False
    if value.shape != own.shape or value.dtype != own.dtype or not own.dtype.is_floating_point:
        return False
    with node.graph.inserting_before(node):
        turned = node.graph.call_function(rotate_half, (x,))
    turned.meta = dict(node.meta)
    node.replace_all_uses_with(turned)
    remove(node)
    return True


def _halved(first: Any, second: Any) -> fx.Node | None:
    """The tensor that these are the first and the second half of, by columns."""
    if not is_one_of(first, "getitem") or not is_one_of(second, "getitem") or first.args[0] is not second.args[0]:
        return None
    x: Any = first.args[0]
    if is_one_of(x, "chunk"):
        into, dim = argument(x, 1, "chunks"), argument(x, 2, "dim", 0)
        in_order = (first.args[1], second.args[1]) == (0, 1)
        x = x.args[0]
        last = isinstance(value_in(x), torch.Tensor) and dim in (-1, value_in(x).ndim - 1)
        even = last and isinstance(value_in(x).shape[-1], int) and value_in(x).shape[-1] % 2 == 0
        return x if into == 2 and in_order and even else None
    value = value_in(x)
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not isinstance(value.shape[-1], int):
        return None
    half = value.shape[-1] // 2
    parts = (_columns(first, 2 * half), _columns(second, 2 * half))
    return x if value.shape[-1] == 2 * half and parts == ((0, half), (half, 2 * half)) else None


def _columns(node: fx.Node, count: int) -> tuple[int, int] | None:
    """The columns, of so many, that ``x[..., a:b]`` has."""
    if not isinstance(node.args[1], tuple):
        return None
    *before, last = node.args[1]
    whole = all(one is Ellipsis or one == slice(None) for one in before)
    full = Ellipsis in before or len(before) == value_in(node.args[0]).ndim - 1
    if not whole or not full or not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(one is None or isinstance(one, int) for one in (last.start, last.stop)):
        return None
    start, stop, _ = last.indices(count)
    return start, stop


# Attention.


def _replace_attention(node: fx.Node, differentiates: bool) -> bool:
    """Finds what a mask comes to, and heads that are repeated."""
    q, k, v = (argument(node, at, name) for at, name in enumerate(("query", "key", "value")))
    mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
    causal, scale = argument(node, 5, "is_causal", False), argument(node, 6, "scale")
    grouped = argument(node, 7, "enable_gqa", False)
    sizes = [sizes_in(one) for one in (q, k, v)]
    if any(size is None or len(size) != 4 for size in sizes) or not isinstance(causal, bool):
        return False
    q_size, k_size = sizes[0] or (), sizes[1] or ()
    if mask is not None:
        seen = _seen(mask, q_size[2], k_size[2]) if isinstance(mask, fx.Node) and not causal else None
        if seen is None:
            return False
        causal = seen == "causal"
    own_k, own_v = _unrepeated(k), _unrepeated(v)
    value = value_in(q)
    narrow = value.is_cuda and value.dtype in (torch.float16, torch.bfloat16)
    trains = _trains_faster(value)
    if (
        own_k is not None
        and own_v is not None
        and sizes_in(own_k) == sizes_in(own_v)
        and (narrow or trains or not differentiates)
    ):
        k, v, grouped = own_k, own_v, True
    target: Callable[..., Any] = F.scaled_dot_product_attention
    if (not differentiates or trains) and dropout == 0:
        from warpsmith._sdpa import sdpa

        target = sdpa
    elif mask is None and (k, v) == (argument(node, 1, "key"), argument(node, 2, "value")):
        return False
    words = {"dropout_p": dropout, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, (q, k, v), words)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    remove(node)
    return True


def _trains_faster(query: torch.Tensor) -> bool:
    """Whether the library's attention is ahead of PyTorch's with its gradient too, by what was measured: on the CPU in
    16 bits, where PyTorch takes three to six times as long, and on Hopper in bf16. In f32 it is level on the CPU.
    """
    if query.device.type == "cuda":
        hopper = torch.cuda.get_device_capability(query.device)[0] == 9
        return hopper and query.dtype is torch.bfloat16 and query.shape[-1] <= 128
    return query.device.type == "cpu" and query.dtype in (torch.float16, torch.bfloat16)


def _unrepeated(node: Any) -> fx.Node | None:
    """`x` of ``x[:, :, None].expand(...).reshape(...)``, which repeats each head."""
    if not is_one_of(node, "reshape") or not is_one_of(node.args[0], "expand"):
        return None
    inner = node.args[0].args[0]
    index = (slice(None), slice(None), None, slice(None), slice(None))
    if not is_one_of(inner, "getitem") or inner.args[1] != index:
        return None
    x = inner.args[0]
    own, repeated, spread = sizes_in(x), sizes_in(node), sizes_in(node.args[0])
    if own is None or repeated is None or spread is None or len(own) != 4 or len(repeated) != 4:
        return None
    batch, heads, length, width = own
    fits = len(spread) == 5 and spread[:2] == (batch, heads) and spread[3:] == (length, width)
    return x if fits and repeated == (batch, heads * spread[2], length, width) else None


def _seen(mask: fx.Node, queries: int, keys: int) -> str | None:
    """What a mask that no input changes lets each query see: "all" keys, or "causal", those up to its own."""
    sizes = sizes_in(mask)
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
            if one.op not in ("call_function", "call_method") or name_of(one) not in PURE:
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
