"""What calls count as in ``torch.utils.flop_counter``: operations of the matrix products, as PyTorch counts its own.

Importing this module makes the formulas known. It is not part of ``import warpsmith``, because PyTorch's counter takes
a third of a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def linear(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    """Each row of ``x`` times each row of ``w``. Matrices of a batch have one product each."""
    return 2 * prod(x) * w[-2]


def linear_backward(x: Shape, w: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    """A product for each gradient of a matrix."""
    dx, dw = out_shape[:2]
    return linear(x, w) * ((dx is not None) + (dw is not None))


def attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Two products over all pairs of queries and keys, those that a mask hides too."""
    batch, q_len, heads, head_dim = q
    return 2 * batch * heads * q_len * k[1] * (head_dim + v[3])


def attention_backward(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    """Five products: the scores again, and four gradients."""
    return attention(q, k, v) * 5 // 2


def linear_cross_entropy(x: Shape, w: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    """The logits, and a product for each gradient that is computed beside them."""
    dx, dw = out_shape[2:]
    return linear(x, w) * (1 + (dx is not None) + (dw is not None))


def linear_quant(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    """Each row of ``x`` times each row of weights, whose bytes say nothing of their number."""
    return 2 * prod(x) * w[0]


def grouped_linear(x: Shape, w: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    """Each row of the result with the matrix of its group."""
    rows: int = prod(out_shape[:-1])
    return 2 * rows * w[-2] * w[-1]


def grouped_linear_backward(x: Shape, w: Shape, counts: Shape, dout: Shape, *_: Any, out_shape: Any, **__: Any) -> int:
    """A product for each gradient of a matrix."""
    dx, dw = out_shape[:2]
    return grouped_linear(x, w, out_shape=dout) * ((dx is not None) + (dw is not None))


def experts(x: Shape, w1: Shape, w2: Shape, ids: Shape, shared: Sequence[Any]) -> tuple[int, int]:
    """Both products of the experts that tokens chose, and of those that every token goes through."""
    of_all = [0 if w is None else 2 * prod(x[:-1]) * w[-2] * w[-1] for w in shared]
    first, second = (2 * prod(ids) * w[-2] * w[-1] for w in (w1, w2))
    return first + of_all[0], second + of_all[1]


def moe_ffn(x: Shape, w1: Shape, w2: Shape, ids: Shape, weights: Shape, *rest: Any, **named: Any) -> int:
    """Two products for each expert of each token."""
    given = dict(zip(("b1", "b2", "shared_w1", "shared_w2"), rest, strict=False)) | named
    return sum(experts(x, w1, w2, ids, (given.get("shared_w1"), given.get("shared_w2"))))


def moe_ffn_backward(
    x: Shape, w1: Shape, w2: Shape, ids: Shape, weights: Shape, dout: Shape, *rest: Any, out_shape: Any, **named: Any
) -> int:
    """The first products again, the gradients of what they are the input of, and a product for each that is wanted."""
    given = dict(zip(("b1", "shared_w1", "shared_w2"), rest, strict=False)) | named
    first, second = experts(x, w1, w2, ids, (given.get("shared_w1"), given.get("shared_w2")))
    dx, dw1, dw2 = (result is not None for result in out_shape[:3])
    return first * (1 + dx + dw1) + second * (1 + dw2)


FORMULAS: dict[str, Callable[..., int]] = {
    "linear": linear,
    "linear_backward": linear_backward,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_quant": linear_quant,
    "grouped_linear": grouped_linear,
    "grouped_linear_backward": grouped_linear_backward,
    "moe_ffn": moe_ffn,
    "moe_ffn_backward": moe_ffn_backward,
    "attention": attention,
    "attention_backward": attention_backward,
}


def register() -> None:
    """Makes the formulas known."""
    for name, formula in FORMULAS.items():
        register_flop_formula([getattr(torch.ops._warpsmith, name), getattr(torch.ops.warpsmith, name)])(formula)


register()
