"""Normalisation of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from warpsmith import ops
from warpsmith.nn._support import fits


class RMSNorm(nn.RMSNorm):
    """RMS normalisation over the last dimensions, as :class:`torch.nn.RMSNorm`.

    With a ``residual``, that is added first, in the same kernel, and the sum is returned too: ``y, total = norm(x,
    residual)``.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows; with ``residual``, also the sum."""
        if not fits("RMSNorm", x, self.weight, residual):
            total = x if residual is None else x + residual
            out = super().forward(total)
            return out if residual is None else (out, total)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        rows = len(self.normalized_shape)
        if rows == 1:
            return ops.rms_norm(x, self.weight, residual, eps=eps)
        weight = None if self.weight is None else self.weight.flatten()
        flat = None if residual is None else residual.flatten(-rows)
        return unflatten(ops.rms_norm(x.flatten(-rows), weight, flat, eps=eps), self.normalized_shape)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimensions, as :class:`torch.nn.LayerNorm`.

    With a ``residual``, that is added first, in the same kernel, and the sum is returned too.
    """

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normalised rows; with ``residual``, also the sum."""
        if not fits("LayerNorm", x, self.weight, self.bias, residual):
            total = x if residual is None else x + residual
            out = super().forward(total)
            return out if residual is None else (out, total)
        rows = len(self.normalized_shape)
        if rows == 1:
            return ops.layer_norm(x, self.weight, self.bias, residual, eps=self.eps)
        weight, bias = (None if given is None else given.flatten() for given in (self.weight, self.bias))
        flat = None if residual is None else residual.flatten(-rows)
        return unflatten(ops.layer_norm(x.flatten(-rows), weight, bias, flat, eps=self.eps), self.normalized_shape)


def unflatten(found: Any, shape: tuple[int, ...]) -> Any:
    """Gives the last dimension of one or more tensors a shape."""
    if isinstance(found, tuple):
        return tuple(unflatten(tensor, shape) for tensor in found)
    # Not `Tensor.unflatten`: Dynamo cannot trace it under a default device.
    return found.reshape(*found.shape[:-1], *shape)
