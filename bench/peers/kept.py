"""Times of peers that the evidence has kept, and the rows that tell whether the machine is still as fast."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import torch

from .common import ROOT, Case

# Bound by memory, by products, and by products among other work: op, case, dtype and peer.
CALIBRATION = {
    "cuda": [
        ("rms_norm", "num_tokens=8192 hidden=4096 +weight", "bf16", "torch"),
        ("linear", "m=4096 n=4096 k=4096 batch=1", "bf16", "torch"),
        (
            "attention",
            "batch=2 q_len=8192 kv_len=8192 num_heads=16 num_kv_heads=16 head_dim=128 causal=true",
            "bf16",
            "torch (flash)",
        ),
    ],
    "cpu": [
        ("rms_norm", "num_tokens=8192 hidden=4096 +weight", "bf16", "torch"),
        ("linear", "m=1024 n=1024 k=3072 batch=1", "bf16", "torch"),
        (
            "attention",
            "batch=1 q_len=1024 kv_len=1024 num_heads=16 num_kv_heads=8 head_dim=128 causal=true",
            "bf16",
            "torch",
        ),
    ],
}


def seconds(text: str) -> float:
    """Reads `60s`, `8m` or `2h`."""
    found = re.fullmatch(r"(\d+)([smh])", text)
    if not found:
        raise ValueError(text)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def version(peer: str) -> str:
    """The library behind a peer, with its version."""
    if peer.startswith("flashinfer"):
        import flashinfer

        return f"flashinfer {flashinfer.__version__}"
    return f"torch {torch.__version__}"


def write(out: TextIO, case: Case, device: str, times: dict[str, float], calibration: bool = False) -> None:
    """Adds a line for each peer, which `warpsmith bench --peers` reads."""
    for name, ms in times.items():
        line = dict(op=case.op, case=case.name, dtype=case.dtype, device=device, peer=name, ms=ms)
        line |= dict(version=version(name), calibration=calibration)
        out.write(json.dumps(line) + "\n")
    out.flush()


class Kept:
    """What the evidence has of peers on a device, given by its marketing name."""

    def __init__(self, name: str):
        path = ROOT / "evidence" / ("-".join(re.findall("[a-z0-9]+", name.lower())) + ".json")
        record = json.loads(path.read_text()) if path.exists() else {}
        self.timings = {(t["op"], t["case"], t["dtype"]): t for t in record.get("timings", [])}
        self.times: dict[tuple[str, str, str], dict[str, dict]] = {}
        for row in record.get("peers", []):
            self.times.setdefault((row["op"], row["case"], row["dtype"]), {})[row["peer"]] = row

    def knows(self, case: Case) -> bool:
        """Whether the peers were timed before. A case may have been timed without them."""
        return (case.op, case.name, case.dtype) in self.times

    def of(self, case: Case) -> dict[str, float]:
        """The times of the peers."""
        return {name: row["ms"] for name, row in self.times.get((case.op, case.name, case.dtype), {}).items()}

    def calibration(self, device: str) -> Iterator[tuple[Case, str, float]]:
        """The cases of the calibration with a peer and the time kept of it, as far as this version was timed."""
        for *key, peer in CALIBRATION[device]:
            row, timing = self.times.get(tuple(key), {}).get(peer), self.timings.get(tuple(key))
            if row is None or timing is None:
                continue
            before, now = row["version"].split("+")[0], version(peer).split("+")[0]
            if before != now:
                print(f"no calibration by {peer}: {before} was timed, this is {now}", file=sys.stderr)
                continue
            # Bytes that calls move, to as many digits as the evidence has.
            size = timing["gbps"] * timing["ms"] * 1e6
            yield Case.of(dict(op=key[0], case=key[1], dtype=key[2], l2=timing["l2"], bytes=size)), peer, row["ms"]

    def calibrate(self, device: str, out: TextIO, measure: Callable[[Case, str], float | None]) -> None:
        """Times the calibration's rows and writes them for `warpsmith bench --peers`."""
        for case, peer, before in self.calibration(device):
            ms = measure(case, peer)
            if ms is None:
                continue
            write(out, case, device, {peer: ms}, calibration=True)
            change = f"{100 * (ms / before - 1):+.1f} %"
            print(f"calibration: {case.op} {peer}: {ms * 1e3:.1f} us, kept {before * 1e3:.1f} us, {change}", flush=True)
