"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from warpsmith import ops
from warpsmith.nn._linear import ACTIVATIONS, Activation, known
from warpsmith.nn._router import MoERouter, RouterLosses, check
from warpsmith.nn._support import fits


class MoE(nn.Module):
    """A router and the experts that it chooses from: the gated MLP of a decoder, many times over.

    ``out[t] = sum over the experts e of token t of weight[t, e] * down[e](activation(gate[e](x[t])) * up[e](x[t]))``,
    in one call for all experts. ``shared_size`` adds an expert that every token goes through. The router is a
    :class:`MoERouter` with the further options, or the one that is given. Slots that it drops for lack of capacity
    contribute nothing.

    Its state dict has the experts' weights as transformers keeps them: ``gate_up_proj``, ``[experts, 2 *
    intermediate_size, hidden_size]``, gates first, and ``down_proj``, ``[experts, hidden_size, intermediate_size]``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: Activation = "silu",
        shared_size: int = 0,
        router: MoERouter | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        name, sizes = type(self).__name__, (hidden_size, num_experts, top_k)
        self.activation = known(name, activation)
        if router is None:
            router = MoERouter(*sizes, device=device, dtype=dtype, **options)
        else:
            check(name, "router", not options, f"no options beside it, such as {next(iter(options), '')}", router)
            own = (router.hidden_size, router.num_experts, router.top_k)
            check(name, "router", own == sizes, f"one of (hidden_size, num_experts, top_k) = {sizes}", own)
        self.router = router

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.gate_up_proj = weight(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = weight(num_experts, hidden_size, intermediate_size)
        self.shared_gate_up_proj = weight(2 * shared_size, hidden_size) if shared_size else None
        self.shared_down_proj = weight(hidden_size, shared_size) if shared_size else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights of the experts, as those of :class:`torch.nn.Linear`."""
        for weight in (self.gate_up_proj, self.down_proj, self.shared_gate_up_proj, self.shared_down_proj):
            if weight is not None:
                nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The block's result for tokens ``[..., hidden_size]``, with ``residual`` added last."""
        routing = self.router(x)
        ids, weights = routing.ids, routing.weights
        if self.router.capacity_factor is not None:
            ids = torch.where(routing.positions < 0, -1, ids)
        shared = (self.shared_gate_up_proj, self.shared_down_proj)
        if not fits("MoE", x, self.gate_up_proj, self.down_proj, *shared, residual):
            out = self.by_expert(x, ids, weights)
            return out if residual is None else residual + out
        matrices = (self.gate_up_proj, self.down_proj)
        options: Any = {"act": self.activation, "gate": "halves"}
        found: torch.Tensor = ops.moe_ffn(
            x, *matrices, ids, weights, shared_w1=shared[0], shared_w2=shared[1], residual=residual, **options
        )
        return found

    def by_expert(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum over the experts in PyTorch's operations, one expert after the other."""

        def run(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            gate, up = nn.functional.linear(rows, first).chunk(2, -1)
            return nn.functional.linear(ACTIVATIONS[self.activation](gate) * up, second)

        rows, ids, weights = x.flatten(0, -2), ids.flatten(0, -2), weights.flatten(0, -2)
        out = torch.zeros_like(rows)
        for expert, matrices in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            token, slot = torch.where(ids == expert)
            found = run(rows[token], *matrices) * weights[token, slot, None].to(x.dtype)
            out = out.index_add(0, token, found)
        if self.shared_gate_up_proj is not None and self.shared_down_proj is not None:
            out = out + run(rows, self.shared_gate_up_proj, self.shared_down_proj)
        return out.view(x.shape)

    def losses(self) -> RouterLosses:
        """The router's losses in the last call."""
        return self.router.losses()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        experts, hidden, inner = self.down_proj.shape
        shared = "" if self.shared_down_proj is None else f", shared_size={self.shared_down_proj.shape[1]}"
        return f"{hidden}, {inner}, {experts} experts, activation={self.activation}{shared}"
