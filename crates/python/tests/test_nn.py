"""Layers against PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import formulas
import pytest
import torch
import warpsmith
from device import DEVICE
from torch import nn
from warpsmith import nn as wnn

#: Our layer, PyTorch's, and an input for both.
Pair = tuple[nn.Module, nn.Module, torch.Tensor]


class PlainMLP(nn.Module):
    """The MLP of Llama, as written in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 48, bias=False)
        self.up_proj = nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Activated(nn.Linear):
    """A linear layer with an activation after it."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> None:
        super().__init__(32, 24, **options)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(x, approximate="tanh")


MAKERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "rms_norm": lambda: (wnn.RMSNorm(32, 1e-5), nn.RMSNorm(32, 1e-5)),
    "rms_norm_of_two": lambda: (wnn.RMSNorm((4, 32)), nn.RMSNorm((4, 32))),
    "rms_norm_plain": lambda: (
        wnn.RMSNorm(32, elementwise_affine=False),
        nn.RMSNorm(32, elementwise_affine=False),
    ),
    "layer_norm": lambda: (wnn.LayerNorm(32), nn.LayerNorm(32)),
    "layer_norm_of_two": lambda: (wnn.LayerNorm((4, 32)), nn.LayerNorm((4, 32))),
    "layer_norm_no_bias": lambda: (wnn.LayerNorm(32, bias=False), nn.LayerNorm(32, bias=False)),
    "linear": lambda: (wnn.FusedLinear(32, 24), nn.Linear(32, 24)),
    "linear_no_bias": lambda: (wnn.FusedLinear(32, 24, bias=False), nn.Linear(32, 24, bias=False)),
    "linear_relu": lambda: (wnn.FusedLinear(32, 24, activation="relu"), Activated(nn.functional.relu)),
    "linear_gelu": lambda: (wnn.FusedLinear(32, 24, activation="gelu"), Activated(nn.functional.gelu)),
    "linear_gelu_tanh": lambda: (wnn.FusedLinear(32, 24, activation="gelu_tanh"), Activated(gelu_tanh)),
    "linear_silu": lambda: (wnn.FusedLinear(32, 24, activation="silu"), Activated(nn.functional.silu)),
    "gated_mlp": lambda: (wnn.GatedMLP(32, 48), PlainMLP()),
}


@pytest.fixture(params=MAKERS, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    torch.manual_seed(0)
    ours, theirs = MAKERS[request.param]()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs, torch.randn(6, 4, 32)


def test_values_and_gradients(pair: Pair) -> None:
    ours, theirs, x = pair
    theirs = theirs.double()
    found, expected = x.clone().requires_grad_(), x.double().requires_grad_()
    one, other = ours(found), theirs(expected)
    torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)
    factor = torch.randn(one.shape, dtype=torch.float64)
    (one * factor.float()).sum().backward()
    (other * factor).sum().backward()
    torch.testing.assert_close(found.grad.double(), expected.grad, rtol=5e-4, atol=5e-4)
    gradients = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, mine), (other_name, yours) in gradients:
        assert name == other_name
        torch.testing.assert_close(mine.grad.double(), yours.grad, rtol=5e-4, atol=5e-4)


def test_without_gradients_too(pair: Pair) -> None:
    ours, theirs, x = pair
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_autocast(pair: Pair) -> None:
    ours, theirs, x = pair
    reference = theirs.double()(x.double())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype=dtype):
            found = ours(x.requires_grad_())
        scale = reference.abs().max().item()
        torch.testing.assert_close(found.double(), reference, rtol=0.02, atol=0.02 * scale)
        found.float().sum().backward()
        assert all(parameter.grad is not None for parameter in ours.parameters())


def test_autocast_types_follow_pytorch() -> None:
    x = torch.randn(4, 32)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert wnn.FusedLinear(32, 24)(x).dtype == torch.bfloat16
        assert wnn.GatedMLP(32, 48)(x).dtype == torch.bfloat16
        for kind in ("RMSNorm", "LayerNorm"):
            for rows in (x, x.bfloat16()):
                ours, theirs = getattr(wnn, kind)(32), getattr(torch.nn, kind)(32)
                assert ours(rows).dtype == theirs(rows).dtype, (kind, rows.dtype)


def test_state_dicts_go_both_ways(pair: Pair) -> None:
    ours, theirs, x = pair
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours).state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_whole_graphs(pair: Pair) -> None:
    ours, _, x = pair
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), ours(x))
    x = x.requires_grad_()
    gradients = [torch.autograd.grad(call(x).square().sum(), x)[0] for call in (compiled, ours)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_what_kernels_lack_is_left_to_pytorch(pair: Pair) -> None:
    ours, theirs, x = pair
    found = ours.double()(x.double())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, theirs.double()(x.double()))


def test_the_kernels_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("rms_norm", "layer_norm", "linear", "attention"):
        real = getattr(warpsmith.ops, name)
        monkeypatch.setattr(
            warpsmith.ops, name, lambda *a, real=real, name=name, **k: called.append(name) or real(*a, **k)
        )
    x, q = torch.randn(4, 32), torch.randn(1, 4, 2, 32)
    with torch.no_grad():
        for layer in (wnn.RMSNorm(32), wnn.LayerNorm(32), wnn.FusedLinear(32, 8), wnn.GatedMLP(32, 8)):
            layer(x)
        wnn.FlashAttention()(q, q, q)
    assert called == ["rms_norm", "layer_norm", "linear", "linear", "linear", "linear", "attention"]


def test_residuals() -> None:
    x, residual = torch.randn(4, 32), torch.randn(4, 32)
    for layer in (wnn.RMSNorm(32), wnn.LayerNorm(32), wnn.RMSNorm((4, 32)), wnn.LayerNorm((4, 32))):
        out, total = layer(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(out, layer(x + residual), rtol=1e-5, atol=1e-5)
        wide, wide_total = layer.double()(x.double(), residual.double())
        torch.testing.assert_close(wide.float(), out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(wide_total.float(), total)
    linear = wnn.FusedLinear(32, 32, activation="silu")
    torch.testing.assert_close(linear(x, residual), linear(x) + residual)


def test_representations() -> None:
    assert repr(wnn.RMSNorm(32)) == "RMSNorm((32,), eps=None, elementwise_affine=True)"
    assert repr(wnn.FusedLinear(3, 4, activation="silu")).endswith("bias=True, activation=silu)")
    assert "activation=silu" in repr(wnn.GatedMLP(3, 4)) and "causal=True" in repr(wnn.FlashAttention(causal=True))
    assert "6 pages of 4 tokens" in repr(wnn.PagedAttention(6, 4, 2, 32))


def test_an_unknown_activation_names_the_known() -> None:
    with pytest.raises(
        warpsmith.ArgumentError, match=r"FusedLinear: argument `activation`.*relu.*got 'tanh'"
    ) as caught:
        wnn.FusedLinear(3, 4, activation="tanh")
    assert caught.value.argument == "activation"


def test_an_adapter_in_place_of_a_layer_is_called() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    mlp = wnn.GatedMLP(32, 48)
    x, before = torch.randn(4, 32), mlp.up_proj
    expected = 2 * mlp(x)
    mlp.up_proj = Doubled(32, 48, bias=False)
    mlp.up_proj.weight = before.weight
    torch.testing.assert_close(mlp(x), expected)
    mlp.up_proj = before
    before.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(mlp(x), expected)


def test_the_activation_of_an_adapter_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, plain = wnn.GatedMLP(32, 48), PlainMLP()
    plain.load_state_dict(mlp.state_dict())
    mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Identity())
    x = torch.randn(4, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    plain(y).square().sum().backward()
    calls, real = [], warpsmith.ops.activation
    monkeypatch.setattr(warpsmith.ops, "activation", lambda *a, **k: calls.append(k) or real(*a, **k))
    mlp(x).square().sum().backward()
    assert calls == [{"kind": "silu"}]
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::warpsmith.FallbackWarning")
def test_flash_attention_trains_with_all_options() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, length, heads, 32) for length, heads in ((9, 4), (12, 2), (12, 2))]
    inputs.append(torch.randn(4))
    layer = wnn.FlashAttention(causal=True, window=5, softcap=3.0, scale=0.5)
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    theirs = [tensor.double().requires_grad_() for tensor in inputs]
    found = layer(*ours[:3], sinks=ours[3])
    expected = formulas.attention(*theirs[:3], sinks=theirs[3], causal=True, window=5, softcap=3.0, scale=0.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-4)


def test_paged_attention() -> None:
    torch.manual_seed(0)
    layer = wnn.PagedAttention(6, 4, num_kv_heads=2, head_dim=32)
    assert not layer.state_dict() and layer.to(torch.bfloat16).k_pages.dtype == torch.bfloat16
    layer = layer.float()
    lengths = [5, 3]
    q, k, v = torch.randn(8, 4, 32), torch.randn(8, 2, 32), torch.randn(8, 2, 32)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    slots = torch.tensor([16, 17, 18, 19, 4, 8, 9, 10])
    lens, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, [0, 5, 8]))
    out = layer(q, k, v, slots, table, lens, starts)
    for start, length in ((0, 5), (5, 3)):
        part = (t[start : start + length].transpose(0, 1)[None].double() for t in (q, k, v))
        expected = nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(
            out[start : start + length].double(), expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5
        )
    # Nothing new: the same again.
    assert torch.equal(layer(q, None, None, None, table, lens, starts), out)
