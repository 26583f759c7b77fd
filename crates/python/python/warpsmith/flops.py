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


FORMULAS: dict[str, Callable[..., int]] = {
    "linear": linear,
    "linear_backward": linear_backward,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_quant": linear_quant,
    "attention": attention,
    "attention_backward": attention_backward,
}


def register() -> None:
    """Makes the formulas known."""
    for name, formula in FORMULAS.items():
        register_flop_formula([getattr(torch.ops._warpsmith, name), getattr(torch.ops.warpsmith, name)])(formula)


register()
