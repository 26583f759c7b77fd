"""Attention with the signatures of the package flash-attn."""

from __future__ import annotations

from typing import Any

import torch

from warpsmith import ops
from warpsmith._sdpa import by_torch, check_dropout, dropped, note, padded, why_not
from warpsmith.errors import ArgumentError, UnsupportedError


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of ``q`` ``[batch, q_len, heads, head_dim]`` over ``k`` and ``v``
    ``[batch, kv_len, kv_heads, head_dim]``, called as flash-attn's. It has gradients.

    ``causal`` and ``window_size`` (keys to the left, keys to the right, -1 for all) count from the end: the last query
    is at the last key. Windows that reach a number of keys to the right, or none to the left, and ``alibi_slopes`` are
    given to the kernel as a mask and a bias, whose memory is quadratic. The result is always deterministic. With
    ``return_attn_probs``, returns ``(out, lse, None)``. What ``dropout_p`` drops follows from a seed that PyTorch's
    generator of the CPU draws for each call.
    """
    check_dropout("flash_attn_func", "dropout_p", dropout_p)
    left, right = window_of("flash_attn_func", window_size, causal)
    q_len, kv_len = q.shape[1], k.shape[1]
    place = torch.arange(q_len, device=q.device)[:, None] + (kv_len - q_len)
    keys = torch.arange(kv_len, device=q.device)[None]
    mask = bias = None
    as_option = right in (None, 0) and left != 0
    if not as_option:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
        if left is not None:
            mask &= keys >= place - left
        if right is not None:
            mask &= keys <= place + right
    if alibi_slopes is not None:
        slopes = alibi_slopes.float().reshape(-1, alibi_slopes.shape[-1], 1, 1)
        bias = -slopes * (place - keys).abs()
    causal, window = (right == 0, left or 0) if as_option else (False, 0)

    reason = why_not(q, k, v, None, dropout_p)
    if reason is not None:
        if softcap > 0 or return_attn_probs:
            given = "a softcap" if softcap > 0 else "return_attn_probs"
            raise UnsupportedError(
                f"flash_attn_func: with {given} no kernel can compute: {reason}", op="flash_attn_func"
            )
        note("flash_attn_func", reason, depth=3)
        if bias is not None:
            mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, float("-inf"))
        return by_torch(q, k, v, mask, dropout_p, "end" if causal else "no", softmax_scale, window)
    q, k, v, scale, width = padded(q, k, v, softmax_scale)
    found = ops.attention(
        q,
        k,
        v,
        mask=None if mask is None else mask[None, None],
        bias=bias,
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        return_lse=return_attn_probs,
        **dropped(dropout_p, None),
    )
    out, lse = found if return_attn_probs else (found, None)
    out = out if width is None else out[..., :width]
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func`, of ``qkv`` ``[batch, length, 3, heads, head_dim]``."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """As :func:`flash_attn_func`, of ``kv`` ``[batch, kv_len, 2, kv_heads, head_dim]``."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of requests of different lengths, one after the other in ``q`` ``[tokens, heads, head_dim]`` and in
    ``k`` and ``v`` ``[keys, kv_heads, head_dim]``, called as flash-attn's. It has gradients.

    ``cu_seqlens_q`` and ``cu_seqlens_k``, i32 ``[requests + 1]``, say where each begins. The longest lengths are not
    needed. With ``return_attn_probs``, returns ``(out, lse [heads, tokens], None)``. Dropout is that of
    :func:`flash_attn_func`. ``alibi_slopes``, windows that reach a number of keys to the right or none to the left, and
    ``block_table`` (see :func:`warpsmith.paged_attention`) are refused.
    """
    name = "flash_attn_varlen_func"
    check_dropout(name, "dropout_p", dropout_p)
    left, right = window_of(name, window_size, causal)
    refused = {
        "alibi_slopes": alibi_slopes is not None,
        "block_table": block_table is not None,
        "window_size": right not in (None, 0) or left == 0,
    }
    for argument, given in refused.items():
        if given:
            got = f"{argument}={window_size}" if argument == "window_size" else f"`{argument}`"
            raise UnsupportedError(f"{name}: no kernel has {got} for packed requests", op=name, argument=argument)
    q, k, v, scale, width = padded(q, k, v, softmax_scale)
    found = ops.attention(
        q[None],
        k[None],
        v[None],
        cu_seqlens_q,
        cu_seqlens_k,
        causal=right == 0,
        window=left or 0,
        softcap=softcap,
        scale=scale,
        return_lse=return_attn_probs,
        **dropped(dropout_p, None),
    )
    out, lse = found if return_attn_probs else (found, None)
    out = out[0] if width is None else out[0, ..., :width]
    return out if lse is None else (out, lse[0], None)


def window_of(op: str, window_size: tuple[int, int], causal: bool) -> tuple[int | None, int | None]:
    """How many keys to the left and to the right of its own a query sees; ``None`` for all."""
    try:
        left, right = window_size
        valid = all(isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in (left, right))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        expected = "two numbers of keys, -1 for all"
        message = f"{op}: argument `window_size`: expected {expected}, got {window_size!r}"
        raise ArgumentError(message, op=op, argument="window_size", expected=expected, got=repr(window_size))
    return None if left < 0 else left, 0 if causal else None if right < 0 else right
