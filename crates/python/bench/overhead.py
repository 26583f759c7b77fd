"""What a call from Python costs: ``warpsmith.rms_norm`` beside ``F.layer_norm`` on a tiny tensor, in one run.

The two take turns, and the least time of many rounds counts, so that other work on the machine weighs on neither.

usage: python crates/python/bench/overhead.py [--device cuda] [--check]
With --check it fails if a call costs more than PyTorch's, or one with gradients more than 1.7 times as much.
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
LIMITS = {"forward": 1.0, "forward with a graph": 1.7, "forward and backward": 1.7}


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

    found = least(
        {
            "ours forward": lambda: ours(weight),
            "theirs forward": lambda: theirs(weight),
            "ours forward with a graph": lambda: ours(trained),
            "theirs forward with a graph": lambda: theirs(trained),
            "ours forward and backward": lambda: backward(lambda: ours(trained)),
            "theirs forward and backward": lambda: backward(lambda: theirs(trained)),
        }
    )
    return {kind: (found[f"ours {kind}"], found[f"theirs {kind}"]) for kind in LIMITS}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for kind, (ours, theirs) in measure(chosen.device).items():
        ratio, limit = ours / theirs, LIMITS[kind]
        failed |= ratio > limit
        print(
            f"{kind:22} rms_norm {ours * 1e6:6.2f} µs, F.layer_norm {theirs * 1e6:6.2f} µs: {ratio:.2f}x (bar {limit}x)"
        )
    return int(chosen.check and failed)


if __name__ == "__main__":
    sys.exit(main())
