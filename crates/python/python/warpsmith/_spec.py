"""The ops' descriptions, as the native half gives them.

Everything about an op in Python is made from these: PyTorch's schema, fake kernel, gradient and autocast rule, and the
function that people call. Positions are those of the op's arguments (``args``) and options (``attrs``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from warpsmith import _native

Number = int | float | bool | str


@dataclass(frozen=True)
class Dim:
    """One dimension of a described shape: a number, or made of the size called ``name``."""

    kind: Literal["number", "named", "ceil", "one_or"]
    name: str = ""
    size: int = 0
    times: int = 1
    over: int = 1
    plus: int = 0


@dataclass(frozen=True)
class Form:
    """A described shape: what may come first, and the last dimensions."""

    leading: Literal["none", "rows", "matrices"]
    dims: tuple[Dim, ...]
    text: str


@dataclass(frozen=True)
class DTypeRule:
    """The types an argument may have."""

    kind: Literal["one_of", "same", "same_or", "with", "chosen"]
    types: tuple[str, ...]
    like: int = -1
    option: int = -1
    #: Of ``with``: types of the other argument, and those that this one may have beside each.
    listed: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Arg:
    """A tensor argument."""

    name: str
    role: Literal["in", "out", "in_out"]
    optional: bool
    given_with: int | None
    shape_option: int | None
    forms: tuple[Form, ...]
    dtype: DTypeRule
    help: str

    @property
    def is_input(self) -> bool:
        """Whether what it holds before the call counts."""
        return self.role != "out"


@dataclass(frozen=True)
class Attr:
    """An option."""

    name: str
    kind: Literal["float", "int", "bool", "choice"]
    #: ``None`` where the op itself chooses a number.
    default: Number | None
    choices: tuple[str, ...]
    doc: str

    @property
    def annotation(self) -> str:
        """Its type in Python."""
        if self.kind == "choice":
            return f"Literal[{', '.join(map(repr, self.choices))}]"
        return f"{self.kind} | None" if self.default is None else self.kind


@dataclass(frozen=True)
class Derived:
    """A size in the shapes that an option, or an optional argument, decides."""

    kind: Literal["option", "option_or", "divided", "else"]
    option: int = -1
    size: str = ""
    by: tuple[int, ...] = ()
    other: str = ""


@dataclass(frozen=True)
class Source:
    """Where an input of a gradient comes from."""

    kind: Literal["input", "output", "output_or_input", "incoming", "recomputed"]
    arg: int
    input: int = -1
    options: tuple[tuple[int, Number], ...] = ()
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gradient:
    """The op that computes an op's gradients."""

    op: str
    inputs: dict[int, Source]
    #: By forward input: whether its gradient is an output of ``op`` or one that arrived, and which.
    results: dict[int, tuple[Literal["output", "incoming"], int]]
    only_if: tuple[tuple[int, Number], ...]
    without: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """A tensor that a call is given."""

    arg: int
    optional: bool
    #: The argument that is written where this is, if there is one.
    written: int | None


@dataclass(frozen=True)
class Variant:
    """A way to call an op: with new outputs, or in place."""

    name: str
    in_place: bool
    schema: str
    raw_schema: str
    tensors: tuple[Given, ...]
    #: Optional outputs, by the switch that asks for them.
    wanted: dict[int, str]
    returned: tuple[int, ...]

    @property
    def is_mutating(self) -> bool:
        """Whether it writes to tensors it is given."""
        return any(given.written is not None for given in self.tensors)


@dataclass(frozen=True)
class Op:
    """An op."""

    name: str
    summary: str
    args: tuple[Arg, ...]
    attrs: tuple[Attr, ...]
    derived: dict[str, Derived]
    gradient: Gradient | None
    autocast: Literal["unchanged", "low", "f32", "widest", "rows"]
    #: Whether results of a row depend on other rows where the shapes do not tell.
    across_rows: bool
    variants: tuple[Variant, ...]
    kernels: tuple[str, ...]


@cache
def all_ops() -> dict[str, Op]:
    """Every op by name."""
    return {raw["name"]: _op(raw) for raw in json.loads(_native.describe_ops())}


def _op(raw: dict[str, Any]) -> Op:
    return Op(
        name=raw["name"],
        summary=raw["summary"],
        args=tuple(_arg(arg) for arg in raw["args"]),
        attrs=tuple(Attr(**(attr | {"choices": tuple(attr["choices"] or ())})) for attr in raw["attrs"]),
        derived={size["name"]: _derived(size["rule"]) for size in raw["derived"]},
        gradient=None if raw["gradient"] is None else _gradient(raw["gradient"]),
        autocast=raw["autocast"],
        across_rows=raw["across_rows"],
        variants=tuple(_variant(variant) for variant in raw["variants"]),
        kernels=tuple(raw["kernels"]),
    )


def _arg(raw: dict[str, Any]) -> Arg:
    forms = tuple(
        Form(form["leading"], tuple(Dim(**dim) for dim in form["dims"]), form["text"]) for form in raw["shape"]["forms"]
    )
    return Arg(
        name=raw["name"],
        role=raw["role"],
        optional=raw["optional"],
        given_with=raw["with"],
        shape_option=raw["shape"]["option"],
        forms=forms,
        dtype=_dtype_rule(raw["dtype"]),
        help=raw["help"],
    )


def _dtype_rule(raw: dict[str, Any]) -> DTypeRule:
    listed = tuple((of, tuple(types)) for of, types in raw.get("listed", ()))
    return DTypeRule(**(raw | {"types": tuple(raw["types"]), "listed": listed}))


def _derived(raw: dict[str, Any]) -> Derived:
    option, size, by = raw.get("option", -1), raw.get("size", ""), tuple(raw.get("by", ()))
    return Derived(raw["kind"], option, size, by, raw.get("or", ""))


def _gradient(raw: dict[str, Any]) -> Gradient:
    def values(options: list[list[Any]]) -> tuple[tuple[int, Number], ...]:
        return tuple((option, value) for option, value in options)

    def source(raw: dict[str, Any]) -> Source:
        options, without = values(raw.get("options", [])), tuple(raw.get("without", ()))
        return Source(raw["kind"], raw["arg"], raw.get("input", -1), options, without)

    return Gradient(
        op=raw["op"],
        inputs={to: source(found) for to, found in raw["inputs"]},
        results={input: (result["kind"], result["arg"]) for input, result in raw["results"]},
        only_if=values(raw["only_if"]),
        without=tuple(raw["without"]),
    )


def _variant(raw: dict[str, Any]) -> Variant:
    return Variant(
        name=raw["name"],
        in_place=raw["in_place"],
        schema=raw["schema"],
        raw_schema=raw["raw_schema"],
        tensors=tuple(Given(**given) for given in raw["tensors"]),
        wanted={output["arg"]: output["switch"] for output in raw["wanted"]},
        returned=tuple(raw["returned"]),
    )
