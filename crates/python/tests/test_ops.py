"""Every op as PyTorch's own."""

from __future__ import annotations

import cases
import formulas
import pytest
import torch
import warpsmith
from warpsmith._spec import Op, Variant, all_ops

torch.set_num_threads(1)
DIFFERENTIABLE = [op for op in all_ops().values() if op.gradient is not None]


def public(variant: Variant):
    return getattr(torch.ops.warpsmith, variant.name).default


@pytest.mark.parametrize(("op", "variant"), cases.ALL, ids=cases.IDS)
@pytest.mark.parametrize("optional", [False, True], ids=["least", "most"])
def test_opcheck(op: Op, variant: Variant, optional: bool) -> None:
    if optional and op.name in cases.EXCLUSIVE:
        pytest.skip("not all of its optional arguments go together")
    tensors, options = cases.make(op, variant, optional=optional)
    if op.gradient is not None and not variant.is_mutating:
        for given, tensor in zip(variant.tensors, tensors, strict=True):
            if tensor is not None and given.arg in op.gradient.results:
                tensor.requires_grad_()
    torch.library.opcheck(public(variant), tuple(tensors), options)


@pytest.mark.parametrize(("op", "variant"), cases.ALL, ids=cases.IDS)
def test_the_raw_op_is_checked_too(op: Op, variant: Variant) -> None:
    tensors, options = cases.make(op, variant)
    row = [attr.choices.index(options[attr.name]) if attr.kind == "choice" else options[attr.name] for attr in op.attrs]
    switches = [options[switch] for switch in variant.wanted.values()]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    raw = getattr(torch.ops._warpsmith, variant.name).default
    torch.library.opcheck(raw, (*tensors, *row, *switches), test_utils=tests)


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
@pytest.mark.parametrize("optional", [False, True], ids=["least", "most"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_values_are_those_of_the_formula(op: Op, dtype: str, optional: bool) -> None:
    if optional and op.name == "attention":
        pytest.skip("not all of its optional arguments go together")
    case = cases.with_gradient(op, optional=optional, dtype=dtype)
    # The formulas of gradients that a forward call returns differentiate.
    wide = {
        name: value.double().requires_grad_() if value.is_floating_point() else value
        for name, value in case.named().items()
        if value is not None
    }
    expected = getattr(formulas, op.name)(**wide, **case.options)
    found = getattr(warpsmith, op.name)(*case.tensors, **case.options)
    cases.assert_all_close(found, expected, 1e-5 if dtype == "f32" else 2e-2)


@pytest.mark.parametrize(("op", "variant"), cases.ALL, ids=cases.IDS)
def test_functions_public_and_raw_ops_agree(op: Op, variant: Variant) -> None:
    case = cases.make(op, variant, optional=op.name not in cases.EXCLUSIVE)
    results = []
    for call in (getattr(warpsmith, variant.name), public(variant)):
        tensors = [None if tensor is None else tensor.clone() for tensor in case.tensors]
        found = call(*tensors, **case.options)
        found = found if isinstance(found, tuple) else (found,)
        results.append([*(t for t in found if t is not None), *(t for t in tensors if t is not None)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)


def test_in_place_gives_what_new_gives() -> None:
    x, weight, residual = torch.randn(4, 64), torch.randn(64), torch.randn(4, 64)
    out, total = warpsmith.rms_norm(x, weight, residual)
    before = x._version, residual._version
    assert warpsmith.rms_norm_(x, weight=weight, residual=residual) is None
    assert torch.equal(x, out) and torch.equal(residual, total)
    assert x._version > before[0] and residual._version > before[1]


def test_autograd_refuses_what_was_overwritten() -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64)
    hidden = x * 2
    out = warpsmith.rms_norm(hidden, weight)
    with torch.no_grad():
        warpsmith.rms_norm_(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    hidden = x * 2
    out = warpsmith.rms_norm(hidden, weight)
    with torch.no_grad():
        torch.ops.warpsmith.rms_norm_(hidden)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_strided_inputs_and_empty_ones() -> None:
    x = torch.randn(64, 6).t()
    expected = formulas.rms_norm(x.double())
    torch.testing.assert_close(warpsmith.rms_norm(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert warpsmith.rms_norm(torch.empty(0, 64)).shape == (0, 64)
    assert warpsmith.rms_norm(torch.randn(2, 4, 64)[:, ::2]).is_contiguous()


def test_library_route_gives_the_same(run_python) -> None:
    run_python(
        """
        import torch, warpsmith
        assert not warpsmith.ops._torch.native
        x, w = torch.randn(4, 64, requires_grad=True), torch.randn(64)
        out = warpsmith.rms_norm(x, w)
        out.sum().backward()
        torch.testing.assert_close(out, torch.rms_norm(x, (64,), w, 1e-6))
        assert torch.equal(warpsmith.activation(x, kind="silu"), torch.ops.warpsmith.activation(x, kind="silu"))
        torch.library.opcheck(torch.ops.warpsmith.kv_copy.default, (torch.tensor([[0, 1]]), torch.randn(4, 2, 2, 8)))
        """,
        WARPSMITH_TORCH_KERNELS="python",
    )
