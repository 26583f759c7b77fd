#!/usr/bin/env python3
"""Times training steps of a model of transformers on this machine's GPU: as it is, compiled, and patched by Warpsmith.

A step is forward with labels, backward and AdamW. All three take turns in one process, each alone in memory, several
times; shown are medians of milliseconds and the peak memory, that of Warpsmith's workspaces included. `--losses N`
trains for N steps from the same weights on the same tokens, plain and patched, and shows how far the losses part. Needs
PyTorch with CUDA, transformers and the package's native half (`scripts/python-dev.sh`).

usage: bench/train.py [--losses N] [--batch 4] [--length 2048] [--layers 12] [--rounds 3] [--no-record]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import _help  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "crates" / "python" / "python"))
VOCABULARY = 32000
#: Tokens of each text whose loss is compared.
LOSS_LENGTH = 256


def build(layers: int, seed: int = 1):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).train()


def prepared(kind: str, layers: int):
    """The model, and what is called."""
    import warpsmith

    model = build(layers)
    if kind == "warpsmith":
        print(warpsmith.patch(model), file=sys.stderr)
    called = torch.compile(model) if kind == "torch.compile" else model
    return model, called


def free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def one(kind: str, args: argparse.Namespace) -> tuple[float, float]:
    """Milliseconds of a step and the peak of memory in GiB."""
    import warpsmith

    model, called = prepared(kind, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (args.batch, args.length), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        called(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    warpsmith.reset_peak_memory_stats("cuda")
    samples = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begun) / 4 * 1e3)
    peak = torch.cuda.max_memory_allocated()
    if kind == "warpsmith":
        # Workspaces are not PyTorch's memory.
        peak += warpsmith.memory_stats("cuda").pool_peak
    return statistics.median(samples), peak / 2**30


def losses(kind: str, args: argparse.Namespace) -> list[float]:
    """Losses of steps on text that can be learned: each token follows from the one before, but for some noise."""
    model, called = prepared(kind, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator("cuda").manual_seed(7)
    follows = torch.randperm(VOCABULARY, device="cuda", generator=generator)
    found = []
    for _ in range(args.losses):
        ids = torch.randint(0, 512, (args.batch, LOSS_LENGTH), device="cuda", generator=generator)
        for at in range(1, LOSS_LENGTH):
            is_noise = torch.rand(args.batch, device="cuda", generator=generator) < 0.1
            ids[:, at] = torch.where(is_noise, ids[:, at], follows[ids[:, at - 1]])
        optimizer.zero_grad(set_to_none=True)
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).float().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--losses", type=int, default=0, help="compare the losses of so many steps, too")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    args = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for kind in ("eager", "torch.compile", "warpsmith"):
            rows.setdefault(kind, []).append(one(kind, args))
            free()
    result: dict = {
        "model": f"Llama, {args.layers} layers of 1024, {args.batch} x {args.length}, vocabulary {VOCABULARY}"
    }
    for kind, found in rows.items():
        times, peaks = zip(*found, strict=True)
        result[kind] = {"ms": statistics.median(times), "peak_gib": max(peaks)}
        print(f"{kind:14} {result[kind]['ms']:7.2f} ms a step, at most {result[kind]['peak_gib']:.2f} GiB", flush=True)
    ours = result["warpsmith"]
    for kind in ("eager", "torch.compile"):
        ratio, part = result[kind]["ms"] / ours["ms"], ours["peak_gib"] / result[kind]["peak_gib"]
        print(f"{ratio:.2f} times as fast as {kind}, {part:.2f} of its memory")
    if args.losses:
        plain, patched = losses("eager", args), losses("warpsmith", args)
        apart = [abs(a - b) / a for a, b in zip(plain, patched, strict=True)]
        tail = slice(-max(args.losses // 10, 1), None)
        ends = [statistics.mean(found[tail]) for found in (plain, patched)]
        result["losses"] = {
            "steps": args.losses,
            "first": plain[0],
            "last_of_torch": ends[0],
            "last_of_warpsmith": ends[1],
            "mean_difference": statistics.mean(apart),
            "largest_difference": max(apart),
        }
        print(
            f"losses of {args.losses} steps: {plain[0]:.3f} to {ends[0]:.4f} and {ends[1]:.4f}; "
            f"apart by {statistics.mean(apart):.3%} in the mean, at most {max(apart):.3%}"
        )
    if not args.no_record:
        device = torch.cuda.get_device_name()
        file = ROOT / "evidence" / "models" / f"training-{device.lower().replace(' ', '-')}.json"
        with contextlib.suppress(FileNotFoundError):
            result = json.loads(file.read_text()) | result
        result |= {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
