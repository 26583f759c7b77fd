"""Shapes and types of an op's outputs, from those of its inputs.

The same rules as the native half's, but on any objects that can be multiplied and compared: PyTorch's symbolic sizes
stay symbolic. Where two sizes must be equal and one is symbolic, that becomes a condition (``require``) instead of a
comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from warpsmith._spec import Arg, Dim, Form, Op
from warpsmith.errors import ArgumentError

#: A size: an int, or something that behaves like one.
Size = Any
#: Shape and name of the type.
Known = tuple[Sequence[Size], str]
Require = Callable[[Any, Callable[[], str]], None]


class Sizes:
    """Collects the named sizes of one call."""

    def __init__(self, op: Op, options: Sequence[Any], require: Require) -> None:
        self.op = op
        self.options = options
        self.require = require
        self.sizes: dict[str, Size] = {}
        self.leading: list[Size] | None = None

    def match(self, index: int, shape: Sequence[Size]) -> None:
        """Learns from the shape of an input, and requires it to fit what is known."""
        arg = self.op.args[index]
        # A symbolic size is fixed to a number only if no other shape is possible.
        for symbols_may_be_numbers in (False, True):
            for form in self.forms(arg):
                if self.may_fit(form, shape, symbols_may_be_numbers):
                    self.bind(arg, form, shape)
                    return
        expected = " or ".join(form.text for form in self.forms(arg))
        self.fail(arg, f"shape {expected}", str(list(shape)))

    def shape(self, index: int) -> list[Size]:
        """The shape of an output."""
        arg = self.op.args[index]
        form = self.forms(arg)[0]
        leading = self.leading if form.leading == "rows" else []
        if leading is None:
            self.fail(arg, "inputs that determine its shape", form.text)
        return [*leading, *(self.evaluate(arg, dim) for dim in form.dims)]

    def forms(self, arg: Arg) -> tuple[Form, ...]:
        """The shapes an argument may have, with these options."""
        if arg.shape_option is None:
            return arg.forms
        attr = self.op.attrs[arg.shape_option]
        return (arg.forms[attr.choices.index(self.options[arg.shape_option])],)

    def may_fit(self, form: Form, shape: Sequence[Size], symbols_may_be_numbers: bool) -> bool:
        """Whether a shape is not certainly wrong."""
        extra = len(shape) - len(form.dims)
        if extra < 0 or (extra > 0 and form.leading == "none"):
            return False
        if form.leading == "rows" and self.leading is not None and len(self.leading) != extra:
            return False
        if form.leading == "matrices" and extra not in (0, max(0, len(self.leading or []) - 1)):
            return False
        return all(
            dim.kind != "number" or (size == dim.size if isinstance(size, int) else symbols_may_be_numbers)
            for dim, size in zip(form.dims, shape[extra:], strict=True)
        )

    def bind(self, arg: Arg, form: Form, shape: Sequence[Size]) -> None:
        extra = len(shape) - len(form.dims)
        if form.leading == "rows":
            if self.leading is None:
                self.leading = list(shape[:extra])
            for known, size in zip(self.leading, shape[:extra], strict=True):
                self.equal(arg, form, known, size, shape)
        elif form.leading == "matrices":
            for known, size in zip((self.leading or [])[:-1], shape[:extra], strict=False):
                self.equal(arg, form, known, size, shape)
        for dim, size in zip(form.dims, shape[extra:], strict=True):
            if dim.kind == "number":
                self.equal(arg, form, dim.size, size, shape)
                continue
            known = self.lookup(dim.name)
            if known is None and dim.kind == "named":
                self.sizes[dim.name] = self.solve(arg, form, dim, size, shape)
            elif dim.kind == "one_or":
                # What an output is never follows from it. A symbolic one, or one whose name a later argument has, is
                # left to the kernel's own check.
                if isinstance(size, int) and size != 1 and known is not None:
                    self.equal(arg, form, known, size, shape)
            elif known is not None:
                self.equal(arg, form, apply(dim, known), size, shape)

    def solve(self, arg: Arg, form: Form, dim: Dim, size: Size, shape: Sequence[Size]) -> Size:
        """What a name must be for a dimension to have this size."""
        product = (size - dim.plus) * dim.over if dim.plus or dim.over != 1 else size
        if dim.times == 1:
            return product
        self.condition(product % dim.times == 0, arg, form, shape)
        return product // dim.times

    def evaluate(self, arg: Arg, dim: Dim) -> Size:
        if dim.kind == "number":
            return dim.size
        known = self.lookup(dim.name)
        if known is None:
            self.fail(arg, "inputs that determine its shape", f"no {dim.name}")
        return apply(dim, known)

    def lookup(self, name: str) -> Size | None:
        """A size that an argument or an option decides, if one did."""
        if name in self.sizes:
            return self.sizes[name]
        derived = self.op.derived.get(name)
        if derived is None:
            return None
        if derived.kind == "else":
            return self.sizes[derived.size] if derived.size in self.sizes else self.lookup(derived.other)
        value = self.options[derived.option]
        if derived.kind == "option":
            return value
        if derived.kind == "option_or":
            return value if not isinstance(value, int) or value != 0 else self.lookup(derived.size)
        size = self.lookup(derived.size)
        divisor = derived.by[self.op.attrs[derived.option].choices.index(value)]
        return size if size is None or divisor == 1 else size // divisor

    def equal(self, arg: Arg, form: Form, known: Size, size: Size, shape: Sequence[Size]) -> None:
        if known is not size:
            self.condition(known == size, arg, form, shape)

    def condition(self, holds: Any, arg: Arg, form: Form, shape: Sequence[Size]) -> None:
        if holds is True:
            return
        if holds is False:
            self.fail(arg, f"shape {form.text}{self.known()}", str(list(shape)))
        self.require(holds, lambda: f"{self.op.name}: argument `{arg.name}`: expected shape {form.text}")

    def known(self) -> str:
        """What an error says of the sizes so far."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f" with {sizes}" if sizes else ""

    def fail(self, arg: Arg, expected: str, got: str) -> NoReturn:
        message = f"{self.op.name}: argument `{arg.name}`: expected {expected}, got {got}"
        raise ArgumentError(message, op=self.op.name, argument=arg.name, expected=expected, got=got)


