"""A user's kernel as one more kernel of an op of the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warpsmith import _codegen, _native, _shapes
from warpsmith._bench import bench, duration
from warpsmith._kernels import overrides
from warpsmith._kernels.op_check import OpChecker
from warpsmith._kernels.overrides import Problem, problem_of
from warpsmith._kernels.sources import Callback, Code, Launch, code_of, refuse
from warpsmith._spec import Op, all_ops
from warpsmith._torch.autograd import Overloads, raw_options
from warpsmith._torch.builtin import builtin
from warpsmith._torch.dtypes import BY_NAME, NAMES
from warpsmith.errors import UnsupportedError

Case = Sequence[Any] | Callable[[], Sequence[Any]]
#: All kernels take turns in each round. To be adopted, one must be the fastest in all rounds but one: other work on the
#: machine may spoil one.
ROUNDS, WARMUP, CALLS = 5, 3, 20
NEEDED = ROUNDS - 1


@dataclass(frozen=True)
class Arguments:
    """A call of the op."""

    tensors: tuple[Any, ...]
    options: tuple[Any, ...]
    switches: tuple[bool, ...]

    @property
    def flat(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.options, *self.switches)

    @property
    def device(self) -> torch.device:
        found: torch.device = next(tensor.device for tensor in self.tensors if tensor is not None)
        return found

    def to(self, device: str) -> Arguments:
        moved = tuple(None if tensor is None else tensor.to(device) for tensor in self.tensors)
        return Arguments(moved, self.options, self.switches)


@dataclass(frozen=True)
class Comparison:
    """How fast a kernel was on a case, beside the library's own."""

    case: int
    #: Seconds of a call, with the kernel and with each of the library's.
    seconds: float
    builtin: dict[str, float]
    #: Whether it was the fastest, and so was adopted.
    adopted: bool

    @property
    def fastest(self) -> str:
        """The fastest of the library's kernels."""
        return min(self.builtin, key=self.builtin.__getitem__)

    def __repr__(self) -> str:
        best = f"{self.fastest} {duration(self.builtin[self.fastest])}"
        verdict = "adopted" if self.adopted else "not adopted"
        return f"case {self.case}: {duration(self.seconds)}, {best}: {verdict}"


