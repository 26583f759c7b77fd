#!/usr/bin/env python3
"""Times what a call costs the host, PyTorch's and Warpsmith's in one run, and merges both into the evidence.

Needs PyTorch. One repeated call on tiny tensors, without a graph: batches of calls, the median over batches. Waiting
for the device is not part of it.

usage: bench/host.py [--device cpu|cuda] [--no-record] [--peers FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import _help  # noqa: F401
import peers
import torch
import torch.nn.functional as F

BATCH, BATCHES, WARM_UP = 100, 60, 5


def host_us(call, device: str) -> float:
    """Median microseconds of one call."""
    samples = []
    for batch in range(WARM_UP + BATCHES):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        took = time.perf_counter() - start
        if device == "cuda":
            torch.cuda.synchronize()
        if batch >= WARM_UP:
            samples.append(took / BATCH * 1e6)
    return statistics.median(samples)


def calls(device: str) -> dict[str, object]:
    """PyTorch's call for each op that `warpsmith bench --host` times, on tensors of the same size."""
    random = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    x, weight, w, bias = random(4, 64), random(64), random(64, 64), random(64)
    q, k, v = random(1, 32, 1, 128), random(1, 8, 256, 128), random(1, 8, 256, 128)
    return {
        "rms_norm": lambda: F.rms_norm(x, (64,), weight, 1e-6),
        "linear": lambda: F.linear(x, w, bias),
        # PyTorch has no pages: the same work on dense keys and values.
        "paged_attention": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    parser.add_argument("--peers", default="target/peers-host.jsonl", help="where PyTorch's times are written")
    args = parser.parse_args()
    peers.build()
    path = peers.ROOT / args.peers
    cases = {row["op"]: row["case"] for row in peers.warpsmith("bench", "--host", "--device", args.device, "--json")}
    with torch.no_grad(), path.open("w") as out:
        for op, call in calls(args.device).items():
            ms = host_us(call, args.device) / 1e3
            line = dict(op=op, case=cases[op], dtype="host", device=args.device, peer="PyTorch", ms=ms)
            out.write(json.dumps(line) + "\n")
    record = [] if args.no_record else ["--record"]
    for row in peers.warpsmith("bench", "--host", "--device", args.device, "--peers", str(path), "--json", *record):
        shown = ", ".join(f"{name} {us:.2f} us" for name, us in row["peers"].items())
        print(f"{row['op']}: warpsmith {row['us']:.2f} us, {shown}")


if __name__ == "__main__":
    main()
