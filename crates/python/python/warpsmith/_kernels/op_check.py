"""The check of a kernel of an op of the library: by the op's own reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from warpsmith import _native
from warpsmith._kernels.check import Checker

if TYPE_CHECKING:
    from warpsmith._kernels.candidate import Candidate


class OpChecker(Checker):
    """Checks a kernel by the reference of the op, and with the tolerance of the library's own kernels."""

    def __init__(self, candidate: Candidate, streams: int) -> None:
        self.candidate = candidate
        super().__init__(candidate.name, Flat(candidate), self.made, self.made, None, streams)

    def made(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        """New outputs, those that the call asks for."""
        args = self.candidate.split(flat)
        return tuple(output for output in self.candidate.outputs(args) if output is not None)

    def expect(self, number: int, inputs: Sequence[Any], declared: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        return ()

    def judge(self, number: int, inputs: Sequence[Any], outputs: Sequence[torch.Tensor], expected: Any) -> None:
        op, args = self.candidate.op, self.candidate.split(inputs)
        returned = op.variants[0].returned
        given = iter(outputs)
        made = [None if form is None else next(given) for form in self.candidate.forms(args)]
        wrong = _native.judge(op.name, lend(args.tensors), list(args.options), list(args.switches), lend(made))
        if wrong is None:
            return
        output, element, why = wrong
        at = returned.index(output)
        wrong_output = made[at]
        message = f"output `{op.args[output].name}` is wrong: {why}"
        if element is None or wrong_output is None:
            self.fail(number, message, at)
        position, truth, got = element
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), wrong_output.shape))
        self.fail(number, message, at, index, truth, got)


def lend(tensors: Sequence[torch.Tensor | None]) -> list[_native.Tensor | None]:
    """Dense copies on the CPU, as tensors of warpsmith."""
    return [None if t is None else _native.from_dlpack(t.detach().cpu().contiguous()) for t in tensors]


@dataclass(frozen=True)
class Flat:
    """The kernel for the check, which knows arguments in one row and outputs that are there."""

    candidate: Candidate

    @property
    def devices(self) -> tuple[str, ...]:
        return self.candidate.code.devices

    def run(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor | None]) -> None:
        args, given = self.candidate.split(inputs), iter(outputs)
        made = [None if form is None else next(given) for form in self.candidate.forms(args)]
        self.candidate.code.run((*args.tensors, *args.options), made)
