"""What the kernels can be given."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from warpsmith._torch.dtypes import FLOATS


def fits(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels can compute with the tensors: they are of one type and device that kernels have. Under autocast
    types may differ, because the ops cast them."""
    first = tensors[0]
    assert first is not None
    if forward_ad._current_level >= 0:
        return False  # The kernels have no forward-mode derivatives.
    kind = first.device.type
    if kind not in ("cpu", "cuda", "meta"):
        return False
    cast = torch.is_autocast_enabled(kind) if kind != "meta" else False
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS or tensor.device != first.device:
            return False
        if tensor.dtype != first.dtype and not cast:
            return False
    return True
