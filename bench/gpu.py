#!/usr/bin/env python3
"""Times Warpsmith and its peers on this machine's GPU, case by case in turn, and merges both into the evidence.

Peers whose times the evidence has kept are not timed again, but for three rows: they tell whether the machine is as
fast as it was. Needs PyTorch with CUDA; FlashInfer is measured where it is installed. The peers get the same work and
are timed in the same way as Warpsmith times itself: calls captured in a CUDA graph, large cases rotating over copies of
their tensors that together are three times the L2, the median of replays between events.

usage: bench/gpu.py [OP ...] [--kernel NAME] [--dtype TYPE] [--stale | --no-record] [--retime-peers] [--few-samples]
       [--budget 8m] [--peers FILE]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TextIO

import _help  # noqa: F401
import peers
import torch

REPLAY_MS = 1.0
MAX_CALLS = 200
MAX_SAMPLES = 400
#: What copies of a peer's tensors may take together.
MOST_BYTES = 16 << 30


@dataclass(frozen=True)
class Pace:
    """How long a peer is timed: seconds of samples after seconds of rest, until there are enough samples."""

    seconds: float
    rest: float
    samples: int


THOROUGH = Pace(seconds=0.04, rest=0.25, samples=20)
#: The same rest before each sample, so that the clock is as high.
FEW_SAMPLES = Pace(seconds=0.04, rest=0.25, samples=5)


def time_call(call, sets: list[tuple], keep_outputs: bool, pace: Pace = THOROUGH) -> float:
    """Milliseconds of one call, the median. With `keep_outputs` no two calls write to the same memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            for tensors in sets:
                call(*tensors)
    stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)

    def capture(rounds: int) -> tuple[torch.cuda.CUDAGraph, list]:
        graph, outputs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for index in range(rounds * len(sets)):
                out = call(*sets[index % len(sets)])
                if keep_outputs and index < len(sets):
                    outputs.append(out)
        return graph, outputs

    def replay(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    graph, outputs = capture(1)
    round_ms = max(replay(graph, 2)[1], 1e-4)
    rounds = min(max(math.ceil(REPLAY_MS / round_ms), 1), max(MAX_CALLS // len(sets), 1))
    if rounds > 1:
        del graph, outputs
        graph, outputs = capture(rounds)
    burst = min(max(int(pace.seconds * 1e3 / (round_ms * rounds)), 1), MAX_SAMPLES)
    samples: list[float] = []
    while len(samples) < pace.samples:
        time.sleep(pace.rest)
        replay(graph, -(-burst // 5))
        samples += replay(graph, burst)
    return statistics.median(samples) / (rounds * len(sets))


class DeviceLostError(Exception):
    """A peer's error after which this process cannot use the GPU any more; with what was measured before."""

    def __init__(self, times: dict[str, float], failures: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in failures.items()))
        self.times, self.failures = times, failures


def measure(
    case: peers.Case, count: int, pace: Pace = THOROUGH, only: str | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """The times of every peer that has the op, or of `only` one, over `count` copies of the tensors; and why others
    have none."""
    # Before the peers are made: some compile at once, and what was compiled for other shapes counts against a limit.
    torch._dynamo.reset()
    work = peers.of(case, "cuda")
    if work is None:
        return {}, {}
    cold = case.row["l2"].lower() == "cold"
    sets = [work.fresh()]
    # A table may be far larger than the rows that are read of it.
    held = sum(tensor.nbytes for tensor in sets[0] if isinstance(tensor, torch.Tensor))
    sets += [work.fresh() for _ in range(min(count, max(MOST_BYTES // max(held, 1), 2)) - 1)]
    calls = dict(work.calls)
    if work.compile:
        calls["torch.compile"] = torch.compile(work.compile, dynamic=False)
    if only:
        calls = {name: call for name, call in calls.items() if name == only}
    times, failures = {}, {}
    for name, call in calls.items():
        try:
            times[name] = time_call(call, sets, keep_outputs=cold, pace=pace)
        except Exception as error:  # a peer may lack a type or a shape; the others still count
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            try:
                torch.cuda.synchronize()
            except Exception:
                raise DeviceLostError(times, failures) from error
    return times, failures


def copies(row: dict) -> int:
    """The copies of tensors that calls rotate over, together three times the L2."""
    if row["l2"].lower() != "cold":
        return 1
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return -(-3 * l2 // max(int(row["bytes"]), 1)) + 1


def calibrate(case: peers.Case, peer: str) -> float | None:
    """The time of one peer, if it still runs."""
    times, failures = measure(case, copies(case.row), only=peer)
    for name, why in failures.items():
        print(f"  {name}: {why}", file=sys.stderr)
    torch.cuda.empty_cache()
    return times.get(peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="only these ops")
    parser.add_argument(
        "--peers",
        default="target/peers-gpu.jsonl",
        help="where the peers' times are written",
    )
    parser.add_argument("--kernel", help="time this kernel, not the one that a call gets")
    parser.add_argument("--dtype", help="only this element type")
    parser.add_argument("--retime-peers", action="store_true", help="time peers whose times are kept, too")
    parser.add_argument("--few-samples", action="store_true", help="five of a peer whose calls are long, not twenty")
    parser.add_argument("--budget", type=peers.seconds, help="begin no case after this time, such as 8m")
    evidence = parser.add_mutually_exclusive_group()
    evidence.add_argument("--stale", action="store_true", help="only cases that the evidence has no present timing of")
    evidence.add_argument("--no-record", action="store_true", help="leave the evidence alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu.py: PyTorch finds no CUDA device")
    begun = time.monotonic()
    peers.build()
    path = peers.ROOT / args.peers
    path.parent.mkdir(parents=True, exist_ok=True)
    record = [] if args.no_record else ["--record"]
    record += ["--stale"] if args.stale else []
    kept = None if args.retime_peers else peers.Kept(torch.cuda.get_device_name(0))
    calibrated = kept is None
    pace = FEW_SAMPLES if args.few_samples else THOROUGH
    with path.open("w") as out:
        for op in args.ops or [None]:
            words = [*([op] if op else []), "--device", "cuda", "--peers", str(path), *record]
            for option in ("kernel", "dtype"):
                if value := getattr(args, option):
                    words += [f"--{option}", value]
            if args.budget:
                words += ["--budget", f"{max(int(args.budget - (time.monotonic() - begun)), 0)}s"]
            with peers.Steps("bench", *words, "--json", "--step") as rows:
                for row in rows:
                    if not calibrated:
                        kept.calibrate("cuda", out, calibrate)
                        calibrated = True
                    compare(row, out, kept, pace)
                    torch.cuda.empty_cache()


def compare(row: dict, out: TextIO, kept: peers.Kept | None, pace: Pace) -> None:
    """Times the peers on the case that Warpsmith has just timed, unless their times are kept."""
    case = peers.Case.of(row)
    if kept and kept.knows(case):
        times = kept.of(case)
    else:
        times, failures = measure(case, copies(row), pace)
        for name, why in failures.items():
            print(f"  {name}: {why}", file=sys.stderr)
        peers.write(out, case, "cuda", times)
    shown = ", ".join(f"{name} {ms * 1e3:.1f} us" for name, ms in times.items()) or "no peer"
    ours = f"warpsmith {row['median_ms'] * 1e3:.1f} us"
    print(f"{case.op} [{case.name} {case.dtype}]: {ours}, {shown}", flush=True)


if __name__ == "__main__":
    main()
