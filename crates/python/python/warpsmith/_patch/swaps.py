"""Which module replaces which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from warpsmith import ops
from warpsmith.nn import GatedMLP, LayerNorm, RMSNorm
from warpsmith.nn._linear import ACTIVATIONS, Activation, Gate, activated, has_hooks, product
from warpsmith.nn._support import fits

#: transformers' names of activations, as the kernels have them.
NAMES: dict[str, Gate] = {
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
        """The term added to the mean square."""
        return self.eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows, rounded once."""
        if not torch.compiler.is_compiling() or residual is not None or self.eps is None:
            return super().forward(x, residual)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class PatchedGemmaNorm(nn.Module):
    """Gemma's RMS norm, whose factor is its weight and one.

    The kernel computes it in f32, as transformers does: in 16 bits the sum would be rounded before it multiplies.
    """

    weight: nn.Parameter
    eps: float

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        adopt(self, original)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows; with ``residual``, that is added first, and the sum is returned too."""
        if torch.compiler.is_compiling() or not fits("RMSNorm", x, residual):
            total = x if residual is None else x + residual
            wide = total.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            out = (wide * (1.0 + self.weight.float())).type_as(total)
            return out if residual is None else (out, total)
        factor = 1.0 + self.weight.float()
        if residual is not None and x.dtype == residual.dtype == torch.float32:
            return ops.rms_norm(x, factor, residual, eps=self.eps)
        total = x if residual is None else x + residual
        out = ops.rms_norm(total.float(), factor, eps=self.eps).to(total.dtype)
        return out if residual is None else (out, total)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


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


class PackedMLP(nn.Module):
    """Phi-3's MLP: gate and up are one layer."""

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def __init__(self, original: nn.Module, activation: Gate) -> None:
        super().__init__()
        self.activation = activation
        adopt(self, original)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP's result."""
        both = self.gate_up_proj(x)
        if not fits("MLP", both):
            gate, up = both.chunk(2, -1)
            found: torch.Tensor = self.down_proj(up * ACTIVATIONS[self.activation](gate))
            return found
        found = self.down_proj(ops.gated_act(both, act=self.activation))
        return found

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"activation={self.activation}"


def conv1d(layer: Any, x: torch.Tensor, act: Activation = "none") -> torch.Tensor:
    """A layer of GPT-2's and an activation: in one kernel if the layer is nothing else."""
    if type(layer).__name__ == "Conv1D" and not has_hooks(layer):
        return product(x, layer.weight.t(), layer.bias, act=act)
    return activated(layer(x), act)


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
    # Gemma's configs have another name for it.
    name = getattr(original.config, "hidden_activation", None) or original.config.hidden_act
    activation = NAMES.get(name)
    if activation is None:
        return Left(f"no kernel has its activation {name}")
    for name in ("gate_proj", "up_proj", "down_proj"):
        if type(getattr(original, name)) is not nn.Linear:
            return Left(f"its {name} is a {type(getattr(original, name)).__name__}")
    mlp = GatedMLP.__new__(GatedMLP)
    nn.Module.__init__(mlp)
    mlp.activation = activation
    adopt(mlp, original)
    return mlp


def packed_mlp(original: Any) -> nn.Module | Left:
    activation = NAMES.get(original.config.hidden_act)
    if activation is None:
        return Left(f"no kernel has its activation {original.config.hidden_act}")
    return PackedMLP(original, activation)


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


def gemma_norm(original: nn.Module) -> nn.Module | Left:
    return PatchedGemmaNorm(original)


def family(name: str, **others: Swap) -> dict[str, Swap]:
    """The modules of a family that differs from Llama in no more than ``others``."""
    return {
        f"{name}RMSNorm": rms_norm,
        f"{name}MLP": gated_mlp,
        **{f"{name}{kind}": swap for kind, swap in others.items()},
    }


#: By the model's type and the name of a module's class: what takes its place.
FAMILIES: dict[str, dict[str, Swap]] = {
    "qwen3": family("Qwen3"),
    "qwen3_moe": family("Qwen3Moe"),
    "qwen2": family("Qwen2"),
    "llama": family("Llama"),
    "mistral": family("Mistral"),
    "mixtral": family("Mixtral"),
    "smollm3": family("SmolLM3"),
    "olmo2": family("Olmo2"),
    "phi3": family("Phi3", MLP=packed_mlp),
    "gemma": family("Gemma", RMSNorm=gemma_norm),
    "gemma2": family("Gemma2", RMSNorm=gemma_norm),
    "gemma3_text": family("Gemma3", RMSNorm=gemma_norm),
    "gpt2": {"LayerNorm": layer_norm, "GPT2MLP": gpt2_mlp},
}

#: Why modules without a swap stay.
STAYS = {
    "Linear": "nothing follows it that could be fused",
    "Conv1D": "nothing follows it that could be fused",
    "Embedding": "PyTorch's does the same",
}


def replacement(module: nn.Module, model_type: str) -> nn.Module | Left | None:
    """The replacement of a module, or why it stays; ``None`` for modules that only hold others."""
    name = type(module).__name__
    if isinstance(module, (RMSNorm, PatchedGemmaNorm, LayerNorm, GatedMLP, FusedMLP, PackedMLP)):
        return Left("it is ours already")
    swap = FAMILIES[model_type].get(name)
    if swap is None:
        if name.endswith("RotaryEmbedding"):
            return Left("its tables are made once for all layers")
        return Left(STAYS[name]) if name in STAYS else None
    if has_hooks(module) or hasattr(module, "_hf_hook"):
        return Left("it has hooks")
    return swap(module)
