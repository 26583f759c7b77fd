#!/usr/bin/env python3
"""Times Warpsmith and PyTorch on this machine's CPU with the same number of threads, and records both as evidence.

For each case both run back to back, several times in turn, so that whatever else the machine does hits both. What is
shown and recorded are medians over the rounds; at the end comes the geometric mean of the ratios.

usage: bench/cpu.py [OP ...] [--threads N] [--rounds N] [--compile] [--no-record]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import time

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


def size_names() -> dict[str, list[str]]:
    """The names of each op's sizes, in order."""
    listed = subprocess.run([peers.BINARY, "list", "--json"], check=True, stdout=subprocess.PIPE).stdout
    return {op["name"]: [size["name"] for size in op["sizes"]] for op in json.loads(listed)}


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
    parser.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    args = parser.parse_args()
    peers.build()
    os.environ["WARPSMITH_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    # Large tensors of Warpsmith's lie in huge pages. So shall PyTorch's, which asks for this before it has any.
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    # A first quick pass only tells the cases.
    rows = []
    for op in args.ops or [None]:
        rows += peers.warpsmith("bench", *([op] if op else []), "--device", "cpu", "--quick", "--json")
    path = peers.ROOT / "target" / "peers-cpu.jsonl"
    sizes = size_names()
    ratios: dict[str, list[float]] = {}
    print(f"PyTorch {torch.__version__}, {args.threads} threads each")
    print(f"{'op':22} {'case':58} {'dtype':6} {'warpsmith':>10} {'best peer':>10} {'ratio':>6} {'of copy':>8}")
    with path.open("w") as out:
        for row in rows:
            case = peers.Case.of(row)
            calls, sets = prepare(case, args.compile)
            words = ["bench", *case.words(sizes[case.op]), "--device", "cpu", "--json", "--step", "--peers", str(path)]
            ours = []
            theirs: dict[str, list[float]] = {name: [] for name in calls}
            with peers.Steps(*words, *([] if args.no_record else ["--record"])) as steps:
                for turn in range(args.rounds):
                    for name, call in calls.items():
                        with torch.inference_mode(mode=not case.op.endswith("_backward")):
                            theirs[name].append(time_call(call, sets))
                    ours.append(steps.again() if turn else steps.next())
                for name, ms in theirs.items():
                    line = dict(op=case.op, case=case.name, dtype=case.dtype, device="cpu", peer=name)
                    out.write(json.dumps(line | {"ms": statistics.median(ms)}) + "\n")
                out.flush()
            mine = statistics.median(round["median_ms"] for round in ours)
            share = statistics.median(round["percent_of_ceiling"] for round in ours)
            best = min((statistics.median(ms) for ms in theirs.values()), default=None)
            shown = "-"
            if best is not None:
                ratios.setdefault(case.op, []).append(best / mine)
                shown = f"{best / mine:.2f}x"
            peer = "-" if best is None else f"{best:.3f}"
            print(
                f"{case.op:22} {case.name:58} {case.dtype:6} {mine:10.3f} {peer:>10} {shown:>6} {share:7.1f}%",
                flush=True,
            )
    every = [ratio for found in ratios.values() for ratio in found]
    if not every:
        return
    print()
    for op, found in ratios.items():
        print(
            f"{op:22} geometric mean {math.exp(statistics.fmean(map(math.log, found))):.2f}x, least {min(found):.2f}x"
        )
    print(f"{'all':22} geometric mean {math.exp(statistics.fmean(map(math.log, every))):.2f}x, least {min(every):.2f}x")


if __name__ == "__main__":
    main()
