"""The decorator that makes an op of a kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from warpsmith._bench import Measurement, bench
from warpsmith._kernels.candidate import Candidate, candidate
from warpsmith._kernels.check import Checker, as_tuple
from warpsmith._kernels.sources import Code, Launch, code_of, refuse

NAMESPACE = "warpsmith_user"


@overload
def kernel(
    *,
    source: Any,
    reference: Callable[..., Any],
    cases: Sequence[Sequence[Any] | Callable[[], Sequence[Any]]],
    launch: Callable[..., Launch] | None = None,
    precision: float | None = None,
    streams: int = 1,
) -> Callable[[Callable[..., Any]], UserKernel]: ...


@overload
def kernel(
    *,
    op: str,
    source: Any = None,
    cases: Sequence[Sequence[Any] | Callable[[], Sequence[Any]]],
    streams: int = 1,
) -> Callable[[Callable[..., Any]], Candidate]: ...


def kernel(
    *,
    op: str | None = None,
    source: Any = None,
    reference: Callable[..., Any] | None = None,
    cases: Sequence[Sequence[Any] | Callable[[], Sequence[Any]]],
    launch: Callable[..., Launch] | None = None,
    precision: float | None = None,
    streams: int = 1,
) -> Callable[[Callable[..., Any]], UserKernel] | Callable[[Callable[..., Any]], Candidate]:
    """Makes an op of a kernel, once it has been checked; or, with ``op``, one more kernel of an op of the library.

    The decorated function declares the op: its parameters, with types, and what it returns, as empty tensors. PyTorch
    traces with it, and the kernel fills what it made.

    source: CUDA source with an ``extern "C" __global__`` function; or a function of Triton's; or a function that takes
        inputs and outputs and writes the outputs.
    reference: computes the same in PyTorch. For the check it gets floating tensors in f64.
    cases: arguments to check with: tuples, or functions that make them. Odd sizes find most mistakes.
    launch: for CUDA and Triton, from inputs and outputs to a :class:`Launch`.
    precision: how far an element may be from the reference, as a share of it or of the median of its row, whichever is
        larger. Left out, it is 1e-5 for f32, 4e-3 for f16 and 3e-2 for bf16. What the rounding of the inputs themselves
        can change is allowed too. Whole numbers must be equal.
    streams: on how many CUDA streams (on the CPU, threads) the check runs it at once.

    Each case is run several times, into memory that has the strides of the declared outputs, is filled with NaN and
    surrounded by guards. A kernel that is wrong
    anywhere, writes where it must not, or gives other bits the next time is refused with a :class:`KernelError` that
    names the first wrong element. CUDA source is compiled at once; without a GPU, the check waits for the first call on
    one, and calls on the CPU compute the reference.

    With ``op="rms_norm"`` the decorated function starts a kernel of that op instead. It takes the op's tensors, options
    and outputs, in the op's order (``None`` for those that a call has not), and returns a :class:`Launch`; without a
    ``source`` it writes the outputs itself. Cases are calls of the op; a dict at the end has named arguments. The
    kernel is checked as above, by the op's own reference and tolerance, and then timed beside the library's kernels.
    On the cases where it is the fastest in four of five rounds, and on calls of the same types, shapes, strides,
    alignment and options, the op runs it from then on: with tensors of PyTorch, with gradients and in
    ``torch.compile``. See :class:`Candidate`; ``.remove()`` takes it back.
    """
    if streams < 1:
        refuse("kernel", "streams", "1 or more", str(streams))
    if not cases:
        refuse("kernel", "cases", "at least one", "none")
    if op is not None:
        for name, value in (("reference", reference), ("launch", launch), ("precision", precision)):
            if value is not None:
                refuse("kernel", name, f"nothing beside op: {op} has its own", repr(value))
        return candidate(op, source, cases, streams)
    if reference is None:
        refuse("kernel", "reference", "a function that computes the same, or op=", "nothing")

    def decorate(declare: Callable[..., Any]) -> UserKernel:
        name = declare.__name__
        for parameter in inspect.signature(declare).parameters.values():
            if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
                refuse(
                    name, parameter.name, "a parameter that can be given by position", str(parameter.kind.description)
                )
        code = code_of(name, source, launch)
        checker = Checker(name, code, declare, reference, precision, streams)
        return UserKernel(declare, code, reference, checker, cases)

    return decorate


class UserKernel:
    """An op that a user's kernel computes. Call it with tensors, also in ``torch.compile``."""

    def __init__(
        self,
        declare: Callable[..., Any],
        code: Code,
        reference: Callable[..., Any],
        checker: Checker,
        cases: Sequence[Sequence[Any] | Callable[[], Sequence[Any]]],
    ) -> None:
        functools.update_wrapper(self, declare)
        self.code, self.reference = code, reference
        self._declare, self._checker, self._cases = declare, checker, cases
        self._signature = inspect.signature(declare)
        #: Devices on which it was checked.
        self.checked: set[str] = set()
        devices = {str(t.device) for case in self.cases() for t in case if isinstance(t, torch.Tensor)}
        if all(device.split(":")[0] in code.devices for device in devices):
            self.check()
        schema = torch.library.infer_schema(declare, mutates_args=())
        name = f"{NAMESPACE}::{declare.__name__}"
        self.op: Any = torch.library.custom_op(name, self._run, mutates_args=(), schema=schema)
        self.op.register_fake(declare)

    def cases(self) -> list[Sequence[Any]]:
        """The arguments of each case."""
        return [self._complete(*(case() if callable(case) else case)) for case in self._cases]

    def _complete(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """All arguments of a call in their order, those left out with their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def check(self, device: str | None = None) -> None:
        """Runs every case, on the device of its tensors or another, and raises if one is wrong."""
        for number, inputs in enumerate(self.cases()):
            if device is not None:
                inputs = [value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs]
            kinds = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
            self._checker.check(number, inputs)
            self.checked |= kinds

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def bench(self, *args: Any, warmup: int = 20, iters: int = 100) -> tuple[Measurement, Measurement]:
        """Times the kernel and its reference, on the same arguments."""
        args, name = self._complete(*args), str(self._checker.name)
        ours = bench(self, *args, warmup=warmup, iters=iters, name=name)
        return ours, bench(self.reference, *args, warmup=warmup, iters=iters, name=f"{name}, reference")

    def _run(self, *given: Any, **named: Any) -> Any:
        args = self._complete(*given, **named)
        outputs = as_tuple(self._declare(*args))
        kind = outputs[0].device.type
        if kind not in self.code.devices:
            results = [
                found.to(made.dtype) for found, made in zip(as_tuple(self.reference(*args)), outputs, strict=True)
            ]
            return results[0] if len(results) == 1 else tuple(results)
        if kind not in self.checked:
            self.check(str(outputs[0].device))
        self.code.run(args, outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def __repr__(self) -> str:
        where = ", ".join(sorted(self.checked)) or "not yet checked"
        return f"<kernel {self._checker.name}, {type(self.code).__name__}, checked on: {where}>"
