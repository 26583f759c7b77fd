"""Functions with an op's own signature, made from its description.

They are made as text, like those of ``dataclasses``: a call then costs no more than that of a function somebody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpsmith._spec import Dim, Given, Op, Variant
from warpsmith.errors import ArgumentError

Target = Callable[[tuple[Any, ...], tuple[Any, ...], tuple[bool, ...]], Any]


class Choices(dict[str, int]):
    """Positions of a choice's names; an unknown name is an error that lists them."""

    def __init__(self, op: Op, option: int) -> None:
        attr = op.attrs[option]
        super().__init__({name: position for position, name in enumerate(attr.choices)})
        self.op, self.attr = op, attr

    def __missing__(self, name: object) -> int:
        expected = f"one of {', '.join(self.attr.choices)}"
        message = f"{self.op.name}: argument `{self.attr.name}`: expected {expected}, got {name!r}"
        raise ArgumentError(message, op=self.op.name, argument=self.attr.name, expected=expected, got=repr(name))


def may_be_number(op: Op, variant: Variant, given: Given) -> bool:
    """Whether callers may give one number instead of a tensor: of one type, with a value for each of something, and
    nothing that other sizes follow from."""
    arg = op.args[given.arg]
    if given.written is not None or given is variant.tensors[0] or arg.dtype.kind != "one_of":
        return False
    plain = all(
        form.leading == "none" and len(form.dims) == 1 and form.dims[0] == Dim("named", form.dims[0].name)
        for form in arg.forms
    )
    known_first = {dim.name for form in op.args[variant.tensors[0].arg].forms for dim in form.dims}
    return plain and len(arg.dtype.types) == 1 and {form.dims[0].name for form in arg.forms} <= known_first


def tensor_names(op: Op, variant: Variant) -> list[str]:
    """Names of the tensors a call is given, in order."""
    return [op.args[given.arg].name for given in variant.tensors]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its name, its type in stubs, and the text of its default, if it has one."""

    name: str
    type: str
    default: str | None = None

    def text(self, *, typed: bool) -> str:
        if not typed:
            return self.name if self.default is None else f"{self.name}={self.default}"
        return f"{self.name}: {self.type}" + ("" if self.default is None else f" = {self.default}")


def tensor_parameters(op: Op, variant: Variant, array: str = "") -> list[Parameter]:
    """The tensors of a function for the op, of the type ``array``."""
    found = []
    for given in variant.tensors:
        kind = f"{array} | float" if may_be_number(op, variant, given) else array
        name = op.args[given.arg].name
        found.append(Parameter(name, f"{kind} | None", "None") if given.optional else Parameter(name, kind))
    return found


def option_parameters(op: Op, variant: Variant, *, raw: bool = False) -> list[Parameter]:
    """The options and switches of a function for the op."""
    found = []
    for attr in op.attrs:
        default = attr.choices.index(str(attr.default)) if raw and attr.kind == "choice" else attr.default
        found.append(Parameter(attr.name, attr.annotation, repr(default)))
    return found + [Parameter(switch, "bool", "False") for switch in variant.wanted.values()]


def joined(positional: Sequence[Parameter], keyword: Sequence[Parameter], *, typed: bool) -> str:
    """The text of a function's parameters."""
    found = [parameter.text(typed=typed) for parameter in positional]
    if keyword:
        found += ["*", *(parameter.text(typed=typed) for parameter in keyword)]
    return ", ".join(found)


def parameters(op: Op, variant: Variant, *, raw: bool = False) -> str:
    """The parameters of a function for the op, as text. All of the raw op's are by position."""
    tensors, options = tensor_parameters(op, variant), option_parameters(op, variant, raw=raw)
    return joined([*tensors, *options], [], typed=False) if raw else joined(tensors, options, typed=False)


def make(name: str, parameters: str, body: list[str], names: Mapping[str, Any], doc: str = "") -> Callable[..., Any]:
    """A function from its source text."""
    text = f"def {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)
    namespace = dict(names)
    exec(compile(text, f"<warpsmith {name}>", "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    function.__doc__ = doc or None
    function.__module__ = "warpsmith"
    return function


def bound(op: Op, variant: Variant, target: Target, *, raw: bool = False) -> Callable[..., Any]:
    """A function with the op's signature that hands its arguments to ``target``: tensors, options, switches. Choices
    are names, also where the raw op has positions."""
    names: dict[str, Any] = {"_target": target}
    options = []
    for attr in op.attrs:
        if raw and attr.kind == "choice":
            names[f"_{attr.name}"] = attr.choices
            options.append(f"_{attr.name}[{attr.name}]")
        else:
            options.append(attr.name)
    parts = (tensor_names(op, variant), options, list(variant.wanted.values()))
    tuples = ", ".join("(" + "".join(f"{name}, " for name in part) + ")" for part in parts)
    return make(variant.name, parameters(op, variant, raw=raw), [f"return _target({tuples})"], names)


def unpack(op: Op, variant: Variant, *, of_tuple: bool) -> list[str]:
    """The results of a call: a single one as it is, several as a tuple, without those not asked for."""
    returned = variant.returned
    if not returned:
        return ["return None"]
    if len(returned) == 1:
        return ["return _results[0]"] if of_tuple else ["return _results"]
    optional = [output for output in returned if op.args[output].optional]
    if not optional:
        return ["return _results"]
    if len(returned) == 2 and len(optional) == 1 and optional[0] == returned[1]:
        return ["return _results[0] if _results[1] is None else _results"]
    return [
        "_results = tuple(_result for _result in _results if _result is not None)",
        "return _results[0] if len(_results) == 1 else _results",
    ]


def documentation(op: Op, variant: Variant) -> str:
    """The text that ``help`` shows."""
    lines = [f"{op.summary}{', in place' if variant.in_place else ''}.", ""]
    for given in variant.tensors:
        arg = op.args[given.arg]
        note = ""
        if given.written is not None:
            written = op.args[given.written]
            note = "; changed" if written is arg else f"; becomes {written.name}"
        if may_be_number(op, variant, given):
            note = "; or one number for all"
        lines.append(f"{arg.name}: {arg.help}{note}")
    lines += [f"{attr.name}: {attr.doc}{_choices(attr.choices)}" for attr in op.attrs]
    lines += [f"{switch}: whether to return {op.args[output].name}" for output, switch in variant.wanted.items()]
    if variant.returned:
        lines += ["", "Returns:"]
    lines += [f"{op.args[output].name}: {op.args[output].help}" for output in variant.returned]
    return "\n".join(lines)


def _choices(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names)})" if names else ""
