"""Random chains of ops: what `bench/fuse.py` times. The generator is seeded: a number names a chain for good."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def wide(x: torch.Tensor) -> torch.Tensor:
    """In f32, or f64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    "rms_norm": lambda x: x * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + 1e-6).to(x.dtype),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "by_largest": lambda x: x / (x.abs().amax(-1, keepdim=True) + 1),
    "by_sum": lambda x: x / (x.square().sum(-1, keepdim=True) + 1),
}
#: Results that differ by more than this, of the value and the mean value together, count as different.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
#: The share of elements that may: comparisons go either way for a few where roundings differ.
EITHER_WAY = 1e-3


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of bf16, as f64; the gradient passes as it is."""
    return x + (x.bfloat16().double() - x).detach()


@dataclass
class Chain:
    """A function of tensors, made of named steps."""

    steps: list[tuple[str, int]]
    tensors: list[torch.Tensor]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.run({}, *tensors)

    def exactly(self, *tensors: torch.Tensor) -> torch.Tensor:
        """In f64, where only what shall be rounded is."""
        return self.run({"wide": lambda x: x, "narrow": rounded}, *tensors)

    def run(self, instead: dict[str, Callable[[torch.Tensor], torch.Tensor]], *tensors: torch.Tensor) -> torch.Tensor:
        x = tensors[0]
        for name, other in self.steps:
            if name in BINARY:
                x = BINARY[name](x, tensors[other])
            else:
                x = (instead.get(name) or UNARY.get(name) or ROWWISE[name])(x)
        return x

    def __str__(self) -> str:
        shape = "x".join(map(str, self.tensors[0].shape))
        return f"{shape} {' '.join(name for name, _ in self.steps)}"

    @property
    def rounds(self) -> bool:
        """Whether anything on the way has 16 bits."""
        narrow = any(tensor.dtype is torch.bfloat16 for tensor in self.tensors)
        return narrow or any(name == "narrow" for name, _ in self.steps)

    def given(self, backward: bool) -> list[torch.Tensor]:
        """What a step is called with: the tensors, and for gradients that of the result. Not ones: the gradient of a
        norm's sum is nothing but rounding errors."""
        if not backward:
            return [*self.tensors]
        output = self(*(tensor.detach() for tensor in self.tensors))
        generator = torch.Generator().manual_seed(len(self.steps))
        gradient = torch.randn(output.shape, generator=generator).to(output)
        return [*(tensor.detach().requires_grad_() for tensor in self.tensors), gradient]


def draw(seed: int, dtype: torch.dtype, reduces: bool, device: str = "cpu") -> Chain:
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
    made = [torch.randn(s, generator=generator).to(t) for s, t in zip(shapes, types, strict=True)]
    return Chain(steps, [tensor.to(device) for tensor in made])


def called(function: Callable[..., torch.Tensor], backward: bool) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A step: the result alone, or the gradients of all tensors, of which the last is the result's."""
    if not backward:
        return lambda *tensors: (function(*tensors),)

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *inputs, gradient = tensors
        return torch.autograd.grad(function(*inputs), inputs, gradient, allow_unused=True)

    return step


def check(chain: Chain, given: list[torch.Tensor], results: tuple[torch.Tensor, ...], backward: bool) -> None:
    """Fails unless results are as near to those of f64, with no rounding but on purpose, as eager PyTorch's."""
    eager = called(chain, backward)(*given)
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in given]
    exact = called(chain.exactly, backward)(*wide)
    for result, own, wanted in zip(results, eager, exact, strict=True):
        assert (result is None) == (own is None), chain
        if result is None:
            continue
        assert (result.dtype, result.shape) == (own.dtype, own.shape), chain
        assert wanted.dtype is torch.float64, chain
        close = CLOSE[torch.bfloat16 if chain.rounds else torch.float32]
        wrong, least = (far(one, wanted, close) for one in (result, own))
        # A sum over rows has few elements, each of many that may go either way. Where a rounding decides about signs,
        # as in the gradient of |x|, eager PyTorch is as far from f64.
        allowed = (EITHER_WAY if result.numel() > 100_000 else 0.02) + 1.5 * least
        assert wrong < allowed, f"{chain}: {wrong:.2%} of {tuple(result.shape)} differ; of eager PyTorch's {least:.2%}"


def far(result: torch.Tensor, wanted: torch.Tensor, close: float) -> float:
    """The share of elements that differ by more than this, of the value and the mean value together."""
    difference = (result.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean() + 1e-3)
    return (~(difference <= close)).double().mean().item()
