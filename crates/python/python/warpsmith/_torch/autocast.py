"""Mixed precision: what becomes of an op's inputs under ``torch.autocast``, as with PyTorch's own ops.

Ops that PyTorch computes in f32 are so on GPUs alone. On the CPU it leaves their inputs as they are: parameters may
then be of another type than the rows, and results are of the rows' type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from warpsmith import _codegen
from warpsmith._spec import Op, Variant
from warpsmith._torch.autograd import Overloads
from warpsmith._torch.dtypes import FLOATS

#: Dispatch keys, by the device whose autocast they are.
KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def is_castable(op: Op, index: int) -> bool:
    """Whether an argument may be any of the usual floating types: tables and scales must be f32."""
    rule = op.args[index].dtype
    if rule.kind in ("one_of", "chosen"):
        return {"f32", "f16", "bf16"} <= set(rule.types)
    return is_castable(op, rule.like)


def autocast_kernel(op: Op, variant: Variant, device: str) -> Callable[..., Any]:
    """The op with its inputs cast, on a device."""
    public = Overloads.public(variant.name)
    castable = [is_castable(op, given.arg) for given in variant.tensors]
    has_rows = [any(form.leading == "rows" for form in op.args[given.arg].forms) for given in variant.tensors]
    policy = "rows" if op.autocast == "f32" and device == "cpu" else op.autocast
    may_stay = [op.args[given.arg].dtype.kind == "same_or" for given in variant.tensors]
    names = [attr.name for attr in op.attrs] + list(variant.wanted.values())
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        target = target_type(policy, device, [t for t, cast in zip(tensors, castable, strict=True) if cast])
        found = []
        for tensor, cast, stay in zip(tensors, castable, may_stay, strict=True):
            fits = tensor is None or not cast or tensor.dtype not in FLOATS
            fits = fits or (stay and tensor.dtype == torch.float32)
            found.append(tensor if fits or target is None else tensor.to(target))
        with torch._C._ExcludeDispatchKeyGuard(keys):
            results = public(*found, **dict(zip(names, (*options, *switches), strict=True)))
        if policy != "rows":
            return results
        rows = zip(tensors, castable, has_rows, strict=True)
        kept = target_type("widest", device, [t for t, cast, row in rows if cast and row])
        return tree_map_only(torch.Tensor, lambda result: result.to(kept), results)

    return _codegen.bound(op, variant, run)


def target_type(policy: str, device: str, tensors: Sequence[Any]) -> torch.dtype | None:
    """The type that inputs are cast to; nothing to leave them as they are."""
    if policy == "low":
        return torch.get_autocast_dtype(device)
    if policy == "f32":
        return torch.float32
    types = {tensor.dtype for tensor in tensors if tensor is not None and tensor.dtype in FLOATS}
    return types.pop() if len(types) == 1 else torch.float32 if types else None
