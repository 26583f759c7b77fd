"""Gradients, from what the ops' descriptions say about them.

An op's gradient is another op. One without says so when its gradient is asked for, and so do the gradients
themselves: there are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from warpsmith import _codegen, _shapes
from warpsmith._checks import native_error
from warpsmith._spec import Gradient, Op, Source, Variant, all_ops
from warpsmith._torch.composed import COMPOSED, Apply, apply, apply_at_level
from warpsmith.errors import UnsupportedError

Raw = Callable[..., Any]


class Overloads:
    """Finds ops of the two namespaces."""

    @staticmethod
    @cache
    def public(name: str) -> Any:
        return getattr(torch.ops.warpsmith, name).default

    @staticmethod
    @cache
    def raw(name: str) -> Any:
        return getattr(torch.ops._warpsmith, name).default


@cache
def choices(name: str) -> tuple[tuple[int, _codegen.Choices], ...]:
    """The options of an op that are choices, with the positions of their names."""
    op = all_ops()[name]
    return tuple((at, _codegen.Choices(op, at)) for at, attr in enumerate(op.attrs) if attr.kind == "choice")


def raw_options(op: Op, options: Sequence[Any]) -> Sequence[Any]:
    """Options as the raw op takes them: choices by position."""
    found = list(options)
    for at, positions in choices(op.name):
        found[at] = positions[found[at]]
    return found


transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def call(op: Op, tensors: Sequence[Any], options: Sequence[Any], switches: Sequence[bool]) -> Any:
    """Calls an op with new outputs: the public one where a second derivative might be asked for, else the raw one."""
    if not torch.is_grad_enabled() and not transformed():
        try:
            return Overloads.raw(op.name)(*tensors, *raw_options(op, options), *switches)
        except RuntimeError as error:
            raise native_error(error) from None
    return call_public(op, op.variants[0], tensors, options, switches)


def call_public(
    op: Op, variant: Variant, tensors: Sequence[Any], options: Sequence[Any], switches: Sequence[bool]
) -> Any:
    names = [attr.name for attr in op.attrs] + list(variant.wanted.values())
    return Overloads.public(variant.name)(*tensors, **dict(zip(names, (*options, *switches), strict=True)))


def next_level(op: Op, variant: Variant) -> Callable[..., Any]:
    """While transforms of ``torch.func`` are at work: the op as the next of them sees it, called as the raw op is. It
    may have a gradient to record, or a dimension to map over, too: that it is called from within a function whose own
    steps are not recorded must not count there."""

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return call_public(op, variant, tensors, options, switches)

    return _codegen.bound(op, variant, run, raw=True)


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def function(op: Op, raw: Raw, *, bare: bool = False) -> type[torch.autograd.Function]:
    """The differentiable form of an op that ``raw`` computes. It takes tensors, options (choices by name) and switches,
    in one row. With ``bare``, outputs that were not asked for are not among its results."""
    variant = op.variants[0]
    attrs = len(op.attrs)
    rule = None if op.gradient is None else Rule(op, variant, op.gradient)
    if rule is not None:
        last = max(at for at in rule.outputs.values() if at not in rule.not_differentiable)
        assert not any(op.args[output].optional for output in variant.returned[:last]), (
            "what may be missing comes after all that has a gradient, or is the last of that"
        )

    def backward(ctx: Any, *incoming: Any) -> Any:
        if rule is None:
            raise UnsupportedError(f"{op.name}: it has no gradient", op=op.name)
        found = rule.gradients(ctx, incoming)
        return (*found, *(None for _ in range(attrs + len(variant.wanted))))

    short = None if rule is None else short_backward(rule, backward)
    members = {
        "forward": staticmethod(forward(op, variant, rule, raw, bare=bare)),
        "backward": staticmethod(backward if short is None else short),
    }
    return type(f"{op.name}_function", (torch.autograd.Function,), members)


def quick(op: Op) -> Callable[..., Any]:
    """An op with its gradient, for callers who know that no transform of functorch is at work: PyTorch's own ``apply``
    looks for those, and takes longer than a small kernel."""
    alone: Callable[..., Any] = _apply(function(op, Overloads.raw(op.name)._op, bare=True))
    if op.name not in COMPOSED:
        return alone
    count = len(op.variants[0].tensors)

    def run(*args: Any) -> Any:
        found = of_parts(op, args[:count], args[count:])
        return alone(*args) if found is None else found

    return run


def of_parts(op: Op, tensors: Sequence[Any], options: Sequence[Any], call: Apply = apply) -> Any:
    """The result of a call whose gradient is that of several ops; ``None`` for all others."""
    composed = COMPOSED.get(op.name)
    if composed is None:
        return None
    return composed(call, tensors, {attr.name: option for attr, option in zip(op.attrs, options, strict=False)})


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """A function's ``apply`` as PyTorch has it in C++."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def forward(op: Op, variant: Variant, rule: Rule | None, raw: Raw, *, bare: bool) -> Callable[..., Any]:
    """Computes the op and keeps what its gradient needs. Made as text, because small calls are as slow as this is."""
    names: dict[str, Any] = {"_raw": raw, "_rule": rule}
    names |= {f"_{op.attrs[at].name}": positions for at, positions in choices(op.name)}
    tensors = _codegen.tensor_names(op, variant)
    options = [attr.name for attr in op.attrs]
    positions = [f"_{attr.name}[{attr.name}]" if attr.kind == "choice" else attr.name for attr in op.attrs]
    # What the gradient needs is computed whether or not it was asked for.
    kept = () if rule is None else rule.computed_outputs
    switches = ["True" if output in kept else switch for output, switch in variant.wanted.items()]
    for at, (output, switch) in enumerate(variant.wanted.items()):
        if rule is not None and output in rule.only_for:
            switches[at] = f"{switch} or ctx.needs_input_grad[{rule.only_for[output]}]"
    body = [f"_results = _raw({', '.join([*tensors, *positions, *switches])})"]
    if rule is not None:
        body.append(f"ctx.options = ({''.join(f'{name}, ' for name in options)})")
        if rule.needs_sizes:
            body.append(f"ctx.extra = _rule.extra(({', '.join(tensors)},), ctx.options)")
        if rule.rule.without:
            body.append(f"ctx.given = [tensor is not None for tensor in ({', '.join(tensors)},)]")
        outputs = [
            f"_results[{at}]" if len(variant.returned) > 1 else "_results" for at in range(len(variant.returned))
        ]
        saved = []
        for arg in rule.saved_inputs:
            name = tensors[rule.inputs[arg]]
            replaced = outputs[rule.outputs[rule.instead[arg]]] if arg in rule.instead else None
            saved.append(name if replaced is None else f"{name} if {replaced} is None else None")
        saved += [outputs[rule.outputs[arg]] for arg in rule.saved_outputs]
        body.append(f"ctx.save_for_backward({', '.join(saved)})")
        if rule.not_differentiable:
            constant = ", ".join(outputs[at] for at in rule.not_differentiable)
            body.append(f"ctx.mark_non_differentiable(*(tensor for tensor in ({constant},) if tensor is not None))")
        if rule.in_place is not None:
            # What was not asked for nobody else has.
            body.append(f"ctx.owned = not ({' or '.join(variant.wanted[output] for output in rule.overwritten)})")
        if rule.computed_outputs:
            asked = [
                f"{text} if {variant.wanted[output]} else None" if output in rule.computed_outputs else text
                for output, text in zip(variant.returned, outputs, strict=True)
            ]
            body.append(f"_results = ({', '.join(asked)})")
    parameters = ", ".join(["ctx", *tensors, *options, *variant.wanted.values()])
    end = _codegen.unpack(op, variant, of_tuple=False) if bare else ["return _results"]
    return _codegen.make("forward", parameters, [*body, *end], names)


