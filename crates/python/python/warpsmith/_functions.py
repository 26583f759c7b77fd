"""The functions that people call, made from the ops' descriptions.

On tensors of PyTorch a function takes the shortest way that is right: the raw kernel; around it a gradient if one is
needed; and the public op where PyTorch traces, transforms or casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warpsmith import _native
from warpsmith._arrays import array_call
from warpsmith._codegen import Choices, documentation, make, parameters, tensor_names, unpack
from warpsmith._spec import Op, Variant

if TYPE_CHECKING:
    from warpsmith._torch import Torch

FLOATS = {"f32", "f16", "bf16"}


def functions(op: Op, torch: Torch | None) -> dict[str, Callable[..., Any]]:
    """The functions of an op by their names; with ``torch``, they know tensors of PyTorch."""
    return {variant.name: build(op, variant, torch) for variant in op.variants}


def build(op: Op, variant: Variant, torch: Torch | None) -> Callable[..., Any]:
    tensors = tensor_names(op, variant)
    options = [attr.name for attr in op.attrs]
    switches = list(variant.wanted.values())
    names: dict[str, Any] = {"_arrays": array_call(op, variant)}
    tuples = ", ".join("(" + "".join(f"{name}, " for name in part) + ")" for part in (tensors, options, switches))
    arrays = [f"_results = _arrays({tuples})", *unpack(op, variant, of_tuple=True)]
    body = arrays
    if torch is not None:
        names |= torch_names(op, variant, torch)
        body = torch_body(op, variant, arrays)
    return make(variant.name, parameters(op, variant), body, names, documentation(op, variant))


def torch_names(op: Op, variant: Variant, torch: Torch) -> dict[str, Any]:
    """What the text of :func:`torch_body` refers to."""
    import torch as library
    from torch.autograd import forward_ad

    from warpsmith._torch.autograd import Overloads, bump

    names: dict[str, Any] = {
        "_Tensor": library.Tensor,
        "_Parameter": library.nn.Parameter,
        "_tracing": library.compiler.is_dynamo_compiling,
        "_autocast": library._C._is_any_autocast_enabled,
        "_transformed": library._C._are_functorch_transforms_active,
        "_forward_ad": forward_ad,
        "_grad": library.is_grad_enabled,
        "_public": Overloads.public(variant.name),
        # What calling the overload comes to, without a function of Python's around it.
        "_raw": Overloads.raw(variant.name)._op,
        "_typed": typed,
        "_bump": bump,
    }
    for index, attr in enumerate(op.attrs):
        if attr.kind == "choice":
            names[f"_{attr.name}"] = Choices(op, index)
    if not variant.is_mutating:
        names["_differentiable"] = torch.differentiable(op)
    return names


def torch_body(op: Op, variant: Variant, arrays: list[str]) -> list[str]:
    """The text of a function that takes tensors of PyTorch, and leaves others to ``arrays``.

    The short way is for plain tensors. Others, such as those that PyTorch traces with, take the public op.
    """
    tensors = tensor_names(op, variant)
    options = [attr.name for attr in op.attrs]
    switches = list(variant.wanted.values())
    keywords = [f"{name}={name}" for name in (*options, *switches)]
    public = f"_public({', '.join([*tensors, *keywords])})"
    positions = [f"_{attr.name}[{attr.name}]" if attr.kind == "choice" else attr.name for attr in op.attrs]
    raw = f"_raw({', '.join([*tensors, *positions, *switches])})"
    differentiable = f"_differentiable({', '.join([*tensors, *options, *switches])})"
    needs = [
        f"({name} is not None and {name}.requires_grad)" if given.optional else f"{name}.requires_grad"
        for given, name in zip(variant.tensors, tensors, strict=True)
        if may_be_float(op, given.arg)
    ]
    end = unpack(op, variant, of_tuple=False)
    short = []
    if needs:
        short.append(f"if ({' or '.join(needs)}) and _grad():")
        graph = [f"_results = {public}", *end] if variant.is_mutating else [f"return {differentiable}"]
        short += [f"    {line}" for line in graph]
    short.append(f"_results = {raw}")
    for given, name in zip(variant.tensors, tensors, strict=True):
        if given.written is not None:
            short.append(f"_bump({name})")
    first = tensors[0]
    return [
        f"if {first}.__class__ is _Tensor or {first}.__class__ is _Parameter:",
        "    if not (_tracing() or _autocast() or _transformed() or _forward_ad._current_level >= 0):",
        "        try:",
        *(f"            {line}" for line in short),
        "        except (AttributeError, RuntimeError) as _error:",
        "            raise _typed(_error) from None",
        *(f"        {line}" for line in end),
        f"elif not isinstance({first}, _Tensor):",
        *(f"    {line}" for line in arrays),
        f"_results = {public}",
        *end,
    ]


def may_be_float(op: Op, index: int) -> bool:
    """Whether an argument may be of a type that has gradients."""
    rule = op.args[index].dtype
    if rule.kind in ("one_of", "chosen"):
        return bool(FLOATS & set(rule.types))
    return may_be_float(op, rule.like)


def typed(error: Exception) -> Exception:
    """The exception with its details, of which PyTorch passes on the text alone."""
    if isinstance(error, AttributeError):
        return TypeError(f"expected tensors of PyTorch, like the first argument: {error}")
    found = _native.take_last_error()
    if isinstance(found, RuntimeError) and str(found) in str(error):
        return found
    return error
