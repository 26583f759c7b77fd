#!/usr/bin/env python3
"""Times Warpsmith and the best peer on random shapes, types and options, and shows the worst first.

The cases are drawn from the ranges that models have; the same seed gives the same cases on every machine. Both sides
are timed as bench/gpu.py and bench/cpu.py do it, with fewer samples. On a GPU, other processes compile the coming cases
meanwhile. What is measured goes to a file, a row for each case, which `warpsmith evidence --sweep FILE` records.

usage: bench/sweep.py --seed N --count M [FAMILY or OP ...] [--device cuda|cpu] [--dtype T ...] [--budget SECONDS]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import _help  # noqa: F401
import cpu
import gpu
import peers
import random_cases
import torch
from ahead import Ahead, share_caches
from random_cases import Drawn

PACE = gpu.Pace(seconds=0.02, rest=0.04, samples=9)
CPU_SECONDS = 0.1
CPU_SAMPLES = 7
# Mostly what models are served in.
DTYPES = ["bf16"] * 11 + ["f16"] * 5 + ["f32"] * 4


def on_gpu(drawn: Drawn, ours: peers.Ask, _: argparse.Namespace) -> dict:
    """One case on both sides."""
    row = ours(drawn.request("time"))
    if "error" in row:
        return row
    try:
        times, failures = gpu.measure(peers.Case.of(row), row["sets"], PACE)
    except gpu.DeviceLostError as lost:
        return row | {"peers": lost.times, "failures": lost.failures, "lost": True}
    torch.cuda.empty_cache()
    return row | {"peers": times, "failures": failures}


def on_cpu(drawn: Drawn, ours: peers.Ask, args: argparse.Namespace) -> dict:
    """One case on both sides, in rounds: the medians over them."""
    row = ours(drawn.request("time"))
    if "error" in row:
        return row
    calls, sets = cpu.prepare(peers.Case.of(row), args.compile)
    mine = [row["median_ms"]]
    theirs: dict[str, list[float]] = {name: [] for name in calls}
    failures: dict[str, str] = {}
    for turn in range(args.rounds):
        for name in [name for name in calls if name not in failures]:
            try:
                with torch.inference_mode(mode=not drawn.op.endswith("_backward")):
                    theirs[name].append(cpu.time_call(calls[name], sets, CPU_SECONDS, CPU_SAMPLES))
            except Exception as error:  # a peer may lack a type or a shape; the others still count
                failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        if turn + 1 < args.rounds:
            mine.append(ours({"do": "again"})["median_ms"])
    times = {name: statistics.median(ms) for name, ms in theirs.items() if name not in failures}
    return row | {"median_ms": statistics.median(mine), "peers": times, "failures": failures}


def timed(cases: Iterable[Drawn], args: argparse.Namespace) -> Iterator[dict]:
    """The rows of the cases, one after the other."""
    compare = on_gpu if args.device == "cuda" else on_cpu
    ours = peers.Ask(args.device)
    try:
        for drawn in cases:
            answer = compare(drawn, ours, args)
            if "case" in answer and set(answer["case"].split()) != set(drawn.name.split()):
                raise SystemExit(f"sweep.py: drew [{drawn.name}], but [{answer['case']}] was timed")
            row = dict(seed=args.seed, family=drawn.family, op=drawn.op, case=drawn.name, dtype=drawn.dtype)
            keys = ("device", "kernel", "config", "source_hash", "limit_ms", "peers", "failures", "error", "lost")
            row |= {key: answer[key] for key in keys if key in answer}
            row |= {"ms": answer["median_ms"]} if "median_ms" in answer else {}
            yield row
    finally:
        ours.close()


def ratio(row: dict) -> float | None:
    """How many times as long the fastest peer took."""
    return min(row["peers"].values()) / row["ms"] if row.get("peers") else None


def describe(row: dict) -> str:
    case = f"{row['op']} [{row['case']} {row['dtype']}]"
    if "error" in row:
        return f"refused: {case}: {row['error']}"
    where = f"{row['kernel']} ({row['config']})" if row["config"] else row["kernel"]
    text = f"{case}: {row['ms'] * 1e3:.1f} us, {where}"
    # How many keys there are is not known to the limit.
    text += "" if "kv_lens=" in row["case"] else f", {100 * row['limit_ms'] / row['ms']:.0f} % of the limit"
    notes = [f"{name}: {why[:100]}" for name, why in row["failures"].items()]
    if row["peers"]:
        name, ms = min(row["peers"].items(), key=lambda item: item[1])
        notes.insert(0, f"{name} {ms * 1e3:.1f} us")
    else:
        notes.insert(0, "no peer")
    shown = ratio(row)
    return f"{'-' if shown is None else f'{shown:.2f}x'}  {text}; {'; '.join(notes)}"


def summary(rows: list[dict]) -> Iterator[str]:
    """A line for each family and class of types."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (found := ratio(row)) is not None:
            groups.setdefault((row["family"], "f32" if row["dtype"] == "f32" else "16-bit"), []).append(found)
    for (family, kind), ratios in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        below = sum(one < 1 for one in ratios)
        yield (
            f"{family:16} {kind:7} {len(ratios):4} cases, geometric mean {mean:.2f}x, worst {min(ratios):.2f}x, "
            f"{below} ({100 * below / len(ratios):.0f} %) under 1"
        )


