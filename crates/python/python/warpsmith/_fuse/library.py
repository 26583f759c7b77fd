"""What ops of the library compute, in the graphs of torch.compile before their gradients are made: losses, lookups
whose gradient is wanted, and products with the activation that follows them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from warpsmith import ops
from warpsmith._fuse.nodes import argument, is_one_of, remove, value_in

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Rows of a product in f32 on the CPU from which the library's is not slower than PyTorch's.
MIN_ROWS = 64


def loss_of(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, reduction: Any, smoothing: float, dtype: torch.dtype
) -> torch.Tensor:
    """As :func:`torch.nn.functional.cross_entropy`, of logits of any float type, computed in f32."""
    loss: torch.Tensor = ops.cross_entropy(
        logits, targets, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
    )
    return loss.to(dtype)


def replace_loss(node: fx.Node) -> bool:
    """A cross entropy by the number of the class: nothing of the size of the logits is stored for it."""
    logits, targets = argument(node, 0, "input"), argument(node, 1, "target")
    weight, ignored = argument(node, 2, "weight"), argument(node, 4, "ignore_index", -100)
    reduction, smoothing = argument(node, 6, "reduction", "mean"), argument(node, 7, "label_smoothing", 0.0)
    old = (argument(node, 3, "size_average"), argument(node, 5, "reduce"))
    x, y, own = value_in(logits), value_in(targets), value_in(node)
    if weight is not None or old != (None, None) or reduction not in ("mean", "sum", "none"):
        return False
    if not all(isinstance(value, torch.Tensor) for value in (x, y, own)) or not isinstance(ignored, int):
        return False
    if x.ndim != 2 or y.ndim != 1 or x.dtype not in FLOATS or y.dtype is not torch.int64 or own.dtype != x.dtype:
        return False
    if not isinstance(smoothing, (int, float)) or not _on_one_device(x, y):
        return False
    with node.graph.inserting_before(node):
        wide = _unwidened(node.graph, logits)
        new = node.graph.call_function(loss_of, (wide, targets, ignored, reduction, float(smoothing), own.dtype))
    return _put(node, new)


def _unwidened(graph: fx.Graph, logits: Any) -> Any:
    """Logits of 16 bits that were only made f32 for the loss, as they were before."""
    view = logits if is_one_of(logits, "view", "reshape") and isinstance(logits, fx.Node) else None
    wide: Any = view.args[0] if view is not None else logits
    if not is_one_of(wide, "float", "to") or not isinstance(wide, fx.Node) or len(wide.args) + len(wide.kwargs) > 2:
        return logits
    narrow: Any = wide.args[0]
    value, after = value_in(narrow), value_in(wide)
    fits = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    if not fits or not isinstance(after, torch.Tensor) or after.dtype is not torch.float32:
        return logits
    if after.device != value.device or view is None:
        return narrow if after.device == value.device else logits
    return graph.call_method("reshape", (narrow, *view.args[1:]), dict(view.kwargs))


def replace_embedding(node: fx.Node) -> bool:
    """A lookup whose gradient is wanted: the library adds it up in f32, in a fixed order. Without a gradient fused
    graphs look rows up themselves.
    """
    ids, weight = argument(node, 0, "input"), argument(node, 1, "weight")
    plain = argument(node, 2, "padding_idx") is None and argument(node, 3, "max_norm") is None
    plain = plain and not argument(node, 5, "scale_grad_by_freq", False) and not argument(node, 6, "sparse", False)
    table, index = value_in(weight), value_in(ids)
    if not plain or not isinstance(table, torch.Tensor) or not isinstance(index, torch.Tensor):
        return False
    if table.ndim != 2 or table.dtype not in FLOATS or index.dtype not in (torch.int64, torch.int32):
        return False
    if not _on_one_device(table, index):
        return False
    with node.graph.inserting_before(node):
        new = node.graph.call_function(ops.embedding, (weight, ids))
    return _put(node, new)


def replace_linear(node: fx.Node) -> bool:
    """``act(linear(x, w, b))``, where nothing is differentiated: the product's kernel applies the activation. Only
    where the library's records say that this is faster than PyTorch's product and a fused kernel after it.
    """
    product = argument(node, 0, "input")
    if not is_one_of(product, "linear") or not isinstance(product, fx.Node) or len(product.users) != 1:
        return False
    if any(is_one_of(user, "mul") for user in node.users):
        # A gate: the product with the other half goes over the result again, and is one kernel with the activation.
        return False
    act = _activation(node)
    x, w, bias = (argument(product, at, name) for at, name in enumerate(("input", "weight", "bias")))
    values = [value_in(one) for one in (x, w, *([] if bias is None else [bias]))]
    own = value_in(node)
    if act is None or not isinstance(own, torch.Tensor) or not all(isinstance(v, torch.Tensor) for v in values):
        return False
    if any(v.dtype != own.dtype for v in values) or own.dtype not in FLOATS or values[1].ndim != 2:
        return False
    if not _on_one_device(*values) or values[0].ndim < 2 or not _is_faster(own):
        return False
    with node.graph.inserting_before(node):
        new = node.graph.call_function(ops.linear, (x, w, bias), {"act": act})
    _put(node, new)
    remove(product)
    return True


def _is_faster(result: torch.Tensor) -> bool:
    """What evidence/ has of `linear` with an activation: in 16 bits always faster on Hopper and on the CPU; in f32 on
    the CPU with many rows. Other GPUs have no record.
    """
    narrow = result.dtype is not torch.float32
    if result.device.type == "cuda":
        return narrow and torch.cuda.get_device_capability(result.device)[0] == 9
    rows = result.shape[:-1].numel() if all(isinstance(size, int) for size in result.shape) else 0
    return result.device.type == "cpu" and (narrow or rows >= MIN_ROWS)


def _activation(node: fx.Node) -> str | None:
    """The activation's name as the library has it."""
    if node.target is F.gelu:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(argument(node, 1, "approximate", "none"))
    for name, target in (("silu", F.silu), ("relu", F.relu)):
        if node.target is target and not argument(node, 1, "inplace", False):
            return name
    return None


def _on_one_device(*tensors: torch.Tensor) -> bool:
    return len({tensor.device for tensor in tensors}) == 1 and tensors[0].device.type in ("cpu", "cuda")


def _put(node: fx.Node, new: fx.Node) -> bool:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    remove(node)
    return True
