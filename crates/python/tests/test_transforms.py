"""Every op under ``torch.func``: gradients, Jacobians, and ``vmap`` against the loop it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import warpsmith
from warpsmith._spec import Op, Variant, all_ops

DIFFERENTIABLE = [op for op in all_ops().values() if op.gradient is not None]
NEW = [(op, op.variants[0]) for op in all_ops().values() if not op.variants[0].is_mutating]
IN_PLACE = [(op, variant) for op, variant in cases.ALL if variant.is_mutating]
SIZE = 3


def differentiable_call(op: Op) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
    """Tensors that an op has gradients with respect to, and a number that follows from them."""
    assert op.gradient is not None
    tensors, options = cases.make(op, op.variants[0], optional=op.name not in cases.EXCLUSIVE)
    places = []
    for at, given in enumerate(op.variants[0].tensors):
        tensor = tensors[at]
        if given.arg in op.gradient.without:
            tensors[at] = None
        elif tensor is not None and tensor.is_floating_point() and given.arg in op.gradient.results:
            places.append(at)

    def call(*chosen: torch.Tensor) -> torch.Tensor:
        row = list(tensors)
        for at, tensor in zip(places, chosen, strict=True):
            row[at] = tensor
        found = getattr(warpsmith, op.name)(*row, **options)
        found = found if isinstance(found, tuple) else (found,)
        return torch.stack([result.float().square().sum() for result in found]).sum()

    return [tensors[at] for at in places], call


def ordinary(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients by ordinary autograd."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(call(*leaves), leaves)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_gradients(op: Op) -> None:
    inputs, call = differentiable_call(op)
    everything = tuple(range(len(inputs)))
    expected = ordinary(call, inputs)
    torch.testing.assert_close(torch.func.grad(call, argnums=everything)(*inputs), expected, rtol=0, atol=0)
    value, pullback = torch.func.vjp(call, *inputs)
    torch.testing.assert_close(pullback(torch.ones_like(value)), expected, rtol=0, atol=0)
    # A number's Jacobian is its gradient; PyTorch finds it by way of a vmap over the gradient.
    torch.testing.assert_close(torch.func.jacrev(call, argnums=everything)(*inputs), expected)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_gradients_of_each_example(op: Op) -> None:
    inputs, call = differentiable_call(op)
    many = [torch.stack([tensor * (1 + at) for at in range(SIZE)]) for tensor in inputs]
    found = torch.vmap(torch.func.grad(call, argnums=tuple(range(len(inputs)))))(*many)
    for at in range(SIZE):
        expected = ordinary(call, [tensor[at] for tensor in many])
        torch.testing.assert_close([part[at] for part in found], list(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_gradients_inside_of_gradients(op: Op) -> None:
    """The inner one is of something else: the op's gradient is the outer one's, and must not be lost."""
    inputs, call = differentiable_call(op)

    def outer(*inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda factor: call(*inputs) * factor)(torch.tensor(1.0))

    everything = tuple(range(len(inputs)))
    found = torch.func.grad(outer, argnums=everything)(*inputs)
    torch.testing.assert_close(found, ordinary(call, inputs), rtol=0, atol=0)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    torch.testing.assert_close(torch.autograd.grad(outer(*leaves), leaves), found, rtol=0, atol=0)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_batched_gradients_of_the_old_kind_are_refused(op: Op) -> None:
    inputs, call = differentiable_call(op)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    with pytest.raises(warpsmith.ArgumentError, match=r"is_grads_batched.*torch.func.jacrev"):
        torch.autograd.grad(call(*leaves), leaves, torch.tensor([1.0, -2.0]), is_grads_batched=True)


def outputs(found: Any) -> list[torch.Tensor]:
    return [result for result in (found if isinstance(found, tuple) else (found,)) if result is not None]


def copies(op: Op, variant: Variant, tensor: torch.Tensor, at: int) -> torch.Tensor:
    """The tensor of another example: other numbers where any will do."""
    if tensor.ndim == 0:
        return tensor + at
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return tensor.roll(at, -1)
    return tensor.clone()


@pytest.mark.parametrize(("op", "variant"), NEW, ids=[variant.name for _, variant in NEW])
@pytest.mark.parametrize("route", ["function", "op"])
@pytest.mark.parametrize("which", ["all", "first", "last"])
def test_vmap_is_the_loop(op: Op, variant: Variant, route: str, which: str) -> None:
    """With the mapped dimension in every tensor, or in one of them and not in front."""
    case = cases.make(op, variant, optional=op.name not in cases.EXCLUSIVE)
    present = [at for at, tensor in enumerate(case.tensors) if tensor is not None]
    mapped = {"all": present, "first": present[:1], "last": present[-1:]}[which]
    dim = 0 if which == "all" else -1
    many = {at: torch.stack([copies(op, variant, case.tensors[at], i) for i in range(SIZE)], dim=dim) for at in mapped}
    function = getattr(warpsmith if route == "function" else torch.ops.warpsmith, variant.name)

    def call(*chosen: torch.Tensor) -> list[torch.Tensor]:
        row = list(case.tensors)
        for at, tensor in zip(mapped, chosen, strict=True):
            row[at] = tensor
        return outputs(function(*row, **case.options))

    found = torch.vmap(call, in_dims=dim)(*many.values())
    for i in range(SIZE):
        expected = call(*(tensor.select(dim, i) for tensor in many.values()))
        torch.testing.assert_close([result[i] for result in found], expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("op", "variant"), IN_PLACE, ids=[variant.name for _, variant in IN_PLACE])
def test_vmap_in_place(op: Op, variant: Variant) -> None:
    case = cases.make(op, variant)
    present = [at for at, tensor in enumerate(case.tensors) if tensor is not None]
    written = [at for at in present if variant.tensors[at].written is not None]
    many = [torch.stack([copies(op, variant, case.tensors[at], i) for i in range(SIZE)]) for at in written]
    expected = [tensor.clone() for tensor in many]
    function = getattr(warpsmith, variant.name)

    def call(*chosen: torch.Tensor) -> torch.Tensor:
        row = [None if tensor is None else tensor.clone() for tensor in case.tensors]
        for at, tensor in zip(written, chosen, strict=True):
            row[at] = tensor
        function(*row, **case.options)
        return chosen[0]

    torch.vmap(call)(*many)
    for i in range(SIZE):
        call(*(tensor[i] for tensor in expected))
    torch.testing.assert_close(many, expected, rtol=0, atol=0, equal_nan=True)
    others = [at for at in present if at not in written]
    if not others:
        return

    def unmapped(other: torch.Tensor) -> Any:
        row = [other if at == others[0] else tensor for at, tensor in enumerate(case.tensors)]
        return function(*row, **case.options)

    with pytest.raises(warpsmith.UnsupportedError, match="must have the mapped dimension"):
        torch.vmap(unmapped)(torch.stack([case.tensors[others[0]]] * SIZE))


@pytest.mark.parametrize(("op", "variant"), NEW, ids=[variant.name for _, variant in NEW])
@pytest.mark.parametrize("route", ["function", "op"])
def test_forward_mode_is_refused(op: Op, variant: Variant, route: str) -> None:
    """It would be zero if it were left out."""
    tensors, options = cases.make(op, variant)
    at = next((at for at, t in enumerate(tensors) if t is not None and t.is_floating_point()), None)
    if at is None:
        pytest.skip("it has no floating inputs")
    function = getattr(warpsmith if route == "function" else torch.ops.warpsmith, variant.name)

    def call(tensor: torch.Tensor) -> list[torch.Tensor]:
        return outputs(function(*tensors[:at], tensor, *tensors[at + 1 :], **options))

    with pytest.raises(warpsmith.UnsupportedError, match="forward-mode"):
        torch.func.jvp(call, (tensors[at],), (torch.ones_like(tensors[at]),))
    with pytest.raises(warpsmith.UnsupportedError, match="forward-mode"):
        torch.func.jacfwd(call)(tensors[at])


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_second_derivatives_are_refused(op: Op) -> None:
    """In whatever way they are asked for: they would be zero if they were left out."""
    inputs, call = differentiable_call(op)
    first = torch.func.grad(call)
    with pytest.raises(warpsmith.UnsupportedError, match="backward: it has no gradient"):
        torch.func.grad(lambda x: first(x, *inputs[1:]).square().sum())(inputs[0])
    with pytest.raises(warpsmith.UnsupportedError, match="forward-mode"):
        torch.func.hessian(call)(*inputs)
    with pytest.raises(warpsmith.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: first(x, *inputs[1:]), (inputs[0],), (torch.ones_like(inputs[0]),))


def test_ops_without_a_gradient_say_so() -> None:
    with pytest.raises(warpsmith.UnsupportedError, match="merge_states: it has no gradient"):
        torch.func.grad(lambda outs: warpsmith.merge_states(outs, torch.zeros(3, 6, 4))[0].sum())(
            torch.randn(3, 6, 4, 8)
        )


def test_layers_leave_forward_mode_to_pytorch() -> None:
    x, ones = torch.randn(4, 32), torch.ones(4, 32)
    ours, theirs = warpsmith.nn.RMSNorm(32), torch.nn.RMSNorm(32)
    found = torch.func.jvp(ours, (x,), (ones,))
    torch.testing.assert_close(found, torch.func.jvp(theirs, (x,), (ones,)))
    q = torch.randn(1, 2, 5, 32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found, expected = (
            torch.func.jvp(lambda q, call=call: call(q, q, q), (q,), (torch.ones_like(q),))
            for call in (warpsmith.sdpa, torch.nn.functional.scaled_dot_product_attention)
        )
    torch.testing.assert_close(found, expected)


def test_an_empty_dimension() -> None:
    found = torch.vmap(warpsmith.rms_norm, in_dims=(0, 0))(torch.empty(0, 4, 64), torch.empty(0, 64))
    assert found.shape == (0, 4, 64)
