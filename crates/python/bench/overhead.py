"""What a call from Python costs: ``warpsmith.rms_norm`` beside ``F.layer_norm`` on a tiny tensor, ``warpsmith.sdpa`` of
one query beside PyTorch's and beside its own kernel with nothing around it, in one run.

They take turns, and the least time of many rounds counts, so that other work on the machine weighs on neither.

usage: python crates/python/bench/overhead.py [--device cuda] [--check]
With --check it fails if rms_norm costs more than PyTorch's layer_norm, or with gradients more than 1.7 times as much,
or if sdpa costs more than 1.6 times its kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import warpsmith
from torch.nn import functional as F

ROUNDS, CALLS = 60, 400
#: What is compared, and how many times the other's time it may take.
LIMITS = {
    "rms_norm, F.layer_norm: forward": 1.0,
    "rms_norm, F.layer_norm: forward with a graph": 1.7,
    "rms_norm, F.layer_norm: forward and backward": 1.7,
    "sdpa, its kernel alone: one query": 1.6,
    "sdpa, PyTorch's: one query": None,
}


def least(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds that one call of each takes."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return best


def measure(device: str) -> dict[str, tuple[float, float]]:
    """Ours and PyTorch's, for each kind of call."""
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    trained = weight.clone().requires_grad_()
    gradient = torch.ones_like(x)

    def backward(call: Callable[[], torch.Tensor]) -> None:
        trained.grad = None
        call().backward(gradient)

    def ours(w: torch.Tensor) -> torch.Tensor:
        return warpsmith.rms_norm(x, w)

    def theirs(w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,), w)

    query, keys = torch.randn(1, 8, 1, 64, device=device), torch.randn(1, 8, 16, 64, device=device)
    turned = [tensor.transpose(1, 2) for tensor in (query, keys, keys)]
    kernel = torch.ops._warpsmith.attention.default
    sdpa = lambda: warpsmith.sdpa(query, keys, keys)  # noqa: E731
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = dict(
        zip(
            LIMITS,
            (
                (lambda: ours(weight), lambda: theirs(weight)),
                (lambda: ours(trained), lambda: theirs(trained)),
                (lambda: backward(lambda: ours(trained)), lambda: backward(lambda: theirs(trained))),
                (sdpa, lambda: kernel(*turned)),
                (sdpa, lambda: F.scaled_dot_product_attention(query, keys, keys)),
            ),
            strict=True,
        )
    )
    calls = {f"{side} {kind}": call for kind, pair in pairs.items() for side, call in enumerate(pair)}
    found = least(calls)
    return {kind: (found[f"0 {kind}"], found[f"1 {kind}"]) for kind in LIMITS}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for kind, (ours, theirs) in measure(chosen.device).items():
        ratio, limit = ours / theirs, LIMITS[kind]
        failed |= limit is not None and ratio > limit
        bar = "" if limit is None else f" (bar {limit}x)"
        print(f"{kind:44} {ours * 1e6:6.2f} µs, {theirs * 1e6:6.2f} µs: {ratio:.2f}x{bar}")
    return int(chosen.check and failed)


if __name__ == "__main__":
    sys.exit(main())
