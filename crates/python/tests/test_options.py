"""Options and arguments as people who know PyTorch give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import warpsmith
from device import DEVICE
from torch.nn import functional as F
from warpsmith._spec import all_ops


def heads(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, device=DEVICE)
    return q, k, v


@pytest.mark.parametrize("scale", [0.0, 0, -0.0, None, 0.5, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_of_zero_is_zero(scale: float | None, dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in heads(2, 4, 6, 32))
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(warpsmith.sdpa(q, k, v, scale=scale).double(), expected, **close)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    masked = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=scale)
    torch.testing.assert_close(warpsmith.sdpa(q, k, v, mask, scale=scale).double(), masked, **close)
    torch.testing.assert_close(warpsmith.sdpa(q, k, v, is_causal=True, scale=scale).double(), masked, **close)
    rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    found = warpsmith.attention(*rows, scale=scale).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, **close)
    found = warpsmith.nn.FlashAttention(scale=scale)(*rows).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, **close)


@pytest.mark.parametrize("scale", [0.0, None])
def test_a_scale_of_zero_in_pages(scale: float | None) -> None:
    q, k, v = heads(5, 2, 32)
    layer = warpsmith.nn.PagedAttention(2, 4, 2, 32, causal=False, scale=scale, device=DEVICE)
    table, lens = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in ([[0, 1]], [5]))
    starts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    found = layer(q, k, v, torch.arange(5, device=DEVICE), table, lens, starts)
    expected = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), scale=scale)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_numbers_for_every_row() -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(3, 11), torch.ones(3)
    tensors = {"temperature": 0.7 * rows, "top_k": (4 * rows).int(), "top_p": 0.9 * rows, "min_p": 0.05 * rows}
    numbers = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05}
    seed, position = (7 * rows).long(), (3 * rows).long()
    expected = warpsmith.sample(logits, seed, position, **tensors)
    assert torch.equal(warpsmith.sample(logits, 7, 3, **numbers), expected)
    assert torch.equal(warpsmith.sample(logits, 7, 3, temperature=1), warpsmith.sample(logits, seed, position))
    # No temperature is not the default one.
    assert torch.equal(warpsmith.sample(logits, 7, 3, temperature=0).long(), logits.argmax(-1))
    compiled = torch.compile(lambda x: warpsmith.sample(x, 7, 3, **numbers), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(logits), expected)
    if DEVICE == "cpu":
        found = warpsmith.sample(logits.numpy(), 7, 3, **numbers)
        assert np.array_equal(found, expected.numpy())


def test_layer_norm_takes_its_bias_third() -> None:
    x, weight, bias = torch.randn(4, 64), torch.randn(64), torch.randn(64)
    expected = F.layer_norm(x, (64,), weight, bias)
    torch.testing.assert_close(warpsmith.layer_norm(x, weight, bias), expected)
    torch.testing.assert_close(torch.ops.warpsmith.layer_norm(x, weight, bias)[0], expected)
    out, total = warpsmith.layer_norm(x, weight, bias, x)
    torch.testing.assert_close(out, F.layer_norm(2 * x, (64,), weight, bias))
    torch.testing.assert_close(total, 2 * x)
    # One row could be taken for a bias; its rank says what it is.
    with pytest.raises(warpsmith.ArgumentError, match="`residual`"):
        warpsmith.layer_norm(x, weight, None, bias)
    with pytest.raises(warpsmith.ArgumentError, match="`bias`"):
        warpsmith.layer_norm(x, weight, x)


@pytest.mark.parametrize(("q", "k", "v"), [(3, 1, 1), (1, 3, 3), (3, 3, 1), (3, 1, 3), (1, 1, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_batches_broadcast(q: int, k: int, v: int, masked: bool) -> None:
    query, key, value = torch.randn(q, 2, 5, 32), torch.randn(k, 2, 7, 32), torch.randn(v, 2, 7, 32)
    mask = torch.rand(max(q, k), 1, 5, 7) < 0.8 if masked else None
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask)
    found = warpsmith.sdpa(query, key, value, mask)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_batches_that_do_not_broadcast_are_refused() -> None:
    query, key = torch.randn(3, 2, 5, 32), torch.randn(2, 2, 7, 32)
    with pytest.raises(RuntimeError, match=r"size of tensor|expand|must match"):
        warpsmith.sdpa(query, key, key)


@pytest.mark.cpu
def test_threads_are_those_of_pytorch(run_python: Any) -> None:
    program = """
        import os, time, torch, warpsmith
        def threads():
            return len(os.listdir("/proc/self/task"))
        torch.set_num_threads({threads})
        x, w = torch.randn(512, 512), torch.randn(512, 512)
        before = threads()
        warpsmith.linear(x, w)
        print(threads() - before)
    """
    assert int(run_python(program.format(threads=1))) == 0
    assert int(run_python(program.format(threads=2))) == 1
    # The library's own setting comes first.
    assert int(run_python(program.format(threads=3), WARPSMITH_NUM_THREADS="1")) == 0
    assert int(run_python(program.format(threads=1), WARPSMITH_NUM_THREADS="4")) == 3


#: What PyTorch computes, and what this library does. The first tensor has rows, the second is a parameter.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (lambda x, w: F.linear(x, w[None]), lambda x, w: warpsmith.linear(x, w[None])),
    "softmax": (lambda x, w: F.softmax(x, -1), lambda x, w: warpsmith.softmax(x)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (32,), w, w), lambda x, w: warpsmith.layer_norm(x, w, w)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w), lambda x, w: warpsmith.rms_norm(x, w)),
    "activation": (lambda x, w: F.gelu(x), lambda x, w: warpsmith.activation(x)),
    "embedding": (lambda x, w: F.embedding(INDICES, x), lambda x, w: warpsmith.embedding(x, INDICES)),
    "mul_add": (
        lambda x, w: torch.addcmul(w.expand_as(x), x, x),
        lambda x, w: warpsmith.mul_add(x, x, w.expand_as(x)),
    ),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], w.expand_as(x)[None, None]),
        lambda x, w: warpsmith.sdpa(x[None, None], x[None, None], w.expand_as(x)[None, None]),
    ),
}
INDICES = torch.tensor([0, 1])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_types_are_those_of_pytorch(
    name: str, rows: torch.dtype, parameters: torch.dtype, low: torch.dtype
) -> None:
    assert name in all_ops()
    theirs, ours = PAIRS[name]
    x, w = torch.randn(4, 32).to(rows), torch.randn(32).to(parameters)
    with torch.autocast(DEVICE, dtype=low):
        try:
            expected = theirs(x, w)
        except RuntimeError:
            pytest.skip("PyTorch has no kernel for these types")
        found = ours(x, w)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-2, atol=2e-2)
