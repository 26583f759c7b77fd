"""Mixtures of experts in PyTorch: routing, products by group, and whole feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .common import ACTIVATIONS, Case, Work, random_like
from .memory import gradient


def _skew(case: Case) -> str:
    """How uneven the routing is: a word of the case's name."""
    return next((word for word in case.name.split() if word in ("zipf", "all-to-one")), "even")


def _shares(case: Case, groups: int, device: str) -> torch.Tensor:
    """What part of all rows each group has."""
    if _skew(case) == "even":
        shares = torch.ones(groups, device=device)
    elif _skew(case) == "zipf":
        shares = 1 / torch.arange(1, groups + 1, device=device)
    else:
        shares = torch.zeros(groups, device=device)
        shares[groups // 2] = 1
    return shares / shares.sum()


def _ends(case: Case, rows: int, groups: int, device: str) -> torch.Tensor:
    ends = (_shares(case, groups, device).double().cumsum(0) * rows).round().to(torch.int32)
    ends[-1] = rows
    return ends


def _ids(case: Case, tokens: int, experts: int, top_k: int, device: str) -> torch.Tensor:
    if _skew(case) == "all-to-one":
        return torch.full((tokens, top_k), experts // 2, device=device)
    return torch.multinomial(_shares(case, experts, device).expand(tokens, experts), top_k)


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
    """The grouped product alone, with as many rows for each group as the case says."""
    rows, groups, n, k = (case.size(name) for name in ("rows", "groups", "n", "k"))
    finish, normal = _gated(case), random_like(case, device)
    if finish is None or case.given or case.dtype != "bf16" or device == "cpu":
        return None
    of_matrix = n if case.option("gate", "none") == "none" else 2 * n

    def make():
        return normal(rows, k), normal(groups, of_matrix, k), _ends(case, rows, groups, device)

    def call(x, w, ends):
        return finish(torch._grouped_mm(x, w.transpose(1, 2), offs=ends))

    return Work(make, {"torch": call}, call)


def grouped_linear_backward(case: Case, device: str) -> Work | None:
    """Both gradients of the product alone."""
    rows, groups, n, k = (case.size(name) for name in ("rows", "groups", "n", "k"))
    if case.given != {"dx", "dw"} or case.option("act", "none") != "none" or case.dtype != "bf16" or device == "cpu":
        return None
    normal, ends = random_like(case, device), _ends(case, rows, groups, device)

    def forward(x, w):
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)

    return gradient(case, device, forward, lambda: (normal(rows, n), normal(rows, k), normal(groups, n, k)))


def _by_group(finish: Callable, experts: int) -> Callable:
    """From ids and weights to the sum, by two grouped products."""

    def call(x, w1, w2, ids, weights):
        top_k, flat = ids.shape[-1], ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = (flat[:, None] == torch.arange(experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        inner = finish(torch._grouped_mm(x[order // top_k], w1.transpose(1, 2), offs=ends))
        y = torch._grouped_mm(inner.contiguous(), w2.transpose(1, 2), offs=ends)
        out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
        out = out.index_add(0, order // top_k, y.float() * weights.reshape(-1)[order, None])
        return out.to(x.dtype)

    return call


def ffn_backward(case: Case, device: str) -> Work | None:
    """The gradients of tokens, matrices and weights through the products by group, from a graph kept for it."""
    tokens, experts, top_k, hidden, inner = (
        case.size(name) for name in ("num_tokens", "experts", "top_k", "hidden", "ffn")
    )
    finish, normal = _gated(case), random_like(case, device)
    wanted = {"dx", "dw1", "dw2", "dweights"}
    if finish is None or case.given != wanted or case.dtype != "bf16" or device == "cpu":
        return None
    rows = inner if case.option("gate", "none") == "none" else 2 * inner
    ids, by_group = _ids(case, tokens, experts, top_k, device), _by_group(finish, experts)

    def make():
        weights = torch.softmax(torch.randn(tokens, top_k, device=device), -1)
        matrices = normal(experts, rows, hidden), normal(experts, hidden, inner)
        return normal(tokens, hidden), normal(tokens, hidden), *matrices, weights

    return gradient(case, device, lambda x, w1, w2, weights: by_group(x, w1, w2, ids, weights), make)


def moe_losses(case: Case, device: str) -> Work | None:
    """Load-balance and z-loss, importance, entropy, and how the experts are used."""
    if case.option("score", "softmax") != "softmax":
        return None
    tokens, experts, top_k = (case.size(name) for name in ("num_tokens", "experts", "top_k"))
    normal = random_like(case, device)

    def call(logits, ids):
        logits = logits.float()
        lse = torch.logsumexp(logits, -1)
        logs = logits - lse[:, None]
        each = logs.exp()
        probability = each.mean(0)
        load = (ids.reshape(-1, 1) == torch.arange(experts, device=device)).sum(0) / ids.numel()
        balance, z_loss = experts * (load * probability).sum(), lse.square().mean()
        importance = probability.var(unbiased=False) / probability.mean().square()
        found = balance, z_loss, importance, load, probability
        return (*found, -(each * logs).sum(-1).mean()) if "entropy" in case.given else found

    def make():
        return normal(tokens, experts), torch.randint(experts, (tokens, top_k), device=device, dtype=torch.int32)

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
        weights = torch.softmax(torch.randn(tokens, top_k, device=device), -1)
        ids = _ids(case, tokens, experts, top_k, device)
        return normal(tokens, hidden), normal(experts, rows, hidden), normal(experts, hidden, inner), ids, weights

    by_group = _by_group(finish, experts)

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
