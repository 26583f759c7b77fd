"""Other projects' names: each gives what the original gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import warpsmith
from torch.nn import functional as F
from warpsmith import compat

LAYERS = [
    (compat.FusedLinearGELU, "gelu", F.gelu),
    (compat.FusedLinearSiLU, "silu", F.silu),
    (compat.FusedLinearReLU, "relu", F.relu),
]


@pytest.mark.parametrize(("alias", "activation", "function"), LAYERS, ids=[name for _, name, _ in LAYERS])
@pytest.mark.parametrize("bias", [True, False])
def test_layers(alias: Callable[..., torch.nn.Module], activation: str, function: Callable, bias: bool) -> None:
    layer, original = alias(32, 48, bias=bias), warpsmith.nn.FusedLinear(32, 48, bias, activation)
    original.load_state_dict(layer.state_dict())
    x = torch.randn(5, 32)
    assert torch.equal(layer(x), original(x))
    torch.testing.assert_close(layer(x), function(F.linear(x, original.weight, original.bias)), rtol=1e-5, atol=1e-5)
    assert isinstance(layer, warpsmith.nn.FusedLinear) and f"activation={activation}" in repr(layer)


def test_element_wise_mul_add() -> None:
    a, b, c = (torch.randn(3, 17) for _ in range(3))
    assert torch.equal(compat.element_wise_mul_add(a, b, c), warpsmith.mul_add(a, b, c))


def test_benchmark_kernel() -> None:
    calls = []
    seconds = compat.benchmark_kernel(lambda x, *, scale: calls.append(x * scale), 3, scale=2, warmup=4, iters=6)
    assert isinstance(seconds, float) and 0 < seconds < 1
    assert calls == [6] * 10
    with pytest.raises(ValueError, match="iters"):
        compat.benchmark_kernel(lambda: None, iters=0)


def test_availability() -> None:
    assert compat.KERNELS_AVAILABLE is warpsmith.available("cuda")


def test_names_exist() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__) and warpsmith.compat is compat
    with pytest.raises(AttributeError, match="no attribute 'FusedLinearGelu'"):
        compat.FusedLinearGelu  # noqa: B018
