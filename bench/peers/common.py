"""A row of a benchmark, the binary that prints them, and what peers are made of."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent.parent
BINARY = ROOT / "target" / "release" / "warpsmith"
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
LAYOUTS = ("padded", "transposed", "misaligned", "heads-first")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "mish": F.mish,
}


def build() -> None:
    """Builds the binary that is measured; a machine without Cargo must have been given it."""
    if shutil.which("cargo"):
        subprocess.run(["cargo", "build", "--release", "-p", "warpsmith-cli"], cwd=ROOT, check=True)


def warpsmith(*words: str) -> list[dict]:
    """Runs the command line and returns the JSON objects it prints."""
    done = subprocess.run([BINARY, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


class Steps:
    """The command line with `--step`, in a `with` block: its next result is made when it is asked for.

    At the end of the block it reads what the peers took, and records.
    """

    def __init__(self, *words: str):
        self.words = words

    def __enter__(self) -> Steps:
        pipe = subprocess.PIPE
        self.run = subprocess.Popen([BINARY, *self.words], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._say("")
        # What it did not read any more need not be written.
        with contextlib.suppress(BrokenPipeError):
            self.run.stdin.close()
        self.run.stdout.close()
        if self.run.wait() and kind is None:
            raise subprocess.CalledProcessError(self.run.returncode, self.words)

    def next(self) -> dict | None:
        """The result of the next case, if there is one."""
        return self._result("")

    def again(self) -> dict | None:
        """Another round of the same case."""
        return self._result("again")

    def __iter__(self) -> Iterator[dict]:
        while (result := self.next()) is not None:
            yield result

    def _result(self, word: str) -> dict | None:
        self._say(word)
        # A case that cannot be timed has an empty result, and is answered like others.
        while (line := self.run.stdout.readline()) and not line.startswith("{"):
            self._say("")
        return json.loads(line) if line else None

    def _say(self, word: str) -> None:
        # If it has ended, its result or its exit code tells.
        with contextlib.suppress(BrokenPipeError):
            self.run.stdin.write(word + "\n")
            self.run.stdin.flush()


class Ask:
    """`bench --stdin` on a device: called with a request, it returns the answer."""

    def __init__(self, device: str):
        self.device = device
        self.run: subprocess.Popen | None = None

    def __call__(self, request: dict) -> dict:
        if self.run is None:
            words = [BINARY, "bench", "--device", self.device, "--stdin"]
            self.run = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # If it has ended, the missing answer tells.
        with contextlib.suppress(BrokenPipeError):
            self.run.stdin.write(json.dumps(request) + "\n")
            self.run.stdin.flush()
        line = self.run.stdout.readline()
        if line:
            return json.loads(line)
        code, self.run = self.run.wait(), None
        return {"error": f"the process ended with code {code}"}

    def close(self) -> None:
        """Ends it."""
        if self.run is not None:
            with contextlib.suppress(BrokenPipeError):
                self.run.stdin.close()
            self.run.wait()
            self.run = None


@dataclass
class Case:
    """One row of `warpsmith bench --json`, taken apart."""

    op: str
    name: str
    dtype: str
    row: dict
    values: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    layout: str = "contiguous"

    @staticmethod
    def of(row: dict) -> Case:
        case = Case(row["op"], row["case"], row["dtype"], row)
        for word in case.name.split():
            if word.startswith("+"):
                case.given.add(word[1:])
            elif "=" in word:
                name, value = word.split("=", 1)
                case.values[name] = value
            elif word in LAYOUTS:
                case.layout = word
        return case

    def size(self, name: str) -> int:
        return int(self.values[name])

    def number(self, name: str, default: float) -> float:
        return float(self.values.get(name, default))

    def option(self, name: str, default: str) -> str:
        return self.values.get(name, default)

    def kv_lens(self, requests: int) -> list[int]:
        """The keys of each request."""
        lengths = [int(keys) for keys in self.option("kv_lens", self.values["kv_len"]).split("/")]
        return [lengths[r % len(lengths)] for r in range(requests)]


@dataclass
class Work:
    """One op on one set of tensors. `fresh` makes another set; `calls` are given the tensors of a set."""

    fresh: Callable[[], tuple]
    calls: dict[str, Callable]
    # Functions torch.compile can improve on; the others are single library kernels.
    compile: Callable | None = None


def flashinfer(device: str):
    """The library, if it is installed and has a GPU to run on."""
    if device == "cpu":
        return None
    try:
        import flashinfer as library
    except ImportError:
        return None
    return library


def random_like(case: Case, device: str) -> Callable[..., torch.Tensor]:
    """Makes random tensors of the case's type that lie in memory as Warpsmith's do."""
    dtype = DTYPES[case.dtype]
    return lambda *shape: arranged(lambda *sizes: torch.randn(*sizes, device=device).to(dtype), shape, case.layout)


def arranged(make: Callable[..., torch.Tensor], shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor of this shape and layout, with elements of what `make` makes."""
    swapped = {"transposed": (-1, -2), "heads-first": (-2, -3)}.get(layout)
    if layout == "misaligned":
        return make(math.prod(shape) + 1)[1:].view(shape)
    if len(shape) == 1 and layout != "contiguous":
        return make(2 * shape[0])[::2]
    if layout == "padded":
        return make(*shape[:-1], shape[-1] + 3)[..., : shape[-1]]
    if swapped and len(shape) >= -swapped[1]:
        sizes = list(shape)
        sizes[swapped[0]], sizes[swapped[1]] = shape[swapped[1]], shape[swapped[0]]
        return make(*sizes).transpose(*swapped)
    return make(*shape)


def row_sizes(case: Case) -> tuple[int, int]:
    return case.size("num_tokens"), case.size("hidden")


def tensors(found) -> Iterator[torch.Tensor]:
    """All tensors in what a call took or returned."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for item in found:
            yield from tensors(item)
