"""What other libraries call the ops: from a Warpsmith benchmark row to callables that do the same work.

A row names its case as Warpsmith does, `num_tokens=8192 hidden=4096 +weight eps=0.5`: sizes and options as
`name=value`, optional arguments with a plus sign.
"""

from __future__ import annotations

from collections.abc import Callable

from . import attention, losses, memory, mixtures, products
from .common import BINARY, ROOT, Ask, Case, Steps, Work, build, tensors, warpsmith
from .kept import Kept, seconds, write

__all__ = [
    "BINARY",
    "MAKERS",
    "ROOT",
    "Ask",
    "Case",
    "Kept",
    "Steps",
    "Work",
    "build",
    "of",
    "seconds",
    "tensors",
    "warpsmith",
    "write",
]

MAKERS: dict[str, Callable[[Case, str], Work | None]] = {
    "rms_norm": memory.norm,
    "rms_norm_backward": memory.norm_backward,
    "layer_norm": memory.norm,
    "layer_norm_backward": memory.norm_backward,
    "softmax": memory.softmax,
    "softmax_backward": memory.softmax_backward,
    "cross_entropy": losses.cross_entropy,
    "cross_entropy_backward": losses.cross_entropy_backward,
    "linear_cross_entropy": losses.linear_cross_entropy,
    "kl_div": losses.kl_div,
    "kl_div_backward": losses.kl_div_backward,
    "activation": memory.activation,
    "activation_backward": memory.activation_backward,
    "add_gelu": memory.add_gelu,
    "add_gelu_backward": memory.add_gelu_backward,
    "mul_add": memory.mul_add,
    "mul_add_backward": memory.mul_add_backward,
    "gated_act": memory.gated_act,
    "gated_act_backward": memory.gated_act_backward,
    "paged_attention": attention.paged_attention,
    "rope": memory.rope,
    "rope_backward": memory.rope,
    "cast": memory.cast,
    "copy": memory.copy,
    "embedding": memory.embedding,
    "embedding_backward": memory.embedding_backward,
    "kv_store": attention.kv_store,
    "kv_copy": attention.kv_copy,
    "merge_states": attention.merge_states,
    "linear": products.linear,
    "linear_backward": products.linear_backward,
    "attention": attention.attention,
    "attention_backward": attention.attention_backward,
    "moe_route": mixtures.route,
    "moe_ffn": mixtures.ffn,
    "moe_ffn_backward": mixtures.ffn_backward,
    "moe_losses": mixtures.moe_losses,
    "grouped_linear": mixtures.grouped_linear,
    "grouped_linear_backward": mixtures.grouped_linear_backward,
}


def of(case: Case, device: str) -> Work | None:
    """The same work in other libraries, or `None` if no library has it."""
    maker = MAKERS.get(case.op)
    return maker(case, device) if maker else None
