"""Calls in PyTorch's counter of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import warpsmith
import warpsmith.flops
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


def counted(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        result = call(*tensors)
        if result.requires_grad:
            result.sum().backward()
    total: int = counter.get_total_flops()
    return total


def test_weights_in_blocks() -> None:
    assert counted(lambda x: warpsmith.linear_quant(x, torch.zeros(6, 68, dtype=torch.uint8)), torch.randn(3, 64)) == (
        2 * 3 * 64 * 6
    )


@pytest.mark.parametrize("needs", [False, True])
def test_calls_count_as_pytorchs(needs: bool) -> None:
    x, w = torch.randn(2, 5, 24, requires_grad=needs), torch.randn(16, 24, requires_grad=needs)
    assert counted(warpsmith.linear, x, w) == counted(F.linear, x, w) > 0
    targets = torch.randint(0, 16, (2, 5))
    # The gradients of a head are computed with its logits.
    loss = counted(lambda x, w: warpsmith.linear_cross_entropy(x, w, targets), x, w)
    assert loss == counted(F.linear, x, w)
    # What is recomputed by neither: a product with an activation, and one with a gate.
    assert counted(lambda x, w: warpsmith.linear(x, w, act="gelu"), x, w) == counted(F.linear, x, w)
    assert counted(lambda x, w: warpsmith.linear(x, w, act="silu", gate="halves"), x, w) == counted(F.linear, x, w)
    shape: tuple[Any, ...] = (2, 4, 8, 32)
    q, k, v = (torch.randn(*shape, requires_grad=needs) for _ in range(3))
    theirs = 4 * 2 * 4 * 8 * 8 * 32
    assert counted(warpsmith.sdpa, q, k, v) == (theirs * 7 // 2 if needs else theirs)


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_mixtures(shared: bool, needs: bool) -> None:
    """Six tokens with two of four experts each, and one that all go through."""
    tokens, chosen, hidden, inner = 6, 2, 8, 12
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, chosen)
    w1, w2 = torch.randn(4, 2 * inner, hidden), torch.randn(4, hidden, inner)
    of_all = [torch.randn(2 * inner, hidden), torch.randn(hidden, inner)] if shared else [None, None]
    tensors = [x, w1, w2, weights, *of_all]
    for tensor in tensors:
        if tensor is not None:
            tensor.requires_grad_(needs)
    ids = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 1], [0, 3], [1, 3]], dtype=torch.int32)

    def call(x: Any, w1: Any, w2: Any, weights: Any, *of_all: Any) -> torch.Tensor:
        names = {"shared_w1": of_all[0], "shared_w2": of_all[1]}
        return warpsmith.moe_ffn(x, w1, w2, ids, weights, **names, act="silu", gate="halves")

    rows = tokens * chosen + (tokens if shared else 0)
    first, second = 2 * rows * 2 * inner * hidden, 2 * rows * inner * hidden
    assert counted(call, *tensors) == first + second + (3 * first + 2 * second if needs else 0)
    counts = torch.tensor([1, 0, 5, 0], dtype=torch.int32)
    products = counted(lambda x, w: warpsmith.grouped_linear(x, w, counts), x, w1)
    assert products == 2 * tokens * 2 * inner * hidden * (3 if needs else 1)
