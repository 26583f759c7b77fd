"""Attention with the signature of PyTorch's."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from warpsmith import ops
from warpsmith._torch.autograd import Overloads, transformed
from warpsmith._torch.dtypes import FLOATS
from warpsmith.errors import ArgumentError, FallbackWarning, UnsupportedError

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 256)

#: The kernel alone.
ATTENTION = Overloads.raw("attention")._op
TENSOR = torch.Tensor
is_tracing, is_casting = torch.compiler.is_dynamo_compiling, torch._C._is_any_autocast_enabled

#: Which keys a query sees by position: all, or those up to its own, counted from the first or from the last.
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
    *,
    seed: int | None = None,
) -> torch.Tensor:
    """As :func:`torch.nn.functional.scaled_dot_product_attention`, by the kernel of :func:`warpsmith.attention`.

    Tensors have two dimensions or more. Masks may be boolean or floating, and broadcast; so do batches. Heads of other
    sizes than 32, 64, 80, 96, 128, 160, 192 and 256 are padded to the next of these. What ``dropout_p`` drops follows
    from ``seed``, which is drawn by PyTorch's generator of the CPU unless given: the same seed drops the same on every
    device, forward and backward. These calls go to PyTorch's own: where a forward-mode derivative is needed; heads
    above 256; other types than f32, f16 and bf16; ``is_causal`` with a mask; dropout without a seed in compiled code;
    and wrong calls, so that the error is the one people know. A :class:`warpsmith.FallbackWarning` says so, once for
    each reason.
    """
    if attn_mask is None and dropout_p == 0.0 and is_plain(query, key, value):
        found = quick(query, key, value, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    check_dropout("sdpa", "dropout_p", dropout_p)
    shape, reason = None, None
    if query.ndim == key.ndim == value.ndim != 4:
        fitting = in_four(query, key, value, attn_mask)
        if fitting is not None:
            shape = (*query.shape[:-1], value.shape[-1])
            query, key, value, attn_mask = fitting
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        reason = f"tensors of {query.ndim}, {key.ndim} and {value.ndim} dimensions"
    elif is_causal and attn_mask is not None:
        reason = "is_causal with a mask"
    else:
        # One head of keys and values for all of the queries' broadcasts to them.
        if query.shape[1] != key.shape[1] and not enable_gqa and not (key.shape[1] == value.shape[1] == 1):
            reason = f"{query.shape[1]} heads of queries, {key.shape[1]} of keys, without enable_gqa"
        batch = max(query.shape[0], key.shape[0], value.shape[0])
        if any(tensor.shape[0] not in (1, batch) for tensor in (query, key, value)):
            reason = f"batches of {query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        elif reason is None:
            query, key, value = (
                tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1)
                for tensor in (query, key, value)
            )
    if reason is not None:
        if seed is not None and dropout_p > 0:
            raise UnsupportedError(f"sdpa: with a seed no kernel can compute: {reason}", op="sdpa", argument="seed")
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        # Only now: most such calls are wrong, and have ended with the error.
        if not torch.compiler.is_compiling():
            note("sdpa", reason, depth=3)
        return out if shape is None else out.reshape(shape)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    causal: Causal = "start" if is_causal else "no"
    out = attend(q, k, v, mask=attn_mask, dropout=dropout_p, seed=seed, causal=causal, scale=scale).transpose(1, 2)
    return out if shape is None else out.reshape(shape)


def in_four(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Tensors of fewer or more than four dimensions as those of a call with four; ``None`` if they mean no such."""
    lead = query.shape[:-3]
    if query.ndim < 2 or (mask is not None and not 2 <= mask.ndim <= max(query.ndim, 3)):
        return None
    if query.ndim > 4 and (key.shape[:-3] != lead or value.shape[:-3] != lead):
        return None
    if mask is not None and mask.ndim > 3:
        try:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
        except RuntimeError:
            return None
    q, k, v = (t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.flatten(0, -4) for t in (query, key, value))
    return q, k, v, mask


