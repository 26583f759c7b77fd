"""`@warpsmith.fuse`: functions of tensors as fused kernels."""

from __future__ import annotations

import dis
import functools
import threading
import warnings
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from warpsmith._fuse.program import Kernel, Layout, Program, fuse_graph, rewrite
from warpsmith._fuse.regions import is_barrier, work
from warpsmith._fuse.writer import DEVICES, Seen, plain, value_of
from warpsmith._native import FusedCall
from warpsmith.errors import ArgumentError, FallbackWarning, UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

#: Ops that are no computation: they run as they are, before and after fused kernels.
_MOVES = {"aten._unsafe_view.default", "aten.clone.default", "aten._reshape_copy.default"}


class FusedFunction(Generic[P, R]):
    """A function whose ops run as fused kernels, on the CPU and on GPUs, for tensors of any sizes. It has gradients."""

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._compiled: dict[Hashable, _Compiled] = {}
        #: Forms for which tracing asked for sizes: they are compiled for each size.
        self._exact: set[Hashable] = set()
        code = getattr(function, "__code__", None)
        #: What the function belongs to, or an object that is called itself.
        self._owner: Any = getattr(function, "__self__", None if code is not None else function)
        if code is None:
            # The code of an object's class, a module's or another's.
            code = getattr(getattr(type(function), "forward", type(function).__call__), "__code__", None)
        self._globals, self._attributes = _names(code)
        self._around: dict[str, Any] = getattr(function, "__globals__", {})
        self._cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
        self._lock = threading.Lock()
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _is_transformed():
            return self._function(*args, **kwargs)
        compiled, tensors = self._find(args, kwargs)
        if compiled is None:
            return self._function(*args, **kwargs)
        result: R = compiled(tensors)
        return result

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The kernels of a call with such arguments, as text."""
        compiled, _ = self._find(args, kwargs)
        if compiled is None:
            return "PyTorch runs it op by op: fused kernels take plain tensors on the CPU and on GPUs"
        return "".join(kernel.native.plan() for kernel in compiled.program.kernels)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Compiled | None, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        form: list[Hashable] = []
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in given:
            if isinstance(value, torch.Tensor):
                if type(value) not in (torch.Tensor, torch.nn.Parameter) or not _has_its_values(value):
                    return None, []
                if value.device.type not in DEVICES:
                    _warn_of_device(self, value.device.type)
                    return None, []
                tensors.append(value)
                form.append((name, value.dtype, value.device, _sizes(value, seen), _order(value)))
            else:
                form.append((name, _constant(self, name, value)))
                if type(value) not in _SIMPLE:
                    form.extend(_numbers_of(value, self._attributes))
        form.extend(self._surroundings())
        key: Hashable = tuple(form)
        if key in self._exact:
            key = (key, tuple(seen))
        compiled = self._compiled.get(key)
        if compiled is None:
            with self._lock:
                compiled = _Compiled(self._function, args, kwargs, tensors)
                if compiled.exact:
                    self._exact.add(tuple(form))
                    key = (tuple(form), tuple(seen))
                self._compiled[key] = compiled
        return compiled, tensors

    def _surroundings(self) -> list[Hashable]:
        """What a trace depends on beside the arguments: numbers, texts and flags that the function reads from around
        it, and settings of PyTorch."""
        found: list[Hashable] = [torch.get_default_dtype()]
        if torch._C._is_any_autocast_enabled():
            found.extend((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES)
        for name in self._globals:
            value = self._around.get(name)
            if type(value) in _SIMPLE:
                found.append((name, _exactly(value)))
            elif value is not torch:
                found.extend(_numbers_of(value, self._attributes))
        for cell in self._cells:
            try:
                value = cell.cell_contents
            except ValueError:
                # It has no value yet.
                continue
            if type(value) in _SIMPLE:
                found.append(_exactly(value))
            else:
                found.extend(_numbers_of(value, self._attributes))
        if self._owner is not None:
            found.extend(_numbers_of(self._owner, self._attributes))
        return found


def fuse(function: Callable[P, R]) -> FusedFunction[P, R]:
    """Makes one kernel, or few, of a function of tensors: elementwise ops, casts, reductions along the last
    dimension, softmax and norms. ::

        @warpsmith.fuse
        def gated(x, gate, weight):
            return torch.nn.functional.silu(gate) * torch.nn.functional.rms_norm(x, weight.shape, weight)

    The function is traced at its first call, and again for other types and numbers of dimensions; sizes may change.
    Other arguments than tensors are constants, and so are numbers, texts and flags that the function reads from around
    it, also as attributes of objects and arguments: with others it is traced again. What is deeper inside of objects,
    and what functions that it calls read from around them, stays as it was.
    """
    return FusedFunction(function)


def _is_transformed() -> bool:
    """Whether somebody looks at the ops: a mode such as fake tensors, or a transform such as `vmap`."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.peek_interpreter_stack() is not None


