"""Mixtures of experts in PyTorch: routing, products by group, and whole feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .common import ACTIVATIONS, Case, Work, random_like


def route(case: Case, device: str) -> Work | None:
    """Softmax and top-k, and what products by group need: the counts and the stable order."""
    plain = {"score": "softmax", "capacity": "0", "groups": "1", "noise": "0", "scale": "1"}
    if any(case.option(name, value) != value for name, value in plain.items()):
        return None
    tokens, experts = case.size("num_tokens"), case.size("experts")
    top_k, normal = int(case.number("top_k", 1)), random_like(case, device)

    def choose(logits):
        weights, ids = torch.topk(torch.softmax(logits.float(), -1), top_k, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    def with_order(logits):
        weights, ids = choose(logits)
        flat = ids.reshape(-1)
        counts = (flat[:, None] == torch.arange(experts, device=device)).sum(0)
        return weights, ids, counts, torch.argsort(flat, stable=True)

    calls = {"torch, softmax and top-k alone": choose, "torch": with_order}
    if device != "cpu":
        calls["torch.compile, softmax and top-k alone"] = torch.compile(choose, dynamic=False)
    return Work(lambda: (normal(tokens, experts),), calls)


def _gated(case: Case) -> Callable[[torch.Tensor], torch.Tensor] | None:
    activation, gate = ACTIVATIONS.get(case.option("act", "none"), lambda x: x), case.option("gate", "none")
    if gate == "interleaved":
        return None
    if gate == "none":
        return activation

    def finish(z):
        g, up = z.chunk(2, -1)
        return activation(g) * up

    return finish


def grouped_linear(case: Case, device: str) -> Work | None:
    """The grouped product alone, rows of about the same number in each group."""
    rows, groups, n, k = (case.size(name) for name in ("rows", "groups", "n", "k"))
    finish, normal = _gated(case), random_like(case, device)
    if finish is None or case.given or case.dtype != "bf16" or device == "cpu":
        return None
    of_matrix = n if case.option("gate", "none") == "none" else 2 * n

    def make():
        ends = torch.arange(1, groups + 1, device=device, dtype=torch.int64) * rows // groups
        return normal(rows, k), normal(groups, of_matrix, k), ends.to(torch.int32)

    def call(x, w, ends):
        return finish(torch._grouped_mm(x, w.transpose(1, 2), offs=ends))

    return Work(make, {"torch": call}, call)


def ffn(case: Case, device: str) -> Work | None:
    """From ids and weights to the sum: products by group on a GPU, a loop over experts on the CPU."""
    tokens, experts, top_k, hidden, inner = (
        case.size(name) for name in ("num_tokens", "experts", "top_k", "hidden", "ffn")
    )
    finish, normal = _gated(case), random_like(case, device)
    if finish is None or case.given:
        return None
    rows = inner if case.option("gate", "none") == "none" else 2 * inner

    def make():
        weights, ids = torch.topk(torch.softmax(torch.randn(tokens, experts, device=device), -1), top_k, -1)
        return normal(tokens, hidden), normal(experts, rows, hidden), normal(experts, hidden, inner), ids, weights

    def by_group(x, w1, w2, ids, weights):
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = (flat[:, None] == torch.arange(experts, device=device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        inner = finish(torch._grouped_mm(x[order // top_k], w1.transpose(1, 2), offs=ends))
        y = torch._grouped_mm(inner.contiguous(), w2.transpose(1, 2), offs=ends)
        out = torch.zeros(tokens, hidden, device=device, dtype=torch.float32)
        out.index_add_(0, order // top_k, y.float() * weights.reshape(-1)[order, None])
        return out.to(x.dtype)

    def by_expert(x, w1, w2, ids, weights):
        out = torch.zeros_like(x)
        for expert in range(experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if token.numel():
                y = F.linear(finish(F.linear(x[token], w1[expert])), w2[expert])
                out.index_add_(0, token, y * weights[token, slot, None].to(x.dtype))
        return out

    if device == "cpu":
        return Work(make, {"torch": by_expert})
    # The library's product by group has no f32.
    return Work(make, {"torch": by_group}, by_group) if case.dtype == "bf16" else None