def is_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether this is a plain computation: nothing is traced, transformed, cast or differentiated."""
    if query.__class__ is not TENSOR or key.__class__ is not TENSOR or value.__class__ is not TENSOR:
        return False
    if is_tracing() or is_casting() or transformed() or forward_ad._current_level >= 0:
        return False
    return not ((query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled())


def quick(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """The usual call, straight to the kernel: with one query, what Python does takes as long as the kernel. ``None``
    for all others, wrong calls among them."""
    q_shape, k_shape = query.shape, key.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or value.ndim != 4:
        return None
    # Calls that mean something else to PyTorch, or that the kernel does not support. It refuses the rest itself.
    if (q_shape[1] != k_shape[1] and not enable_gqa) or (is_causal and q_shape[2] != k_shape[2]):
        return None
    if q_shape[3] not in HEAD_DIMS or value.shape[3] != q_shape[3] or query.dtype not in FLOATS:
        return None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    try:
        # Each keyword argument costs time.
        if scale is None:
            results = ATTENTION(q, k, v, causal=True) if is_causal else ATTENTION(q, k, v)
        else:
            results = ATTENTION(q, k, v, causal=is_causal, scale=scale)
    except (RuntimeError, TypeError):
        return None
    found: torch.Tensor = results[0]
    return found.transpose(1, 2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    causal: Causal,
    scale: float | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Attention of ``[batch, length, heads, head_dim]``, by the kernel or by PyTorch."""
    if causal == "start" and q.shape[1] < k.shape[1]:
        # No query sees the keys after the last query's.
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    reason = why_not(q, k, v, mask, dropout, seed)
    if reason is not None:
        seeded = seed is not None and dropout > 0
        if softcap > 0 or sinks is not None or seeded:
            given = "a softcap" if softcap > 0 else "sinks" if sinks is not None else "a seed"
            raise UnsupportedError(f"attention: with {given} no kernel can compute: {reason}", op="attention")
        if not torch.compiler.is_compiling():
            note("sdpa", reason)
        return by_torch(q, k, v, mask, dropout, causal, scale, window)
    if causal == "start" and q.shape[1] > k.shape[1]:
        mask, causal = visible(q, k, causal, window), "no"
    if mask is not None:
        mask = spread(mask, q.shape[1], k.shape[1])
    seen, bias = (mask, None) if mask is None or mask.dtype == torch.bool else (None, mask)
    q, k, v, scale, width = padded(q, k, v, scale)
    out: torch.Tensor = ops.attention(
        q,
        k,
        v,
        mask=seen,
        bias=bias,
        sinks=sinks,
        causal=causal != "no",
        window=window,
        softcap=softcap,
        scale=scale,
        **dropped(dropout, seed),
    )
    return out if width is None else out[..., :width]


def check_dropout(op: str, argument: str, share: float) -> None:
    """Refuses what is no share of probabilities that can be dropped."""
    if not 0.0 <= share < 1.0:
        expected = "a number from 0 to below 1"
        message = f"{op}: argument `{argument}`: expected {expected}, got {share!r}"
        raise ArgumentError(message, op=op, argument=argument, expected=expected, got=repr(share))


def dropped(share: float, seed: int | None) -> dict[str, Any]:
    """The options of dropout. The seed is one of PyTorch's random numbers, so that ``torch.manual_seed`` and
    checkpointing, which draws again, repeat it."""
    if share == 0:
        return {}
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    # Seeds of 2^63 and above by their bits.
    return {"dropout": share, "seed": (seed + 2**63) % 2**64 - 2**63}


def padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float | None, int | None]:
    """Heads of a size that kernels have, with zeros after the given ones, the scale that belongs to them, and the size
    of the results' heads, ``None`` if nothing was padded."""
    dim, width = q.shape[-1], v.shape[-1]
    fitting = next((size for size in HEAD_DIMS if size >= max(dim, width)), None)
    if fitting is None or fitting == dim == width or k.shape[-1] != dim:
        return q, k, v, scale, None
    q, k = F.pad(q, (0, fitting - dim)), F.pad(k, (0, fitting - dim))
    return q, k, F.pad(v, (0, fitting - width)), dim**-0.5 if scale is None else scale, width


def why_not(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    seed: int | None = None,
) -> str | None:
    """Why the kernel cannot run a call; ``None`` if it can."""
    kind = q.device.type
    if dropout > 0 and seed is None and torch.compiler.is_compiling():
        return "dropout without a seed in compiled code"
    if kind not in ("cpu", "cuda", "meta"):
        return f"tensors on {kind}"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    if max(q.shape[-1], v.shape[-1]) > HEAD_DIMS[-1] or 0 in (q.shape[-1], v.shape[-1]):
        return f"heads of {q.shape[-1]} (values of {v.shape[-1]})"
    cast = kind != "meta" and torch.is_autocast_enabled(kind)
    types = {q.dtype, k.dtype, v.dtype}
    if not types.issubset(FLOATS) or (len(types) > 1 and not cast):
        return f"types {', '.join(sorted(map(str, types)))}"
    if mask is not None and (mask.ndim not in (2, 3, 4) or mask.dtype not in (torch.bool, torch.float32, q.dtype)):
        return f"a mask of {mask.ndim} dimensions and {mask.dtype}"
    return None


def spread(mask: torch.Tensor, q_len: int, kv_len: int) -> torch.Tensor:
    """A mask with four dimensions, of which the last two are whole."""
    while mask.ndim < 4:
        mask = mask[None]
    return mask.expand(-1, -1, q_len, kv_len)


def visible(q: torch.Tensor, k: torch.Tensor, causal: Causal, window: int) -> torch.Tensor:
    """Which keys queries see by position, ``[q_len, kv_len]``."""
    q_len, kv_len = q.shape[1], k.shape[1]
    # Without a causal mask, the window counts from the end too.
    place = torch.arange(q_len, device=q.device)[:, None] + (0 if causal == "start" else kv_len - q_len)
    keys = torch.arange(kv_len, device=q.device)[None]
    seen = keys <= place if causal != "no" else torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    return seen & (keys >= place - window) if window > 0 else seen


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: Causal,
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """The same with PyTorch's implementation."""
    if window > 0 or (causal == "end" and (mask is not None or q.shape[1] != k.shape[1])):
        seen = visible(q, k, causal, window)
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
def note(what: str, reason: str, depth: int = 4) -> None:
    """Warns once that PyTorch computes, and why, at the line ``depth`` calls up."""
    warnings.warn(f"{what}: computed by PyTorch, not by a kernel: {reason}", FallbackWarning, stacklevel=depth)