def _sizes(tensor: torch.Tensor, seen: dict[int, int]) -> tuple[int, ...]:
    """0 and 1, and for other sizes which are equal: negative numbers."""
    return tuple(size if size < 2 else -1 - seen.setdefault(size, len(seen)) for size in tensor.shape)


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def _constant(function: FusedFunction[..., Any], name: int | str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{function.__name__}: argument {name}: expected a tensor or a constant, got {type(value).__name__}",
            op="fuse",
            argument=str(name),
            expected="a tensor or a constant",
            got=type(value).__name__,
        ) from None
    return _exactly(value)


def _exactly(value: Any) -> Hashable:
    """A constant with its type: 1, 1.0 and True are equal, and so are zeros of both signs, also within tuples."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    if isinstance(value, tuple):
        return type(value), tuple(map(_exactly, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(_exactly, value))
    return type(value), value


#: Types of constants that nobody can change.
_SIMPLE = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}


def _names(code: CodeType | None) -> tuple[list[str], list[str]]:
    """The names that code, and code within it, looks up in its globals, and those of attributes."""
    around: dict[str, None] = {}
    attributes: dict[str, None] = {}
    left = [] if code is None else [code]
    while left:
        within = left.pop()
        left.extend(constant for constant in within.co_consts if isinstance(constant, CodeType))
        for step in dis.get_instructions(within):
            if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
                around[step.argval] = None
            elif step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")):
                attributes[step.argval] = None
    return list(around), list(attributes)


def _numbers_of(value: Any, names: list[str]) -> list[Hashable]:
    """Numbers, texts and flags that an object has under these names, of its own or of its class."""
    if value is None or isinstance(value, (type, FunctionType)):
        return []
    own, kind = getattr(value, "__dict__", {}), type(value)
    found: list[Hashable] = []
    for name in names:
        attribute = own[name] if name in own else getattr(kind, name, None)
        if type(attribute) in _SIMPLE and attribute is not None:
            found.append((name, _exactly(attribute)))
    return found


def _has_its_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds what it says: not the negative of it, nor, without memory, zeros."""
    return tensor.layout is torch.strided and not tensor.is_neg() and not tensor._is_zerotensor()


_warned: set[str] = set()


def _warn_of_device(function: FusedFunction[..., Any], device: str) -> None:
    if device not in _warned:
        _warned.add(device)
        text = (
            f"there are fused kernels for the CPU and for CUDA; on {device}, PyTorch runs {function.__name__} op by op"
        )
        warnings.warn(text, FallbackWarning, stacklevel=4)


