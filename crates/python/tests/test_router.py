"""Routers of mixtures of experts beside PyTorch's operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from device import DEVICE
from torch.nn import functional as F
from warpsmith.errors import ArgumentError
from warpsmith.nn import ExpertGating, LoadBalancer, MoERouter


def router(**options: Any) -> MoERouter:
    torch.manual_seed(0)
    return MoERouter(32, 8, 2, device=DEVICE, **options)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, device=DEVICE)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_weights_and_gradients_are_those_of_topk(score: Any, normalize: bool) -> None:
    ours = router(score=score, normalize=normalize, scale=1.5, bias=True)
    plain = copy.deepcopy(ours)
    x = tokens(3, 5)
    found = ours(x)
    logits = F.linear(x, plain.weight, plain.bias)
    scores = F.softmax(logits, -1) if score == "softmax" else logits.sigmoid()
    weights, ids = scores.topk(2, -1)
    weights = 1.5 * (weights / weights.sum(-1, keepdim=True) if normalize else weights)
    assert torch.equal(found.ids, ids.int())
    torch.testing.assert_close(found.weights, weights)
    assert torch.equal(found.counts.cpu(), torch.bincount(ids.flatten().cpu(), minlength=8).int())
    upstream = torch.randn_like(weights)
    found.weights.backward(upstream)
    weights.backward(upstream)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_losses_and_their_gradients() -> None:
    ours, balancer = router(), LoadBalancer(8, load_balance=0.5, z_loss=0.1, importance=0.2)
    plain = copy.deepcopy(ours)
    x = tokens(40)
    routing = ours(x)
    losses = ours.losses()
    logits = F.linear(x, plain.weight)
    p = F.softmax(logits, -1)
    load = F.one_hot(routing.ids.long(), 8).sum((0, 1)) / 80
    mean = p.mean(0)
    balance, z = 8 * (load * mean).sum(), logits.logsumexp(-1).square().mean()
    importance = (mean - 1 / 8).square().mean() * 64
    expected = (balance, z, importance, load, mean, torch.special.entr(p).sum(-1).mean())
    for name, one, other in zip(losses._fields, losses, expected, strict=True):
        torch.testing.assert_close(
            one, other.float(), rtol=1e-4, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}"
        )
    balancer(losses).backward()
    (0.5 * balance + 0.1 * z + 0.2 * importance).backward()
    torch.testing.assert_close(ours.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_bias_evens_out_the_loads_without_a_loss() -> None:
    balancer = LoadBalancer(8, load_balance=0, rate=0.01, device=DEVICE)
    ours = router(score="sigmoid", bias=True, balancer=balancer)
    with torch.no_grad():
        ours.bias.zero_()[:2] += 2.0
        x = tokens(512)
        ours(x)
        before = balancer.statistics()
        assert before["imbalance"] > 2 and before["dropped"] == 0 and before["entropy"] < 1
        for _ in range(200):
            ours(x)
            balancer.step()
        balancer.reset()
        weights = ours(x).weights
        after = balancer.statistics()
    assert after["imbalance"] < 1.25 and abs(sum(after["load"]) - 1) < 1e-6
    # The bias chooses; weights are those of the scores.
    scores = F.linear(x, ours.weight, ours.bias).sigmoid()
    assert ours.last is not None
    chosen = scores.gather(-1, ours.last.ids.long())
    torch.testing.assert_close(weights, chosen / chosen.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_noise_is_for_training_and_follows_the_generator() -> None:
    ours, x = router(noise=2.0), tokens(64)

    def ids(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return ours(x).ids

    assert torch.equal(ids(1), ids(1)) and not torch.equal(ids(1), ids(2))
    ours.eval()
    assert torch.equal(ids(1), ids(2))


@torch.no_grad()
def test_capacities_drop_and_are_counted() -> None:
    balancer = LoadBalancer(8)
    ours = router(capacity_factor=0.5, balancer=balancer).cpu()
    routing = ours(tokens(64).cpu())
    # 64 tokens with 2 slots: 16 an expert are the mean.
    assert int(routing.counts.max()) <= 8 and int(routing.counts.sum() + routing.dropped.sum()) == 128
    assert torch.equal(routing.positions < 0, routing.weights == 0)
    assert balancer.statistics()["dropped"] == routing.dropped.sum().item() / 128


def test_layers_are_copied_cast_and_saved() -> None:
    ours = router(balancer=LoadBalancer(8, rate=0.1, device=DEVICE))
    ours(tokens(4)).weights.sum().backward()
    # The graph of the last call stays behind.
    other = copy.deepcopy(ours).bfloat16()
    assert other.last is None and other.balancer is not None and other.balancer.bias.dtype == torch.float32
    assert other(tokens(4).bfloat16()).weights.dtype == torch.float32
    assert set(ours.state_dict()) == {"weight", "balancer.bias"}
    gating = ExpertGating(32, 8)
    gating.load_state_dict({"weight": ours.weight})
    assert "8 experts" in repr(gating)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ArgumentError, match="num_experts"):
        ExpertGating(32, 0)
    with pytest.raises(ArgumentError, match="top_k"):
        MoERouter(32, 8, 9)
    with pytest.raises(ArgumentError, match="score"):
        router(score="softmin")
    with pytest.raises(ArgumentError, match="groups"):
        router(groups=3)
    with pytest.raises(ArgumentError, match="capacity_factor"):
        router(capacity_factor=0)
    with pytest.raises(ArgumentError, match="balancer"):
        router(balancer=LoadBalancer(4))
    with pytest.raises(ArgumentError, match="rate"):
        LoadBalancer(8, rate=-1)
    with pytest.raises(RuntimeError, match="before the first call"):
        router().losses()
