"""Dropout of attention: which probabilities are dropped, and by whose seed."""

from __future__ import annotations

import warnings
from typing import Any

import formulas
import pytest
import torch
import warpsmith
from device import DEVICE
from torch.utils.checkpoint import checkpoint


def heads(length: int = 40, keys: int = 70, kv_heads: int = 2, dtype: Any = torch.float32) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = ((4, length), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, n, length, 32, generator=random, device="cpu").to(DEVICE, dtype) for n, length in shapes]


def seeded(seed: int, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    return warpsmith.sdpa(*tensors, enable_gqa=True, **options)


@pytest.fixture(autouse=True)
def no_fallback() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", warpsmith.FallbackWarning)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_those_of_the_definition(dtype: torch.dtype) -> None:
    tensors = [tensor.requires_grad_() for tensor in heads(dtype=dtype)]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = warpsmith.sdpa(*tensors, dropout_p=0.3, enable_gqa=True, seed=2**64 - 5)
    rows = [tensor.transpose(1, 2) for tensor in wide]
    expected = formulas.attention(*rows, dropout=0.3, seed=-5).transpose(1, 2)
    close = 1e-4 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), device="cpu").to(DEVICE)
    (found * factor.to(dtype)).sum().backward()
    (expected * factor.to(dtype)).sum().backward()
    for tensor, other in zip(tensors, wide, strict=True):
        assert tensor.grad is not None and other.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other.grad, rtol=4 * close, atol=4 * close)


def test_the_seed_is_drawn_by_pytorch() -> None:
    tensors = heads()
    found = seeded(1, *tensors, dropout_p=0.5)
    assert torch.equal(seeded(1, *tensors, dropout_p=0.5), found)
    assert not torch.equal(seeded(2, *tensors, dropout_p=0.5), found)
    torch.manual_seed(1)
    first, second = (warpsmith.sdpa(*tensors, dropout_p=0.5, enable_gqa=True) for _ in range(2))
    assert torch.equal(first, found)
    assert not torch.equal(second, found)
    assert torch.equal(*(warpsmith.sdpa(*tensors, dropout_p=0.5, enable_gqa=True, seed=9) for _ in range(2)))


def test_nothing_is_dropped_without() -> None:
    tensors = heads()
    state = torch.get_rng_state()
    expected = warpsmith.sdpa(*tensors, enable_gqa=True)
    assert torch.equal(warpsmith.sdpa(*tensors, dropout_p=0.0, enable_gqa=True, seed=9), expected)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


def test_the_kept_share_is_right() -> None:
    zeros = torch.zeros(4, 8, 256, 32, device=DEVICE)
    for share in (0.1, 0.5, 0.9):
        ones = warpsmith.sdpa(zeros, zeros, zeros + 1, dropout_p=share, seed=1)
        # Each result is the mean of 256 factors; five standard deviations of the mean of all.
        spread = (share / (1 - share)) ** 0.5
        assert abs(ones[..., 0].double().mean().item() - 1) < 5 * spread / (4 * 8 * 256 * 256) ** 0.5 + 1e-4
        assert abs(ones[..., 0].double().std().item() - spread / 16) < 0.05 * spread / 16


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(warpsmith.ArgumentError, match="from 0 to below 1"):
        warpsmith.sdpa(*heads(), dropout_p=share, enable_gqa=True)
    with pytest.raises(warpsmith.ArgumentError, match="from 0 to below 1"):
        warpsmith.nn.FlashAttention(dropout=share)
    q, k, v = (tensor.transpose(1, 2) for tensor in heads())
    with pytest.raises(warpsmith.ArgumentError, match="dropout"):
        warpsmith.attention(q, k, v, dropout=share)


def test_layers_drop_in_training() -> None:
    layer = warpsmith.nn.FlashAttention(causal=True, dropout=0.5, window=20, softcap=5.0)
    tensors = [tensor.transpose(1, 2) for tensor in heads(60, 60)]
    torch.manual_seed(1)
    first = layer(*tensors)
    torch.manual_seed(1)
    assert torch.equal(layer(*tensors), first)
    assert not torch.equal(layer(*tensors), first)
    layer.eval()
    assert torch.equal(layer(*tensors), layer(*tensors))
    assert not torch.equal(layer(*tensors), first)


def test_checkpoints_draw_again() -> None:
    grads = []
    for kept in (True, False):
        tensors = [tensor.requires_grad_() for tensor in heads()]

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return warpsmith.sdpa(q, k, v, dropout_p=0.5, enable_gqa=True)

        torch.manual_seed(5)
        out = call(*tensors) if kept else checkpoint(call, *tensors, use_reentrant=False)
        out.square().sum().backward()
        grads.append([tensor.grad for tensor in tensors])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_seed_is_not_left_to_pytorch() -> None:
    q, k, v = heads()
    mask = torch.ones(40, 70, dtype=torch.bool, device=DEVICE)
    with pytest.raises(warpsmith.UnsupportedError, match="seed"):
        warpsmith.sdpa(q, k, v, mask, 0.5, True, enable_gqa=True, seed=1)
    with pytest.raises(warpsmith.UnsupportedError, match="seed"):
        warpsmith.sdpa(*(tensor.double() for tensor in (q, k, v)), dropout_p=0.5, enable_gqa=True, seed=1)


def test_compiled_code() -> None:
    tensors = heads()
    compiled = torch.compile(
        lambda *x: warpsmith.sdpa(*x, dropout_p=0.5, enable_gqa=True, seed=3), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*tensors), warpsmith.sdpa(*tensors, dropout_p=0.5, enable_gqa=True, seed=3))
    # Without a seed, PyTorch's own, in one graph too.
    unseeded = torch.compile(
        lambda *x: warpsmith.sdpa(*x, dropout_p=0.5, enable_gqa=True), backend="aot_eager", fullgraph=True
    )
    assert not torch.equal(unseeded(*tensors), unseeded(*tensors))


def test_patched_models_keep_theirs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.5,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE)
    warpsmith.patch(model)
    ids = torch.arange(24, device=DEVICE)[None]
    plain = model.eval()(ids).logits
    assert torch.equal(model(ids).logits, plain)
    model.train()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(model(ids).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], plain)
    results[0].sum().backward()
