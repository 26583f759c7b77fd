"""What the ops with a gradient compute, in PyTorch's own terms: judged in f64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F


def rms_norm(x: Any, weight: Any = None, residual: Any = None, *, eps: float = 1e-6) -> Any:
    total = x if residual is None else x + residual
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if residual is None else (out, total)


def layer_norm(x: Any, weight: Any = None, residual: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    total = x if residual is None else x + residual
    out = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return out if residual is None else (out, total)


def softmax(x: Any, *, scale: float = 1.0) -> Any:
    return torch.softmax(x * scale, -1)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
}


def activation(x: Any, *, kind: str = "gelu") -> Any:
    return ACTIVATIONS[kind](x)


def add_gelu(x: Any, bias: Any, *, approximate: str = "none") -> Any:
    return F.gelu(x + bias, approximate=approximate)


def mul_add(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def gated_act(x: Any, *, act: str = "silu", layout: str = "split") -> Any:
    gate, up = x.chunk(2, -1) if layout == "split" else (x[..., 0::2], x[..., 1::2])
    return ACTIVATIONS[act](gate) * up


def embedding(weight: Any, ids: Any) -> Any:
    return weight[ids]


def linear(
    x: Any, w: Any, bias: Any = None, residual: Any = None, *, act: str = "none", scale: float = 1.0, **_: Any
) -> Any:
    out = ACTIVATIONS[act](F.linear(x, w, bias)) * scale
    return out if residual is None else out + residual


def rope(x: Any, positions: Any, cos: Any = None, sin: Any = None, *, theta: float = 10000.0, **_: Any) -> Any:
    half = x.shape[-1] // 2
    if cos is None:
        angles = positions[..., None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos(), angles.sin()
    else:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
