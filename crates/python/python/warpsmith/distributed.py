"""The ops on tensors that are spread over devices (``DTensor``).

Importing this module tells PyTorch how the ops that work row by row (norms, activations, products, their gradients) may
be sharded: by any dimension of the rows. Weights are replicated, and gradients of weights are partial sums. Other ops
take replicated tensors. FSDP and DDP need none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.experimental import register_sharding

from warpsmith._codegen import bound
from warpsmith._spec import Op, Variant, all_ops
from warpsmith._torch.autograd import Overloads, as_tuple

#: What a call takes and gives in one way of sharding it: placements of the results, and of the arguments.
Way = tuple[list[Any], list[Any]]


def ways(op: Op, variant: Variant) -> Callable[..., list[Way]]:
    """The ways of sharding a call."""

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> list[Way]:
        rest = [None] * (len(options) + len(switches))
        asked = dict(zip(variant.wanted, switches, strict=True))
        arguments = [argument.arg for argument in variant.tensors]
        given: dict[int | None, bool] = {
            arg: tensor is not None for arg, tensor in zip(arguments, tensors, strict=True)
        }
        # Results that were not asked for, and those that belong to an argument that was left out, are none.
        belongs = {output: op.args[output].given_with for output in variant.returned}
        made = [asked.get(output, belongs[output] is None or given.get(belongs[output], True)) for output in belongs]
        replicated = [None if tensor is None else Replicate() for tensor in tensors]
        found: list[Way] = [([Replicate() if there else None for there in made], [*replicated, *rest])]
        rows = [rows_of(op, arg) for arg in arguments]
        results = [rows_of(op, output) for output in variant.returned]
        leading = [t.ndim - dims for t, dims in zip(tensors, rows, strict=True) if t is not None and dims is not None]
        if op.across_rows:
            return found
        # Results without rows are sums over them, in gradients alone.
        if not leading or len(set(leading)) > 1 or (None in results and not op.name.endswith("_backward")):
            return found
        for dim in range(leading[0]):
            inputs = [
                None if tensor is None else Replicate() if dims is None else Shard(dim)
                for tensor, dims in zip(tensors, rows, strict=True)
            ]
            outputs = [
                None if not there else Partial() if dims is None else Shard(dim)
                for there, dims in zip(made, results, strict=True)
            ]
            found.append((outputs, [*inputs, *rest]))
        return found

    return bound(op, variant, run, raw=True)


def rows_of(op: Op, arg: int) -> int | None:
    """How many dimensions an argument has after those of its rows; ``None`` if it has no rows."""
    forms = op.args[arg].forms
    rows = all(form.leading == "rows" for form in forms) and len({len(form.dims) for form in forms}) == 1
    return len(forms[0].dims) if rows else None


def by_hand(op: Op, variant: Variant) -> Callable[..., Any]:
    """A call on each device's part, for ops whose first result is optional: PyTorch's own dispatch takes those for ops
    without tensors as results."""
    found = ways(op, variant)
    first = rows_of(op, variant.tensors[0].arg)

    def run(raw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count, x = len(variant.tensors), args[0]
        mesh, rows = x.device_mesh, x.shape[: 0 if first is None else x.ndim - first]
        of_first = {way[1][0]: way for way in found(*args, **kwargs)}
        # For each dimension of the devices: the way of the first argument, where there is one.
        chosen = [of_first.get(placement, of_first[Replicate()]) for placement in x.placements]
        local = [
            part_of(arg, [way[1][at] for way in chosen]) if isinstance(arg, DTensor) else arg
            for at, arg in enumerate(args[:count])
        ]
        results = []
        for at, result in enumerate(as_tuple(raw(*local, *args[count:], **kwargs))):
            if result is not None:
                dims = rows_of(op, variant.returned[at])
                shape = result.shape if dims is None else (*rows, *result.shape[result.ndim - dims :])
                meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), result.dtype)
                spec = DTensorSpec(mesh, tuple(way[0][at] for way in chosen), meta)
                result = DTensor(result, spec, requires_grad=False)
            results.append(result)
        return tuple(results) if len(results) > 1 else results[0]

    return run


def part_of(tensor: DTensor, placements: list[Any]) -> torch.Tensor:
    """This device's part of a tensor, once it is spread in a given way."""
    wanted = DTensorSpec(tensor.device_mesh, tuple(placements), tensor._spec.tensor_meta)
    return redistribute_local_tensor(tensor._local_tensor, tensor._spec, wanted)


def register() -> None:
    """Tells PyTorch the ways of every op that returns its results."""
    for op in all_ops().values():
        for variant in op.variants:
            if variant.is_mutating:
                continue
            raw = Overloads.raw(variant.name)
            if variant.returned and op.args[variant.returned[0]].optional:
                DTensor._op_dispatcher._custom_op_handlers[raw] = by_hand(op, variant)
            else:
                register_sharding(raw)(ways(op, variant))


register()
