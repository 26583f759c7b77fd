"""Gradients of calls that are made of parts for it, against PyTorch's in f64: gated and batched products, quantised
weights, casts, copies, and heads that are normalised and rotated. By ordinary autograd, and under ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import formulas
import pytest
import torch
import warpsmith
from cases import q8_0
from device import generator

ROWS, K, N = 5, 12, 8

Call = Callable[..., torch.Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def number(call: Call) -> Call:
    """A number that follows from all elements of a result, each with its own weight, and not linearly."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        out = call(*tensors)
        factor = torch.arange(out.numel(), device=out.device).sin().view(out.shape).to(out.dtype)
        return (out * factor + 0.1 * out.square()).to(torch.promote_types(out.dtype, torch.float32)).sum()

    return run


def judge(ours: Call, formula: Call, inputs: list[torch.Tensor], tolerance: float = 1e-4) -> None:
    """Gradients by autograd, ``grad``, ``jacrev`` and ``vmap`` of ``grad``."""
    everything = tuple(range(len(inputs)))
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(number(formula)(*wide), wide)

    def close(found: Any, expected: Any) -> None:
        for one, other, given in zip(found, expected, inputs, strict=True):
            assert one.dtype == given.dtype
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)

    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    close(torch.autograd.grad(number(ours)(*leaves), leaves), expected)
    close(torch.func.grad(number(ours), argnums=everything)(*inputs), expected)
    # Every element of the result has a row in the Jacobian: the pullback under vmap.
    close_to = torch.func.jacrev(formula, argnums=everything)(*(tensor.detach() for tensor in wide))
    close(torch.func.jacrev(ours, argnums=everything)(*inputs), close_to)
    many = [torch.stack([tensor, 0.5 * tensor]) for tensor in inputs]
    found = torch.vmap(torch.func.grad(number(ours), argnums=everything))(*many)
    for at in range(2):
        wide = [tensor[at].double().requires_grad_() for tensor in many]
        close([part[at] for part in found], torch.autograd.grad(number(formula)(*wide), wide))