class _Compiled:
    """A function for tensors of one form."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        module, self._spec, self.exact = _trace(function, args, kwargs, tensors)
        self.program = fuse_graph(module.graph, lambda group: work(group) > 0, strict=False)
        _refuse_others(self.program, getattr(function, "__name__", "function"))
        for kernel in self.program.kernels:
            kernel.call = _Differentiable(kernel)
        self._run = rewrite(self.program, module, boxed=False).forward

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(self._run(*tensors), self._spec)


def _trace(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[fx.GraphModule, Any, bool]:
    """The function's graph of ATen ops with symbolic sizes, the form of its results, and whether it asked for sizes."""
    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    from warpsmith._fuse.backend import DECOMPOSED

    spec: list[Any] = []

    def on_tensors(*given: torch.Tensor) -> list[Any]:
        rest = iter(given)
        put = [next(rest) if isinstance(value, torch.Tensor) else value for value in args]
        named = {key: next(rest) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        leaves, form = pytree.tree_flatten(function(*put, **named))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise UnsupportedError(f"fuse: the function returns a {type(leaf).__name__}; it must return tensors")
        spec.append(form)
        return leaves

    table: Any = get_decompositions([getattr(torch.ops.aten, name) for name in DECOMPOSED])

    def traced(what: Callable[..., Any]) -> fx.GraphModule:
        # Tensors from elsewhere become constants of the graph, which is refused later by a clear message.
        tracer = make_fx(what, table, tracing_mode="symbolic", _allow_non_fake_inputs=True)
        module: fx.GraphModule = tracer(*[tensor.detach() for tensor in tensors])
        return module

    with torch.no_grad():
        module = traced(on_tensors)
        # What writes may come from inside of PyTorch's ops, where functionalization does not see it at first.
        if any(is_barrier(node) for node in module.graph.nodes):
            module = traced(torch.func.functionalize(module))
    module.graph.eliminate_dead_code()
    sizes = [size for node in module.graph.nodes for size in getattr(value_of(node), "shape", ())]
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    return module, spec[-1], bool(symbolic is not None and symbolic.node.shape_env.guards)


def _refuse_others(program: Program, name: str) -> None:
    """Whatever is not fused may only move elements or make constants."""
    fused = {node for kernel in program.kernels for node in kernel.nodes}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            raise UnsupportedError(f"fuse: {name} uses a tensor that is no argument of it; make it one", op="fuse")
        target = node.target
        if node.op != "call_function" or node in fused or not isinstance(target, torch._ops.OpOverload):
            continue
        size = isinstance(value_of(node), (torch.SymInt, int))
        moves = size or target.is_view or str(target) in _MOVES or not node.all_input_nodes
        if is_barrier(node) or not moves:
            reason = "writes an argument" if is_barrier(node) else program.refused.get(node, "stands between others")
            raise UnsupportedError(
                f"fuse: {name}: node `{node.name}` ({target}) {reason}; "
                "torch.compile(backend='warpsmith') leaves such ops to PyTorch",
                op="fuse",
                argument=node.name,
            )


class _Differentiable:
    """A fused graph with a gradient."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.call = kernel.call
        self.__name__ = kernel.call.__name__
        self.__qualname__ = self.__name__
        self._derivatives: dict[tuple[int, ...], _Derivative] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            wanted = tuple(at for at, tensor in enumerate(tensors) if tensor.requires_grad)
            if wanted:
                derivative = self._derivatives.get(wanted)
                if derivative is None:
                    derivative = self._derivatives[wanted] = _Derivative(self.kernel, wanted)
                results = _Apply.apply(derivative, *tensors)  # type: ignore[no-untyped-call]
                return results[0] if len(results) == 1 else results
        return self.call(*tensors)


class _Derivative:
    """The calls of a graph's derivative by some of its inputs."""

    def __init__(self, kernel: Kernel, wanted: tuple[int, ...]) -> None:
        names = kernel.native.inputs
        forward, backward = kernel.native.gradient([names[at] for at in wanted])
        self.wanted = wanted
        self.outputs = len(kernel.outputs)
        self.whole = [at for at, node in enumerate(kernel.outputs) if not value_of(node).is_floating_point()]
        kept: list[Layout] = [(plain(rank), list(range(rank))) for rank in _ranks(forward, kernel)[self.outputs :]]
        self.forward = FusedCall(forward, "forward", kernel.seen, [*kernel.layouts, *kept], kernel.device)
        # Where each tensor of the backward call is found: among the inputs, what was kept, or the gradients of outputs.
        outputs = kernel.native.outputs
        places = {name: ("input", at) for at, name in enumerate(names)}
        places |= {f"kept{at}": ("kept", at) for at in range(len(kept))}
        places |= {f"grad_{name}": ("grad", at) for at, name in enumerate(outputs)}
        self.places = [places[name] for name in backward.inputs]
        self.saved = [at for kind, at in self.places if kind == "input"]
        layouts = [_as_given(kernel.seen[at]) for at in wanted]
        ranks = _ranks(forward, kernel)
        seen: dict[str, list[Seen]] = {
            "input": kernel.seen,
            "kept": [plain(rank) for rank in ranks[self.outputs :]],
            "grad": [_as_graph(dims, rank) for (dims, _), rank in zip(kernel.layouts, ranks, strict=False)],
        }
        self.backward = FusedCall(
            backward, "backward", [seen[kind][at] for kind, at in self.places], layouts, kernel.device
        )


def _ranks(graph: Any, kernel: Kernel) -> list[int]:
    return [len(shape) for _, shape in graph.forms(kernel.shapes)]


def _as_given(seen: Seen) -> Layout:
    """The layout of a gradient like an input that a graph sees so."""
    dims = [seen.index(dim) for dim in range(sum(dim is not None for dim in seen))]
    return tuple(dims), list(range(len(dims)))


def _as_graph(dims: tuple[int, ...], rank: int) -> Seen:
    """How a graph sees the gradient of an output that has these of its dimensions."""
    return tuple(dims.index(dim) if dim in dims else None for dim in range(rank))


def _with_its_values(grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a conjugate's imaginary part may be the negative of what is in memory."""
    return grad if _has_its_values(grad) else torch.empty_like(grad, memory_format=torch.contiguous_format).copy_(grad)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, derivative: _Derivative, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = derivative.forward(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        outputs, kept = results[: derivative.outputs], results[derivative.outputs :]
        ctx.derivative = derivative
        ctx.save_for_backward(*(tensors[at] for at in derivative.saved), *kept)
        ctx.mark_non_differentiable(*(outputs[at] for at in derivative.whole))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        derivative: _Derivative = ctx.derivative
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) for _ in derivative.saved]
        given, kept = iter(inputs), list(saved)
        arguments = []
        for kind, at in derivative.places:
            if kind == "input":
                arguments.append(next(given))
            elif kind == "kept":
                arguments.append(kept[at])
            else:
                arguments.append(_with_its_values(grads[at]))
        results = derivative.backward(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        by_input = dict(zip(derivative.wanted, results, strict=True))
        return (None, *(by_input.get(at) for at in range(len(ctx.needs_input_grad) - 1)))
