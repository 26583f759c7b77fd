"""The functions that people call, made from the ops' descriptions.

On tensors of PyTorch a function takes the shortest way that is right: the raw kernel; around it a gradient if one is
needed; and the public op where PyTorch traces, transforms or casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warpsmith._arrays import array_call, full_like
from warpsmith._checks import failed_call, flag, refusal
from warpsmith._codegen import Choices, documentation, make, may_be_number, parameters, tensor_names, unpack
from warpsmith._shapes import Sizes
from warpsmith._spec import Op, Variant

if TYPE_CHECKING:
    from warpsmith._torch import Torch

FLOATS = {"f32", "f16", "bf16"}


def functions(op: Op, torch: Torch | None) -> dict[str, Callable[..., Any]]:
    """The functions of an op by their names; with ``torch``, they know tensors of PyTorch."""
    return {variant.name: build(op, variant, torch) for variant in op.variants}


def build(op: Op, variant: Variant, torch: Torch | None) -> Callable[..., Any]:
    names: dict[str, Any] = {"_arrays": array_call(op, variant), "_fill": filler(op, variant)}
    names["_flag"] = lambda name, value: flag(op, name, value)
    arrays = [f"_results = _arrays({tuples(op, variant)})", *unpack(op, variant, of_tuple=True)]
    body = arrays
    if torch is not None:
        names |= torch_names(op, variant, torch)
        body = torch_body(op, variant, arrays)
    body = [*numbers(op, variant), *flags(op, variant), *body]
    return make(variant.name, parameters(op, variant), body, names, documentation(op, variant))


def numbers(op: Op, variant: Variant) -> list[str]:
    """The text that makes tensors of single numbers, where people may give those."""
    first = tensor_names(op, variant)[0]
    lines = []
    for at, given in enumerate(variant.tensors):
        if may_be_number(op, variant, given):
            name = op.args[given.arg].name
            lines.append(f"if type({name}) is float or type({name}) is int:")
            lines.append(f"    {name} = _fill({at}, {name}, {first})")
    return lines


def flags(op: Op, variant: Variant) -> list[str]:
    """The text that checks switches: PyTorch would accept anything, even the text "no" as true."""
    names = [*(attr.name for attr in op.attrs if attr.kind == "bool"), *variant.wanted.values()]
    return [f"if {name} is not True and {name} is not False: {name} = _flag({name!r}, {name})" for name in names]


def filler(op: Op, variant: Variant) -> Callable[[int, float, Any], Any]:
    """Expands one number to a tensor for the argument at this position."""

    def fill(at: int, value: float, first: Any) -> Any:
        arg = op.args[variant.tensors[at].arg]
        dtype = arg.dtype.types[0]
        if isinstance(value, float) and dtype not in FLOATS:
            raise refusal(op, arg.name, f"a whole number or a tensor of {dtype}", repr(value))
        if not hasattr(first, "shape"):
            return value
        sizes = Sizes(op, [attr.default for attr in op.attrs], lambda *_: None)
        sizes.match(variant.tensors[0].arg, first.shape)
        return full_like(first, sizes.lookup(arg.forms[0].dims[0].name), value, dtype)

    return fill


def tuples(op: Op, variant: Variant) -> str:
    """Tensors, options and switches of a call, as the text of three tuples."""
    parts = (tensor_names(op, variant), [attr.name for attr in op.attrs], list(variant.wanted.values()))
    return ", ".join("(" + "".join(f"{name}, " for name in part) + ")" for part in parts)


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
        # The body of calling the overload, without a Python function around it.
        "_raw": Overloads.raw(variant.name)._op,
        "_failed": lambda error, *call: failed_call(error, op, variant, *call),
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
        "        except (AttributeError, RuntimeError, TypeError, ValueError) as _error:",
        f"            raise _failed(_error, {tuples(op, variant)}) from None",
        *(f"        {line}" for line in end),
        f"elif not isinstance({first}, _Tensor):",
        *(f"    {line}" for line in arrays),
        f"_results = {public}",
        *end,
    ]


def may_be_float(op: Op, index: int) -> bool:
    """Whether an argument may have a differentiable type."""
    rule = op.args[index].dtype
    if rule.kind in ("one_of", "chosen"):
        return bool(FLOATS & set(rule.types))
    return may_be_float(op, rule.like)