def short_backward(rule: Rule, general: Callable[..., Any]) -> Callable[..., Any] | None:
    """What :meth:`Rule.gradients` does, as the text of a function, with all looked up that is known beforehand.
    Only for gradients that need nothing but what was kept; where second derivatives might be asked for, and where the
    gradient's op is not needed, it leaves the call to ``general``."""
    op, gradient, form = rule.op, rule.rule, rule.form
    sources = {arg: gradient.inputs.get(arg) for arg in (given.arg for given in form.tensors)}
    kinds = {source.kind for source in sources.values() if source is not None}
    if gradient.only_if or gradient.without or rule.needs_sizes or "recomputed" in kinds:
        return None
    names: dict[str, Any] = {
        "_general": general,
        "_grad": torch.is_grad_enabled,
        "_transformed": transformed,
        "_raw": Overloads.raw(rule.backward.name)._op,
        "_native_error": native_error,
        "_keeps_graph": torch._C._autograd._get_current_graph_task_keep_graph,
    }
    if rule.in_place is not None:
        names["_raw_in_place"] = Overloads.raw(rule.in_place.name)._op
    names |= {f"_choice_{at}": positions for at, positions in choices(rule.backward.name)}
    saved = [f"_saved_{arg}" for arg in rule.saved_inputs] + [f"_kept_{arg}" for arg in rule.saved_outputs]
    incoming = {output: f"_incoming_{at}" for output, at in rule.outputs.items()}

    def value(source: Source | None) -> str:
        if source is None:
            return "None"
        if source.kind == "input":
            return f"_saved_{source.arg}"
        if source.kind == "incoming":
            return incoming[source.arg]
        kept = f"_kept_{source.arg}"
        return kept if source.kind == "output" else f"_saved_{source.input} if {kept} is None else {kept}"

    #: Where each input's gradient comes from; those of inputs that have none are refused by the general form.
    places = {given.arg: at for at, given in enumerate(rule.variant.tensors)}
    computed: dict[int, list[str]] = {}
    found = []
    refused = []
    for arg, at in places.items():
        if arg not in gradient.results:
            refused.append(f"_needs[{at}]")
            found.append("None")
            continue
        kind, result = gradient.results[arg]
        if kind == "output":
            computed.setdefault(result, []).append(f"_needs[{at}]")
        several = len(form.returned) > 1
        made = (
            (f"_results[{rule.results[result]}]" if several else "_results") if kind == "output" else incoming[result]
        )
        found.append(f"{made} if _needs[{at}] else None")
    any_computed = " or ".join(needs for group in computed.values() for needs in group)
    options = []
    for at, source_at in enumerate(rule.options):
        text = f"ctx.options[{source_at}]"
        options.append(f"_choice_{at}[{text}]" if f"_choice_{at}" in names else text)
    switches = [" or ".join(computed.get(output, ["False"])) for output in form.wanted]
    all_incoming = ", ".join(incoming.values())
    leave = " or ".join(["_grad()", "_transformed()", f"not ({any_computed})", *refused])
    rest = len(op.attrs) + len(rule.variant.wanted)
    given = [*(value(sources[arg]) for arg in sources), *options]
    compute = [f"    _results = _raw({', '.join([*given, *switches])})"]
    if rule.in_place is not None:
        written = {tensor.written: value(sources[tensor.arg]) for tensor in rule.in_place.tensors}
        results = [written[output] for output in form.returned]
        names["_Tensor"] = torch.Tensor
        compute = [
            # Other classes of tensors trace, or are spread over devices.
            f"    if ctx.owned and not _keeps_graph() and {results[0]}.__class__ is _Tensor:",
            f"        _raw_in_place({', '.join(given)})",
            f"        _results = {', '.join(results)}",
            "    else:",
            f"    {compute[0]}",
        ]
    body = [
        "_needs = ctx.needs_input_grad",
        f"if {leave}:",
        f"    return _general(ctx, {all_incoming})",
        f"({''.join(f'{name}, ' for name in saved)}) = ctx.saved_tensors" if saved else "",
        *(f"{name} = None if {name} is None else {name}.contiguous()" for name in incoming.values()),
        "try:",
        *compute,
        "except RuntimeError as _error:",
        "    raise _native_error(_error) from None",
        f"return ({', '.join([*found, *['None'] * rest])},)",
    ]
    parameters = ", ".join(["ctx", *(f"{name}=None" for name in incoming.values())])
    return _codegen.make("backward", parameters, [line for line in body if line], names)


