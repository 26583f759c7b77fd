#!/usr/bin/env python3
"""Trains a small GPT on a text file, from scratch, and lets it write.

Tokens are bytes. The model is Llama-like: RMS norms, rotary positions, attention with fewer KV heads, gated MLPs. It
runs on warpsmith's kernels, forward and backward; with --plain the same model runs on PyTorch's, from the same random
numbers.

    python examples/train/train.py                              # this repository's documents, a minute on a CPU
    python examples/train/train.py --plain                      # the same in PyTorch
    python examples/train/train.py book.txt --size medium --steps 2000 --device cuda
    python examples/train/train.py --resume                     # go on from the last checkpoint
    python examples/train/train.py --steps 0 --prompt "The op " # only write
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """A model's dimensions."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    batch: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def inner(self) -> int:
        """Width of the MLPs."""
        return self.width * 8 // 3 // 32 * 32


SIZES = {
    "tiny": Size(layers=2, width=128, heads=4, kv_heads=2, context=128, batch=16),
    "small": Size(layers=4, width=256, heads=8, kv_heads=4, context=256, batch=8),
    "medium": Size(layers=8, width=512, heads=8, kv_heads=4, context=512, batch=16),
    "large": Size(layers=12, width=1024, heads=16, kv_heads=8, context=1024, batch=16),
}


class PlainNorm(nn.RMSNorm):
    """warpsmith.nn.RMSNorm in PyTorch: a residual is added first, and the sum is returned too."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = super().forward(total)
        return normed if residual is None else (normed, total)


class PlainLinear(nn.Linear):
    """warpsmith.nn.FusedLinear in PyTorch: a residual is added last."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x)
        return out if residual is None else residual + out


