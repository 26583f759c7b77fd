"""A quarter turn of pairs of columns, as rotary positions need it: one op, so that it reaches fused graphs whole."""

from __future__ import annotations

from typing import Any

import torch

#: Its ops are there as long as it is.
_LIBRARY = torch.library.Library("_warpsmith_fuse", "DEF")


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    turned: torch.Tensor = rotate_half(grad)
    return -turned


_LIBRARY.define("rotate_half(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("rotate_half", _rotate_half, "CompositeExplicitAutograd")
torch.library.register_fake("_warpsmith_fuse::rotate_half", _rotate_half, lib=_LIBRARY)
torch.library.register_autograd("_warpsmith_fuse::rotate_half", _backward, lib=_LIBRARY)

#: ``cat((-x[..., n:], x[..., :n]), -1)`` for an `x` of 2 n columns.
rotate_half: Any = torch.ops._warpsmith_fuse.rotate_half.default