class Rule:
    """How one op's gradients are computed."""

    def __init__(self, op: Op, variant: Variant, gradient: Gradient) -> None:
        self.op, self.variant, self.rule = op, variant, gradient
        self.backward = all_ops()[gradient.op]
        self.form = self.backward.variants[0]
        #: By argument: its place among the tensors given, or among the results.
        self.inputs = {given.arg: at for at, given in enumerate(variant.tensors)}
        self.outputs = {output: at for at, output in enumerate(variant.returned)}
        self.results = {output: at for at, output in enumerate(self.form.returned)}
        sources = gradient.inputs.values()
        needed = {source.arg for source in sources if source.kind == "input"}
        for source in sources:
            if source.kind == "recomputed":
                needed |= {given.arg for given in variant.tensors if given.arg not in source.without}
        #: Inputs that are needed only where an output is missing.
        self.instead = {s.input: s.arg for s in sources if s.kind == "output_or_input" and s.input not in needed}
        kept = {source.arg for source in sources if source.kind in ("output", "output_or_input")}
        self.saved_inputs = sorted(needed | {s.input for s in sources if s.kind == "output_or_input"})
        self.saved_outputs = sorted(kept)
        #: Outputs that callers may leave out, but the gradient cannot do without.
        self.computed_outputs = sorted({s.arg for s in sources if s.kind == "output"} & variant.wanted.keys())
        #: Of those, the ones that the gradient of one input alone is made of: by output, that input's place. The
        #: gradient's op says so by a result that is given exactly when it is given the output.
        self.only_for: dict[int, int] = {}
        for arg, (kind, result) in gradient.results.items():
            given_with = self.backward.args[result].given_with if kind == "output" else None
            made_of = None if given_with is None else gradient.inputs.get(given_with)
            if made_of is not None and made_of.kind == "output" and made_of.arg in self.computed_outputs:
                self.only_for[made_of.arg] = self.inputs[arg]
        arriving = {source.arg for source in sources if source.kind == "incoming"}
        arriving |= {arg for kind, arg in gradient.results.values() if kind == "incoming"}
        self.not_differentiable = [at for output, at in self.outputs.items() if output not in arriving]
        #: The gradient's op in place of outputs that only it needs, where there is one. A graph that is not kept needs
        #: them no more, and beside them the gradients would take as much memory again.
        self.in_place = self.form_in_place()
        self.overwritten = [] if self.in_place is None else self.computed_outputs_of(self.in_place)
        names = {attr.name: at for at, attr in enumerate(op.attrs)}
        self.options = [names.get(attr.name) for attr in self.backward.attrs]
        self.needs_sizes = None in self.options

    def computed_outputs_of(self, form: Variant) -> list[int]:
        """The outputs of the forward call that a form of the gradient's op writes over."""
        return [self.rule.inputs[given.arg].arg for given in form.tensors if given.written is not None]

    def form_in_place(self) -> Variant | None:
        """The form of the gradient's op whose results all take the place of outputs that are kept for it alone."""
        arguments = [given.arg for given in self.form.tensors]
        for form in self.backward.variants[1:]:
            written = {given.written: given.arg for given in form.tensors if given.written is not None}
            sources = [self.rule.inputs.get(arg) for arg in written.values()]
            kept = all(s is not None and s.kind == "output" and s.arg in self.computed_outputs for s in sources)
            whole = set(written) == set(self.form.returned) and [given.arg for given in form.tensors] == arguments
            if form.is_mutating and not form.wanted and kept and whole:
                return form
        return None

    def extra(self, tensors: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """Sizes of the forward call that are options of the gradient."""
        sizes = _shapes.Sizes(self.op, options, torch._check)
        for given, tensor in zip(self.variant.tensors, tensors, strict=True):
            if tensor is not None:
                sizes.match(given.arg, tensor.shape)
        missing = zip(self.backward.attrs, self.options, strict=True)
        return [sizes.lookup(attr.name) for attr, at in missing if at is None]

    def gradients(self, ctx: Any, incoming: Sequence[Any]) -> list[Any]:
        needs = {given.arg: ctx.needs_input_grad[at] for at, given in enumerate(self.variant.tensors)}
        wanted = [arg for arg, needed in needs.items() if needed]
        self.check(ctx, wanted)
        tensors = ctx.saved_tensors  # Once: checkpointing forbids a second time.
        saved = dict(zip(self.saved_inputs, tensors, strict=False))
        kept = dict(zip(self.saved_outputs, tensors[len(self.saved_inputs) :], strict=True))
        incoming = self.by_output(incoming)
        computed = {arg for kind, arg in (self.rule.results[arg] for arg in wanted) if kind == "output"}
        results: tuple[Any, ...] = ()
        if computed:
            inputs = []
            for given in self.form.tensors:
                source = self.rule.inputs.get(given.arg)
                inputs.append(None if source is None else self.value(ctx, source, saved, kept, incoming))
            extra = iter(ctx.extra if self.needs_sizes else ())
            options = [next(extra) if at is None else ctx.options[at] for at in self.options]
            switches = [output in computed for output in self.form.wanted]
            results = as_tuple(call(self.backward, inputs, options, switches))
        found: list[Any] = []
        for given in self.variant.tensors:
            if not needs[given.arg]:
                found.append(None)
                continue
            kind, arg = self.rule.results[given.arg]
            found.append(results[self.results[arg]] if kind == "output" else incoming[self.outputs[arg]])
        return found

    def by_output(self, incoming: Sequence[Any]) -> list[Any]:
        """What arrived for each output. Outputs that were not asked for come last: nothing arrives for them."""
        found = [None if grad is None else grad.contiguous() for grad in incoming]
        return found + [None] * (len(self.outputs) - len(found))

    def value(
        self, ctx: Any, source: Source, saved: dict[int, Any], kept: dict[int, Any], incoming: Sequence[Any]
    ) -> Any:
        """The tensor that an input of the gradient is."""
        if source.kind == "input":
            return saved[source.arg]
        if source.kind == "incoming":
            return incoming[self.outputs[source.arg]]
        if source.kind != "recomputed":
            output = kept[source.arg]
            return saved[source.input] if output is None and source.kind == "output_or_input" else output
        first, value = source.options[0]
        if ctx.options[first] == value:
            return None
        options = list(ctx.options)
        for option, value in source.options:
            options[option] = value
        tensors = [None if given.arg in source.without else saved[given.arg] for given in self.variant.tensors]
        results = call(self.op, tensors, options, [False] * len(self.variant.wanted))
        return as_tuple(results)[self.outputs[source.arg]]

    def check(self, ctx: Any, wanted: Sequence[int]) -> None:
        """Raises where the call has no gradient."""
        op = self.op
        for arg in wanted:
            if arg not in self.rule.results:
                name = op.args[arg].name
                raise UnsupportedError(f"{op.name}: it has no gradient with respect to `{name}`", op=op.name)
        for option, value in self.rule.only_if:
            if ctx.options[option] != value:
                got = f"{op.attrs[option].name}={ctx.options[option]}"
                raise UnsupportedError(f"{op.name}: it has no gradient with {got}", op=op.name)
        for arg in self.rule.without:
            if ctx.given[self.inputs[arg]]:
                raise UnsupportedError(f"{op.name}: it has no gradient with `{op.args[arg].name}`", op=op.name)


def refuse_tangents(op: Op, tensors: Sequence[Any]) -> None:
    """Raises if a forward-mode derivative is asked for: there is none, and leaving it out would make it zero."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise UnsupportedError(f"{op.name}: it has no forward-mode derivative (jvp)", op=op.name)


def needs_gradient(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def autograd_kernel(op: Op, variant: Variant) -> Callable[..., Any]:
    """What the public op does about gradients before it computes."""
    raw = Overloads.raw(variant.name)
    differentiable = None if variant.is_mutating else function(op, raw._op)
    levelled = None if variant.is_mutating else _apply(function(op, next_level(op, variant)))
    written = [at for at, given in enumerate(variant.tensors) if given.written is not None]

    def run(tensors: tuple[Any, ...], options: tuple[Any, ...], switches: tuple[bool, ...]) -> Any:
        refuse_tangents(op, tensors)
        at_levels = transformed()
        if needs_gradient(tensors):
            found = of_parts(op, tensors, options, apply_at_level if at_levels else apply)
            if found is not None:
                return found
            if differentiable is None or levelled is None:
                raise UnsupportedError(f"{variant.name}: it works in place and has no gradient", op=op.name)
            if not at_levels:
                return differentiable.apply(*tensors, *options, *switches)
            # The gradient to record is that of one transform, and the next is called from within.
            with enable_single_level_autograd_function():
                return levelled(*tensors, *options, *switches)
        try:
            if at_levels:
                with torch._C._AutoDispatchBelowAutograd():
                    results = call_public(op, variant, tensors, options, switches)
            else:
                results = raw(*tensors, *raw_options(op, options), *switches)
        except RuntimeError as error:
            raise native_error(error) from None
        for at in written:
            bump(tensors[at])
        return results

    return _codegen.bound(op, variant, run)


def bump(tensor: torch.Tensor | None) -> None:
    """Tells autograd that a tensor was written, so that it refuses to use it as what it was before."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
