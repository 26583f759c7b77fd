"""Functions with an op's own signature, made from its description.

They are made as text, like those of ``dataclasses``: a call then costs no more than that of a function somebody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from warpsmith._spec import Op, Variant
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


def tensor_names(op: Op, variant: Variant) -> list[str]:
    """Names of the tensors a call is given, in order."""
    return [op.args[given.arg].name for given in variant.tensors]


def parameters(op: Op, variant: Variant, *, raw: bool = False, types: Mapping[str, str] | None = None) -> str:
    """The parameters of a function for the op, as text; with ``types``, annotated."""

    def typed(name: str, type_: str, default: str | None) -> str:
        if types is None:
            return name if default is None else f"{name}={default}"
        return f"{name}: {type_}" if default is None else f"{name}: {type_} = {default}"

    array = (types or {}).get("array", "")
    found = []
    for given in variant.tensors:
        optional = f"{array} | None" if given.optional else array
        found.append(typed(op.args[given.arg].name, optional, "None" if given.optional else None))
    options = []
    for attr in op.attrs:
        default = attr.choices.index(str(attr.default)) if raw and attr.kind == "choice" else attr.default
        options.append(typed(attr.name, attr.annotation, repr(default)))
    options += [typed(switch, "bool", "False") for switch in variant.wanted.values()]
    if options and not raw:
        found.append("*")
    return ", ".join(found + options)


def make(name: str, parameters: str, body: list[str], names: Mapping[str, Any], doc: str = "") -> Callable[..., Any]:
    """A function from its text."""
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
    """Returns what the call gave: the one result as it is, several as a tuple, none that was not asked for."""
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
        lines.append(f"{arg.name}: {arg.help}{note}")
    lines += [f"{attr.name}: {attr.doc}{_choices(attr.choices)}" for attr in op.attrs]
    lines += [f"{switch}: whether to return {op.args[output].name}" for output, switch in variant.wanted.items()]
    if variant.returned:
        lines += ["", "Returns:"]
    lines += [f"{op.args[output].name}: {op.args[output].help}" for output in variant.returned]
    return "\n".join(lines)


def _choices(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names)})" if names else ""
