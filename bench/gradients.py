#!/usr/bin/env python3
"""Times forward and backward of attention and of losses from Python, beside PyTorch; on a GPU also their memory.

A call makes a result and the gradients of its inputs. All take turns in one process; shown are medians of milliseconds.
On a GPU: the losses of large heads, and attention over 32768 tokens beside attention in separate steps, with the peak
of memory beyond inputs and gradients, the library's workspaces among it. On the CPU: ten shapes of attention and three
heads, with as many threads each. Needs PyTorch and the package with its native half (`scripts/python-dev.sh`).

usage: bench/gradients.py [ROW ...] [--device cpu|cuda] [--rounds 3] [--no-compile] [--no-record]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "crates" / "python" / "python"))
#: Seconds of calls in a sample.
SECONDS = {"cpu": 0.25, "cuda": 0.05}

Call = Callable[..., torch.Tensor]


@dataclass
class Row:
    """Tensors, of which the floating ones get gradients, and functions of them that compute the same."""

    name: str
    fresh: Callable[[], list[torch.Tensor]]
    calls: dict[str, Call]


def attention(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, separate: bool = False) -> Row:
    """Attention of a batch; with `separate` also as three steps with all scores in memory."""
    import warpsmith

    batch, length, heads, kv_heads, dim = shape

    def fresh() -> list[torch.Tensor]:
        counts = (heads, kv_heads, kv_heads)
        made = [torch.randn(batch, count, length, dim, device=device, dtype=dtype) for count in counts]
        return [tensor.requires_grad_() for tensor in made]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warpsmith.sdpa(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

    def in_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        return ((q @ k.mT) * dim**-0.5).masked_fill_(hidden, -torch.inf).softmax(-1) @ v

    calls = {"torch": plain, "warpsmith": ours}
    if separate:
        calls["torch, separate steps"] = in_steps
    sizes = f"batch={batch} length={length} heads={heads} kv_heads={kv_heads} head_dim={dim} causal"
    return Row(f"attention {sizes} {str(dtype).removeprefix('torch.')}", fresh, calls)


def head(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, compiled: bool) -> Row:
    """The loss of a language model's head."""
    import warpsmith

    def fresh() -> list[torch.Tensor]:
        x = torch.randn(tokens, hidden, device=device, dtype=dtype)
        w = torch.randn(vocab, hidden, device=device, dtype=dtype) * hidden**-0.5
        return [x.requires_grad_(), w.requires_grad_(), torch.randint(vocab, (tokens,), device=device)]

    def plain(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # As the models of transformers have it.
        return F.cross_entropy(F.linear(x, w).float(), targets)

    calls: dict[str, Call] = {"torch": plain}
    if compiled:
        calls["torch.compile"] = torch.compile(plain, dynamic=False)
    calls["warpsmith"] = warpsmith.linear_cross_entropy
    return Row(f"linear_cross_entropy {tokens}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}", fresh, calls)


def loss(tokens: int, vocab: int, dtype: torch.dtype, device: str, compiled: bool) -> Row:
    """The loss of logits."""
    import warpsmith

    def fresh() -> list[torch.Tensor]:
        logits = torch.randn(tokens, vocab, device=device, dtype=dtype).requires_grad_()
        return [logits, torch.randint(vocab, (tokens,), device=device)]

    calls: dict[str, Call] = {"torch": F.cross_entropy}
    if compiled:
        calls["torch.compile"] = torch.compile(F.cross_entropy, dynamic=False)
    calls["warpsmith"] = warpsmith.cross_entropy
    return Row(f"cross_entropy {tokens}x{vocab} {str(dtype).removeprefix('torch.')}", fresh, calls)


#: Of attention on the CPU: batch, length, heads, KV heads, elements of a head.
SHAPES = [
    (1, 128, 8, 8, 64),
    (8, 128, 12, 12, 64),
    (4, 256, 12, 12, 64),
    (1, 512, 8, 2, 128),
    (2, 512, 16, 4, 64),
    (1, 1024, 8, 8, 64),
    (1, 1024, 16, 8, 128),
    (1, 1024, 8, 8, 96),
    (1, 2048, 4, 4, 64),
    (1, 2048, 4, 2, 128),
]


def rows(device: str, compiled: bool) -> Iterator[Row]:
    """All rows of a device."""
    if device == "cpu":
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                yield attention(shape, dtype, device)
            for sizes in ((256, 512, 32000), (512, 768, 16384), (2048, 256, 8192)):
                yield head(*sizes, dtype, device, compiled=False)
        return
    for sizes in ((4096, 2048, 50257), (8192, 1024, 151936), (8192, 4096, 128256)):
        yield head(*sizes, torch.bfloat16, device, compiled)
    yield loss(8192, 128256, torch.bfloat16, device, compiled)
    yield attention((1, 32768, 4, 4, 128), torch.bfloat16, device, separate=True)


def step(call: Call, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Forward and backward."""
    found = call(*tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(found, leaves, torch.ones_like(found))


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def sample(call: Call, tensors: list[torch.Tensor], device: str) -> float:
    """Milliseconds of a call, the mean of some."""
    calls, spent = 0, 0.0
    while spent < SECONDS[device] or calls < 3:
        # Waiting for each call would count what the host does before the first kernel.
        begun = time.perf_counter()
        for _ in range(4 if device != "cpu" else 1):
            step(call, tensors)
            calls += 1
        wait(device)
        spent += time.perf_counter() - begun
    return spent / calls * 1e3


def extra_gib(call: Call, tensors: list[torch.Tensor]) -> float:
    """The peak of memory in a call beyond inputs and gradients."""
    import warpsmith

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before, pool = torch.cuda.memory_allocated(), warpsmith.memory_stats("cuda").pool_used
    # A stream of its own has a workspace of its own.
    with torch.cuda.stream(torch.cuda.Stream()):
        step(call, tensors)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        warpsmith.reset_peak_memory_stats("cuda")
        grads = step(call, tensors)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
    return (peak + warpsmith.memory_stats("cuda").pool_peak - pool) / 2**30


def measure(row: Row, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and memory of each call of a row."""
    tensors, found = row.fresh(), {}
    for name, call in row.calls.items():
        step(call, tensors)
        found[name] = {"ms": 0.0}
        if device != "cpu":
            found[name]["extra_gib"] = extra_gib(call, tensors)
    samples: dict[str, list[float]] = {name: [] for name in row.calls}
    for _ in range(rounds):
        for name, call in row.calls.items():
            samples[name].append(sample(call, tensors, device))
    for name, times in samples.items():
        found[name]["ms"] = statistics.median(times)
    return found


def device_name(device: str) -> str:
    """The marketing name, as in the names of the evidence."""
    if device != "cpu":
        return torch.cuda.get_device_name()
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", help="only rows whose names begin so")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    args = parser.parse_args()
    import warpsmith

    # A row that PyTorch computes would be compared with itself.
    warnings.simplefilter("error", warpsmith.FallbackWarning)
    torch.manual_seed(0)
    result, ratios = {}, {}
    for row in rows(args.device, not args.no_compile):
        if args.rows and not row.name.startswith(tuple(args.rows)):
            continue
        found = result[row.name] = measure(row, args.device, args.rounds)
        best = min(part["ms"] for name, part in found.items() if name != "warpsmith")
        ratio = best / found["warpsmith"]["ms"]
        words = row.name.split()
        ratios.setdefault(f"{words[0]} {words[-1]}", []).append(ratio)
        shown = []
        for name, part in found.items():
            extra = f" (+{part['extra_gib']:.2f} GiB)" if "extra_gib" in part else ""
            shown.append(f"{name} {part['ms']:.2f} ms{extra}")
        print(f"{row.name}: {', '.join(shown)}, {ratio:.2f} times as fast", flush=True)
        gc.collect()
    for kind, values in ratios.items():
        print(f"{kind}: {math.exp(statistics.fmean(map(math.log, values))):.2f} in the geometric mean of {len(values)}")
    if result and not args.no_record:
        name = device_name(args.device)
        file = ROOT / "evidence" / "models" / f"gradients-{'-'.join(re.findall('[a-z0-9]+', name.lower()))}.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        record |= {"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        if args.device == "cpu":
            record["threads"] = torch.get_num_threads()
        record["rows"] = record.get("rows", {}) | result
        file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
