"""What the kernels can be given."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from warpsmith._sdpa import note
from warpsmith._torch.dtypes import FLOATS


def fits(what: str, *tensors: torch.Tensor | None) -> bool:
    """Whether kernels can compute with the tensors: they are of one type and device that kernels have. Under autocast
    types may differ, because the ops cast them. If not, a warning says why, once."""
    reason = why_not(tensors)
    if reason is not None and not torch.compiler.is_compiling():
        note(what, reason)
    return reason is None


def why_not(tensors: tuple[torch.Tensor | None, ...]) -> str | None:
    """Why kernels cannot compute with the tensors; ``None`` if they can."""
    first = tensors[0]
    assert first is not None
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives"
    kind = first.device.type
    if kind not in ("cpu", "cuda", "meta"):
        return f"tensors on {kind}"
    cast = torch.is_autocast_enabled(kind) if kind != "meta" else False
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            return f"a tensor of {tensor.dtype}"
        if tensor.device != first.device:
            return f"tensors on {first.device} and {tensor.device}"
        if tensor.dtype != first.dtype and not cast:
            return f"tensors of {first.dtype} and {tensor.dtype}"
    return None
