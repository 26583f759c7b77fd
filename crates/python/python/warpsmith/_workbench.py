"""What there is: ops, kernels, devices, and what is missing."""

from __future__ import annotations

import html
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from warpsmith import _native
from warpsmith._arrays import borrow
from warpsmith._codegen import bound
from warpsmith._spec import Op, Variant, all_ops


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as a table of HTML."""

    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


@dataclass(frozen=True)
class OpInfo:
    """An op."""

    name: str
    summary: str
    #: How it is called.
    signature: str
    #: PyTorch's schema.
    schema: str
    kernels: tuple[str, ...]
    has_gradient: bool
    #: Whether it has a second function that works in place.
    works_in_place: bool

    def __repr__(self) -> str:
        return f"{self.signature}: {self.summary}"


class OpList(list[OpInfo]):
    """Ops, shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        rows = [(op.signature, op.summary, "yes" if op.has_gradient else "", ", ".join(op.kernels)) for op in self]
        return table(("op", "what it does", "gradient", "kernels"), rows)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))


def list_ops() -> OpList:
    """Every op."""
    return OpList(info(op) for op in all_ops().values())


def info(op: Op) -> OpInfo:
    from warpsmith import ops

    return OpInfo(
        name=op.name,
        summary=op.summary,
        signature=f"{op.name}{inspect.signature(getattr(ops, op.name))}",
        schema=f"warpsmith::{op.variants[0].schema}",
        kernels=op.kernels,
        has_gradient=op.gradient is not None,
        works_in_place=any(variant.in_place for variant in op.variants),
    )


@dataclass(frozen=True)
class Explanation:
    """Which kernel a call runs, and why."""

    op: str
    kernel: str
    reason: str
    config: str
    #: Every other kernel, with the reason it is not taken.
    others: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        first = f"{self.op}: {self.kernel} ({self.reason}) {self.config}".rstrip()
        return "\n".join([first, *(f"  not {kernel}: {why}" for kernel, why in self.others)])

    def _repr_html_(self) -> str:
        rows = [(self.kernel, f"taken: {self.reason}. {self.config}"), *self.others]
        return table(("kernel", self.op), rows)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel ``warpsmith.<op>(*args, **kwargs)`` would run. ``kernel=NAME`` asks for a particular one."""
    kernel = kwargs.pop("kernel", None)
    described, variant = find(op)

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Explanation:
        lent = borrow(described, variant, tuple(getattr(tensor, "detach", lambda t=tensor: t)() for tensor in tensors))
        found = _native.explain(described.name, variant.in_place, lent, list(options), list(switches), kernel)
        others = tuple(found[3])
        if kernel is not None or variant.in_place:
            return Explanation(op, *found[:3], others)
        yours = of_users(described.name, tensors, options, switches)
        for name, taken, why, config in yours:
            if taken:
                rest = [(n, w) for n, _, w, _ in yours if n != name]
                return Explanation(
                    op, name, why, config, (*rest, (found[0], f"the library's choice: {found[1]}"), *others)
                )
        return Explanation(op, *found[:3], (*((name, why) for name, _, why, _ in yours), *others))

    explained: Explanation = bound(described, variant, run)(*args, **kwargs)
    return explained


def of_users(
    op: str, tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]
) -> list[tuple[str, bool, str, str]]:
    """The users' kernels of an op: name, whether it computes the call, why or why not, and what it is made of."""
    torch = sys.modules.get("torch")
    given = [tensor for tensor in tensors if tensor is not None]
    if torch is None or not all(isinstance(tensor, torch.Tensor) for tensor in given):
        return []
    from warpsmith._kernels.candidate import candidates
    from warpsmith._kernels.overrides import problem_of

    problem = problem_of(tensors, options, switches)
    return [(found.name, *found.explain(problem), type(found.code).__name__) for found in candidates(op)]


def find(name: str) -> tuple[Op, Variant]:
    """An op's variant by its name."""
    for op in all_ops().values():
        for variant in op.variants:
            if variant.name == name:
                return op, variant
    raise ValueError(f"no op is called `{name}`; there are: {', '.join(all_ops())}")


@cache
def devices() -> dict[str, str]:
    """The devices whose kernels can run, with their makers' names."""
    return dict(_native.devices())


def available(device: str = "cuda") -> bool:
    """Whether ops can run on a device: "cpu", "cuda" (any GPU) or "cuda:N"."""
    return any(name == device or name.split(":")[0] == device for name in devices())


@dataclass(frozen=True)
class Finding:
    """Something that was looked for."""

    what: str
    #: "ok", "missing" (it is optional) or "broken".
    state: str
    found: str
    #: What to do about it; may be empty.
    fix: str


class Report(list[Finding]):
    """What was found on this machine."""

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(finding.state != "broken" for finding in self)

    def __repr__(self) -> str:
        lines = []
        for finding in self:
            lines.append(f"{finding.state:8} {finding.what}: {finding.found}")
            if finding.fix:
                lines.append(f"{'':8} {finding.fix}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(finding.what, finding.state, finding.found, finding.fix) for finding in self]
        return table(("", "state", "found", "what to do"), rows)


def doctor() -> Report:
    """Examines this machine: what works, what is missing, and how to fix it."""
    report = Report(Finding(*line) for line in _native.examine())
    report.append(torch_finding())
    return report


def torch_finding() -> Finding:
    from warpsmith import ops

    if ops._torch is None:
        return Finding(
            "torch", "missing", "PyTorch is not installed", "Optional. For torch.ops.warpsmith: pip install torch"
        )
    import torch

    if ops._torch.native:
        return Finding("torch", "ok", f"PyTorch {torch.__version__}, which calls kernels directly", "")
    fix = "Calls cost some microseconds more. PyTorch 2.9 or later calls kernels directly"
    return Finding("torch", "ok", f"PyTorch {torch.__version__}, which calls kernels through Python", fix)
