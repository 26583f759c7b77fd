"""Checks that a kernel matches its reference, writes nothing else, and gives the same bits in each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch

from warpsmith._kernels.sources import Code
from warpsmith.errors import KernelError

#: Bytes around outputs that must stay as they are.
GUARD = 4096
#: The bytes of guards and outputs before a kernel runs. They are NaN in every floating-point type.
POISON = 0xFF
#: How far results may be from the f64 reference, relative to the typical magnitude of nearby elements.
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
RUNS = 3
#: From this length a row is judged by its own typical magnitude, not that of the whole output.
ROW = 16
#: How often the effect of rounding the inputs is sampled.
ROUNDINGS = 2


def extent(like: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    if like.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))


def poisoned(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for an output: all of it, and the output inside, with the strides that it has in calls."""
    size = extent(like) * like.element_size()
    memory = torch.full((2 * GUARD + size,), POISON, dtype=torch.uint8, device=like.device)
    whole = memory.view(like.dtype)
    return memory, whole.as_strided(like.shape, like.stride(), GUARD // like.element_size())


def typical(target: torch.Tensor) -> torch.Tensor:
    """A magnitude for each element that errors near it are measured by: the median of its row, if that is long, or of
    all. Zeros and what is not finite do not count, and neither does the output's scale: an output of small numbers is
    judged as one of large numbers is."""
    sizes = target.abs()
    sizes = torch.where(sizes.isfinite() & (sizes > 0), sizes, torch.nan)
    by_row = target.ndim > 0 and target.shape[-1] >= ROW
    found = sizes.nanmedian(-1, keepdim=True).values if by_row else sizes.flatten().nanmedian()
    return found.nan_to_num(0.0)


def rounded(value: Any, seed: int) -> Any:
    """A floating tensor in f64, each element moved up or down by its type's rounding."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return widened(value)
    signs = torch.randint(0, 2, value.shape, generator=torch.Generator().manual_seed(seed), device="cpu") * 2 - 1
    return value.detach().double() * (1 + signs.to(value.device) * torch.finfo(value.dtype).eps / 2)


def widened(value: Any) -> Any:
    """A copy in f64, of floating tensors."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().double() if value.is_floating_point() else value.detach().clone()


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


class Checker:
    """Checks one kernel."""

    def __init__(
        self,
        name: str,
        code: Code,
        declare: Callable[..., Any],
        reference: Callable[..., Any],
        precision: float | None,
        streams: int,
    ) -> None:
        self.name, self.code, self.declare, self.reference = name, code, declare, reference
        self.precision, self.streams = precision, streams

    def check(self, number: int, inputs: Sequence[Any]) -> None:
        """Runs a case, and raises if something is wrong with it."""
        before = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        declared = as_tuple(self.declare(*inputs))
        for at, output in enumerate(declared):
            if torch._debug_has_internal_overlap(output) == 1:
                self.fail(number, f"output {at} is declared with elements that share memory", at)
        expected = self.expect(number, inputs, declared)
        runs = self.runs(inputs, declared)
        for at, (memory, found) in enumerate(runs[0]):
            self.check_guards(number, at, memory, found)
        self.judge(number, before, [found for _, found in runs[0]], expected)
        for at, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and not same_bits(value, before[at]):
                index = first(bits(value.detach()) != bits(before[at]))
                self.fail(number, f"it wrote to its argument {at}", index=index)
        for again in runs[1:]:
            for at, ((_, found), (memory, other)) in enumerate(zip(runs[0], again, strict=True)):
                self.check_guards(number, at, memory, other)
                if not same_bits(found, other):
                    index = first(bits(found) != bits(other))
                    message = "two runs differ"
                    self.fail(number, message, at, index, found[index].item(), other[index].item())

    def expect(
        self, number: int, inputs: Sequence[Any], declared: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The reference results of a case."""
        expected = as_tuple(self.reference(*(widened(value) for value in inputs)))
        if [tuple(t.shape) for t in expected] != [tuple(t.shape) for t in declared]:
            shapes = [", ".join(str(list(t.shape)) for t in tensors) for tensors in (expected, declared)]
            self.fail(number, f"the reference returns {shapes[0]}, but {shapes[1]} is declared")
        return expected

    def judge(
        self, number: int, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], expected: tuple[torch.Tensor, ...]
    ) -> None:
        """Raises if an output is not what was expected."""
        shaken = [as_tuple(self.reference(*(rounded(v, seed) for v in inputs))) for seed in range(ROUNDINGS)]
        for at, (found, target) in enumerate(zip(outputs, expected, strict=True)):
            # The error that rounding the inputs alone can cause, as where numbers cancel: no kernel can be better.
            moved = [(other[at].double() - target.double()).abs().nan_to_num(0.0) for other in shaken]
            self.compare(number, at, found, target, torch.stack(moved).amax(0))

    def runs(self, inputs: Sequence[Any], declared: tuple[torch.Tensor, ...]) -> list[list[tuple[Any, Any]]]:
        """The outputs of several runs, with their guards; on several streams at once if requested."""
        runs = [[poisoned(output) for output in declared] for _ in range(max(RUNS, self.streams))]
        device = declared[0].device

        def run(at: int) -> None:
            self.code.run(inputs, [output for _, output in runs[at]])

        if device.type == "cuda":
            torch.cuda.synchronize(device)
            streams = [torch.cuda.Stream(device) for _ in range(self.streams)]
            for at in range(len(runs)):
                with torch.cuda.stream(streams[at % self.streams]):
                    run(at)
            torch.cuda.synchronize(device)
        else:
            with ThreadPoolExecutor(self.streams) as threads:
                list(threads.map(run, range(len(runs))))
        return runs

    def check_guards(self, number: int, at: int, memory: torch.Tensor, found: torch.Tensor) -> None:
        """Raises if anything besides the output was written."""
        size = extent(found) * found.element_size()
        if extent(found) > found.numel():
            gaps = torch.ones(extent(found), dtype=torch.bool, device=found.device)
            gaps.as_strided(found.shape, found.stride()).fill_(False)
            between = memory[GUARD : GUARD + size].view(-1, found.element_size())[gaps]
            if (between != POISON).any():
                self.fail(number, f"it wrote outside output {at}: between its elements", at)
        for part, where in ((memory[:GUARD], "before"), (memory[GUARD + size :], "after")):
            changed = part != POISON
            if changed.any():
                distance = int(changed.nonzero()[-1 if where == "before" else 0])
                distance = GUARD - distance if where == "before" else distance + 1
                bytes_ = "byte" if distance == 1 else "bytes"
                self.fail(number, f"it wrote outside output {at}: {distance} {bytes_} {where} it", at)

    def compare(self, number: int, at: int, found: torch.Tensor, expected: torch.Tensor, chance: torch.Tensor) -> None:
        """Raises if an element differs from the reference by more than rounding."""
        if found.is_floating_point():
            precision = PRECISION.get(found.dtype, 0.1) if self.precision is None else self.precision
            wide, target = found.double(), expected.double()
            # Numbers below the type's smallest one count as that.
            least = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
            allowed = precision * torch.maximum(target.abs(), typical(target)) + 4 * chance + least
            right = (wide - target).abs() <= allowed
            right |= (wide == target) | (wide.isnan() & target.isnan())
        else:
            right = found == expected.to(found.dtype)
        if not bool(right.all()):
            index = first(~right)
            wrong = int((~right).sum())
            message = f"{wrong} of {found.numel()} elements of output {at} are wrong"
            self.fail(number, message, at, index, expected[index].item(), found[index].item())

    def fail(
        self,
        case: int,
        message: str,
        output: int | None = None,
        index: tuple[int, ...] | None = None,
        expected: Any = None,
        got: Any = None,
    ) -> NoReturn:
        """Refuses the kernel."""
        text = f"{self.name}: case {case}: {message}"
        if index is not None:
            text += f"; first at {list(index)}"
            if expected is not None:
                text += f": expected {expected!r}, got {got!r}"
        raise KernelError(text, op=self.name, case=case, output=output, index=index, expected=expected, got=got)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one.detach()), bits(other.detach()))


def first(wrong: torch.Tensor) -> tuple[int, ...]:
    """The index of the first element that is true."""
    return tuple(int(at) for at in wrong.nonzero()[0])
