"""Gradients against those of formulas in f64."""

from __future__ import annotations

from typing import Any

import cases
import formulas
import pytest
import torch
import warpsmith
from warpsmith._spec import Op, all_ops

DIFFERENTIABLE = [op for op in all_ops().values() if op.gradient is not None]


def variations(op: Op) -> list[dict[str, Any]]:
    """Options: the defaults, and each choice of the functions."""
    found: list[dict[str, Any]] = [{}]
    for attr in op.attrs:
        if attr.name in ("kind", "act", "approximate"):
            found += [{attr.name: choice} for choice in attr.choices[1:]]
        if attr.name == "scale" and op.name in ("softmax", "linear"):
            found.append({"scale": 0.5})
    if op.name in ("cross_entropy", "linear_cross_entropy"):
        reductions = next(attr.choices for attr in op.attrs if attr.name == "reduction")
        found += [{"reduction": choice} for choice in reductions[1:]]
        found += [{"softcap": 2.0}, {"label_smoothing": 0.2}, {"z_loss": 0.05}, {"ignore_index": 0}]
        found.append({"softcap": 2.0, "label_smoothing": 0.2, "z_loss": 0.05, "reduction": "sum"})
    if op.name == "kl_div":
        found += [{"reduction": "sum"}, {"reduction": "none"}, {"temperature": 2.5}, {"direction": "reverse"}]
        found.append({"ignore_index": 0, "temperature": 0.5, "direction": "reverse", "reduction": "sum"})
    return found


CALLS = [
    pytest.param(op, options, optional, id=f"{op.name}-{options}-{'most' if optional else 'least'}")
    for op in DIFFERENTIABLE
    for options in variations(op)
    for optional in (False, True)
    # What goes together of attention has a test of its own.
    if not (optional and op.name == "attention")
]


