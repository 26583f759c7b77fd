#!/usr/bin/env python3
"""Times random chains of ops on the CPU: fused by Warpsmith, compiled by inductor, and run op by op.

Both compilers are backends of torch.compile. Each chain has 2 to 12 ops, broadcasts and mixed types; half of the
chains have a reduction. The generator is seeded: a number names a chain for good. All three run in turn, several
times, so that whatever else the machine does hits all of them. Shown are medians, the time from the first call to its
result, and at the end geometric means of the ratios. Results must agree before anything is timed. Nothing is
recorded.

usage: bench/fuse.py [--chains 24] [--seed 0] [--dtype f32 | bf16] [--backward] [--threads N] [--rounds 5]
                     [--no-inductor]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SHAPES = [(4096, 512), (1024, 2048), (512, 4096), (8, 128, 1024), (2, 512, 768), (256, 11008), (4, 1000, 333)]
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "exp": lambda x: torch.exp(-x.abs()),
    "abs": torch.abs,
    "square": torch.square,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "scale": lambda x: x * 0.7 + 0.1,
    "clamp": lambda x: x.clamp(-2.0, 2.0),
    "wide": lambda x: x.float(),
    "narrow": lambda x: x.bfloat16(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
}
ROWWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "rms_norm": lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "by_largest": lambda x: x / (x.abs().amax(-1, keepdim=True) + 1),
    "by_sum": lambda x: x / (x.square().sum(-1, keepdim=True) + 1),
}


@dataclass
class Chain:
    """A function of tensors, made of named steps."""

    steps: list[tuple[str, int]]
    tensors: list[torch.Tensor]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        x = tensors[0]
        for name, other in self.steps:
            if name in BINARY:
                x = BINARY[name](x, tensors[other])
            else:
                x = (UNARY.get(name) or ROWWISE[name])(x)
        return x

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensors[0].shape))
        return f"{shape} {' '.join(name for name, _ in self.steps)}"


def draw(seed: int, dtype: torch.dtype, reduces: bool) -> Chain:
    """The chain of a number."""
    rng = random.Random(seed)
    shape = rng.choice(SHAPES)
    kinds = [shape, shape[-1:], (*shape[:-1], 1), shape]
    others = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    count = rng.randint(2, 12)
    steps = []
    for _ in range(count):
        if rng.random() < 0.45:
            steps.append((rng.choice(sorted(BINARY)), rng.randint(1, len(others))))
        else:
            steps.append((rng.choice(sorted(UNARY)), 0))
    if reduces:
        steps[rng.randrange(count)] = (rng.choice(sorted(ROWWISE)), 0)
    generator = torch.Generator().manual_seed(seed)
    types = [dtype, *(rng.choice([dtype, dtype, torch.float32]) for _ in others)]
    shapes = [shape, *others]
    return Chain(steps, [torch.randn(s, generator=generator).to(t) for s, t in zip(shapes, types, strict=True)])


def called(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], backward: bool) -> Callable[[], object]:
    if not backward:
        return lambda: function(*tensors)

    def step() -> object:
        output = function(*tensors)
        return torch.autograd.grad(output, tensors, torch.ones_like(output), allow_unused=True)

    return step


def time_of(call: Callable[[], object], seconds: float) -> float:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def check(chain: Chain, result: torch.Tensor) -> None:
    expected = chain(*[tensor.double() for tensor in chain.tensors]) if "narrow" not in str(chain) else None
    eager = chain(*chain.tensors)
    assert result.dtype == eager.dtype and result.shape == eager.shape, chain
    close = 2e-2 if result.dtype is torch.bfloat16 or "narrow" in str(chain) else 1e-3
    if any(tensor.dtype is torch.bfloat16 for tensor in chain.tensors):
        close = 6e-2
    wanted = (eager if expected is None or expected.dtype is not torch.float64 else expected).double()
    difference = (result.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean() + 1e-3)
    # Comparisons may go either way for a few elements where roundings differ.
    assert (difference > close).double().mean() < 1e-3, f"{chain}: {difference.max()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--backward", action="store_true", help="time a step: forward and the gradients of all inputs")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each time in each round")
    parser.add_argument("--no-inductor", action="store_true", help="beside eager PyTorch alone")
    args = parser.parse_args()
    import warpsmith  # noqa: F401, here it registers the backend

    if args.threads:
        torch.set_num_threads(args.threads)
    backends = ["eager", "warpsmith"] + ([] if args.no_inductor else ["inductor"])
    ratios: dict[str, list[float]] = {"eager": [], "inductor": []}
    cold: dict[str, list[float]] = {"warpsmith": [], "inductor": []}
    for at in range(args.chains):
        chain = draw(args.seed * 1000 + at, DTYPES[args.dtype], reduces=at % 2 == 0)
        tensors = [tensor.requires_grad_(args.backward) for tensor in chain.tensors]
        calls = {}
        for backend in backends:
            torch._dynamo.reset()
            function = chain if backend == "eager" else torch.compile(chain.__call__, backend=backend, dynamic=False)
            calls[backend] = called(function, tensors, args.backward)
            start = time.perf_counter()
            first = calls[backend]()
            if backend != "eager":
                cold[backend].append(time.perf_counter() - start)
                if not args.backward:
                    check(chain, first)
        times: dict[str, list[float]] = {backend: [] for backend in backends}
        for _ in range(args.rounds):
            for backend in backends:
                times[backend].append(time_of(calls[backend], args.seconds))
        medians = {backend: statistics.median(values) for backend, values in times.items()}
        for peer in backends:
            if peer != "warpsmith":
                ratios[peer].append(medians[peer] / medians["warpsmith"])
        shown = "  ".join(f"{backend} {medians[backend] * 1e3:8.3f} ms" for backend in backends)
        print(f"{at:2}  {shown}  {chain}", flush=True)
    for peer, values in ratios.items():
        if values:
            mean, worst, best = geometric_mean(values), min(values), max(values)
            print(f"warpsmith is {mean:.2f} times as fast as {peer}, {worst:.2f} to {best:.2f}")
    for backend, values in cold.items():
        if values:
            print(f"{backend}: first result after {statistics.median(values):.2f} s")


if __name__ == "__main__":
    main()
