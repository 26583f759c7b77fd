"""Layers of transformers' decoders whose parts run together: a norm with the addition before it, and the norms of
queries and keys with their rotary positions.

A layer keeps its module, parameters and hooks; only its class changes, to one that is derived from its own. In a
compiled model the original code runs: the compiler fuses the same parts with their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import nn

from warpsmith import ops
from warpsmith._patch import experts
from warpsmith._patch.attention import NAME
from warpsmith._patch.attention import forward as attend
from warpsmith._patch.swaps import PatchedGemmaNorm, PatchedRMSNorm
from warpsmith.nn import GatedMLP, RMSNorm
from warpsmith.nn._linear import has_hooks
from warpsmith.nn._support import why_not

PREFIX = "Patched"


def pre_norm(base: Any) -> Callable[..., torch.Tensor]:
    """A layer with a norm before each half: the second norm adds the first half's result, and the MLP's last product
    the sum."""

    @wraps(base.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or args:
            found: torch.Tensor = base.forward(self, hidden_states, *args, **kwargs)
            return found
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        normed, total = self.post_attention_layernorm(attended, hidden_states)
        found = self.mlp(normed, residual=total) if type(self.mlp) is GatedMLP else total + self.mlp(normed)
        return found

    return forward


def pre_norm_with_dropout(base: Any) -> Callable[..., torch.Tensor]:
    """As :func:`pre_norm`, with dropout before each addition: Phi-3's."""

    @wraps(base.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or args:
            found: torch.Tensor = base.forward(self, hidden_states, *args, **kwargs)
            return found
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        normed, total = self.post_attention_layernorm(self.resid_attn_dropout(attended), hidden_states)
        found = total + self.resid_mlp_dropout(self.mlp(normed))
        return found

    return forward


def self_attention(base: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Attention with our rotary positions and our kernel."""

    @wraps(base.forward)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        embeddings = kwargs.get("position_embeddings")
        other = args or self.config._attn_implementation != NAME
        if embeddings is None or other or torch.compiler.is_compiling() or why_not((hidden_states,)) is not None:
            found: tuple[torch.Tensor, Any] = base.forward(self, hidden_states, *args, **kwargs)
            return found
        del kwargs["position_embeddings"]
        mask, past = kwargs.pop("attention_mask", None), kwargs.pop("past_key_values", None)
        shape = hidden_states.shape[:-1]
        q, k, v = heads_of(self, hidden_states)
        q, k = placed(self, q, k, embeddings)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        if type(self).__name__ in SOFTCAPPED:
            kwargs["softcap"] = self.attn_logit_softcapping
        attended, _ = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(attended.reshape(*shape, -1)), None

    return forward


def heads_of(attention: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values, ``[batch, length, heads, head_dim]``, normalised where that is done over all heads."""
    found = []
    parts: tuple[torch.Tensor, ...]
    if hasattr(attention, "qkv_proj"):
        q_heads, kv_heads = attention.config.num_attention_heads, attention.num_key_value_heads
        widths = [heads * attention.head_dim for heads in (q_heads, kv_heads, kv_heads)]
        parts = attention.qkv_proj(x).split(widths, -1)
    else:
        parts = tuple(getattr(attention, f"{part}_proj")(x) for part in "qkv")
    for part, heads in zip("qkv", parts, strict=True):
        norm = getattr(attention, f"{part}_norm", None)
        heads = norm(heads) if norm is not None and norms_all_heads(attention, norm) else heads
        found.append(heads.view(*x.shape[:-1], -1, attention.head_dim))
    return found


def norms_all_heads(attention: Any, norm: Any) -> bool:
    """Whether a norm is over all heads of a token at once: OLMo 2's. Others are over each head."""
    found: bool = norm.weight.shape[0] != attention.head_dim
    return found


def placed(attention: Any, q: torch.Tensor, k: torch.Tensor, embeddings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised head by head where the family does that, and rotated where this layer does: both in
    one kernel if the norms are ours."""
    norms = [getattr(attention, f"{part}_norm", None) for part in "qk"]
    by_head = [norm for norm in norms if norm is not None and not norms_all_heads(attention, norm)]
    if not getattr(attention, "use_rope", True):
        return (by_head[0](q), by_head[1](k)) if by_head else (q, k)
    positions, cos, sin = tables(embeddings[0], embeddings[1], q.shape[0])
    rotary_dim = 2 * cos.shape[-1]
    if by_head and why_apart(attention) is None:
        of_q, of_k = (factor_of(norm) for norm in by_head)
        if fit_together(q, k, [of_q, of_k]):
            found: tuple[torch.Tensor, torch.Tensor] = ops.qk_norm_rope(
                q, k, of_q, of_k, positions, cos, sin, rotary_dim=rotary_dim, eps=by_head[0].eps
            )
            return found
    if by_head:
        q, k = by_head[0](q), by_head[1](k)
    return (
        ops.rope(q, positions, cos, sin, rotary_dim=rotary_dim),
        ops.rope(k, positions, cos, sin, rotary_dim=rotary_dim),
    )


def factor_of(norm: Any) -> torch.Tensor:
    """What a norm of ours multiplies by. Gemma's is its weight and one, in f32: in 16 bits the sum would be rounded."""
    weight: torch.Tensor = norm.weight
    return 1.0 + weight.float() if isinstance(norm, PatchedGemmaNorm) else weight


def fit_together(q: torch.Tensor, k: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Whether one kernel can be given all of them."""
    return q.dtype == k.dtype and all(weight.dtype in (q.dtype, torch.float32) for weight in weights)


def why_apart(attention: Any) -> str | None:
    """Why the norms of a layer's heads do not run together with the rotation; ``None`` if they do."""
    norms = [getattr(attention, f"{part}_norm") for part in "qk"]
    if any(norms_all_heads(attention, norm) for norm in norms):
        return "a norm over all heads of a token at once runs before the rotation's kernel"
    if any(not isinstance(norm, (PatchedRMSNorm, PatchedGemmaNorm)) for norm in norms):
        return "a norm that is not ours runs before the rotation's kernel"
    if any(has_hooks(norm) or "forward" in vars(norm) for norm in norms):
        return "a norm with hooks, or with a forward of its own, runs before the rotation's kernel"
    if norms[0].eps != norms[1].eps:
        return "norms with another eps each run before the rotation's kernel"
    return None


def tables(cos: torch.Tensor, sin: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """transformers' tables of angles, ``[1 or batch, length, 2 * pairs]`` with all pairs twice, as the kernel wants
    them: each token's row, ``[batch, length]``, and the tables, ``[rows, pairs]`` in f32. Made once for all layers."""
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = getattr(cos, "_warpsmith_tables", None)
    if made is not None and made[0].shape[0] == batch:
        return made
    length, pairs = cos.shape[1], cos.shape[2] // 2
    rows = torch.arange(cos.shape[0] * length, device=cos.device).view(-1, length).expand(batch, -1)
    of_pairs = [table[..., :pairs].float().reshape(-1, pairs) for table in (cos, sin)]
    made = rows, of_pairs[0], of_pairs[1]
    cos._warpsmith_tables = made  # type: ignore[attr-defined]
    return made


#: Attention whose scores have a limit.
SOFTCAPPED = ("Gemma2Attention",)

#: By the name of a layer's class: how its derived class runs.
FORWARDS = {
    **{
        f"{name}DecoderLayer": pre_norm
        for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Gemma")
    },
    "Phi3DecoderLayer": pre_norm_with_dropout,
    **{
        f"{name}Attention": self_attention
        for name in (
            *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe"),
            *("SmolLM3", "Gemma", "Gemma2", "Gemma3", "Olmo2", "Phi3"),
        )
    },
    **{f"{name}TopKRouter": experts.router for name in ("Mixtral", "Qwen3Moe")},
    **{f"{name}Experts": experts.experts for name in ("Mixtral", "Qwen3Moe")},
}


@cache
def derived(base: Any) -> type[nn.Module]:
    """The class of ours for one of transformers'. It has the same name, because saved models and those that are spread
    over devices go by that, and can be found by its qualified name, so that models can be pickled."""
    members = {
        "forward": FORWARDS[base.__name__](base),
        "__module__": __name__,
        "__qualname__": f"{PREFIX}{base.__name__}",
    }
    return type(base.__name__, (base,), members)


def __getattr__(name: str) -> Any:
    # Classes of models that were pickled in another process.
    of = name.removeprefix(PREFIX)
    if of == name or of not in FORWARDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = of
    for part in ("DecoderLayer", "Attention", "TopKRouter", "Experts"):
        family = family.removesuffix(part)
    family = family.replace("Moe", "_moe").lower()
    return derived(getattr(import_module(f"transformers.models.{family}.modeling_{family}"), of))


def why_left(module: Any) -> str | None:
    """Why a layer keeps its class; ``None`` if it can be changed."""
    if "forward" in vars(module):
        return "its forward was replaced"
    if hasattr(module, "act_fn") and type(module.act_fn).__name__ not in experts.ACTIVATIONS:
        return f"no kernel has its activation {type(module.act_fn).__name__}"
    if hasattr(module, "post_attention_layernorm"):
        norm = module.post_attention_layernorm
        return None if isinstance(norm, (RMSNorm, PatchedGemmaNorm)) else "its norm is not ours"
    return None
