"""Gradients of calls that no single op computes: the call is made of parts that have one.

A call without a gradient runs as one kernel. One whose gradient is asked for runs as these parts: a product with a gate
or an activation as the product, which is kept, and what follows it (to compute the product again takes longer than to
store it); a product of a batch of matrices with products of their gradients; a product with quantised weights with a
gradient for ``x``, for adapters over a frozen model. Heads that are normalised and rotated run as one kernel either
way, and their gradient is that of the rotation and then that of the norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from warpsmith._torch.dtypes import FLOATS, NAMES

#: Calls one of the functions below.
Apply = Callable[..., Any]
Composed = Callable[[Apply, Sequence[Any], dict[str, Any]], Any]
#: Columns of a quantised weight that are expanded at a time, a multiple of all blocks.
EXPANDED = 1024


def ops() -> Any:
    # Its functions are made from this package.
    from warpsmith import ops

    return ops


class Products(torch.autograd.Function):
    """Each matrix of ``x`` times the transposed one of ``w``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, precision: str, to: str) -> Any:
        return ops().linear(x, w, precision=precision, to=to)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, ctx.precision, _ = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        dout = incoming[0].to(x.dtype)
        dx = apply(Products, dout, w.mT, ctx.precision, "auto") if ctx.needs_input_grad[0] else None
        dw = apply(Products, dout.mT, x.mT, ctx.precision, "auto") if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class Cast(torch.autograd.Function):
    """A cast with a scale that is a constant. Its gradient is the same of what arrives, back to the type before."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor | None, to: str, inverse: bool) -> Any:
        return ops().cast(x, scale, to=to, inverse=inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, scale, _, ctx.inverse = inputs
        ctx.name = NAMES[x.dtype]
        ctx.save_for_backward(scale)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return apply(Cast, incoming[0], scale, ctx.name, ctx.inverse), None, None, None


class Copy(torch.autograd.Function):
    """A copy, with the last two dimensions swapped or not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, order: str) -> Any:
        return ops().copy(x, order=order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.order = inputs[1]

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        return incoming[0].mT if ctx.order == "swapped" else incoming[0], None


class QuantProduct(torch.autograd.Function):
    """A product with quantised weights, which are constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any]) -> Any:
        return ops().linear_quant(x, w, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, ctx.options = inputs
        ctx.k, ctx.dtype = x.shape[-1], x.dtype
        ctx.save_for_backward(w)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        block = block_length(ctx.options["format"])
        blocks, at_once = ctx.k // block, EXPANDED // block
        dout = incoming[0].to(ctx.dtype)
        dx = [
            ops().linear(dout, expanded(w, blocks, at, min(at_once, blocks - at), ctx.dtype, ctx.options["format"]))
            for at in range(0, blocks, at_once)
        ]
        return torch.cat(dx, -1), None, None


class Heads(torch.autograd.Function):
    """Heads of queries and keys that are normalised and rotated, by tables that are constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        options: dict[str, Any],
    ) -> Any:
        return ops().qk_norm_rope(q, k, q_weight, k_weight, positions, cos, sin, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        q, k, q_weight, k_weight, *places = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_q = of_heads(q, q_weight, incoming[0], places, ctx.options, (needs[0], needs[2]))
        of_k = of_heads(k, k_weight, incoming[1], places, ctx.options, (needs[1], needs[3]))
        return of_q[0], of_k[0], of_q[1], of_k[1], None, None, None, None


def of_heads(
    x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor, places: Any, options: dict[str, Any], needs: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of heads of one kind and of their weight."""
    if not any(needs):
        return None, None
    rest = {name: option for name, option in options.items() if name != "eps"}
    # In the type of the weight, which may be wider.
    wide = weight.dtype
    dnormed = ops().rope_backward(dout.to(wide), *places, **rest)
    found = ops().rms_norm_backward(x.to(wide), dnormed, weight, eps=options["eps"], return_dweight=needs[1])
    dx, dweight = found if needs[1] else (found, None)
    return dx.to(x.dtype) if needs[0] else None, dweight


def apply(function: Any, *args: Any) -> Any:
    """Calls a function."""
    return function.apply(*args)


def apply_at_level(function: Any, *args: Any) -> Any:
    """Calls a function from within an op that one transform of ``torch.func`` is at work on: the function's gradient is
    that transform's, and its forward is what the next one sees."""
    with enable_single_level_autograd_function():
        return levelled(function)(*args)


@cache
def levelled(function: Any) -> Apply:
    def forward(*args: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return function.forward(*args)

    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(function.setup_context),
        "backward": staticmethod(function.backward),
    }
    made = type(f"{function.__name__}AtLevel", (torch.autograd.Function,), members)
    found: Apply = super(torch.autograd.Function, made).apply  # type: ignore[misc]
    return found


def block_length(form: str) -> int:
    """Weights of a block of a format."""
    return 256 if form.endswith("_k") else 32


def expanded(w: torch.Tensor, blocks: int, start: int, count: int, dtype: torch.dtype, form: str) -> torch.Tensor:
    """Columns of a quantised weight as rows: those of ``count`` blocks from ``start`` on, of ``blocks`` in each row.

    Each block is taken for a row of its own and multiplied with the rows of a unit matrix. Those are kept when
    activations are rounded to 8 bits.
    """
    rows, size, length = w.shape[0], w.shape[1] // blocks, block_length(form)
    alone = w[:, start * size : (start + count) * size].reshape(rows * count, size)
    unit = torch.eye(length, dtype=dtype, device=w.device)
    found: torch.Tensor = ops().linear_quant(unit, alone, format=form)
    return found.view(length, rows, count).permute(2, 0, 1).reshape(count * length, rows)


def activated(z: torch.Tensor, rest: dict[str, Any], residual: torch.Tensor | None) -> torch.Tensor:
    """What follows a product: a gate or an activation, the factor, the residual."""
    if rest["gate"] != "none":
        layout = "split" if rest["gate"] == "halves" else "interleaved"
        if rest["act"] == "none":
            parts = z.chunk(2, -1) if layout == "split" else z.unflatten(-1, (-1, 2)).unbind(-1)
            z = parts[0] * parts[1]
        else:
            z = ops().gated_act(z, act=rest["act"], layout=layout)
    elif rest["act"] != "none":
        z = ops().activation(z, kind=rest["act"])
    if rest["scale"] != 1.0:
        z = z * rest["scale"]
    return z if residual is None else z + residual


def linear(call: Apply, tensors: Sequence[Any], options: dict[str, Any]) -> torch.Tensor | None:
    x, w, bias, residual, *scales = tensors
    plain = options["gate"] == options["act"] == "none"
    if (w.ndim == 2 and plain) or any(scale is not None for scale in scales):
        return None
    if x.dtype not in FLOATS or w.dtype != x.dtype:
        return None
    precision, to = options["precision"], options["to"]
    if w.ndim == 2:
        z = ops().linear(x, w, bias, precision=precision, to=to)
    else:
        z = call(Products, x, w, precision, to)
        z = z if bias is None else z + bias
    return activated(z, options, residual)


def cast(call: Apply, tensors: Sequence[Any], options: dict[str, Any]) -> torch.Tensor | None:
    x, scale = tensors
    fixed = scale is None or not scale.requires_grad
    if x.dtype not in FLOATS or options["to"] not in ("f32", "f16", "bf16") or not fixed:
        return None
    found: torch.Tensor = call(Cast, x, scale, options["to"], options["inverse"])
    return found


def copy(call: Apply, tensors: Sequence[Any], options: dict[str, Any]) -> torch.Tensor | None:
    found: torch.Tensor = call(Copy, tensors[0], options["order"])
    return found


def linear_quant(call: Apply, tensors: Sequence[Any], options: dict[str, Any]) -> torch.Tensor | None:
    x, w, bias, residual = tensors
    if x.dtype not in FLOATS:
        return None
    product = {name: options[name] for name in ("format", "precision", "to")}
    z = call(QuantProduct, x, w, product)
    return activated(z if bias is None else z + bias, options, residual)


def qk_norm_rope(call: Apply, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    cos, sin = tensors[5:]
    if any(table is not None and table.requires_grad for table in (cos, sin)):
        return None
    return call(Heads, *tensors, options)


#: By op: the call made of parts, or ``None`` where the op's own gradient, or its refusal, is right.
COMPOSED: dict[str, Composed] = {
    "linear": linear,
    "cast": cast,
    "copy": copy,
    "linear_quant": linear_quant,
    "qk_norm_rope": qk_norm_rope,
}
