"""The ops under ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warpsmith import _codegen, _shapes
from warpsmith._spec import Form, Op, Variant
from warpsmith._torch.autograd import Overloads, as_tuple
from warpsmith._torch.dtypes import BY_NAME, NAMES
from warpsmith.errors import ArgumentError, UnsupportedError

#: Most dimensions of a tensor that the kernels take.
MAX_RANK = 8


def batching_rule(op: Op, variant: Variant) -> Callable[..., Any]:
    """What a call means whose tensors have one more dimension: one call with more rows where the op works row by row,
    else a call for each element of that dimension."""
    rule = Batching(op, variant)
    parts = _codegen.bound(op, variant, lambda *parts: parts)

    def run(info: Any, in_dims: tuple[int | None, ...], *args: Any, **kwargs: Any) -> Any:
        tensors, options, switches = parts(*args, **kwargs)
        # PyTorch leaves out what has its default at the end.
        dims = (*in_dims[: len(tensors)], *(None for _ in tensors[len(in_dims) :]))
        return rule.run(info.batch_size, dims, tensors, options, switches)

    return run


class Batching:
    """The rule of one op."""

    def __init__(self, op: Op, variant: Variant) -> None:
        self.op, self.variant = op, variant

    def run(
        self,
        size: int,
        dims: tuple[int | None, ...],
        tensors: tuple[Any, ...],
        options: tuple[Any, ...],
        switches: tuple[bool, ...],
    ) -> tuple[Any, Any]:
        """The results and where their further dimension is."""
        first = [t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)]
        batched = [dim is not None for dim in dims]
        made = self.outputs(first, batched, options, switches)
        if self.works_by_row(first, batched, options, made):
            found = as_tuple(self.call(self.with_rows(first, batched, size), options, switches))
        else:
            found = tuple(self.one_by_one(first, batched, options, switches, size, made))
        places = tuple(None if result is None else 0 for result in found)
        if len(found) == 1:
            return found[0], places[0]
        return (found, places) if found else (None, None)

    def call(self, tensors: Sequence[Any], options: Sequence[Any], switches: Sequence[bool]) -> Any:
        names = [attr.name for attr in self.op.attrs] + list(self.variant.wanted.values())
        named = dict(zip(names, (*options, *switches), strict=True))
        return Overloads.public(self.variant.name)(*tensors, **named)

    def outputs(
        self, first: Sequence[Any], batched: Sequence[bool], options: Sequence[Any], switches: Sequence[bool]
    ) -> list[_shapes.Known | None]:
        """Shape and type of what one element's call returns."""
        op, variant = self.op, self.variant
        if not variant.returned:
            return []
        inputs: list[_shapes.Known | None] = [None] * len(op.args)
        for given, tensor, extra in zip(variant.tensors, first, batched, strict=True):
            if tensor is not None and tensor.dtype in NAMES:
                inputs[given.arg] = (tensor.shape[1:] if extra else tensor.shape, NAMES[tensor.dtype])
        wanted = [output for output, switch in zip(variant.wanted, switches, strict=True) if switch]
        found = _shapes.outputs(op, inputs, options, wanted, torch._check)
        return [found[output] for output in variant.returned]

    def works_by_row(
        self, first: Sequence[Any], batched: Sequence[bool], options: Sequence[Any], made: Sequence[Any]
    ) -> bool:
        """Whether the further dimension is nothing but more rows."""
        op, variant = self.op, self.variant
        if variant.is_mutating or op.across_rows:
            return False
        sizes = _shapes.Sizes(op, options, torch._check)
        for output, known in zip(variant.returned, made, strict=True):
            if known is not None and any(form.leading != "rows" for form in sizes.forms(op.args[output])):
                return False
        for given, tensor, extra in zip(variant.tensors, first, batched, strict=True):
            if tensor is None:
                continue
            if tensor.ndim + (not extra) > MAX_RANK:
                return False
            forms = sizes.forms(op.args[given.arg])
            rows = all(form.leading == "rows" for form in forms)
            shared = all(tensor.ndim == len(form.dims) for form in forms if form.leading != "rows")
            if (extra and not rows) or (not extra and not rows and not shared):
                return False
        return True

    def with_rows(self, first: Sequence[Any], batched: Sequence[bool], size: int) -> list[Any]:
        """All tensors that have rows with the further dimension first."""
        found = []
        for given, tensor, extra in zip(self.variant.tensors, first, batched, strict=True):
            alone = tensor is None or extra or has_no_rows(self.op.args[given.arg].forms, tensor.shape)
            found.append(tensor if alone else tensor.expand(size, *tensor.shape))
        return found

    def one_by_one(
        self,
        first: Sequence[Any],
        batched: Sequence[bool],
        options: Sequence[Any],
        switches: Sequence[bool],
        size: int,
        made: Sequence[_shapes.Known | None],
    ) -> list[Any]:
        """A call for each element."""
        op = self.op
        for given, tensor, extra in zip(self.variant.tensors, first, batched, strict=True):
            if given.written is not None and tensor is not None and not extra:
                name = op.args[given.arg].name
                raise UnsupportedError(
                    f"{self.variant.name}: under vmap, `{name}` is written for every element, "
                    "so it must have the mapped dimension too",
                    op=op.name,
                )
        calls = []
        for at in range(size):
            row = [tensor[at] if extra else tensor for tensor, extra in zip(first, batched, strict=True)]
            calls.append(as_tuple(self.call(row, options, switches)))
        results: list[Any] = []
        device = next(tensor.device for tensor in first if tensor is not None)
        for at, known in enumerate(made):
            if known is None:
                results.append(None)
            elif calls:
                results.append(torch.stack([call[at] for call in calls]))
            else:
                results.append(torch.empty((0, *known[0]), dtype=BY_NAME[known[1]], device=device))
        return results


def has_no_rows(forms: Sequence[Form], shape: Sequence[int]) -> bool:
    """Whether a shape is one of the forms without rows, such as that of one scale for all."""
    return any(
        form.leading != "rows"
        and len(form.dims) == len(shape)
        and all(dim.kind != "number" or dim.size == size for dim, size in zip(form.dims, shape, strict=True))
        for form in forms
    )


def no_batched_gradients(op: Op) -> Callable[..., Any]:
    """What an op says to the older ``vmap`` of ``torch.autograd.grad(is_grads_batched=True)``: it has no rule."""

    def run(*_: Any, **__: Any) -> Any:
        expected = "ordinary gradients: torch.func.jacrev, or torch.vmap of torch.func.vjp, take several at once"
        message = f"{op.name}: argument `is_grads_batched`: expected {expected}, got batched ones"
        raise ArgumentError(message, op=op.name, argument="is_grads_batched", expected=expected, got="batched ones")

    return run
