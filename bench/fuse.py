#!/usr/bin/env python3
"""Times random chains of ops: fused by Warpsmith, compiled by inductor, and run op by op.

Both compilers are backends of torch.compile. Each chain has 2 to 12 ops, broadcasts and mixed types; half of the
chains have a reduction. All three run in turn, several times, so that whatever else the machine does hits all of them.
Results must agree before anything is timed. Shown are medians, the time from the first call to its result, and at the
end geometric means of the ratios. On a GPU, steps are captured in CUDA graphs and rotate over copies of their tensors
that exceed the L2, as docs/measuring.md says; caches of compiled code are empty at first.

With --record a run replaces what evidence/fusion has of its device, types and direction. --table prints the tables of
docs/fusion.md from there.

usage: bench/fuse.py [--device cpu | cuda] [--chains 24] [--first 0] [--seed 0] [--dtype f32 | bf16] [--backward]
                     [--threads N] [--rounds 5] [--samples 10] [--rest 0.1] [--no-inductor] [--record] | --table
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence" / "fusion"


def empty_caches() -> None:
    """Compilers shall find nothing of an earlier run. Must come before they are imported."""
    folder = tempfile.mkdtemp(prefix="fuse-")
    for name in ("WARPSMITH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.path.join(folder, name.lower())


def time_on_cpu(call: Callable[[], object], seconds: float) -> float:
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def copies(bytes_of_chain: int) -> int:
    """Copies of a chain's tensors that calls rotate over, together three times the L2."""
    import torch

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return 1 if bytes_of_chain * 8 < l2 else -(-3 * l2 // bytes_of_chain) + 1


def copied(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def measure(args: argparse.Namespace, at: int, backends: list[str]) -> dict[str, object]:
    """One chain: milliseconds and seconds to the first result of each backend."""
    import chains
    import torch

    backward = args.backward
    chain = chains.draw(args.seed * 1000 + at, chains.DTYPES[args.dtype], at % 2 == 0, args.device)
    given = chain.given(backward)
    steps, first = {}, {}
    torch._dynamo.reset()
    for backend in backends:
        function = chain if backend == "eager" else torch.compile(chain.__call__, backend=backend, dynamic=False)
        steps[backend] = chains.called(function, backward)
        start = time.perf_counter()
        results = steps[backend](*given)
        if args.device == "cuda":
            torch.cuda.synchronize()
        first[backend] = time.perf_counter() - start
        if backend != "eager":
            chains.check(chain, given, results, backward)
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    if args.device == "cuda":
        from gpu import Pace, time_call

        moved = sum(tensor.nbytes for tensor in (*given, *results) if tensor is not None)
        sets = [tuple(copied(tensor) for tensor in given) for _ in range(copies(moved))]
        pace = Pace(seconds=0.02, rest=args.rest, samples=args.samples)
        for _ in range(args.rounds):
            for backend in backends:
                times[backend].append(time_call(steps[backend], sets, keep_outputs=len(sets) > 1, pace=pace))
    else:
        for _ in range(args.rounds):
            for backend in backends:
                call = steps[backend]
                times[backend].append(1e3 * time_on_cpu(lambda call=call: call(*given), args.seconds))
    row: dict[str, object] = {"chain": at, "what": str(chain), "dtype": args.dtype, "backward": backward}
    row |= {f"{backend}_ms": round(statistics.median(values), 6) for backend, values in times.items()}
    row |= {f"{backend}_first_s": round(first[backend], 4) for backend in backends if backend != "eager"}
    return row


def summary(rows: list[dict]) -> list[str]:
    """What a run comes to, in words."""
    lines = []
    for peer in ("eager", "inductor"):
        ratios = [row[f"{peer}_ms"] / row["warpsmith_ms"] for row in rows if f"{peer}_ms" in row]
        if ratios:
            mean, worst, best = geometric_mean(ratios), min(ratios), max(ratios)
            lines.append(f"warpsmith is {mean:.2f} times as fast as {peer}, {worst:.2f} to {best:.2f}")
    for backend in ("warpsmith", "inductor"):
        seconds = [row[f"{backend}_first_s"] for row in rows if f"{backend}_first_s" in row]
        if seconds:
            lines.append(f"{backend}: first result after {statistics.median(seconds):.2f} s")
    return lines


def file_of(device: str) -> pathlib.Path:
    return EVIDENCE / f"{device.lower().replace(' ', '-')}.json"


def identity(row: dict) -> tuple:
    """What a row is a time of."""
    if "chain" in row:
        return (False, row["dtype"], row["backward"], row["chain"])
    return (True, *(row[name] for name in ("model", "step", "batch", "length")), row.get("layers", 0))


def record(device: str, rows: list[dict]) -> None:
    """Replaces the rows of these chains or models, a row a line."""
    import torch

    file = file_of(device)
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    new = {identity(row) for row in rows}
    rows = sorted([row for row in known if identity(row) not in new] + rows, key=identity)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = f'"device": {json.dumps(device)},\n  "torch": "{torch.__version__}"'
    file.write_text(f'{{\n  {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def table() -> str:
    """The recorded runs as tables in Markdown."""
    chains = [
        "| device | type | | chains | to inductor, mean | least | most | to eager | first result | inductor's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    models = [
        "| device | model | step | tokens | Warpsmith | inductor | eager PyTorch | to inductor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file in sorted(EVIDENCE.glob("*.json")):
        known = json.loads(file.read_text())
        device, rows = known["device"], known["rows"]
        for dtype, backward in sorted({(row["dtype"], row["backward"]) for row in rows if "chain" in row}):
            own = [row for row in rows if "chain" in row and (row["dtype"], row["backward"]) == (dtype, backward)]
            ratios = [row["inductor_ms"] / row["warpsmith_ms"] for row in own]
            eager = geometric_mean([row["eager_ms"] / row["warpsmith_ms"] for row in own])
            first = [statistics.median(row[f"{of}_first_s"] for row in own) for of in ("warpsmith", "inductor")]
            cells = [device, dtype, "with backward" if backward else "forward", str(len(own))]
            cells += [f"{number:.2f}" for number in (geometric_mean(ratios), min(ratios), max(ratios), eager)]
            cells += [f"{seconds:.2f} s" for seconds in first]
            chains.append(f"| {' | '.join(cells)} |")
        for row in rows:
            if "model" in row:
                layers = f", {row['layers']} layers" if "layers" in row else ""
                cells = [device, row["model"] + layers, row["step"], f"{row['batch']} x {row['length']}"]
                cells += [f"{row[f'{of}_ms']:.2f} ms" for of in ("warpsmith", "inductor", "eager")]
                cells.append(f"{row['inductor_ms'] / row['warpsmith_ms']:.2f}")
                models.append(f"| {' | '.join(cells)} |")
    return "\n".join([*chains, "", *models])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chains", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="the number of the first chain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--backward", action="store_true", help="time a step: forward and the gradients of all inputs")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each time in each round, on the CPU")
    parser.add_argument("--samples", type=int, default=10, help="times in each round, on a GPU")
    parser.add_argument("--rest", type=float, default=0.1, help="seconds between them, which a GPU needs to stay cool")
    parser.add_argument("--no-inductor", action="store_true", help="beside eager PyTorch alone")
    parser.add_argument("--record", action="store_true", help="write the evidence, after each chain")
    parser.add_argument("--table", action="store_true", help="print the table of what is recorded")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    empty_caches()
    import torch
    import warpsmith  # noqa: F401, here it registers the backend

    if args.threads:
        torch.set_num_threads(args.threads)
    backends = ["eager", "warpsmith"] + ([] if args.no_inductor else ["inductor"])
    # What compilers import and start, none of them does for the first chain alone.
    for backend in backends[1:]:
        warm = torch.compile(lambda x: x * 2 + 1, backend=backend, dynamic=False)
        made = warm(torch.ones(8192, device=args.device, requires_grad=args.backward))
        if args.backward:
            made.sum().backward()
    if args.record and args.no_inductor:
        sys.exit("fuse.py: nothing is recorded without the peer")
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    rows, failed = [], 0
    for at in range(args.first, args.first + args.chains):
        try:
            row = measure(args, at, backends)
        except Exception as error:  # the others still count
            failed += 1
            print(f"{at:2}  {type(error).__name__}: {str(error).strip()[:2000]}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        if args.record:
            record(device, [row])
        shown = "  ".join(f"{backend} {row[f'{backend}_ms'] * 1e3:9.1f} us" for backend in backends)
        seconds = " ".join(f"{row[f'{backend}_first_s']:.2f}" for backend in backends[1:])
        print(f"{at:2}  {shown}  first {seconds} s  {row['what']}", flush=True)
    print("\n".join(summary(rows)))
    if failed:
        sys.exit(f"fuse.py: {failed} chains failed")


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "cpu"


if __name__ == "__main__":
    main()
