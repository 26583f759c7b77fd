"""Attention with the signature of PyTorch's."""

from __future__ import annotations

import logging
from functools import cache
from typing import Literal

import torch
from torch.nn import functional as F

from warpsmith import ops
from warpsmith._spec import all_ops
from warpsmith._torch.dtypes import FLOATS

#: Says, at level DEBUG and once for each reason, when PyTorch computes instead of a kernel.
LOG = logging.getLogger("warpsmith")

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 256)
#: Whether the kernel has a gradient.
HAS_GRADIENT = all_ops()["attention"].gradient is not None

#: Which keys a query sees by its place: all, those up to its own counted from the first, or counted from the last.
Causal = Literal["no", "start", "end"]


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As :func:`torch.nn.functional.scaled_dot_product_attention`, by the kernel of :func:`warpsmith.attention`.

    Masks may be boolean or floating, and broadcast. These calls go to PyTorch's own: with dropout; where a gradient is
    needed (the kernel has none yet); heads of other sizes than 32, 64, 80, 96, 128, 160, 192 and 256; other types than
    f32, f16 and bf16; ``is_causal`` with more queries than keys or with a mask; and wrong calls, so that the error is
    the one people know. The logger ``warpsmith`` says so once for each reason, at level DEBUG.
    """
    plain = query.ndim == 4 and key.ndim == 4 and value.ndim == 4 and not (is_causal and attn_mask is not None)
    if not plain or (query.shape[1] != key.shape[1] and not enable_gqa):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal: Causal = "start" if is_causal else "no"
    return attend(q, k, v, mask=attn_mask, dropout=dropout_p, causal=causal, scale=scale).transpose(1, 2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    causal: Causal,
    scale: float | None,
) -> torch.Tensor:
    """Attention of ``[batch, length, heads, head_dim]``, by the kernel or by PyTorch."""
    if causal == "start" and q.shape[1] < k.shape[1]:
        # No query sees the keys after the last query's.
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    reason = why_not(q, k, v, mask, dropout, causal)
    if reason is not None:
        if not torch.compiler.is_compiling():
            note(reason)
        return by_torch(q, k, v, mask, dropout, causal, scale)
    if mask is not None:
        mask = spread(mask, q.shape[1], k.shape[1])
    seen, bias = (mask, None) if mask is None or mask.dtype == torch.bool else (None, mask)
    found: torch.Tensor = ops.attention(
        q, k, v, mask=seen, bias=bias, causal=causal != "no", scale=0.0 if scale is None else scale
    )
    return found


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: Causal,
) -> str | None:
    """Why the kernel cannot do a call; ``None`` if it can."""
    kind = q.device.type
    if dropout > 0:
        return "dropout"
    if kind not in ("cpu", "cuda", "meta"):
        return f"tensors on {kind}"
    if torch.is_grad_enabled() and not HAS_GRADIENT:
        if any(tensor is not None and tensor.requires_grad for tensor in (q, k, v, mask)):
            return "gradients"
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        return f"heads of {q.shape[-1]} (values of {v.shape[-1]})"
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    types = {q.dtype, k.dtype, v.dtype}
    if not types.issubset(FLOATS) or (len(types) > 1 and not cast):
        return f"types {', '.join(sorted(map(str, types)))}"
    if causal == "start" and q.shape[1] > k.shape[1]:
        return "is_causal with more queries than keys"
    if mask is not None and (mask.ndim not in (2, 3, 4) or mask.dtype not in (torch.bool, torch.float32, q.dtype)):
        return f"a mask of {mask.ndim} dimensions and {mask.dtype}"
    return None


def spread(mask: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """A mask with four dimensions, of which the last two are whole."""
    while mask.ndim < 4:
        mask = mask[None]
    return mask.expand(-1, -1, q_len, kv_len)


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: Causal,
    scale: float | None,
) -> torch.Tensor:
    """The same by PyTorch's own."""
    if causal == "end" and (mask is not None or q.shape[1] != k.shape[1]):
        ones = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        seen = ones.tril(k.shape[1] - q.shape[1])
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        causal = "no"
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal != "no", scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


@cache
def note(reason: str) -> None:
    """Says once why PyTorch computes."""
    LOG.debug("sdpa: computed by PyTorch: %s", reason)
