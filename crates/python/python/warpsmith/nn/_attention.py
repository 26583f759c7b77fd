"""Attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from warpsmith import ops
from warpsmith._sdpa import attend, check_dropout
from warpsmith.errors import ArgumentError


class FlashAttention(nn.Module):
    """Attention in linear memory, of ``q`` ``[batch, q_len, heads, head_dim]`` over ``k`` and ``v``
    ``[batch, kv_len, kv_heads, head_dim]``.

    It has no parameters. ``causal`` counts from the end: the last query sees all keys. ``window`` is how many keys
    before its own position a query sees, ``None`` for all; ``softcap`` the limit that scores approach, 0 for none.
    ``dropout`` applies in training: what it drops follows from a seed that PyTorch's generator of the CPU draws for
    each call. What the kernel cannot do is left to PyTorch, see :func:`warpsmith.sdpa`.
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise refused("window", "None, or a number of keys of at least 1", window)
        if not 0.0 <= softcap < float("inf"):
            raise refused("softcap", "a limit of scores, or 0 for none", softcap)
        check_dropout("FlashAttention", "dropout", dropout)
        self.causal, self.scale, self.dropout = causal, scale, dropout
        self.window, self.softcap = window, softcap

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[batch, q_len, heads, head_dim]``. ``mask``, boolean (keys that are seen) or added to scores, broadcasts
        to ``[batch, heads, q_len, kv_len]``. ``sinks``, ``[heads]`` in f32, are scores without a value."""
        return attend(
            q,
            k,
            v,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            causal="end" if self.causal else "no",
            scale=self.scale,
            window=self.window or 0,
            softcap=self.softcap,
            sinks=sinks,
        )

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        shown = f"causal={self.causal}, scale={self.scale}, dropout={self.dropout}"
        if self.window is not None:
            shown += f", window={self.window}"
        return f"{shown}, softcap={self.softcap}" if self.softcap else shown


def refused(argument: str, expected: str, got: object) -> ArgumentError:
    message = f"FlashAttention: argument `{argument}`: expected {expected}, got {got!r}"
    return ArgumentError(message, op="FlashAttention", argument=argument, expected=expected, got=repr(got))


class PagedAttention(nn.Module):
    """Attention over a paged cache of keys and values, for many requests of different lengths.

    It owns the pages of one layer, ``k_pages`` and ``v_pages``, ``[num_pages, page_size, kv_heads, head_dim]``. They
    move with the module and are no part of its state dict. Who has which page is the caller's to decide.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = True,
        scale: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale = causal, scale
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        for name in ("k_pages", "v_pages"):
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        slots: torch.Tensor | None,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        q_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new keys and values, if there are any, and attends.

        ``q``, ``k`` and ``v`` are ``[tokens, heads, head_dim]``, one request after the other; ``slots`` says where each
        token is stored (page * page_size + place in it); ``page_table`` ``[requests, pages]``, ``kv_lens``
        ``[requests]`` (new tokens included) and ``q_starts`` ``[requests + 1]`` are i32. Gradients are refused.
        """
        if k is not None and v is not None and slots is not None:
            ops.kv_store(k, v, slots, self.k_pages, self.v_pages)
        return ops.paged_attention(
            q, self.k_pages, self.v_pages, page_table, kv_lens, q_starts, causal=self.causal, scale=self.scale
        )

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        pages, size, heads, dim = self.k_pages.shape
        return f"{pages} pages of {size} tokens, kv_heads={heads}, head_dim={dim}, causal={self.causal}"
