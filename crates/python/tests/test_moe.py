"""Mixtures of experts beside a loop over the experts in PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F
from warpsmith.errors import ArgumentError
from warpsmith.nn import LoadBalancer, MoE, MoERouter


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(48, 24, 6, 2, device=DEVICE, **options)


def by_loop(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """The definition: the router in PyTorch's operations, and one expert after the other."""
    scores = F.softmax(F.linear(x, moe.router.weight).float(), -1)
    weights, ids = scores.topk(moe.router.top_k, -1)
    return moe.by_expert(x, ids, weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("options", [{}, {"shared_size": 40}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 48), (0, 48)], ids=str)
def test_results_and_gradients_are_those_of_the_loop(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    moe = layer(**options)
    plain = copy.deepcopy(moe)
    inputs = [torch.randn(shape, device=DEVICE).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    found, expected = moe(inputs[0]), by_loop(plain, inputs[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=1e-5)
    for (name, one), other in zip(moe.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
        )


@torch.no_grad()
def test_residuals_and_types() -> None:
    x = torch.randn(9, 48, device=DEVICE)
    moe = layer()
    torch.testing.assert_close(moe(x, x), moe(x) + x)
    narrow = copy.deepcopy(moe).bfloat16()
    assert narrow(x.bfloat16()).dtype == torch.bfloat16
    # PyTorch's operations where no kernel has the type.
    wide = copy.deepcopy(moe).double()(x.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), moe(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_dropped_slots_contribute_nothing() -> None:
    x = torch.randn(40, 48, device=DEVICE)
    moe = layer(capacity_factor=0.5)
    routing = moe.router(x)
    assert int(routing.dropped.sum()) > 0
    kept = torch.where(routing.positions < 0, -1, routing.ids)
    torch.testing.assert_close(moe(x), moe.by_expert(x, kept, routing.weights), rtol=1e-4, atol=1e-5)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ArgumentError, match="top_k"):
        MoE(48, 24, 6, 7)
    with pytest.raises(ArgumentError, match="activation"):
        MoE(48, 24, 6, 2, activation="swash")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="router"):
        MoE(48, 24, 6, 2, router=MoERouter(48, 5, 2))
    with pytest.raises(ArgumentError, match="scale"):
        MoE(48, 24, 6, 2, router=MoERouter(48, 6, 2), scale=2.0)


class Model(nn.Module):
    """A language model with one layer: the token before and the one before that, and a mixture of experts."""

    def __init__(self, moe: MoE, hidden: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, hidden)
        self.before = nn.Embedding(128, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.moe = moe
        self.head = nn.Linear(hidden, 128, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids[:, 1:-1]) + self.before(ids[:, :-2])
        logits: torch.Tensor = self.head(x + self.moe(self.norm(x)))
        return F.cross_entropy(logits.flatten(0, -2), ids[:, 2:].flatten())


def train(kind: str, steps: int = 300) -> tuple[list[float], torch.Tensor]:
    """The losses, and the load of each expert over the last steps."""
    torch.manual_seed(3)
    balancer = LoadBalancer(8, load_balance=0.02, z_loss=1e-3)
    moe = MoE(48, 32, 8, 2, balancer=balancer)
    model = Model(moe).to(DEVICE)
    with torch.no_grad():
        # Two experts get nearly everything at first.
        moe.router.weight[:2] += 0.3 * moe.router.weight[:2].sign()
    text = torch.tensor([min(byte, 127) for byte in Path(__file__).read_bytes()], device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses, load = torch.Generator().manual_seed(5), [], torch.zeros(8)
    if kind == "pytorch":
        moe.forward = lambda x: by_loop(moe, x)  # type: ignore[method-assign, assignment]
    for step in range(steps):
        starts = torch.randint(0, len(text) - 50, (8,), generator=generator)
        ids = torch.stack([text[start : start + 50] for start in starts])
        task = model(ids)
        with torch.set_grad_enabled(True):
            if kind == "pytorch":
                x = model.norm(model.embedding(ids[:, 1:-1]) + model.before(ids[:, :-2]))
                logits = F.linear(x, moe.router.weight)
                scores = F.softmax(logits, -1).flatten(0, -2)
                share = F.one_hot(scores.topk(2, -1).indices, 8).sum((0, 1)) / (2 * len(scores))
                balance = 8 * (share * scores.mean(0)).sum()
                extra = 0.02 * balance + 1e-3 * logits.logsumexp(-1).square().mean()
            else:
                found = moe.losses()
                extra, share = balancer(found), found.load
        optimizer.zero_grad()
        (task + extra).backward()
        optimizer.step()
        losses.append(task.item())
        if step >= steps - 50:
            load += share.detach().cpu()
    return losses, load / 50


def test_a_model_trains_as_in_pytorch_and_its_loads_even_out() -> None:
    (ours, load), (theirs, _) = train("ours"), train("pytorch")
    last = [sum(losses[-50:]) / 50 for losses in (ours, theirs)]
    assert last[0] < 0.7 * ours[0] and abs(last[0] / last[1] - 1) < 0.005, last
    assert load.max() / load.mean() < 1.5, load
