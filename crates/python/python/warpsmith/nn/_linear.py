"""Matrix products with what follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

from warpsmith import ops
from warpsmith.errors import ArgumentError
from warpsmith.nn._support import fits

#: Names of activations. The product's kernel applies them.
Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]

#: Names of those that a gate can have.
Gate = Literal["relu", "gelu", "gelu_tanh", "silu"]

#: The activations in PyTorch's terms.
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def known(layer: str, activation: Activation | None) -> Activation:
    """The name of an activation as the kernel has it."""
    name: Activation = "none" if activation is None else activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        expected = f"None or one of {', '.join(list(ACTIVATIONS)[1:])}"
        message = f"{layer}: argument `activation`: expected {expected}, got {activation!r}"
        raise ArgumentError(message, op=layer, argument="activation", expected=expected, got=repr(activation))
    return name


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    act: Activation = "none",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``residual + act(x @ weight.T + bias)``, in one kernel where there is one."""
    if x.ndim > 0 and fits("linear", x, weight, bias, residual):
        return ops.linear(x, weight, bias, residual, act=act)
    out = ACTIVATIONS[act](F.linear(x, weight, bias))
    return out if residual is None else residual + out


class FusedLinear(nn.Linear):
    """A linear layer with its activation, as :class:`torch.nn.Linear` and an activation after it.

    ``activation`` is None, "relu", "gelu", "gelu_tanh" or "silu". With a ``residual``, that is added last.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: Activation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.activation = known(type(self).__name__, activation)
        super().__init__(in_features, out_features, bias, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual + activation(x @ weight.T + bias)``."""
        return product(x, self.weight, self.bias, act=self.activation, residual=residual)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{super().extra_repr()}, activation={self.activation}"


class GatedMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, the MLP of Llama, Qwen and others.

    Its state dict is that of theirs: ``gate_proj``, ``up_proj`` and ``down_proj``, each a :class:`torch.nn.Linear`. One
    that is replaced by something else, such as an adapter, is called as it is.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Activation = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = known(type(self).__name__, activation)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The MLP's result, with ``residual`` added last."""
        return run(self.down_proj, gated(self.gate_proj, self.up_proj, x, self.activation), residual=residual)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"activation={self.activation}"


def gated(gate: nn.Module, up: nn.Module, x: torch.Tensor, act: Activation) -> torch.Tensor:
    """``act(gate(x)) * up(x)``."""
    if trains(gate, up, x) and is_plain(gate) and is_plain(up) and act != "none":
        weights, biases = (gate.weight, up.weight), (gate.bias, up.bias)
        whole = gate.weight.shape == up.weight.shape and all(bias is None for bias in biases)
        # To join the weights costs as much as a product of some rows; with many rows it saves two passes over the
        # products' results, and the gate's product in the backward pass.
        if whole and x.ndim > 0 and x.numel() >= x.shape[-1] * x.shape[-1] and fits("GatedMLP", x, *weights):
            return ops.gated_act(ops.linear(x, torch.cat(weights)), act=act)
    return run(gate, x, act) * run(up, x)


def trains(gate: nn.Module, up: nn.Module, x: torch.Tensor) -> bool:
    """Whether gradients will be asked for."""
    needed = x.requires_grad or any(p.requires_grad for layer in (gate, up) for p in layer.parameters())
    return torch.is_grad_enabled() and needed


def run(
    layer: nn.Module, x: torch.Tensor, act: Activation = "none", residual: torch.Tensor | None = None
) -> torch.Tensor:
    """A layer, an activation and a sum: in one kernel if it is nothing but a linear layer."""
    if is_plain(layer):
        return product(x, layer.weight, layer.bias, act=act, residual=residual)
    out = activated(layer(x), act)
    return out if residual is None else residual + out


def activated(x: torch.Tensor, act: Activation) -> torch.Tensor:
    """An activation of what a layer of others' returned. A compiler fuses it with what is around it."""
    if act == "none" or torch.compiler.is_compiling() or not fits("activation", x):
        return ACTIVATIONS[act](x)
    return ops.activation(x, kind=act)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear layer and nothing else happens when it is called."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Whether something is to happen when the layer is called."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