@pytest.mark.parametrize(("op", "options", "optional"), CALLS)
@pytest.mark.parametrize("route", ["function", "op"])
def test_gradient(op: Op, options: dict[str, Any], optional: bool, route: str) -> None:
    assert op.gradient is not None
    variant = op.variants[0]
    case = cases.with_gradient(op, optional=optional)
    tensors = case.tensors
    settings = case.options | options
    wide: list[Any] = []
    for given, tensor in zip(variant.tensors, tensors, strict=True):
        copy = tensor
        if tensor is not None and tensor.is_floating_point():
            copy = tensor.double()
            if given.arg in op.gradient.results:
                tensor.requires_grad_()
                copy.requires_grad_()
        wide.append(copy)
    call = getattr(warpsmith if route == "function" else torch.ops.warpsmith, op.name)
    judged = dict(zip((op.args[given.arg].name for given in variant.tensors), wide, strict=True))
    judged = {name: value for name, value in judged.items() if value is not None}
    found, expected = call(*tensors, **settings), getattr(formulas, op.name)(**judged, **settings)
    cases.assert_all_close(found, expected, 1e-5)
    loss, wide_loss = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for one, other in zip(cases.returned(found), cases.returned(expected), strict=True):
        assert one.requires_grad == other.requires_grad
        if one.requires_grad:
            factor = torch.randn(other.shape, dtype=torch.float64)
            loss, wide_loss = loss + (one * factor.float()).sum(), wide_loss + (other * factor).sum()
    loss.backward()
    wide_loss.backward()
    compared = 0
    for tensor, copy in zip(tensors, wide, strict=True):
        if tensor is not None and tensor.requires_grad:
            torch.testing.assert_close(tensor.grad.double(), copy.grad, rtol=2e-4, atol=2e-4)
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_second_derivatives_are_refused(op: Op) -> None:
    assert op.gradient is not None
    variant = op.variants[0]
    tensors, options = cases.make(op, variant)
    with_gradient = (
        tensor
        for given, tensor in zip(variant.tensors, tensors, strict=True)
        if tensor is not None and given.arg in op.gradient.results
    )
    given = [tensor.requires_grad_() for tensor in with_gradient]
    out = getattr(warpsmith, op.name)(*tensors, **options)
    out = out[0] if isinstance(out, tuple) else out
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    with pytest.raises(warpsmith.UnsupportedError, match="has no gradient"):
        sum(grad.square().sum() for grad in first).backward()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": 3, "softcap": 4.0, "scale": 0.4},
        {"causal": True, "window": 2},
        {"dropout": 0.4, "seed": -3, "offset": 2},
        {"dropout": 0.4, "seed": 7, "causal": True, "window": 4, "softcap": 4.0},
    ],
    ids=["causal", "window", "both", "dropout", "dropout_and_others"],
)
def test_attention(options: dict[str, Any], return_lse: bool) -> None:
    torch.manual_seed(0)
    inputs = {
        "q": torch.randn(2, 5, 4, 32),
        "k": torch.randn(2, 9, 2, 32),
        "v": torch.randn(2, 9, 2, 32),
        "bias": torch.randn(1, 4, 5, 9),
        "sinks": torch.randn(4),
    }
    mask = torch.rand(2, 1, 5, 9) < 0.8
    wide = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    found = warpsmith.attention(**inputs, mask=mask, **options, return_lse=return_lse)
    expected = formulas.attention(**wide, mask=mask, **options, return_lse=return_lse)
    for results in (found, expected):
        torch.manual_seed(1)
        results = results if return_lse else (results,)
        torch.stack([(one * torch.randn(one.shape)).sum() for one in results]).sum().backward()
    for name, tensor in inputs.items():
        torch.testing.assert_close(tensor.grad.double(), wide[name].grad, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("route", ["function", "op"])
def test_ops_without_a_gradient_say_so(route: str) -> None:
    q = torch.randn(3, 4, 32, requires_grad=True)
    cache, table, lens = torch.randn(2, 4, 2, 32), torch.zeros(3, 1, dtype=torch.int32), torch.full((3,), 4)
    call = warpsmith.paged_attention if route == "function" else torch.ops.warpsmith.paged_attention
    out = call(q, cache, cache, table, lens.int())
    with pytest.raises(warpsmith.UnsupportedError, match="paged_attention: it has no gradient"):
        (out if route == "function" else out[0]).sum().backward()
    with pytest.raises(warpsmith.UnsupportedError, match="in place"):
        warpsmith.rms_norm_(torch.randn(4, 64, requires_grad=True) * 2)


def test_what_has_no_gradient_names_the_reason() -> None:
    x, w = (torch.randn(4, 8).to(torch.float8_e4m3fn) for _ in range(2))
    out = warpsmith.linear(x.requires_grad_(), w, x_scale=torch.ones(1), w_scale=torch.ones(1))
    with pytest.raises(warpsmith.UnsupportedError, match="it has no gradient with `x_scale`"):
        out.float().sum().backward()


def test_only_what_is_needed_is_computed() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64, requires_grad=True)
    warpsmith.rms_norm(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    x.requires_grad_()
    warpsmith.rms_norm(x, weight.detach()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("route", ["function", "op"])
def test_gradients_of_a_head_take_no_memory_beside_their_sums(route: str) -> None:
    """The forward call has made them but for a factor. Where nobody else needs that, it is multiplied in place."""
    call = warpsmith.linear_cross_entropy if route == "function" else torch.ops.warpsmith.linear_cross_entropy
    targets = torch.tensor([3, 0, -100, 6])
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)

    def loss(**options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], set[int]]:
        found = call(x, w, targets, **options)
        found = found if isinstance(found, tuple) else (found,)
        saved = {tensor.data_ptr() for tensor in found[0].grad_fn.saved_tensors if tensor is not None}
        return found[0], tuple(one for one in found[1:] if one is not None), saved

    def places(grads: tuple[torch.Tensor, ...], saved: set[int]) -> list[bool]:
        return [grad.data_ptr() in saved for grad in grads]

    first, _, saved = loss()
    expected = torch.autograd.grad(2 * first, (x, w), retain_graph=True)
    again = torch.autograd.grad(2 * first, (x, w), retain_graph=True)
    assert places(expected, saved) == places(again, saved) == [False, False], "the graph is kept"
    last = torch.autograd.grad(2 * first, (x, w))
    assert places(last, saved) == [True, True]
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    torch.testing.assert_close(last, expected, rtol=0, atol=0)
    # What the caller has too.
    first, others, saved = loss(return_dx=True, return_dw=True)
    copies = [other.clone() for other in others]
    found = torch.autograd.grad(2 * first, (x, w))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert places(found, saved) == [False, False]
    torch.testing.assert_close(list(others), copies, rtol=0, atol=0)
    # A head that is frozen.
    w.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(2 * loss()[0], x)[0], expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("call", [warpsmith.rms_norm, torch.ops.warpsmith.rms_norm], ids=["function", "op"])
def test_forward_mode_is_refused(call: Any) -> None:
    x = torch.randn(4, 64)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: call(x), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward-mode"):
            call(dual)


def test_transforms_that_do_not_work_do_not_lie() -> None:
    x = torch.randn(4, 64)
    try:
        found = torch.func.grad(lambda x: warpsmith.rms_norm(x).sum())(x)
    except RuntimeError:
        return
    wide = x.double().requires_grad_()
    formulas.rms_norm(wide).sum().backward()
    torch.testing.assert_close(found.double(), wide.grad, rtol=1e-4, atol=1e-4)


def test_inputs_without_a_gradient_say_so() -> None:
    student, teacher = torch.randn(3, 11), torch.randn(3, 11, requires_grad=True)
    with pytest.raises(warpsmith.UnsupportedError, match="kl_div: it has no gradient with respect to `teacher`"):
        warpsmith.kl_div(student, teacher).backward()
    cos = torch.rand(16, 4, requires_grad=True)
    out = warpsmith.rope(torch.randn(6, 2, 8), torch.arange(6), cos, cos.detach())
    with pytest.raises(warpsmith.UnsupportedError, match="with respect to `cos`"):
        out.sum().backward()
