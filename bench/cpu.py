#!/usr/bin/env python3
"""Times Warpsmith and PyTorch on this machine's CPU with the same number of threads, and records both as evidence.

For each case both run back to back, several times in turn, so that whatever else the machine does hits both. What is
shown and recorded are medians over the rounds; at the end comes the geometric mean of the ratios. PyTorch is not timed
again where the evidence has kept its times, but for three rows: they tell whether the machine is as fast as it was.

usage: bench/cpu.py [OP ...] [--threads N] [--rounds N] [--compile] [--stale | --no-record] [--retime-peers]
                    [--budget 8m]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time

import _help  # noqa: F401
import peers
import torch

# As Warpsmith: as many copies of the tensors, results too, and samples long enough for the clock.
ROTATION_BYTES = 512 << 20
# A case may touch little of large tensors, such as a cache: copies of those must still fit into memory.
MOST_BYTES = 4 << 30
SAMPLE_SECONDS = 2e-4
SECONDS = 0.3
FEWEST_SAMPLES = 20
PATIENCE = 6.0


def time_call(call, sets: list[tuple], seconds: float = SECONDS, fewest: int = FEWEST_SAMPLES) -> float:
    """Milliseconds of one call, the median.

    Each set keeps its last results: were they dropped at once, every call would write to the memory the call before
    has left in the cache, while Warpsmith's results rotate like its inputs.
    """
    kept = [None] * len(sets)
    # Three times: the allocator takes memory of this size from the system until some has come back to it.
    for _ in range(3):
        for index, tensors in enumerate(sets):
            kept[index] = call(*tensors)
    start = time.perf_counter()
    call(*sets[0])
    once = time.perf_counter() - start
    calls = min(max(math.ceil(SAMPLE_SECONDS / max(once, 1e-9)), 1), 100_000)
    samples, index, begin = [], 0, time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            index = (index + 1) % len(sets)
            kept[index] = call(*sets[index])
        samples.append((time.perf_counter() - start) * 1e3 / calls)
        spent = time.perf_counter() - begin
        if spent >= seconds and len(samples) >= fewest:
            break
        if spent >= PATIENCE * seconds and len(samples) >= 3:
            break
    return statistics.median(samples)


def prepare(case: peers.Case, with_compile: bool) -> tuple[dict, list[tuple]]:
    """The peers' calls and the sets of tensors they rotate over."""
    work = peers.of(case, "cpu")
    if work is None:
        return {}, []
    cold = case.row["l2"].lower() == "cold"
    count = max(-(-ROTATION_BYTES // max(int(case.row["bytes"]), 1)), 2) if cold else 1
    count = case.row.get("sets", count)
    calls = dict(work.calls)
    if with_compile and work.compile:
        torch._dynamo.reset()
        calls["torch.compile"] = torch.compile(work.compile, dynamic=False)
    sets = [work.fresh()]
    held = sum(x.numel() * x.element_size() for x in peers.tensors(sets[0]))
    count = min(count, max(MOST_BYTES // max(held, 1), 1))
    return calls, sets + [work.fresh() for _ in range(count - 1)]


def calibrate(case: peers.Case, peer: str, rounds: int) -> float | None:
    """The time of one peer, the median over the rounds, if there still is such a one."""
    calls, sets = prepare(case, with_compile=False)
    if peer not in calls:
        return None
    with torch.inference_mode(mode=not case.op.endswith("_backward")):
        return statistics.median(time_call(calls[peer], sets) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="only these ops")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="time torch.compile too (slow to compile)",
    )
    parser.add_argument("--retime-peers", action="store_true", help="time peers whose times are kept, too")
    parser.add_argument("--budget", type=peers.seconds, help="begin no case after this time, such as 8m")
    evidence = parser.add_mutually_exclusive_group()
    evidence.add_argument("--stale", action="store_true", help="only cases that the evidence has no present timing of")
    evidence.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    args = parser.parse_args()
    begun = time.monotonic()
    peers.build()
    os.environ["WARPSMITH_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    # Large tensors of Warpsmith's lie in huge pages. So shall PyTorch's, which asks for this before it has any.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    path = peers.ROOT / "target" / "peers-cpu.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = [] if args.no_record else ["--record"]
    record += ["--stale"] if args.stale else []
    kept: peers.Kept | None = None
    ratios: dict[str, list[float]] = {}
    print(f"PyTorch {torch.__version__}, {args.threads} threads each")
    print(f"{'op':22} {'case':58} {'dtype':6} {'warpsmith':>10} {'best peer':>10} {'ratio':>6} {'of copy':>8}")
    with path.open("w") as out:
        for op in args.ops or [None]:
            words = [*([op] if op else []), "--device", "cpu", "--peers", str(path), *record]
            if args.budget:
                words += ["--budget", f"{max(int(args.budget - (time.monotonic() - begun)), 0)}s"]
            with peers.Steps("bench", *words, "--json", "--step") as steps:
                for row in steps:
                    if kept is None and not args.retime_peers:
                        kept = peers.Kept(row["device"])
                        kept.calibrate("cpu", out, lambda case, peer: calibrate(case, peer, args.rounds))
                    case = peers.Case.of(row)
                    known = kept is not None and kept.knows(case)
                    calls, sets = ({}, []) if known else prepare(case, args.compile)
                    ours = [row]
                    theirs: dict[str, list[float]] = {name: [] for name in calls}
                    for turn in range(args.rounds):
                        for name, call in calls.items():
                            with torch.inference_mode(mode=not case.op.endswith("_backward")):
                                theirs[name].append(time_call(call, sets))
                        if turn:
                            ours.append(steps.again())
                    times = {name: statistics.median(ms) for name, ms in theirs.items()}
                    peers.write(out, case, "cpu", times)
                    ratio = show(case, ours, kept.of(case) if known else times)
                    if ratio is not None:
                        ratios.setdefault(case.op, []).append(ratio)
    every = [ratio for found in ratios.values() for ratio in found]
    if not every:
        return
    print()
    for op, found in ratios.items():
        print(
            f"{op:22} geometric mean {math.exp(statistics.fmean(map(math.log, found))):.2f}x, least {min(found):.2f}x"
        )
    print(f"{'all':22} geometric mean {math.exp(statistics.fmean(map(math.log, every))):.2f}x, least {min(every):.2f}x")


def show(case: peers.Case, ours: list[dict], times: dict[str, float]) -> float | None:
    """Prints the medians of a case; returns how many times as long the best peer took."""
    mine = statistics.median(round["median_ms"] for round in ours)
    share = statistics.median(round["percent_of_ceiling"] for round in ours)
    best = min(times.values(), default=None)
    shown = "-" if best is None else f"{best / mine:.2f}x"
    peer = "-" if best is None else f"{best:.3f}"
    print(
        f"{case.op:22} {case.name:58} {case.dtype:6} {mine:10.3f} {peer:>10} {shown:>6} {share:7.1f}%",
        flush=True,
    )
    return None if best is None else best / mine


if __name__ == "__main__":
    main()
