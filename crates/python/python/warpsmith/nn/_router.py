"""Routers of mixtures of experts, and what keeps their experts evenly used."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from warpsmith import ops
from warpsmith.errors import ArgumentError
from warpsmith.nn._linear import product

#: From logits to scores: of all experts together, or of each alone.
Score = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """What a router chose for tokens ``[...]``: the results of :func:`warpsmith.moe_route` and the logits."""

    #: ``[..., top_k]``, f32.
    weights: torch.Tensor
    #: ``[..., top_k]``: experts by falling score.
    ids: torch.Tensor
    #: ``[experts]``: tokens that each expert keeps.
    counts: torch.Tensor
    #: ``[..., top_k]``: slots by expert.
    order: torch.Tensor
    #: ``[..., top_k]``: places of the slots in ``order``; -1 for dropped ones.
    positions: torch.Tensor
    #: ``[experts]``: tokens beyond the capacity.
    dropped: torch.Tensor
    #: ``[..., experts]``.
    logits: torch.Tensor


class RouterLosses(NamedTuple):
    """The results of :func:`warpsmith.moe_losses`. The first three have gradients."""

    load_balance: torch.Tensor
    z_loss: torch.Tensor
    importance: torch.Tensor
    #: ``[experts]``: the part of the slots that each has.
    load: torch.Tensor
    #: ``[experts]``: the mean probability of each.
    probability: torch.Tensor
    entropy: torch.Tensor


def check(layer: str, argument: str, holds: bool, expected: str, got: object) -> None:
    """An error that names the argument, unless it holds."""
    if not holds:
        message = f"{layer}: argument `{argument}`: expected {expected}, got {got!r}"
        raise ArgumentError(message, op=layer, argument=argument, expected=expected, got=repr(got))


def positive(layer: str, **sizes: int) -> None:
    """An error unless all are whole numbers above 0."""
    for name, size in sizes.items():
        whole = isinstance(size, int) and not isinstance(size, bool)
        check(layer, name, whole and size > 0, "a whole number above 0", size)


def not_negative(layer: str, **numbers: float) -> None:
    """An error unless all are finite numbers that are not negative."""
    for name, number in numbers.items():
        known = isinstance(number, (int, float)) and math.isfinite(number)
        check(layer, name, known and number >= 0, "a finite number that is not negative", number)


class ExpertGating(nn.Module):
    """A score for each expert: ``logits = x @ weight.T + bias``, without a bias unless asked for.

    Its state dict is that of the ``gate`` of Mixtral, Qwen3-MoE and others.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(type(self).__name__, hidden_size=hidden_size, num_experts=num_experts)
        self.hidden_size, self.num_experts = hidden_size, num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random weights, as those of :class:`torch.nn.Linear`."""
        bound = self.hidden_size**-0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> Any:
        """Logits ``[..., num_experts]`` of tokens ``[..., hidden_size]``."""
        return product(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.hidden_size}, {self.num_experts} experts"


class LoadBalancer(nn.Module):
    """Keeps the experts of a router evenly used, and tells how evenly.

    - Called with a router's losses, it returns their sum with the factors ``load_balance``, ``z_loss`` and
      ``importance``, to be added to the loss of the task.
    - With a ``rate`` above 0 it also balances without a loss, as DeepSeek-V3: a router adds ``bias`` to the scores for
      the choice, and :meth:`step`, after the optimizer's, raises it by ``rate`` for experts with fewer tokens than
      the mean and lowers it for those with more.
    - :meth:`statistics` has the loads of all calls in training since the last :meth:`reset`.
    """

    bias: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
    recent: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        *,
        load_balance: float = 0.01,
        z_loss: float = 0.0,
        importance: float = 0.0,
        rate: float = 0.0,
        device: Any = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        positive(name, num_experts=num_experts)
        not_negative(name, load_balance=load_balance, z_loss=z_loss, importance=importance, rate=rate)
        self.num_experts, self.rate = num_experts, rate
        self.factors = (load_balance, z_loss, importance)
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        for kept in ("counts", "dropped", "recent"):
            self.register_buffer(kept, torch.zeros(num_experts, dtype=torch.int64, device=device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> LoadBalancer:
        # The op takes a bias of f32, whatever type the model is cast to.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.bias = self.bias.float()
        return self

    def forward(self, losses: RouterLosses) -> torch.Tensor:
        """The part of the loss that balances."""
        parts = (losses.load_balance, losses.z_loss, losses.importance)
        total: torch.Tensor | None = None
        for factor, part in zip(self.factors, parts, strict=True):
            if factor != 0:
                total = factor * part if total is None else total + factor * part
        return torch.zeros_like(losses.load_balance) if total is None else total

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Counts a call. Routers in training do so by themselves."""
        self.counts += routing.counts
        self.dropped += routing.dropped
        self.recent += routing.counts
        self.recent += routing.dropped

    @torch.no_grad()
    def step(self, group: Any = None) -> None:
        """Moves the bias by what was counted since the last step, in all processes of ``group`` together if training is
        distributed."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.recent, group=group)
        self.bias += self.rate * torch.sign(self.recent.float().mean() - self.recent)
        self.recent.zero_()

    @torch.no_grad()
    def statistics(self) -> dict[str, Any]:
        """``load``: the part of the slots that each expert kept; ``imbalance``: the largest over the mean, 1 where
        everything is even; ``entropy``: of the loads, over its largest value; ``dropped``: the part of the slots
        beyond a capacity."""
        counts = self.counts.double()
        total, dropped = counts.sum(), self.dropped.sum()
        load = counts / total.clamp(min=1)
        most = math.log(self.num_experts) if self.num_experts > 1 else 1.0
        entropy = torch.special.entr(load).sum() / most
        return {
            "load": load.tolist(),
            "imbalance": (load.max() * self.num_experts).item(),
            "entropy": entropy.item() if self.num_experts > 1 else 1.0,
            "dropped": (dropped / (total + dropped).clamp(min=1)).item(),
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Forgets what was counted for the statistics."""
        self.counts.zero_()
        self.dropped.zero_()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        load_balance, z_loss, importance = self.factors
        losses = f"load_balance={load_balance}, z_loss={z_loss}, importance={importance}"
        return f"{self.num_experts} experts, {losses}, rate={self.rate}"