@pytest.mark.parametrize("batched", [False, True], ids=["one_matrix", "batched"])
@pytest.mark.parametrize("act", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("gate", ["none", "halves", "interleaved"])
def test_products(gate: str, act: str, batched: bool) -> None:
    if gate == act == "none" and not batched:
        pytest.skip("the op's own gradient")
    lead = [2] if batched else []
    rows = N if gate == "none" else 2 * N
    inputs = [random(2, ROWS, K), random(*lead, rows, K, seed=1) / 3, random(rows, seed=2), random(2, ROWS, N, seed=3)]
    options = {"act": act, "gate": gate, "scale": 0.75}
    judge(
        lambda *tensors: warpsmith.linear(*tensors, **options),
        lambda *tensors: formulas.linear(*tensors, **options),
        inputs,
    )


@pytest.mark.parametrize("call", [warpsmith.linear, torch.ops.warpsmith.linear], ids=["function", "op"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_half_precision(call: Any, dtype: torch.dtype) -> None:
    inputs = [random(64, 96, dtype=dtype), random(128, 96, dtype=dtype, seed=1) / 8]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    plain = [tensor.clone().requires_grad_() for tensor in inputs]
    dout = random(64, 64, dtype=dtype, seed=4)
    call(*leaves, act="silu", gate="halves").backward(dout)
    formulas.linear(*wide, act="silu", gate="halves").backward(dout.double())
    formulas.linear(*plain, act="silu", gate="halves").backward(dout)
    for one, other, theirs in zip(leaves, wide, plain, strict=True):
        error, naive = (grad.double() - other.grad for grad in (one.grad, theirs.grad))
        assert error.norm() <= 1.25 * naive.norm()


def test_only_what_is_needed_is_computed() -> None:
    x, w = random(2, ROWS, K), random(2, N, K, seed=1).requires_grad_()
    warpsmith.linear(x, w).sum().backward()
    torch.testing.assert_close(w.grad, x.sum(1, keepdim=True).expand(2, N, K))
    y = x.clone().requires_grad_()
    warpsmith.linear(y, w.detach()).sum().backward()
    torch.testing.assert_close(y.grad, w.detach().sum(1, keepdim=True).expand(2, ROWS, K))


def test_gradients_of_gradients_of_batched_products() -> None:
    x, w = random(2, 3, 4).double(), random(2, 5, 4, seed=1).double()

    def twice(call: Call, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        first = torch.autograd.grad(number(call)(*leaves), leaves, create_graph=True)
        return list(torch.autograd.grad(sum((grad.square().sum() for grad in first), torch.zeros(())), leaves))

    found, expected = twice(warpsmith.linear, x.float(), w.float()), twice(formulas.linear, x, w)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("scaled", ["no", "tensor", "rows"])
def test_casts(scaled: str, inverse: bool) -> None:
    if inverse and scaled == "no":
        pytest.skip("there is nothing to divide by")
    x = random(ROWS, K).bfloat16().float()
    scale = {"no": None, "tensor": torch.tensor([0.5]), "rows": torch.tensor([0.5, 2.0, 4.0, 1.0, 0.25])}[scaled]
    factor = 1.0 if scale is None else scale[:, None].double() if scaled == "rows" else scale.double()

    def formula(x: torch.Tensor) -> torch.Tensor:
        return x / factor if inverse else x * factor

    # Powers of two are exact in every type.
    judge(lambda x: warpsmith.cast(x, scale, to="bf16", inverse=inverse).float(), formula, [x], 2**-6)
    judge(lambda x: warpsmith.cast(x, scale, to="f32", inverse=inverse), formula, [x])
    half = x.to(torch.bfloat16).requires_grad_()
    dout = random(ROWS, K, seed=5)
    warpsmith.cast(half, scale, to="f32", inverse=inverse).backward(dout)
    assert half.grad is not None and half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.grad, formula(dout.double()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("order", ["kept", "swapped"])
def test_copies(order: str) -> None:
    inputs = [random(2, ROWS, K).transpose(0, 1)]
    judge(
        lambda x: warpsmith.copy(x, order=order),
        lambda x: x.mT.contiguous() if order == "swapped" else x.clone(),
        inputs,
    )


@pytest.mark.parametrize("act", ["none", "silu"])
@pytest.mark.parametrize("gate", ["none", "halves", "interleaved"])
def test_quantised_weights(gate: str, act: str) -> None:
    weights = torch.randint(-8, 8, (16, 2, 32), generator=generator(1))
    packed = q8_0(weights / 1)
    dense = weights.flatten(1).double()
    # Rows of multiples of 1/127: their rounding to 8 bits changes nothing.
    x = torch.randint(-127, 128, (3, 64), generator=generator(2)).float()
    x[:, 0], x[:, 32] = 127, -127
    columns = 16 if gate == "none" else 8
    bias, residual = random(16, seed=3), random(3, columns, seed=4)
    options = {"act": act, "gate": gate, "scale": 0.5}

    def ours(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return warpsmith.linear_quant(x / 127, packed, bias, residual, format="q8_0", **options)

    def formula(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return formulas.linear(x / 127, dense, bias, residual, **options)

    judge(ours, formula, [x, bias, residual], 1e-3)


@pytest.mark.parametrize(
    ("form", "block", "size"),
    [
        ("q8_0", 32, 34),
        ("q4_0", 32, 18),
        ("q4_1", 32, 20),
        ("q5_0", 32, 22),
        ("q5_1", 32, 24),
        ("q4_k", 256, 144),
        ("q5_k", 256, 176),
        ("q6_k", 256, 210),
    ],
)
def test_formats_of_quantised_weights(form: Any, block: int, size: int) -> None:
    """Any bytes whose scales are ordinary numbers: 0x2c2c is 0.0652 in f16, 44 as a scale of 8 bits."""
    k = 1280
    chosen = torch.randint(0, 256, (6, k // block, size), generator=generator(1), dtype=torch.uint8)
    if form == "q6_k":
        chosen[..., -2:] = 0x2C
    else:
        chosen[..., :4] = 0x2C
    w = chosen.flatten(1)
    # Only the CPU has the full precision.
    unit = torch.eye(k, device="cpu")
    dense = warpsmith.linear_quant(unit, w.cpu(), format=form, precision="full").mT.double().to(w.device)
    assert dense.isfinite().all() and dense.abs().max() > 0.5
    x, dout = random(4, k).requires_grad_(), random(4, 6, seed=2)
    warpsmith.linear_quant(x, w, format=form).backward(dout)
    torch.testing.assert_close(x.grad.double(), dout.double() @ dense, rtol=1e-4, atol=1e-5 * dense.abs().max().item())
    half = x.detach().bfloat16().requires_grad_()
    warpsmith.linear_quant(half, w, format=form).backward(dout.bfloat16())
    largest = dense.abs().max().item()
    torch.testing.assert_close(half.grad.double(), dout.double() @ dense, rtol=0.02, atol=0.02 * largest)


def test_what_has_no_gradient_says_so() -> None:
    x = random(4, 128).requires_grad_()
    scale = torch.tensor([2.0], requires_grad=True)
    for call in (
        lambda: warpsmith.cast(x, scale).float(),
        lambda: warpsmith.cast(x, to="f8e4m3").float(),
    ):
        with pytest.raises(warpsmith.UnsupportedError, match="cast: it has no gradient"):
            call().sum().backward()
    small = warpsmith.linear(x.to(torch.float8_e4m3fn), random(8, 128).to(torch.float8_e4m3fn))
    with pytest.raises(warpsmith.ArgumentError, match="argument `x`: expected dtype f32 or f16 or bf16, got f8e4m3"):
        small.float().sum().backward()


def test_compiled() -> None:
    w, x = random(2 * N, K, seed=1), random(ROWS, K)
    leaves = [(x.clone().requires_grad_(), w.clone().requires_grad_()) for _ in range(2)]

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gated = warpsmith.linear(x, w, act="silu", gate="halves")
        return warpsmith.linear(gated[None], gated[None]).square().sum()

    torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves[0]).backward()
    call(*leaves[1]).backward()
    for one, other in zip(*leaves, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("tables", [False, True], ids=["angles", "tables"])
def test_heads(tables: bool) -> None:
    q, k = random(3, 2, 8), random(3, 1, 8, seed=1)
    weights = [random(8, seed=seed) for seed in (2, 3)]
    positions = torch.tensor([5, 0, 2])
    angles = torch.outer(torch.arange(6), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    places = (positions, angles.cos(), angles.sin()) if tables else (positions,)

    def joined(call: Call) -> Call:
        def run(*tensors: torch.Tensor) -> torch.Tensor:
            wide = (positions, *(table.to(tensors[0].dtype) for table in places[1:]))
            return torch.cat(call(*tensors, *wide, eps=1e-5), 1)

        return run

    judge(joined(warpsmith.qk_norm_rope), joined(formulas.qk_norm_rope), [q, k, *weights])


def test_heads_may_have_wider_weights() -> None:
    q, k = (random(4, heads, 16, dtype=torch.bfloat16, seed=heads).requires_grad_() for heads in (3, 1))
    weights = [random(16, seed=seed).requires_grad_() for seed in (2, 3)]
    positions = torch.arange(4)
    found = warpsmith.qk_norm_rope(q, k, *weights, positions)
    assert all(heads.dtype == torch.bfloat16 for heads in found)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, *weights)]
    expected = formulas.qk_norm_rope(*leaves, positions, eps=1e-6)
    torch.stack([heads.float().square().mean() for heads in found]).sum().backward()
    torch.stack([heads.square().mean() for heads in expected]).sum().backward()
    for tensor, leaf in zip((q, k, *weights), leaves, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype
        torch.testing.assert_close(tensor.grad.double(), leaf.grad, rtol=2e-2, atol=2e-3)


def test_heads_need_no_gradient_of_all() -> None:
    q, k, weight = random(4, 3, 16), random(4, 1, 16), random(16).requires_grad_()
    q_out, k_out = warpsmith.qk_norm_rope(q, k, weight, weight.detach(), torch.arange(4))
    (q_out.square().sum() + k_out.sum()).backward()
    assert q.grad is None and k.grad is None and weight.grad is not None
    cos = torch.rand(16, 8, requires_grad=True)
    with pytest.raises(warpsmith.UnsupportedError, match="qk_norm_rope: it has no gradient"):
        warpsmith.qk_norm_rope(q, k, weight, weight, torch.arange(4), cos, cos.detach())[0].sum().backward()
