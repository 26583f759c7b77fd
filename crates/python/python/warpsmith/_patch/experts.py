"""Mixtures of experts: the choice of a router is one kernel, and all experts of a layer are one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from warpsmith import ops
from warpsmith.nn._linear import Gate, product
from warpsmith.nn._support import fits

#: By the class of an expert's activation: what the kernels call it.
ACTIVATIONS: dict[str, Gate] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
}

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def router(base: Any) -> Callable[..., Routed]:
    """Logits, and of each token the weights of its experts and these."""

    @wraps(base.forward)
    def forward(self: Any, hidden_states: torch.Tensor) -> Routed:
        rows = hidden_states.reshape(-1, self.hidden_dim)
        if torch.compiler.is_compiling() or not fits("router", rows, self.weight):
            found: Routed = base.forward(self, hidden_states)
            return found
        logits = product(rows, self.weight)
        weights, ids = ops.moe_route(logits, top_k=self.top_k, normalize=getattr(self, "norm_topk_prob", True))[:2]
        # transformers' experts, which stay where they cannot be swapped, take no other integers.
        return logits, weights.to(logits.dtype), ids.long()

    return forward


def experts(base: Any) -> Callable[..., torch.Tensor]:
    """The sum of what the experts of a token make of it, weighted."""

    @wraps(base.forward)
    def forward(self: Any, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        matrices = (self.gate_up_proj, self.down_proj)
        if torch.compiler.is_compiling() or not fits("experts", hidden_states, *matrices):
            found: torch.Tensor = base.forward(self, hidden_states, ids, weights)
            return found
        act = ACTIVATIONS[type(self.act_fn).__name__]
        out: torch.Tensor = ops.moe_ffn(hidden_states, *matrices, ids, weights, act=act, gate="halves")
        return out

    return forward