def report(rows: list[dict], total: int, seed: int) -> None:
    refused = [row for row in rows if "error" in row]
    others = [row for row in rows if "error" not in row]
    others.sort(key=lambda row: math.inf if ratio(row) is None else ratio(row))
    print(f"\nrefused: {len(refused)}; the rest, worst first (time of the fastest peer over ours)")
    for row in refused + others:
        print(describe(row))
    print()
    for line in summary(rows):
        print(line)
    without = sum(ratio(row) is None for row in others)
    print(f"seed {seed}: {len(rows)} of {total} cases timed, {len(refused)} refused, {without} without a peer")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named = f"families ({', '.join(random_cases.FAMILIES)}) or ops [default: every family]"
    parser.add_argument("names", nargs="*", metavar="FAMILY or OP", help=named)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True, help="cases of each family or op")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", action="append", choices=["bf16", "f16", "f32"], help="only these types")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no case is begun")
    parser.add_argument("--dry-run", action="store_true", help="print the cases, time nothing")
    parser.add_argument("--resume", action="store_true", help="go on after the cases that the rows have")
    parser.add_argument("--no-build", action="store_true", help="time the binary that is there")
    parser.add_argument("--out", type=Path, help="the rows [default: target/sweep-DEVICE-SEED.jsonl]")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="on the CPU, of each side")
    parser.add_argument("--rounds", type=int, default=5, help="on the CPU: how often a case is timed")
    parser.add_argument("--compile", action="store_true", help="on the CPU: time torch.compile too")
    args = parser.parse_args()
    try:
        wanted = args.dtype or DTYPES
        args.cases = random_cases.cases(args.seed, args.count, args.names, args.device, wanted)
    except ValueError as error:
        parser.error(str(error))
    args.cores = cores
    return args


def main() -> None:
    args = arguments()
    if args.dry_run:
        for drawn in args.cases:
            print(drawn)
        return
    start = time.monotonic()
    deadline = start + args.budget
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("sweep.py: PyTorch finds no CUDA device")
    if not args.no_build:
        peers.build()
    path = args.out or peers.ROOT / "target" / f"sweep-{args.device}-{args.seed}.jsonl"
    rows: list[dict] = []
    if args.resume and path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    done = {(row["op"], row["case"], row["dtype"]) for row in rows}
    missing = [drawn for drawn in args.cases if (drawn.op, drawn.name, drawn.dtype) not in done]
    lost = False
    with path.open("a" if rows else "w") as out:

        def go(cases: Iterable[Drawn]) -> None:
            nonlocal lost
            for row in timed(cases, args):
                lost = row.pop("lost", False)
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(f"{time.monotonic() - start:5.0f} s  {describe(row)}", flush=True)
                if lost or time.monotonic() > deadline:
                    return

        if args.device == "cuda":
            share_caches()
            with Ahead(missing, args.cores, args.device) as ahead:
                go(ahead.ready(deadline))
        else:
            os.environ["WARPSMITH_NUM_THREADS"] = str(args.threads)
            torch.set_num_threads(args.threads)
            # Large tensors of Warpsmith's lie in huge pages. So shall PyTorch's, which asks for this before it has any.
            os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
            go(missing)
    if lost:
        # A peer's error took the GPU from this process. Another goes on.
        left = ["--resume", "--no-build", "--budget", str(max(deadline - time.monotonic(), 0.0))]
        os.execv(sys.executable, [sys.executable, *sys.argv, *left])
    report(rows, len(args.cases), args.seed)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
