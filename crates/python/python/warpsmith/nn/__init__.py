"""Layers that take the place of PyTorch's.

Each has the parameters, the state dict and the signature of the layer it replaces. What no kernel can do (other types
than f32, f16 and bf16, other devices) is left to PyTorch, so a model that works with PyTorch's layers works with these.
"""

from __future__ import annotations

from warpsmith.nn._attention import FlashAttention, PagedAttention
from warpsmith.nn._linear import FusedLinear, GatedMLP
from warpsmith.nn._moe import MoE
from warpsmith.nn._norms import LayerNorm, RMSNorm
from warpsmith.nn._router import ExpertGating, LoadBalancer, MoERouter, RouterLosses, Routing

__all__ = [
    "ExpertGating",
    "FlashAttention",
    "FusedLinear",
    "GatedMLP",
    "LayerNorm",
    "LoadBalancer",
    "MoE",
    "MoERouter",
    "PagedAttention",
    "RMSNorm",
    "RouterLosses",
    "Routing",
]
