"""Attention with PyTorch's signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE
from torch.nn import functional as F
from warpsmith import _sdpa

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 5, 7, 32


def tensors(queries: int = QUERIES, keys: int = KEYS, kv_heads: int = HEADS, dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((HEADS, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(BATCH, heads, length, DIM).to(dtype) for heads, length in shapes]


def masks() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    seen = torch.rand(BATCH, HEADS, QUERIES, KEYS) < 0.6
    seen[..., 0] = True
    return {
        "whole": seen,
        "of_all_heads": seen[:, :1],
        "of_all": seen[0, 0],
        "of_all_queries": seen[:, :1, :1],
        "floating": torch.randn(BATCH, HEADS, QUERIES, KEYS),
        "floating_of_all": torch.randn(QUERIES, KEYS),
        "with_infinity": torch.zeros(BATCH, 1, QUERIES, KEYS).masked_fill(~seen[:, :1], float("-inf")),
    }


CALLS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (tensors(), {}),
    "scaled": (tensors(), {"scale": 0.3}),
    "causal": (tensors(6, 6), {"is_causal": True}),
    "causal_from_the_start": (tensors(4, 9), {"is_causal": True}),
    "more_queries_than_keys": (tensors(9, 4), {"is_causal": True}),
    "heads_of_20": ([t[..., :20] for t in tensors()], {}),
    "heads_of_20_causal": ([t[..., :20] for t in tensors(6, 6)], {"is_causal": True}),
    "other_heads_of_values": ([*tensors()[:2], tensors()[2][..., :24]], {}),
    "groups": (tensors(kv_heads=2), {"enable_gqa": True}),
    "groups_with_a_mask": (tensors(kv_heads=2), {"enable_gqa": True, "attn_mask": masks()["whole"]}),
    "one_head_of_keys": (tensors(kv_heads=1), {}),
    "three_dimensions": ([t[0] for t in tensors()], {}),
    "three_dimensions_and_a_mask": ([t[0] for t in tensors()], {"attn_mask": masks()["whole"][0]}),
    "three_dimensions_in_groups": ([t[0] for t in tensors(kv_heads=2)], {"enable_gqa": True}),
    "two_dimensions": ([t[0, 0] for t in tensors(6, 6)], {"is_causal": True}),
    "five_dimensions": ([torch.stack([t, t / 2, -t]) for t in tensors()], {"attn_mask": masks()["of_all_heads"]}),
    **{f"mask_{name}": (tensors(), {"attn_mask": mask}) for name, mask in masks().items()},
}


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    real = warpsmith.ops.attention
    monkeypatch.setattr(warpsmith.ops, "attention", lambda *a, **k: calls.append(None) or real(*a, **k))
    # Usual calls go straight to the kernel.
    direct = _sdpa.ATTENTION
    monkeypatch.setattr(_sdpa, "ATTENTION", lambda *a, **k: calls.append(None) or direct(*a, **k))
    return calls


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_gives_what_pytorch_gives(name: str, kernel_calls: list[None]) -> None:
    inputs, options = CALLS[name]
    wide = {
        key: value.double() if key == "attn_mask" and value.dtype != torch.bool else value
        for key, value in options.items()
    }
    expected = F.scaled_dot_product_attention(*(tensor.double() for tensor in inputs), **wide)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        found = warpsmith.sdpa(*(tensor.to(dtype) for tensor in inputs), **options)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert len(kernel_calls) == 2


@pytest.mark.parametrize(
    ("inputs", "options", "reason"),
    [
        ([t.repeat(1, 1, 1, 9) for t in tensors()], {}, "heads of 288"),
        (tensors(dtype=torch.float64), {}, "float64"),
        ([tensors()[0][:, :1], *tensors()[1:]], {}, "1 heads of queries, 4 of keys"),
        pytest.param(
            tensors(6, 6),
            {"attn_mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True},
            "is_causal with a mask",
            marks=pytest.mark.cpu,
        ),
    ],
)
def test_what_pytorch_computes_instead(
    inputs: list[Any],
    options: dict[str, Any],
    reason: str,
    kernel_calls: list[None],
) -> None:
    warpsmith._sdpa.note.cache_clear()
    with pytest.warns(warpsmith.FallbackWarning, match=reason) as said:
        results = []
        for call in (warpsmith.sdpa, F.scaled_dot_product_attention, warpsmith.sdpa):
            torch.manual_seed(2)
            results.append(call(*inputs, **options))
    torch.testing.assert_close(results[0], results[1])
    assert len(said) == 1, "said once"
    assert said[0].filename == __file__, "at the line of the caller"
    assert not kernel_calls


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (tensors(), {"attn_mask": masks()["whole"][0, 0, 0]}),
        (tensors(kv_heads=2), {}),
        (tensors(), {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
        ([tensors()[0], tensors()[1], tensors()[2].bfloat16()], {}),
    ],
    ids=["mask_of_one_dimension", "groups_not_asked_for", "mask_of_another_shape", "types"],
)
def test_wrong_calls_are_refused(inputs: list[Any], options: dict[str, Any]) -> None:
    try:
        F.scaled_dot_product_attention(*inputs, **options)
    except (RuntimeError, IndexError):
        with pytest.raises((RuntimeError, IndexError)):
            warpsmith.sdpa(*inputs, **options)
    else:
        pytest.skip("PyTorch takes it on this device")


@pytest.mark.parametrize("dimensions", [3, 4])
def test_gradients(dimensions: int) -> None:
    given = [t if dimensions == 4 else t[0] for t in tensors()]
    ours = [t.clone().requires_grad_() for t in given]
    theirs = [t.double().requires_grad_() for t in given]
    for call, inputs in ((warpsmith.sdpa, ours), (F.scaled_dot_product_attention, theirs)):
        call(*inputs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


def test_autocast() -> None:
    q, k, v = tensors()
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = warpsmith.sdpa(q, k.bfloat16(), v)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["plain", "causal", "causal_from_the_start", "mask_of_all_queries", "groups"])
def test_whole_graphs(name: str) -> None:
    inputs, options = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: warpsmith.sdpa(*args, **options), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), warpsmith.sdpa(*inputs, **options))
    # And where PyTorch computes.
    wide = [tensor.requires_grad_() for tensor in tensors(6, 6)]
    torch.testing.assert_close(compiled(*wide), warpsmith.sdpa(*wide, **options)) if name == "plain" else None


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("keys", [5, 9])
@pytest.mark.parametrize("masked", ["no", "bool", "float"])
def test_flash_attention_counts_from_the_end(gradients: bool, keys: int, masked: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 32), torch.randn(2, keys, 2, 32), torch.randn(2, keys, 2, 32)
    mask = {"no": None, "bool": torch.rand(5, keys) < 0.7, "float": torch.randn(5, keys)}[masked]
    if masked == "bool":
        mask[:, 0] = True
    seen = torch.ones(5, keys, dtype=torch.bool).tril(keys - 5)
    both = seen if mask is None else mask & seen if masked == "bool" else mask.double().masked_fill(~seen, -torch.inf)
    wide = (t.transpose(1, 2).double() for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*wide, both, enable_gqa=True).transpose(1, 2)
    found = warpsmith.nn.FlashAttention(causal=True)(q.requires_grad_(gradients), k, v, mask)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