class Candidate:
    """A user's kernel of an op of the library. The op runs it where it was measured as the fastest."""

    def __init__(self, op: Op, body: Callable[..., Any], code: Code, cases: Sequence[Case], streams: int) -> None:
        functools.update_wrapper(self, body)
        self.op, self.code, self.name = op, code, body.__name__
        self._cases, self._checker = cases, OpChecker(self, streams)
        self._forms: dict[Problem, list[Any]] = {}
        #: Results by case, of the devices it was measured on.
        self.comparisons: list[Comparison] = []
        self._problems: dict[Problem, Comparison] = {}
        self.measure()

    def cases(self) -> list[Arguments]:
        """The calls it is measured on."""
        found = []
        for case in self._cases:
            case = case() if callable(case) else case
            named: dict[str, Any] = {}
            if case and isinstance(case[-1], dict):
                case, named = case[:-1], case[-1]
            found.append(self.arguments(*case, **named))
        return found

    @functools.cached_property
    def arguments(self) -> Callable[..., Arguments]:
        """From a call of the op to its arguments."""
        return _codegen.bound(self.op, self.op.variants[0], Arguments)

    def split(self, flat: Sequence[Any]) -> Arguments:
        """Flattened arguments."""
        variant = self.op.variants[0]
        first = len(variant.tensors)
        second = first + len(self.op.attrs)
        return Arguments(tuple(flat[:first]), tuple(flat[first:second]), tuple(flat[second:]))

    def forms(self, args: Arguments) -> list[Any]:
        """Shape and type of each output, in the order they are returned; nothing for those not asked for."""
        variant = self.op.variants[0]
        inputs: list[_shapes.Known | None] = [None] * len(self.op.args)
        for given, tensor in zip(variant.tensors, args.tensors, strict=True):
            if tensor is not None:
                inputs[given.arg] = (tensor.shape, NAMES[tensor.dtype])
        wanted = [output for output, switch in zip(variant.wanted, args.switches, strict=True) if switch]
        found = _shapes.outputs(self.op, inputs, args.options, wanted, torch._check)
        return [found[output] for output in variant.returned]

    def outputs(self, args: Arguments, forms: list[Any] | None = None) -> list[torch.Tensor | None]:
        """New outputs of a call."""
        forms = self.forms(args) if forms is None else forms
        device = args.device
        return [None if form is None else torch.empty(form[0], dtype=BY_NAME[form[1]], device=device) for form in forms]

    def compute(self, problem: Problem, tensors: Sequence[Any], options: Sequence[Any]) -> list[torch.Tensor | None]:
        """A call that it was adopted for."""
        made = self.outputs(Arguments(tuple(tensors), tuple(options), ()), self._forms[problem])
        self.code.run((*tensors, *options), made)
        return made

    def measure(self, device: str | None = None) -> list[Comparison]:
        """Checks and times every case whose tensors are on a device that it runs on, or all of them on ``device``, and
        has the op run it where it wins. Raises, and changes nothing, if it is wrong or is not measured to the end."""
        cases = list(enumerate(self.cases()))
        if device is not None:
            cases = [(number, args.to(device)) for number, args in cases]
        cases = [(number, args) for number, args in cases if args.device.type in self.code.devices]
        for number, args in cases:
            self.runnable(args)  # Raises if it is no valid call, of which the reference says nothing.
            self._checker.check(number, args.flat)
        replaced: list[tuple[str, Problem, overrides.Adopted | None]] = []
        found: list[tuple[Problem, Comparison]] = []
        try:
            for number, args in cases:
                found.append(self.compare(number, args, replaced))
        except BaseException:
            for kind, problem, before in reversed(replaced):
                overrides.put(self.op.name, kind, problem, before)
            raise
        previous = _candidates.get((self.op.name, self.name))
        if previous is not None and previous is not self:
            previous.remove()
        _candidates[self.op.name, self.name] = self
        self._problems.update(found)
        self.comparisons += (measured := [comparison for _, comparison in found])
        return measured

    def compare(
        self, number: int, args: Arguments, replaced: list[tuple[str, Problem, overrides.Adopted | None]]
    ) -> tuple[Problem, Comparison]:
        """Times a case beside the library's kernels; if it wins, it is adopted. Notes what computed the case before."""
        problem = problem_of(args.tensors, args.options, args.switches)
        row = (*args.tensors, *raw_options(self.op, args.options), *args.switches)
        self._forms[problem] = self.forms(args)
        before, device = overrides.find(self.op.name, problem), args.device.type
        replaced.append((device, problem, before))
        kernels: dict[str, Any] = {name: builtin(self.op.name, name) for name in self.runnable(args)}
        # As callers use it: through PyTorch.
        overrides.adopt(self.op.name, device, problem, self)
        kernels[self.name] = Overloads.raw(self.op.name)
        rounds = [
            {name: bench(call, *row, warmup=WARMUP, iters=CALLS).median for name, call in kernels.items()}
            for _ in range(ROUNDS)
        ]
        best = {name: min(times[name] for times in rounds) for name in kernels}
        mine = best.pop(self.name)
        won = sum(times[self.name] == min(times.values()) for times in rounds)
        adopted = won >= NEEDED and mine < min(best.values())
        comparison = Comparison(number, mine, best, adopted)
        if not adopted:
            # If it was adopted itself before, it is so no longer.
            overrides.put(self.op.name, device, problem, None if before is self else before)
        return problem, comparison

    def runnable(self, args: Arguments) -> list[str]:
        """The library's kernels that can run a call."""
        device = args.device
        where = device.type if device.type == "cpu" else f"cuda:{device.index or 0}"
        lent = [None if t is None else _native.from_dlpack(t.detach()) for t in args.tensors]
        found = []
        for name in self.op.kernels:
            try:
                _native.explain(self.op.name, False, lent, list(args.options), list(args.switches), name)
            except UnsupportedError:
                continue
            found.append(name)
        if not found:
            raise UnsupportedError(
                f"{self.op.name}: the library has no kernel for this call on {where}", op=self.op.name
            )
        return found

    def remove(self) -> None:
        """Removes the kernel: the op runs the library's kernels again."""
        overrides.drop(lambda _, kernel: kernel is self)
        self.comparisons.clear()
        self._problems.clear()
        _candidates.pop((self.op.name, self.name), None)

    def explain(self, problem: Problem) -> tuple[bool, str]:
        """Whether it computes a call, and why or why not."""
        comparison = self._problems.get(problem)
        if comparison is None:
            return False, "your kernel, not measured on such a call"
        times = (
            f"{duration(comparison.seconds)}, {comparison.fastest} {duration(comparison.builtin[comparison.fastest])}"
        )
        if overrides.find(self.op.name, problem) is self:
            return True, f"your kernel, measured as the fastest: {times}"
        return False, f"your kernel, not the fastest: {times}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes a call with this kernel, whether or not the op would."""
        call = self.arguments(*args, **kwargs)
        if call.device.type not in self.code.devices:
            expected = f"tensors on {' or '.join(self.code.devices)}"
            refuse(self.name, self.op.args[self.op.variants[0].tensors[0].arg].name, expected, str(call.device))
        made = self.outputs(call)
        self.code.run((*call.tensors, *call.options), made)
        found = [output for output in made if output is not None]
        return found[0] if len(found) == 1 else tuple(found)

    def __repr__(self) -> str:
        kind = type(self.code).__name__
        if not self.comparisons:
            return f"<kernel {self.name} of {self.op.name}, {kind}, not yet measured>"
        lines = [f"<kernel {self.name} of {self.op.name}, {kind}>", *map(repr, self.comparisons)]
        return "\n  ".join(lines)


_candidates: dict[tuple[str, str], Candidate] = {}


def candidates(op: str) -> list[Candidate]:
    """The users' kernels of an op."""
    return [candidate for (name, _), candidate in _candidates.items() if name == op]


def candidate(op: str, source: Any, cases: Sequence[Case], streams: int) -> Callable[[Callable[..., Any]], Candidate]:
    """The decorator for kernels of an op; see :func:`warpsmith.kernel`."""
    found = all_ops().get(op)
    if found is None:
        refuse("kernel", "op", f"one of {', '.join(all_ops())}", repr(op))
    if found.variants[0].is_mutating:
        refuse("kernel", "op", "one that returns new tensors", f"{op}, which changes its arguments")

    def decorate(body: Callable[..., Any]) -> Candidate:
        name = body.__name__
        if name in found.kernels:
            refuse(name, "name", f"another than those of {op}'s own kernels", name)
        launch: Callable[..., Launch] = body
        code: Code = Callback(body) if source is None else code_of(name, source, launch)
        return Candidate(found, body, code, cases, streams)

    return decorate
