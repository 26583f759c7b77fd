"""Attention with flash-attn's signatures, against its definition in f64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import warpsmith
from device import DEVICE, generator

HEADS, KV_HEADS = 4, 2


def tensors(q_len: int = 7, kv_len: int = 9, dim: int = 32, batch: int = 2) -> list[torch.Tensor]:
    shapes = ((q_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    random = generator(5)
    return [torch.randn(batch, length, heads, dim, generator=random) for length, heads in shapes]


def defined(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithms of sums, as flash-attn documents them."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    q_len, kv_len = scores.shape[-2:]
    place, keys = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    place, keys = place.to(q.device), keys.to(q.device)
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().reshape(-1, q.shape[1], 1, 1)
        scores = scores - slopes * (place - keys).abs()
    left, right = window_size
    if causal:
        right = 0
    if left >= 0:
        scores = scores.masked_fill(keys < place - left, float("-inf"))
    if right >= 0:
        scores = scores.masked_fill(keys > place + right, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(lse[..., None].isinf(), 0.0, (scores - lse[..., None]).exp())
    return (weights @ v).transpose(1, 2), lse


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 0)},
    "window_of_both_sides": {"window_size": (2, 1)},
    "own_key": {"window_size": (0, 0)},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": (-1, 2)},
    "causal_window": {"causal": True, "window_size": (4, -1)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi_of_requests": {"alibi_slopes": torch.rand(2, HEADS), "causal": True},
}


@pytest.mark.parametrize("lengths", [(7, 9), (9, 9), (9, 7)], ids=["7_9", "9_9", "9_7"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, lengths: tuple[int, int]) -> None:
    options = OPTIONS[name]
    ours, theirs = tensors(*lengths), [tensor.double() for tensor in tensors(*lengths)]
    for inputs in (ours, theirs):
        for tensor in inputs:
            tensor.requires_grad_()
    found, lse, none = warpsmith.flash_attn_func(*ours, **options, return_attn_probs=True)
    expected, expected_lse = defined(*theirs, **options)
    assert none is None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-5)
    weight = torch.randn(found.shape, generator=generator(6))
    (found * weight).sum().backward()
    (expected * weight).nan_to_num().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad.nan_to_num(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dim", [8, 40, 72, 112, 256])
def test_sizes_of_heads(dim: int) -> None:
    inputs = tensors(dim=dim)
    torch.testing.assert_close(warpsmith.flash_attn_func(*inputs).double(), defined(*inputs)[0], rtol=1e-4, atol=1e-5)


def test_packed_inputs() -> None:
    qkv = torch.randn(2, 6, 3, HEADS, 32, generator=generator(7))
    expected = warpsmith.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(warpsmith.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(warpsmith.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (3, 0)}, {"softcap": 3.0}])
@pytest.mark.parametrize("dim", [32, 24])
def test_requests_of_different_lengths(options: dict[str, Any], dim: int) -> None:
    q_lens, kv_lens = (3, 0, 6, 1), (5, 2, 6, 4)
    q, k, v = (t[0].requires_grad_() for t in tensors(sum(q_lens), sum(kv_lens), dim, batch=1))
    starts = [
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
        for lengths in (q_lens, kv_lens)
    ]
    found, lse, _ = warpsmith.flash_attn_varlen_func(q, k, v, *starts, 6, 6, return_attn_probs=True, **options)
    assert lse.shape == (HEADS, sum(q_lens))
    found.square().sum().backward()
    grads = [tensor.grad.clone() for tensor in (q, k, v)]
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    parts = [tensor.split(lengths) for tensor, lengths in zip(wide, (q_lens, kv_lens, kv_lens), strict=True)]
    whole = torch.cat([defined(a[None], b[None], c[None], **options)[0][0] for a, b, c in zip(*parts, strict=True)])
    torch.testing.assert_close(found.double(), whole, rtol=1e-4, atol=1e-5)
    whole.square().sum().backward()
    for one, other in zip(grads, wide, strict=True):
        torch.testing.assert_close(one.double(), other.grad, rtol=1e-3, atol=1e-4)


def test_dropout_is_pytorchs_choice_of_a_seed() -> None:
    q_lens, kv_lens = (3, 5), (6, 8)
    q, k, v = tensors(sum(q_lens), sum(kv_lens), batch=1)
    starts = [torch.tensor([0, a, a + b], dtype=torch.int32, device=DEVICE) for a, b in (q_lens, kv_lens)]

    def packed(first: int) -> torch.Tensor:
        torch.manual_seed(first)
        return warpsmith.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 5, 8, dropout_p=0.5, softcap=2.0)

    found = packed(1)
    assert torch.equal(packed(1), found)
    assert not torch.equal(packed(2), found)
    # A request of a batch drops what a packed one does.
    torch.manual_seed(1)
    alone = warpsmith.flash_attn_func(q[:, :3], k[:, :6], v[:, :6], dropout_p=0.5, softcap=2.0)
    torch.testing.assert_close(alone[0], found[:3])
    assert (alone - warpsmith.flash_attn_func(q[:, :3], k[:, :6], v[:, :6], softcap=2.0)).abs().max() > 0.1
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(warpsmith.ArgumentError, match="dropout_p"):
            warpsmith.flash_attn_func(q, k, v, dropout_p=share)


@pytest.mark.parametrize("window", [(1,), 3, (-2, 0), (1.5, 0), (True, 0), None])
def test_windows_that_are_none(window: Any) -> None:
    with pytest.raises(warpsmith.ArgumentError, match="window_size"):
        warpsmith.flash_attn_func(*tensors(), window_size=window)


@pytest.mark.parametrize("options", [{"window_size": (2, 2)}, {"alibi_slopes": torch.ones(4)}, {"block_table": 1}])
def test_what_packed_requests_lack(options: dict[str, Any]) -> None:
    starts = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    q, k, v = (tensor[0] for tensor in tensors(7, 7, batch=1))
    with pytest.raises(warpsmith.UnsupportedError, match=next(iter(options))):
        warpsmith.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, **options)
