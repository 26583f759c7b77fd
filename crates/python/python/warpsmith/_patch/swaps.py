"""Which module takes the place of which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from warpsmith.nn import GatedMLP, LayerNorm, RMSNorm
from warpsmith.nn._linear import ACTIVATIONS, Activation, has_hooks, product

#: transformers' names of activations, as the kernels have them.
NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True)
class Left:
    """A module that stays, and why."""

    why: str


class PatchedRMSNorm(RMSNorm):
    """An RMS norm with the attributes of transformers'.

    In a compiled model the compiler computes it: it fuses the norm with the addition before and the rotation after,
    which a call of a kernel would keep apart.
    """

    @property
    def variance_epsilon(self) -> float | None:
        """What is added to the mean square."""
        return self.eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows, rounded once."""
        if not torch.compiler.is_compiling() or residual is not None or self.eps is None:
            return super().forward(x, residual)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class PatchedLayerNorm(LayerNorm):
    """A layer norm that the compiler computes in a compiled model, as :class:`PatchedRMSNorm`."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows."""
        if not torch.compiler.is_compiling() or residual is not None:
            return super().forward(x, residual)
        return nn.LayerNorm.forward(self, x)


class FusedMLP(nn.Module):
    """GPT-2's MLP: its weights are ``[in, out]``."""

    c_fc: nn.Module
    c_proj: nn.Module
    dropout: nn.Module

    def __init__(self, original: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        adopt(self, original)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's result."""
        hidden = conv1d(self.c_fc, x, self.activation)
        found: torch.Tensor = self.dropout(conv1d(self.c_proj, hidden))
        return found

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"activation={self.activation}"


def conv1d(layer: Any, x: torch.Tensor, act: Activation = "none") -> torch.Tensor:
    """A layer of GPT-2's and an activation: in one kernel if the layer is nothing else."""
    if type(layer).__name__ == "Conv1D" and not has_hooks(layer):
        return product(x, layer.weight.t(), layer.bias, act=act)
    return ACTIVATIONS[act](layer(x))


def adopt(module: nn.Module, original: nn.Module) -> None:
    """Gives a module the parameters, children and attributes of another."""
    module._parameters.update(original._parameters)
    module._modules.update(original._modules)
    for name, value in vars(original).items():
        vars(module).setdefault(name, value)
    module.train(original.training)


def rms_norm(original: Any) -> nn.Module | Left:
    norm = PatchedRMSNorm(list(original.weight.shape), original.variance_epsilon, device="meta")
    norm.weight = original.weight
    norm.train(original.training)
    return norm


def layer_norm(original: Any) -> nn.Module | Left:
    shape, affine = list(original.normalized_shape), original.elementwise_affine
    norm = PatchedLayerNorm(shape, original.eps, affine, original.bias is not None, device="meta")
    norm.weight, norm.bias = original.weight, original.bias
    norm.train(original.training)
    return norm


def gated_mlp(original: Any) -> nn.Module | Left:
    activation = NAMES.get(original.config.hidden_act)
    if activation is None:
        return Left(f"no kernel has its activation {original.config.hidden_act}")
    for name in ("gate_proj", "up_proj", "down_proj"):
        if type(getattr(original, name)) is not nn.Linear:
            return Left(f"its {name} is a {type(getattr(original, name)).__name__}")
    mlp = GatedMLP.__new__(GatedMLP)
    nn.Module.__init__(mlp)
    mlp.activation = activation
    adopt(mlp, original)
    return mlp


def gpt2_mlp(original: Any) -> nn.Module | Left:
    name = ACTIVATION_CLASSES.get(type(original.act).__name__)
    if name is None:
        return Left(f"no kernel has its activation {type(original.act).__name__}")
    for layer in ("c_fc", "c_proj"):
        if type(getattr(original, layer)).__name__ != "Conv1D":
            return Left(f"its {layer} is a {type(getattr(original, layer)).__name__}")
    return FusedMLP(original, name)


#: Classes of activations, as the kernels have them.
ACTIVATION_CLASSES: dict[str, Activation] = {
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "ReLU": "relu",
}

Swap = Callable[[nn.Module], nn.Module | Left]

#: By the model's type and the name of a module's class: what takes its place.
FAMILIES: dict[str, dict[str, Swap]] = {
    "qwen3": {"Qwen3RMSNorm": rms_norm, "Qwen3MLP": gated_mlp},
    "llama": {"LlamaRMSNorm": rms_norm, "LlamaMLP": gated_mlp},
    "gpt2": {"LayerNorm": layer_norm, "GPT2MLP": gpt2_mlp},
}

#: Why modules without a swap stay.
STAYS = {
    "Linear": "nothing follows it that could be fused",
    "Conv1D": "nothing follows it that could be fused",
    "Embedding": "PyTorch's does the same",
    "LlamaRotaryEmbedding": "its tables are made once for all layers",
    "Qwen3RotaryEmbedding": "its tables are made once for all layers",
}


def replacement(module: nn.Module, family: str) -> nn.Module | Left | None:
    """What takes a module's place, or why it stays; ``None`` for modules that only hold others."""
    name = type(module).__name__
    if isinstance(module, (RMSNorm, LayerNorm, GatedMLP, FusedMLP)):
        return Left("it is ours already")
    swap = FAMILIES[family].get(name)
    if swap is None:
        return Left(STAYS[name]) if name in STAYS else None
    if has_hooks(module) or hasattr(module, "_hf_hook"):
        return Left("it has hooks")
    return swap(module)