class MoERouter(ExpertGating):
    """The experts of each token, and their weights: gating, and the choice of :func:`warpsmith.moe_route` with its
    options.

    - ``noise`` is the standard deviation of the noise that is added to logits for the choice in training. Its seeds
      come from PyTorch's default generator.
    - ``capacity_factor`` limits an expert to so many times the mean of tokens. Further ones are dropped: their slots
      have weight 0.
    - ``balancer`` counts what experts get, and its bias takes part in the choice.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Score = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 0,
        group_score: Literal["sum", "max"] = "sum",
        noise: float = 0.0,
        capacity_factor: float | None = None,
        balancer: LoadBalancer | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_experts, bias=bias, device=device, dtype=dtype)
        name = type(self).__name__
        positive(name, top_k=top_k)
        check(name, "top_k", top_k <= num_experts, f"at most num_experts={num_experts}", top_k)
        not_negative(name, noise=noise)
        if capacity_factor is not None:
            holds = isinstance(capacity_factor, (int, float)) and 0 < capacity_factor < math.inf
            check(name, "capacity_factor", holds, "None or a finite number above 0", capacity_factor)
        if balancer is not None:
            known = isinstance(balancer, LoadBalancer)
            check(name, "balancer", known, "None or a LoadBalancer", balancer)
            expected = f"one of num_experts={num_experts}"
            check(name, "balancer", balancer.num_experts == num_experts, expected, balancer.num_experts)
        self.top_k, self.noise, self.capacity_factor, self.balancer = top_k, noise, capacity_factor, balancer
        self.score: Score = score
        self.options: dict[str, Any] = {
            "top_k": top_k,
            "score": score,
            "normalize": normalize,
            "scale": scale,
            "groups": groups,
            "top_groups": top_groups,
            "group_score": group_score,
        }
        # Wrong options are found here, not in the first call.
        ops.moe_route(torch.zeros(1, num_experts), **self.options)
        self.last: Routing | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The results of a call belong to its graph: they are not copied or saved with the layer.
        return {**self.__dict__, "last": None}

    def forward(self, x: torch.Tensor) -> Routing:
        """The routing of tokens ``[..., hidden_size]``."""
        logits = super().forward(x)
        if logits.dtype == torch.float64:
            logits = logits.float()
        options = dict(self.options)
        if self.capacity_factor is not None:
            slots = logits.numel() // self.num_experts * self.top_k
            options["capacity"] = max(1, math.ceil(self.capacity_factor * slots / self.num_experts))
        if self.noise > 0 and self.training:
            options |= {"noise": self.noise, "seed": int(torch.randint(2**62, ()))}
        bias = None if self.balancer is None or self.balancer.rate == 0 else self.balancer.bias
        returned: dict[str, Any] = {f"return_{name}": True for name in ("counts", "order", "positions", "dropped")}
        weights, ids, counts, order, positions, dropped = ops.moe_route(logits, bias, **options, **returned)
        routing = Routing(weights, ids, counts, order, positions, dropped, logits)
        self.last = routing
        if self.balancer is not None and self.training:
            self.balancer.observe(routing)
        return routing

    def losses(self) -> RouterLosses:
        """The losses of the last call."""
        if self.last is None:
            raise RuntimeError(f"{type(self).__name__}: there are no losses before the first call")
        returned: dict[str, Any] = {f"return_{name}": True for name in ("load", "probability", "entropy")}
        return RouterLosses(*ops.moe_losses(self.last.logits, self.last.ids, score=self.score, **returned))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        shown = f"{super().extra_repr()}, top_k={self.top_k}, score={self.score}"
        if self.capacity_factor is not None:
            shown += f", capacity_factor={self.capacity_factor}"
        return shown if self.noise == 0 else f"{shown}, noise={self.noise}"