def apply(dim: Dim, known: Size) -> Size:
    """The size of a dimension whose name has the size ``known``."""
    if dim.kind == "ceil":
        return (known + (dim.over - 1)) // dim.over
    if dim.kind == "one_or":
        return known
    size = known if dim.times == 1 else known * dim.times
    size = size if dim.over == 1 else size // dim.over
    return size if dim.plus == 0 else size + dim.plus


def allowed_types(op: Op, index: int, types: Sequence[str | None]) -> tuple[str, ...] | None:
    """The types an argument may have beside others of these types; ``None`` if they do not say."""
    rule = op.args[index].dtype
    if rule.kind in ("one_of", "chosen"):
        return rule.types
    same = types[rule.like]
    if same is None:
        return None
    if rule.kind == "same_or":
        return (same, *rule.types)
    return dict(rule.listed).get(same, (same,))


def all_types(op: Op, index: int) -> tuple[str, ...]:
    """All types an argument may have in some call."""
    rule = op.args[index].dtype
    like = all_types(op, rule.like) if rule.kind in ("same", "same_or", "with") else ()
    listed = (dtype for _, types in rule.listed for dtype in types)
    return tuple(dict.fromkeys((*like, *rule.types, *listed)))


def output_type(op: Op, index: int, types: Sequence[str | None], options: Sequence[Any]) -> str:
    """The type of an output that is made for the call."""
    rule = op.args[index].dtype
    if rule.kind == "one_of":
        return rule.types[0]
    if rule.kind == "chosen" and options[rule.option] in DTYPES:
        return str(options[rule.option])
    like = types[rule.like]
    if like is None:
        like = output_type(op, rule.like, types, options)
    if rule.kind == "chosen" and like not in rule.types:
        return "bf16"
    return like


#: Names of all element types.
DTYPES = ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "u8", "bool")


def outputs(
    op: Op,
    inputs: Sequence[Known | None],
    options: Sequence[Any],
    wanted: Sequence[int],
    require: Require,
) -> list[Known | None]:
    """Shape and type of each output, by position: required ones, those in ``wanted``, and those an input implies."""
    types = [None if known is None else known[1] for known in inputs]
    sizes = Sizes(op, options, require)
    for index, (arg, known) in enumerate(zip(op.args, inputs, strict=True)):
        if not arg.is_input:
            continue
        if known is None:
            if not arg.optional:
                sizes.fail(arg, "a tensor", "nothing")
            continue
        allowed = allowed_types(op, index, types)
        if allowed is not None and known[1] not in allowed:
            sizes.fail(arg, f"dtype {' or '.join(dict.fromkeys(allowed))}", known[1])
        sizes.match(index, known[0])
    found: list[Known | None] = []
    for index, arg in enumerate(op.args):
        implied = arg.given_with is not None and inputs[arg.given_with] is not None
        made = not arg.is_input and (not arg.optional or implied or index in wanted)
        found.append((sizes.shape(index), output_type(op, index, types, options)) if made else None)
    return found
