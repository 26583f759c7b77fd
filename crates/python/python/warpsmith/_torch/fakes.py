"""Fake kernels: what an op returns, without computing it. Sizes stay symbolic, and strides are those of the real
outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warpsmith import _codegen, _shapes
from warpsmith._checks import refusal, types_text
from warpsmith._spec import Op, Variant
from warpsmith._torch.dtypes import BY_NAME, NAMES


def fake(op: Op, variant: Variant, *, raw: bool) -> Callable[..., Any]:
    """The fake kernel of an op."""

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        inputs: list[_shapes.Known | None] = [None] * len(op.args)
        device = None
        for given, tensor in zip(variant.tensors, tensors, strict=True):
            if tensor is None:
                continue
            name = op.args[given.arg].name
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                raise refusal(op, name, f"a tensor on {device}, like the other arguments", str(tensor.device))
            if tensor.dtype not in NAMES:
                raise refusal(op, name, types_text(op, given.arg), str(tensor.dtype).removeprefix("torch."))
            inputs[given.arg] = (tensor.shape, NAMES[tensor.dtype])
        wanted = [output for output, switch in zip(variant.wanted, switches, strict=True) if switch]
        found = _shapes.outputs(op, inputs, options, wanted, torch._check)
        made = [
            None if known is None else torch.empty(known[0], dtype=BY_NAME[known[1]], device=device)
            for known in (found[output] for output in variant.returned)
        ]
        if len(made) == 1:
            return made[0]
        return tuple(made) if made else None

    return _codegen.bound(op, variant, run, raw=raw)
