"""Attention of transformers' models by our kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from warpsmith._sdpa import attend, note, sdpa

#: What the attention is called in ``config._attn_implementation``.
NAME = "warpsmith"


@cache
def register() -> None:
    """Makes the attention known to transformers. Without the mask's function it would pass none, and padding would be
    seen."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: ``[batch, heads, length, head_dim]`` in, ``[batch, length, heads, head_dim]``
    out. Without a mask, queries see keys up to their own place counted from the first."""
    if any(kwargs.get(name) is not None for name in ("position_bias", "cache")):
        note("attention", "position_bias or cache", depth=3)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return found
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = query.shape[2] > 1 and attention_mask is None and bool(is_causal)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        out = sdpa(query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = attend(
        q,
        k,
        v,
        mask=attention_mask,
        dropout=dropout,
        causal="start" if causal else "no",
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=None if sinks is None else sinks.float(),
    )
    return out.contiguous(), None