class PlainMLP(nn.Module):
    """warpsmith.nn.GatedMLP in PyTorch."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out if residual is None else residual + out


class Plain:
    """What the model is made of, in PyTorch."""

    norm, linear, mlp = PlainNorm, PlainLinear, PlainMLP
    embedding = staticmethod(F.embedding)

    @staticmethod
    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = (table[: x.shape[1], None] for table in (cos, sin))
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    @staticmethod
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    @staticmethod
    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def fused() -> type[Plain]:
    """What the model is made of, in warpsmith."""
    try:
        import warpsmith
    except ImportError as error:
        raise SystemExit(f"train: {error}; `make wheel` builds it, and --plain does without") from None

    class Fused(Plain):
        norm, linear, mlp = warpsmith.nn.RMSNorm, warpsmith.nn.FusedLinear, warpsmith.nn.GatedMLP

        @staticmethod
        def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return warpsmith.embedding(weight, tokens)

        @staticmethod
        def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            return warpsmith.rope(x, positions, cos, sin)

        @staticmethod
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return warpsmith.attention(q, k, v, causal=True)

        @staticmethod
        def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return warpsmith.linear_cross_entropy(hidden, weight, targets)

    return Fused


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: Size, parts: type[Plain]) -> None:
        super().__init__()
        self.size, self.parts = size, parts
        self.attention_norm, self.mlp_norm = parts.norm(size.width, eps=1e-5), parts.norm(size.width, eps=1e-5)
        self.q = parts.linear(size.width, size.heads * size.head_dim, bias=False)
        self.kv = parts.linear(size.width, 2 * size.kv_heads * size.head_dim, bias=False)
        self.out = parts.linear(size.heads * size.head_dim, size.width, bias=False)
        self.mlp = parts.mlp(size.width, size.inner)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size, parts = self.size, self.parts
        normed = self.attention_norm(x)
        q = self.q(normed).unflatten(-1, (size.heads, size.head_dim))
        k, v = self.kv(normed).unflatten(-1, (2, size.kv_heads, size.head_dim)).unbind(2)
        found = parts.attention(parts.rope(q, cos, sin), parts.rope(k, cos, sin), v)
        normed, x = self.mlp_norm(self.out(found.flatten(2)), x)
        return self.mlp(normed, residual=x)


class GPT(nn.Module):
    """The language model. Its head is its embedding."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: Size, parts: type[Plain]) -> None:
        super().__init__()
        self.size, self.parts = size, parts
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Block(size, parts) for _ in range(size.layers))
        self.norm = parts.norm(size.width, eps=1e-5)
        angles = torch.outer(
            torch.arange(size.context), 10000.0 ** -(torch.arange(0, size.head_dim, 2) / size.head_dim)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What is added to the residual stream starts smaller the more layers add to it.
                added = name.endswith(("out.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if added else 0.02)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.parts.embedding(tokens, self.embedding.weight)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.parts.loss(self.hidden(tokens).flatten(0, 1), self.embedding.weight, targets.flatten())

    @torch.no_grad()
    def write(self, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[bytes]:
        """Bytes after a prompt, one by one. Nothing is cached: the model is small."""
        random = torch.Generator().manual_seed(seed)
        tokens = list(prompt) or [ord("\n")]
        for _ in range(count):
            seen = torch.tensor([tokens[-self.size.context :]], device=self.embedding.weight.device)
            logits = F.linear(self.hidden(seen)[0, -1], self.embedding.weight).float().cpu()
            if temperature > 0:
                tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)))
            else:
                tokens.append(int(logits.argmax()))
            yield bytes(tokens[-1:])


@dataclass
class Run:
    """A training run, as a checkpoint keeps it."""

    model: GPT
    optimiser: torch.optim.Optimizer
    random: torch.Generator
    size: str
    losses: list[float]

    def save(self, path: Path) -> None:
        state = {
            "size": self.size,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": self.random.get_state(),
            "losses": self.losses,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run that is stopped while it saves keeps the last whole checkpoint.
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise SystemExit(f"train: {path}: expected a checkpoint: {error}") from None
        if state["size"] != self.size:
            raise SystemExit(f"train: {path} holds a model of --size {state['size']}, not {self.size}")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.random.set_state(state["random"])
        self.losses = state["losses"]


def read_text(path: Path | None) -> bytes:
    if path is not None:
        try:
            return path.read_bytes()
        except OSError as error:
            raise SystemExit(f"train: {path}: {error.strerror}") from None
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return b"\n".join(document.read_bytes() for document in documents)


def batches(text: torch.Tensor, size: Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and the same moved by one byte."""
    starts = torch.randint(len(text) - size.context, (size.batch,), generator=random)
    pieces = torch.stack([text[start : start + size.context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def judged(model: GPT, text: torch.Tensor, device: torch.device) -> float:
    """The mean loss over the part of the text that was kept back."""
    size = model.size
    count = max(1, min(32, (len(text) - 1) // size.context))
    losses = []
    for at in range(count):
        piece = text[at * size.context : (at + 1) * size.context + 1].long()[None].to(device)
        losses.append(float(model.loss(piece[:, :-1], piece[:, 1:])))
    return sum(losses) / len(losses)


def plot(losses: list[float], path: Path, title: str) -> None:
    """The loss over the steps, as an SVG."""
    width, height, left, bottom = 640, 320, 56, 40
    smooth, mean = [], losses[0]
    for loss in losses:
        mean += (loss - mean) * 0.1
        smooth.append(mean)
    top, low = max(losses), min(0.0, *losses)

    def line(values: list[float], colour: str, stroke: float) -> str:
        scale = (width - left - 16) / max(1, len(values) - 1)
        points = (
            f"{left + at * scale:.1f},{height - bottom - (value - low) / (top - low) * (height - bottom - 32):.1f}"
            for at, value in enumerate(values)
        )
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{stroke}" points="{" ".join(points)}"/>'

    ticks = "".join(
        f'<text x="{left - 8}" y="{height - bottom - share * (height - bottom - 32) + 4:.0f}" text-anchor="end">'
        f"{low + share * (top - low):.1f}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="20" font-size="14">{title}</text>{ticks}'
        f'<text x="{width - 16}" y="{height - 12}" text-anchor="end">step {len(losses)}</text>'
        f"{line(losses, '#c8d4e8', 1)}{line(smooth, '#20508c', 2)}</svg>\n"
    )


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path, help="a text file; this repository's documents if left out")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="steps of training (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="pieces of text a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="PyTorch's kernels in place of warpsmith's")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument("--dtype", choices=("f32", "bf16"), help="of products (default: bf16 on a GPU)")
    parser.add_argument("--out", type=Path, default=Path("train-out"), help="folder of results (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder of results")
    parser.add_argument("--prompt", default="Warpsmith ", help="what to continue (default: %(default)r)")
    parser.add_argument("--bytes", type=int, default=300, help="bytes to write at the end (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of what is written; 0 takes the likeliest byte")
    found = parser.parse_args(words)
    for name in ("steps", "bytes"):
        if getattr(found, name) < 0:
            parser.error(f"argument --{name}: expected 0 or more, got {getattr(found, name)}")
    for name in ("save_every", "batch"):
        if getattr(found, name) is not None and getattr(found, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: expected at least 1, got {getattr(found, name)}")
    if not found.rate > 0:
        parser.error(f"argument --rate: expected more than 0, got {found.rate}")
    if not found.temperature >= 0:
        parser.error(f"argument --temperature: expected 0 or more, got {found.temperature}")
    try:
        found.device = torch.device(found.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        parser.error(f"argument --device: expected cpu or cuda, got {found.device!r}")
    if found.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"argument --device: PyTorch finds no GPU for {found.device}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    device: torch.device = args.device
    dtype = {"f32": None, "bf16": torch.bfloat16, None: torch.bfloat16 if device.type == "cuda" else None}[args.dtype]
    size = SIZES[args.size]
    if args.batch is not None:
        size = replace(size, batch=args.batch)
    text = torch.frombuffer(bytearray(read_text(args.text)), dtype=torch.uint8)
    if len(text) < 12 * size.context:
        raise SystemExit(f"train: expected a text of at least {12 * size.context} bytes, got {len(text)}")
    # The last tenth is kept back.
    text, kept = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]

    torch.manual_seed(args.seed)
    model = GPT(size, Plain if args.plain else fused()).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), args.rate, betas=(0.9, 0.95), weight_decay=0.1)
    run = Run(model, optimiser, torch.Generator().manual_seed(args.seed), args.size, [])
    checkpoint = args.out / "checkpoint.pt"
    if args.resume or args.steps == 0:
        if checkpoint.exists():
            run.load(checkpoint)
            print(f"resumed {checkpoint} at step {len(run.losses)}")
        elif args.resume:
            raise SystemExit(f"train: {checkpoint}: no such checkpoint")

    parameters = sum(parameter.numel() for parameter in model.parameters())
    kernels = "PyTorch" if args.plain else "warpsmith"
    print(f"{parameters / 1e6:.2f} M parameters, {len(text):,} bytes of text, {device}, kernels of {kernels}")
    train(run, args, size, text, device, dtype)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        if run.losses:
            print(f"loss on text that was kept back: {judged(model, kept, device):.4f}")
        print(f"\n{args.prompt}", end="", flush=True)
        for piece in model.write(args.prompt.encode(), args.bytes, args.temperature, args.seed):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    print()


def train(
    run: Run, args: argparse.Namespace, size: Size, text: torch.Tensor, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Trains up to the number of steps, with progress, checkpoints and a plot."""
    step_loss = torch.compile(run.model.loss) if args.compile else run.model.loss
    warm_up = max(1, args.steps // 20)
    first, began, said = len(run.losses), time.perf_counter(), 0.0
    for step in range(first, args.steps):
        share = (step + 1) / warm_up if step < warm_up else None
        if share is None:
            share = 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, args.steps - warm_up)))
        for group in run.optimiser.param_groups:
            group["lr"] = args.rate * share
        tokens, targets = (part.to(device) for part in batches(text, size, run.random))
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = step_loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimiser.step()
        run.optimiser.zero_grad(set_to_none=True)
        run.losses.append(loss.item())
        if not math.isfinite(run.losses[-1]):
            raise SystemExit(f"train: the loss of step {step + 1} is {run.losses[-1]}; try a lower --rate")
        now = time.perf_counter()
        if step + 1 == args.steps or now - said > 2:
            said = now
            speed = (step + 1 - first) * size.batch * size.context / (now - began)
            print(f"step {step + 1:5} of {args.steps}  loss {run.losses[-1]:.4f}  {speed:,.0f} tokens/s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            run.save(args.out / "checkpoint.pt")
    if run.losses:
        kernels = "PyTorch" if args.plain else "warpsmith"
        plot(run.losses, args.out / "loss.svg", f"loss, {args.size} model, kernels of {kernels}")
        (args.out / "losses.json").write_text(json.dumps(run.losses))
        print(f"wrote {args.out / 'checkpoint.pt'}, {args.out / 'loss.svg'} and {args.out / 'losses.json'}")


if __name__ == "__main__":
    main()
